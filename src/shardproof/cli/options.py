"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, TypeVar

import click

from shardproof.cli.failures import BadPath

__all__ = [
    "checkpoint_argument",
    "folder_argument",
    "format_option",
    "json_option",
    "path_argument",
    "print_json",
    "size",
    "span",
    "trust_pickle_option",
]

MANIFEST = "manifest.json"
"""As in `shardproof.format`, which would import numpy."""

Function = TypeVar("Function", bound=Callable[..., Any])


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds_of(text: str) -> float:
    """Seconds of a span of time: a number with s, m, h, d or w. A bare number means seconds.

    Raises:
        ValueError: `text` has another form.

    >>> seconds_of("90"), seconds_of("1.5h"), seconds_of("2d")
    (90.0, 5400.0, 172800.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a span of time; write 90s, 30m, 1h, 2d or 1w")
    return float(match[1]) * _UNITS[match[2] or "s"]


def span(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Callback of an option: seconds from a text such as "1h"; a usage error for another form."""
    try:
        return seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_SIZES = {
    "": 1,
    **{
        f"{unit}{kind}": base ** (at + 1)
        for kind, base in (("B", 1000), ("iB", 1024))
        for at, unit in enumerate("KMGT")
    },
}


def bytes_of(text: str) -> int:
    """Bytes of a size: a number with KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (of 1024).

    Raises:
        ValueError: `text` has another form.

    >>> bytes_of("5GB"), bytes_of("4GiB"), bytes_of("100")
    (5000000000, 4294967296, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 500MB, 5GB or 4GiB")
    return int(float(match[1]) * _SIZES[match[2] or ""])


def size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Callback of an option: bytes from a text such as "5GB"; a usage error for another form."""
    try:
        return None if value is None else bytes_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def folder_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a folder. A missing folder is bad usage (exit code 2)."""
    return click.argument(name, callback=_folder)


def checkpoint_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a checkpoint. A missing folder, or the folder of a run, is bad usage (exit code 2)."""
    return click.argument(name, callback=_checkpoint)


def path_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a checkpoint of any format, a folder or a file. A missing one is bad usage."""
    return click.argument(name, callback=_path)


def _path(context: click.Context, parameter: click.Parameter, path: str) -> str:
    return path if os.path.isfile(path) else _checkpoint(context, parameter, path)


def _folder(_context: click.Context, parameter: click.Parameter, path: str) -> str:
    if "://" in path:  # the storage reports what is wrong with a URL
        return path
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadPath(f"{parameter.human_readable_name}: {_shown(path)} does not exist") from error
    except OSError:  # the storage reports it with its cause
        return path
    if not stat.S_ISDIR(mode):
        raise BadPath(f"{parameter.human_readable_name}: {_shown(path)} is a file, and a folder is needed")
    return path


def _shown(path: str) -> str:
    """The path as given, and its absolute form if that differs."""
    from shardproof.storage import LocalStorage

    whole = LocalStorage(path).location if path else path
    return f"{path!r}" + (f" ({whole})" if whole != path else "")


def _checkpoint(context: click.Context, parameter: click.Parameter, path: str) -> str:
    if "://" in path:
        return path
    try:
        names = os.listdir(_folder(context, parameter, path))
    except OSError:  # the storage reports it with its cause
        return path
    steps = [name for name in names if re.fullmatch(r"step-[0-9]{8,18}", name)]
    if steps and MANIFEST not in names and "shards" not in names:
        whole = [step for step in steps if os.path.exists(os.path.join(path, step, MANIFEST))]
        step = os.path.join(path, max(whole or steps, key=lambda name: int(name[5:])))
        raise BadPath(
            f"{parameter.human_readable_name}: this is a run: give a step, e.g. {step} "
            f"(`shardproof ls {path}`)"
        )
    return path


format_option = click.option("--format", metavar="FORMAT", help="Format of a checkpoint, if it is not found.")
trust_pickle_option = click.option(
    "--trust-pickle",
    is_flag=True,
    help="Unpickle values of other formats that are no plain data. This may run code of the checkpoint.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_json(value: Any) -> None:
    """A JSON document on standard output, indented. Bytes in paths that are not UTF-8 become escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))

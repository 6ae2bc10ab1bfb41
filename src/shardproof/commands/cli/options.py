"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import click

from shardproof._utils.arguments import unexpanded_home
from shardproof._utils.humanize import printable
from shardproof.commands.cli.terminal import BadPath

MANIFEST = "manifest.json"
"""As in `shardproof.engine.format`, which would import numpy."""

_STEP = re.compile(r"step-[0-9]{8,18}")

Function = TypeVar("Function", bound=Callable[..., Any])
Quantity = TypeVar("Quantity")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    f"{unit}{kind}": base ** (at + 1)
    for kind, base in (("B", 1000), ("iB", 1024))
    for at, unit in enumerate("KMGT")
} | {"": 1}


def seconds_of(text: str) -> float:
    """Seconds of a span of time: a number with s, m, h, d or w. A bare number could mean any of them.

    Raises:
        ValueError: `text` has another form.

    >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of("2d")
    (90.0, 5400.0, 172800.0)
    """
    return _scaled(text, _SECONDS, "a span of time with its unit; write 90s, 30m, 1h, 2d or 1w")


def bytes_of(text: str) -> int:
    """Bytes of a size: a number with KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (of 1024).

    Raises:
        ValueError: `text` has another form.

    >>> bytes_of("5GB"), bytes_of("4GiB"), bytes_of("100")
    (5000000000, 4294967296, 100)
    """
    return int(_scaled(text, _BYTES, "a size; write 500MB, 5GB or 4GiB"))


def _scaled(text: str, units: Mapping[str, int], expected: str) -> float:
    """A number with one of the units behind it, times the unit."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    return float(match[1]) * units[match[2]]


def _quantity(
    parse: Callable[[str], Quantity], *, positive: bool = False
) -> Callable[[click.Context, click.Parameter, str | None], Quantity | None]:
    """The callback of an option that `parse` reads. Text of another form is a usage error."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Quantity | None:
        try:
            found = None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        if positive and found == 0:
            raise click.BadParameter("it is more than 0")
        return found

    return callback


size = _quantity(bytes_of)
"""Callback of an option: bytes from a text such as "5GB"."""
span = _quantity(seconds_of)
"""Callback of an option: seconds from a text such as "1h"."""
positive_span = _quantity(seconds_of, positive=True)
"""As `span`, above 0."""


def folder_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a folder. A missing folder is bad usage (exit code 2)."""
    return click.argument(name, callback=existing_folder)


def checkpoint_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a checkpoint. A missing folder, a file, or a run, is bad usage (exit code 2)."""

    def callback(context: click.Context, parameter: click.Parameter, path: str) -> str:
        existing_folder(context, parameter, path)
        return existing_checkpoint(context, parameter, path)

    return click.argument(name, callback=callback)


def path_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a checkpoint of any format, a folder or a file. A missing one is bad usage."""
    return click.argument(name, callback=existing_checkpoint)


def path_or_run_argument(name: str) -> Callable[[Function], Function]:
    """As `path_argument`, or for a run, of which `checkpoint_of` chooses a step."""
    return click.argument(name, callback=_checkpoint_or_run)


def destination_argument(name: str) -> Callable[[Function], Function]:
    """An argument for a new folder or file. A URL of no known store is bad usage (exit code 2)."""
    return click.argument(name, type=click.Path(), callback=_destination)


def _destination(_context: click.Context, parameter: click.Parameter, path: str) -> str:
    if not _is_url(parameter, path, is_stored=False):
        _check_home(parameter, path)
    return path


def _is_url(parameter: click.Parameter, text: str, *, is_stored: bool = True) -> bool:
    """True for the URL of a store. With `is_stored`, a run in memory must have a folder.

    Raises:
        BadPath: the URL is of no known store, or of a run that is not in the memory of this node.
    """
    if ":/" not in text:
        return False
    from shardproof.engine.storage import storage_at
    from shardproof.errors import StorageError

    try:
        storage = storage_at(text)
    except StorageError as error:
        raise BadPath(f"{_name_of(parameter)}: {error.message}") from error
    if storage.path is None:
        return True
    if not storage.in_memory:
        return False
    if is_stored and not storage.path.exists():
        raise BadPath(
            f"{_name_of(parameter)}: {text}: {storage.location} does not exist (`shardproof memory` lists "
            "the runs in the memory of this node)"
        )
    return True


def _name_of(parameter: click.Parameter) -> str:
    """The name as a user writes it: RUN of an argument, --second-tier of an option."""
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


def existing_folder(_context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """The callback of a path or URL, or of several. A missing folder is bad usage."""
    for path in [value] if isinstance(value, str) else value or ():
        _check_folder(parameter, path)
    return value


def _check_home(parameter: click.Parameter, path: str) -> None:
    """Refuses a path that a storage would refuse, because only a shell expands ``~``."""
    if (fault := unexpanded_home(path, in_shell=True)) is not None:
        raise BadPath(f"{_name_of(parameter)}: {path!r}: {fault}")


def _check_folder(parameter: click.Parameter, path: str) -> None:
    if _is_url(parameter, path):
        return
    _check_home(parameter, path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadPath(f"{_name_of(parameter)}: {_shown(path)}: it does not exist") from error
    except OSError:  # the storage reports it with its cause
        return
    if not stat.S_ISDIR(mode):
        raise BadPath(f"{_name_of(parameter)}: {_shown(path)} is a file, expected a folder")


def _shown(path: str) -> str:
    """The path as given, and its absolute form if that differs."""
    from shardproof.engine.storage import LocalStorage

    whole = LocalStorage(path).location if path else path
    return f"{path!r}" + (f" ({whole})" if whole != path else "")


def existing_checkpoint(context: click.Context, parameter: click.Parameter, path: str) -> str:
    """The callback of a checkpoint of any format. A missing one, or a run, is bad usage."""
    path = _checkpoint_or_run(context, parameter, path)
    if steps := _steps_of_run(path):
        from shardproof.engine.storage import storage_at

        run = storage_at(path)
        saved = (name for name in reversed(steps) if run.size(f"{name}/{MANIFEST}") is not None)
        raise BadPath(
            f"{parameter.human_readable_name}: this is a run: give a step, e.g. {path.rstrip('/')}/"
            f"{next(saved, steps[-1])} (`shardproof ls {path}`)"
        )
    return path


def _checkpoint_or_run(_context: click.Context, parameter: click.Parameter, path: str) -> str:
    if not os.path.isfile(path) and not _is_url(parameter, path):
        _check_folder(parameter, path)
    return path


def _steps_of_run(path: str) -> list[str]:
    """The step folders of a run, oldest first; empty if the path is no run."""
    from shardproof.engine.storage import storage_at
    from shardproof.errors import StorageError

    if os.path.isfile(path):
        return []
    storage = storage_at(path)
    try:
        steps = [name for name in storage.folders() if _STEP.fullmatch(name)]
        if not steps or storage.size(MANIFEST) is not None or storage.list("shards"):
            return []
    except StorageError:  # the command reports it with its cause
        return []
    return sorted(steps, key=lambda name: int(name[5:]))


def step_folder(word: str) -> str | None:
    """The folder of the step that a word names, by its number or by its folder; None for another word.

    >>> step_folder("3"), step_folder("step-00000003"), step_folder("step-3")
    ('step-00000003', 'step-00000003', None)
    """
    if re.fullmatch(r"[0-9]{1,18}", word) is not None:
        return f"step-{int(word):08d}"
    return word if _STEP.fullmatch(word) is not None else None


def no_step(path: str, word: str) -> click.UsageError:
    """The error of a word that names no step of a run."""
    return click.UsageError(
        f"{word!r} is no step of {path}: give a number, or the name of its folder (`shardproof ls {path}` "
        "lists its steps)"
    )


def is_run(path: str) -> bool:
    """True for the folder of a run that has the folder of a step."""
    return bool(_steps_of_run(path))


def checkpoint_of(path: str, words: Sequence[str], *, quiet: bool = False) -> tuple[str, Sequence[str]]:
    """The checkpoint that a command means: `path` itself, or a step of the run `path`.

    The first word behind a run may name a step (`step_folder`). Without one, it is the newest step that can
    be restored. Unless `quiet`, lines on standard error name it, and the newer steps that it passes over.

    Returns:
        The path of the checkpoint, and the words behind the number.

    Raises:
        click.UsageError: the run has no such step.
        NotCommittedError: no step of the run can be restored.
        StorageError: the storage cannot read a step at the moment, and it may be whole.
    """
    steps = _steps_of_run(path)
    if not steps:
        return path, words
    run = path.rstrip("/")
    if words and (name := step_folder(words[0])) is not None:
        if name not in steps:
            raise click.UsageError(f"{path} has no step {words[0]} (`shardproof ls {path}` lists its steps)")
        return f"{run}/{name}", words[1:]
    from shardproof.engine.storage import storage_at
    from shardproof.errors import NotCommittedError
    from shardproof.runs.checkpointer import Verdict, judge, read_node_mark, saves_since

    storage, passed = storage_at(path), list[str]()
    mark, since = read_node_mark(storage), cache(partial(saves_since, storage))
    for name in reversed(steps):
        if (found := judge(storage, name, mark=mark, saves_since=since)) is None:
            continue
        is_unreadable = found.verdict is Verdict.UNREADABLE
        if is_unreadable and found.error is not None and storage.size(f"{name}/{MANIFEST}") is not None:
            raise found.error  # a restore passes over a folder without a manifest
        if found.verdict in (Verdict.COMMITTED, Verdict.PARTIAL):
            for line in () if quiet else (*passed, f"{name}: the newest step that can be restored"):
                click.echo(printable(line), err=True)
            return f"{run}/{name}", words
        passed.append(f"{name}: {found.verdict}, {found.reason}")
    raise NotCommittedError(
        f"{path}: no step can be restored:\n" + "\n".join(f"  {line}" for line in passed), path=path
    )


def _known_format(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None:
        from shardproof.engine.foreign import NATIVE, READERS

        if name not in (NATIVE, *READERS):
            raise click.BadParameter(f"{name!r} is none of {', '.join((NATIVE, *READERS))}")
    return name


format_option = click.option(
    "--format",
    metavar="FORMAT",
    callback=_known_format,
    help="Format of the checkpoint, or of the first of two. Default: detected.",
)
other_format_option = click.option(
    "--other-format",
    metavar="FORMAT",
    callback=_known_format,
    help="Format of the second checkpoint. Default: detected.",
)
trust_pickle_option = click.option(
    "--trust-pickle",
    is_flag=True,
    help="Unpickle values of other formats that are not plain data. This may run code in the checkpoint.",
)


def renames_of(items: Sequence[str]) -> dict[str, str]:
    """The table of the option --rename, from all its pairs and files: stored key to new key.

    Raises:
        click.UsageError: an item names no key, a file cannot be read, or a key has two new names.
    """
    found: dict[str, str] = {}
    for item in items:
        stored, sign, new = item.partition("=")
        if not stored:
            raise click.UsageError(f"--rename: {item!r} names no key. Give OLD=NEW or a TOML file")
        is_file = not sign or item.endswith(".toml")
        for key, name in (_rename_table(item) if is_file else {stored: new}).items():
            if found.setdefault(key, name) != name:
                raise click.UsageError(f"--rename: {key!r} would be both {found[key]!r} and {name!r}")
    return found


def _rename_table(path: str) -> dict[str, str]:
    """The table of a TOML file."""
    import tomllib

    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (OSError, ValueError) as error:  # no TOML, no UTF-8, or no path
        raise click.UsageError(
            f"--rename: {path} cannot be read: {error}. Give OLD=NEW or a TOML file"
        ) from error
    wrong = [key for key, value in table.items() if not isinstance(value, str)]
    if wrong:
        raise click.UsageError(
            f"--rename: {path}: the value of {wrong[0]!r} is not a string. Write keys with dots in quotes: "
            '"model.module" = "model"'
        )
    return table


def key_options(verb: str) -> Callable[[Function], Function]:
    """The options --include, --exclude and --rename of a command that does `verb` to keys."""
    options = (
        click.option(
            "--include", multiple=True, metavar="PATTERN", help=f"Keys to {verb}, and all below them."
        ),
        click.option(
            "--exclude", multiple=True, metavar="PATTERN", help="Keys to leave out, and all below them."
        ),
        click.option(
            "--rename",
            multiple=True,
            metavar="OLD=NEW",
            help='New name of a key and of all below it; or a TOML file of lines "model.module" = "model", '
            "which also takes an OLD with '=' and a NEW that ends with .toml.",
        ),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def worker_options(verb: str) -> Callable[[Function], Function]:
    """The options --workers and --on of a command whose workers do `verb`."""
    options = (
        click.option(
            "--workers", type=click.IntRange(1), default=1, show_default=True, help=f"Processes that {verb}."
        ),
        click.option(
            "--on",
            type=click.Choice(["processes", "ray"]),  # as in `shardproof.workers`
            default="processes",
            show_default=True,
            help="Processes of this machine, or a Ray cluster whose nodes share the file systems.",
        ),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _registered(_context: click.Context, _parameter: click.Parameter, names: Sequence[str]) -> Sequence[str]:
    for name in names:
        from shardproof.engine.state import register_by_name  # imports torch

        try:
            register_by_name(name)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return names


register_option = click.option(
    "--register",
    multiple=True,
    metavar="NAME",
    callback=_registered,
    help="A module to import, which registers classes; or the name of one enum or dataclass to register.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def older_than_option(text: str) -> Callable[[Function], Function]:
    """The option --older-than, which separates files of dead saves from those of saves in progress."""
    return click.option(
        "--older-than", callback=span, metavar="SPAN", default="1h", show_default=True, help=text
    )


def print_json(value: Any) -> None:
    """A JSON document on standard output, indented. Bytes in paths that are not UTF-8 become escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))

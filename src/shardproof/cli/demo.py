"""``shardproof demo``: the engine at its main job."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from shardproof.cli.failures import BAD, YES
from shardproof.cli.options import json_option, print_json

__all__ = ["command"]


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """From a text such as "3,1"; a usage error if it is none."""
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and len(word) < 7 and int(word) > 0 for word in words):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers of at least 1; write 3,1")
    return tuple(map(int, words))


@click.command("demo", short_help="Train, save, die, resume elsewhere, compare every bit.")
@click.option(
    "--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Train on this file."
)
@click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="Processes before the accident."
)
@click.option(
    "--resume-ranks",
    callback=_numbers,
    metavar="N,N",
    default="3,1",
    show_default=True,
    help="Processes of each run that resumes from the one before.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda and the like.")
@click.option("--steps", type=click.IntRange(min=1), default=24, show_default=True, help="Training steps.")
@click.option(
    "--save-every", type=click.IntRange(min=1), default=4, show_default=True, help="Steps between saves."
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "distributed", "hybrid"]),
    default="adamw",
    show_default=True,
    help="adamw: torch's. distributed: its state sharded over ranks. hybrid: part of its step on the CPU.",
)
@click.option(
    "--sharding",
    type=click.Choice(["fsdp2", "flat", "none"]),
    default="fsdp2",
    show_default=True,
    help="Of the parameters. fsdp2: torch's. flat: shardproof.fsdp. none: whole on every rank.",
)
@click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path), help="An empty or new folder, which stays."
)
@click.option("--keep", is_flag=True, help="Keep the temporary folder.")
@json_option
def command(as_json: bool, **options: Any) -> int:
    """Train, save, be killed in the middle of a save, resume on other layouts, and compare every bit.

    Exit code 0: every claim held. 1: one did not; the report says which.
    """
    from rich.console import Console

    from shardproof.cli.terminal import WIDTH_OFF_TERMINAL
    from shardproof.demo import print_event, print_report, run_demo

    out = Console(width=None if sys.stdout.isatty() else WIDTH_OFF_TERMINAL)
    try:
        report = run_demo(**options, on_event=None if as_json else partial(print_event, console=out))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, out)
    return YES if report.ok else BAD

"""What a command prints: tables on standard output, progress and errors on standard error. The exit codes.

An error is text or JSON, never a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

from shardproof._utils.humanize import printable
from shardproof.errors import ShardproofError, tells_nothing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

YES, BAD, USAGE, UNEXPECTED = 0, 1, 2, 3
INTERRUPTED, CUT_OFF = 130, 141
"""The codes that a shell reports for SIGINT and SIGPIPE (the reader closed the output)."""
TRACEBACK = "SHARDPROOF_TRACEBACK"
"""Environment variable: print the traceback of an unexpected failure."""
_WIDTH_OFF_TERMINAL = 200


class BadPath(click.UsageError):
    """A path on the command line that the command cannot use. It is shown without the usage."""


def show_usage(error: click.UsageError, as_json: bool) -> None:
    """Prints a usage error, with the usage of the command."""
    if as_json:
        _show_json("UsageError", error.format_message(), {})
        return
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    if error.ctx is not None and not isinstance(error, BadPath):
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
    click.echo(printable(f"error: {error.format_message()}", lines=True), err=True)


def show_failure(error: Exception, as_json: bool) -> None:
    """Prints an error: a `ShardproofError` with its message, any other as an unexpected failure."""
    if isinstance(error, ShardproofError):
        kind, message, details = type(error).__name__, error.message, error.details
        if tells_nothing(details):
            message += " This says nothing about the checkpoint, which may be whole."
    else:
        kind, details = type(error).__name__, {}
        message = (
            f"unexpected {kind}: {error}. This says nothing about the checkpoint. If the cause is unclear, "
            f"this is a defect of shardproof: run with {TRACEBACK}=1 in the environment and report it."
        )
        if os.environ.get(TRACEBACK):
            sys.excepthook(type(error), error, error.__traceback__)  # `traceback` imports slow modules
    if as_json:
        _show_json(kind, message, details)
    else:
        click.echo(printable(f"error: {message}", lines=True), err=True)


def _show_json(kind: str, message: str, details: dict[str, object]) -> None:
    click.echo(json.dumps({"type": kind, "message": message, "details": details}, default=str), err=True)


def console(stream: TextIO | None = None) -> Console:
    """A console without markup. Its lines are wide if the output is not a terminal."""
    from rich.console import Console

    stream = stream or sys.stdout
    width = None if stream.isatty() else _WIDTH_OFF_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table. The columns named in `right` are flush right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        drawn.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn


@contextmanager
def bytes_progress(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with GB and GB/s on standard error, if `shown` is true and that is a terminal.

    Yields:
        A function to call with the bytes done and the total, from any thread.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from shardproof.engine.events import Bars, Hub

    hub = Hub()  # a separate hub, so that the bar shows only this command
    bars = Bars(console(sys.stderr), lines=False, at_once=True)
    with hub.subscribe(bars, bars.close), hub.phase(title, "read") as phase:
        yield phase.progress

"""Exit codes and errors of the command line: text or JSON on standard error, never a traceback."""

from __future__ import annotations

import json
import os
import traceback

import click

from shardproof._utils.humanize import printable
from shardproof.errors import ShardproofError, tells_nothing

YES, BAD, USAGE, UNEXPECTED = 0, 1, 2, 3
INTERRUPTED, CUT_OFF = 130, 141
"""The codes that a shell reports for SIGINT and SIGPIPE (the reader closed the output)."""


class BadPath(click.UsageError):
    """A path on the command line that the command cannot use. It is shown without the usage."""


TRACEBACK = "SHARDPROOF_TRACEBACK"
"""Environment variable: print the traceback of an unexpected failure."""


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
            traceback.print_exception(error)
    if as_json:
        _show_json(kind, message, details)
    else:
        click.echo(printable(f"error: {message}", lines=True), err=True)


def _show_json(kind: str, message: str, details: dict[str, object]) -> None:
    click.echo(json.dumps({"type": kind, "message": message, "details": details}, default=str), err=True)

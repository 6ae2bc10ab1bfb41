"""Exit codes and errors of the command line: text or JSON on standard error, never a traceback."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping

import click

from shardproof._utils.humanize import printable
from shardproof.errors import ShardproofError

__all__ = [
    "BAD",
    "CUT_OFF",
    "INTERRUPTED",
    "UNEXPECTED",
    "USAGE",
    "YES",
    "BadPath",
    "show_failure",
    "show_usage",
    "tells_nothing",
]

YES, BAD, USAGE, UNEXPECTED = 0, 1, 2, 3
INTERRUPTED, CUT_OFF = 130, 141
"""As a shell reports SIGINT, and SIGPIPE: nobody reads the output any more."""


class BadPath(click.UsageError):
    """A path on the command line that is not what the command needs. It is shown without the usage."""


TRACEBACK = "SHARDPROOF_TRACEBACK"
"""Environment variable: show where an unexpected failure came from."""


def tells_nothing(details: Mapping[str, object]) -> bool:
    """Whether an error is of the system that reads, and not of the checkpoint, as a missing file would be.

    No permission, a file server that is gone, too many open files: the checkpoint may be whole.

    >>> tells_nothing({"errno": "EACCES", "missing": False})
    True
    >>> tells_nothing({"errno": "ENOENT", "missing": True})
    False
    """
    return bool(details.get("errno")) and details.get("missing") is not True


def show_usage(error: click.UsageError, as_json: bool) -> None:
    """Prints what is wrong with the command line, with the usage of the command."""
    if as_json:
        _show_json("UsageError", error.format_message(), {})
        return
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    if error.ctx is not None and not isinstance(error, BadPath):
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
    click.echo(printable(f"error: {error.format_message()}"), err=True)


def show_failure(error: Exception, as_json: bool) -> None:
    """Prints an error: one of shardproof's in its own words, any other as a failure of the program."""
    if isinstance(error, ShardproofError):
        kind, message, details = type(error).__name__, error.message, error.details
        if tells_nothing(details):
            message += " This says nothing about the checkpoint, which may be whole."
    else:
        kind, details = type(error).__name__, {}
        message = (
            f"unexpected {kind}: {error}. This says nothing about the checkpoint. If the text does not make "
            f"the cause plain, it is a defect of shardproof; {TRACEBACK}=1 in the environment shows where."
        )
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
    if as_json:
        _show_json(kind, message, details)
    else:
        click.echo(printable(f"error: {message}"), err=True)


def _show_json(kind: str, message: str, details: dict[str, object]) -> None:
    click.echo(json.dumps({"type": kind, "message": message, "details": details}, default=str), err=True)

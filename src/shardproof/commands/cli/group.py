"""The group of commands, loaded on demand, and the exit code of every outcome.

The modules of the commands import click and nothing heavier. A command imports what it needs when it runs, so
``--help`` needs neither torch nor numpy nor rich.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from shardproof.commands.cli.terminal import (
    BAD,
    CUT_OFF,
    INTERRUPTED,
    UNEXPECTED,
    USAGE,
    show_failure,
    show_usage,
)
from shardproof.errors import ShardproofError, tells_nothing
from shardproof.version import __version__

COMMANDS = {
    "ls": "look",
    "inspect": "look",
    "verify": "check",
    "diff": "check",
    "stats": "look",
    "convert": "rewrite",
    "repair": "rewrite",
    "prune": "clean",
    "memory": "clean",
    "doctor": "health",
    "watch": "health",
    "page": "page",
    "trace": "health",
}
"""Each command, and the module of this package that defines it as ``<name>_command``."""

_INSTEAD = {"demo": " The demo is in the repository: `make demo`."}
"""What to use in place of a word that a user may try as a command."""
_OPTIONS_INSTEAD = {"--then": ("--second-tier", " Name the second tier with '--second-tier'.")}
"""The option to use in place of one that a user may try, and the advice for a command that has it."""


class Commands(click.Group):
    """The commands of `COMMANDS`, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first word. ``help COMMAND`` is ``COMMAND --help``."""
        if args[0] == "help" and not ctx.resilient_parsing:
            words = [word for word in args[1:] if not word.startswith("-")]
            if not words:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [words[0], "--help"]
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{_INSTEAD.get(args[0], meant)}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"shardproof.commands.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shardproof %(version)s")
def commands() -> None:
    """Inspect, verify, compare, repair and prune checkpoints of PyTorch training runs.

    Exit codes: 0 yes, 1 the checkpoint is bad (diff: they differ), 2 bad usage, 3 an unexpected failure.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code. Errors are printed, never raised."""
    # Before parsing, because a parsing error is printed as JSON too.
    as_json = "--json" in arguments
    try:
        result: Any = commands.main(list(arguments), prog_name="shardproof", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption) and error.option_name in _OPTIONS_INSTEAD and error.ctx:
            option, advice = _OPTIONS_INSTEAD[error.option_name]
            if any(option in parameter.opts for parameter in error.ctx.command.params):
                error = click.UsageError(error.message + advice, error.ctx)
        show_usage(error, as_json)
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except ShardproofError as error:
        show_failure(error, as_json)
        return UNEXPECTED if tells_nothing(error.details) else BAD
    except (BrokenPipeError, SystemExit):
        # The reader (such as `head`) closed the output; click and rich turn that into an exit. The command
        # may not have finished, so the exit code says neither yes nor no.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except Exception as error:
        show_failure(error, as_json)
        return UNEXPECTED
    return result if isinstance(result, int) else 0

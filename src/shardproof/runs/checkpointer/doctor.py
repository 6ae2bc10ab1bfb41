"""Finds the problems of a run, and names the command that repairs each.

The findings come from the scan, the plan of `prune`, `verify` and the free space of the storage. This module
changes nothing. Only `probe_storage` writes: a file of its own, which it removes.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardproof._utils.humanize import age, counted, gigabytes, listed
from shardproof.engine.format import MANIFEST_NAME, index_name
from shardproof.engine.storage import (
    FreeSpace,
    Storage,
    UncachedStorage,
    write_file,
)
from shardproof.errors import NotCommittedError, ShardproofError, StorageError
from shardproof.runs.checkpointer.judge import Damage, Judgement, Verdict, is_damage, judge, repair_refusal
from shardproof.runs.checkpointer.prune import PrunePlan, plan_prune
from shardproof.runs.checkpointer.retention import Leftover
from shardproof.runs.checkpointer.scan import StepInfo, scan_run
from shardproof.runs.checkpointer.step_folders import StepFolder, parse_folder, place_of, read_node_mark

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")

_CLOCK_SECONDS = 60.0
"""Seconds. A finding reports two clocks that differ by more."""

_SYNCHRONIZE = "synchronize the clocks (see `timedatectl`) of this machine, the writers and the storage"
_NO_CHANGE = os.ST_RDONLY if hasattr(os, "ST_RDONLY") else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run, or a fact about it.

    Example:
        >>> finding = Finding("warning", "leftover", "step-00000002", "a save died", "shardproof prune run")
        >>> finding.is_healthy
        False
    """

    severity: Severity
    """One of:

    - "error": a step cannot be restored, or the next save fails;
    - "warning": something needs attention;
    - "note": a fact.
    """
    kind: str
    """A code for programs, such as "leftover"."""
    where: str
    """The folder in the run, or the location of the run."""
    what: str
    """One sentence."""
    fix: str = ""
    """The command that repairs it, or other advice; empty for a fact."""

    @property
    def is_healthy(self) -> bool:
        """True for a note."""
        return self.severity == "note"


@dataclass(frozen=True, slots=True)
class Examination:
    """The state of a run."""

    location: str
    steps: tuple[int, ...]
    """Committed steps, ascending."""
    next_save: int
    """Bytes of the tensors of the newest committed step, which the next full save writes."""
    space: FreeSpace | None
    """The space for the next save; None: not known."""
    findings: tuple[Finding, ...]
    """The most severe first."""
    partial: tuple[int, ...] = ()
    """Steps of which this folder, that of one node, has some files, ascending."""
    infos: tuple[StepInfo, ...] = ()
    """The checkpoints and leftovers that were examined, oldest step first."""

    @property
    def is_healthy(self) -> bool:
        """True if all findings are notes."""
        return all(finding.is_healthy for finding in self.findings)

    def with_findings(self, more: Sequence[Finding]) -> Examination:
        """The same with more findings."""
        findings = sorted((*self.findings, *more), key=lambda finding: _ORDER.index(finding.severity))
        return replace(self, findings=tuple(findings))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        space = self.space
        return {
            "location": self.location,
            "healthy": self.is_healthy,
            "steps": list(self.steps),
            "partial": list(self.partial),
            "next_save": self.next_save,
            "free": None if space is None else space.free,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine_run(storage: Storage, run: str, *, older_than: float, now: float) -> Examination:
    """Examines a run. Reads manifests and sizes, and no tensors; writes nothing.

    Args:
        storage: the run's folder.
        run: the run, as commands name it.
        older_than: seconds since the last write after which files without a manifest count as those of a
            dead save.
        now: Unix seconds.

    Raises:
        StorageError: the storage cannot list the run.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> run = tempfile.mkdtemp()
        >>> _ = sp.Checkpointer(run).save(1, {"w": torch.ones(4)}).result()
        >>> found = examine_run(LocalStorage(run), run, older_than=3600.0, now=time.time())
        >>> found.steps, found.is_healthy
        ((1,), True)
    """
    infos = scan_run(storage, depth="metadata", older_than=older_than, now=now)
    committed = [info for info in infos if info.is_step]
    partial = [info for info in infos if info.status == Verdict.PARTIAL and info.step is not None]
    newest = (committed or partial)[-1:]
    next_save = newest[0].bytes if newest else 0
    space = storage.free_space()
    steps = tuple(info.step for info in committed if info.step is not None)
    quoted = shlex.quote(run)
    findings = [
        *_of_steps(infos, run),
        *_of_leftovers(storage, infos, quoted, older_than, now),
        *_of_space(storage.location, next_save, space, quoted, len(committed)),
        *_of_clocks(storage, infos, now),
        *_of_permissions(storage, infos),
    ]
    parts = tuple(info.step for info in partial if info.step is not None)
    examined = Examination(storage.location, steps, next_save, space, (), parts, tuple(infos))
    return examined.with_findings(findings)


def _of_steps(infos: Sequence[StepInfo], run: str) -> Iterator[Finding]:
    quoted = shlex.quote(run)
    has_steps = any(info.is_step or info.status == Verdict.PARTIAL for info in infos)
    if not has_steps:
        yield from _of_no_steps(infos, run)
    for info in infos:
        if info.name == "." and any(parse_folder(other.name) for other in infos):
            yield _beside_steps(info, run)
        reason = info.reason or ""
        if info.status == Verdict.DAMAGED:
            yield _damaged_step(info.name, reason, run, has_others=has_steps)
        elif info.status == Verdict.REPAIRABLE:
            fix = f"shardproof repair {quoted}/{info.name}"
            yield Finding("error", "repairable", info.name, reason, fix)
        elif info.status == Verdict.MISPLACED:
            yield _misplaced_step(info, infos, run)
        elif info.status == Verdict.UNREADABLE:
            yield Finding("error", "unreadable", info.name, reason, _rights_advice(run))
        elif info.status == Verdict.SUSPECT:
            settle = f'sp.Checkpointer({run!r}).settle_suspect({info.step}, "...")'
            yield Finding("warning", "suspect", info.name, reason, settle)
        elif info.status == Verdict.SETTLED:
            yield Finding("note", "settled", info.name, f"a settled suspect: {info.verdict}")
        elif info.status in (Verdict.PARTIAL, Verdict.REFERENCED):
            yield Finding("note", info.status, info.name, reason)
        if info.pinned is not None:
            yield Finding("note", "pinned", info.name, f"pinned, so that retention keeps it: {info.pinned}")
        if info.linked:
            text = "a symbolic link, so that retention and prune remove nothing in it"
            yield Finding("note", "linked", info.name, text)


def _of_no_steps(infos: Sequence[StepInfo], run: str) -> Iterator[Finding]:
    """The finding of a run without a step that can be restored; none for a folder that is a checkpoint."""
    others = [info.name for info in infos if info.committed]
    has_only_others = len(others) == len(infos)
    if has_only_others and "." in others:
        return
    text, fix = "no step of the run can be restored", ""
    if others:
        place = run if others[-1] == "." else f"{run.rstrip('/')}/{others[-1]}"
        text = "the run has no step" if has_only_others else text
        text = f"{text}. A restore takes no folder of another name: {listed(others)}"
        fix = f"sp.load({place!r}, state)"
    yield Finding("note" if has_only_others else "error", "no steps", ".", text, fix)


def _beside_steps(info: StepInfo, run: str) -> Finding:
    """The finding of a checkpoint in the run's own folder."""
    text = (
        "a checkpoint is in the folder of the run, beside its steps. A restore takes no notice of it, and "
        "verify, inspect, stats and convert take RUN for this checkpoint, so that they find no STEP"
    )
    place = f"{run.rstrip('/')}/checkpoint"
    parts = [MANIFEST_NAME, index_name(info.save.attempt or ""), "shards"]
    if "://" in run or info.save.attempt is None:
        fix = f"move {', '.join(parts)} to another folder"
    else:
        files = shlex.join(f"{run.rstrip('/')}/{part}" for part in parts)
        fix = f"mkdir {shlex.quote(place)} && mv {files} {shlex.quote(place)}"
    return Finding("warning", "beside steps", ".", text, fix)


def _damaged_step(folder: str, reason: str, run: str, *, has_others: bool) -> Finding:
    """The finding of a step that no command can repair. Without another step, no removal is advised."""
    if has_others:
        return Finding(
            "error", "damaged", folder, reason, f"shardproof prune {shlex.quote(run)} --damaged --yes"
        )
    path = f"{run}/{folder}"
    text = (
        f"{reason}. Keep the folder: if there is a copy of the damaged file elsewhere, put it back; "
        f"sp.open({path!r})[key].read() reads a tensor without chunks in it"
    )
    return Finding("error", "damaged", folder, text, f"shardproof verify {shlex.quote(path)}")


def _misplaced_step(info: StepInfo, infos: Sequence[StepInfo], run: str) -> Finding:
    """The finding of a folder that was renamed or copied. The fix depends on the folder of the step."""
    reason = info.reason or ""
    name = StepFolder(info.save.step or 0, info.suspect).name
    there = next((one for one in infos if one.name == name), None)
    here, own = (shlex.quote(f"{run}/{folder}") for folder in (info.name, name))
    if "://" in run:
        fix = f"shardproof convert {here} {own} --standalone" if there is None else ""
    elif there is None:
        fix = f"mv {here} {own}"
    elif (
        there.whole and there.save.attempt == info.save.attempt and not info.referenced_by and not info.linked
    ):
        fix = f"rm -r {here}"
        reason = f"{reason}. {name} has the same checkpoint"
    else:
        fix = ""
        place = repr(f"{run}/{info.name}")
        reason = f"{reason}. {name} has another checkpoint. restore(state, step={place}) loads this one"
    return Finding("error", "misplaced", info.name, reason, fix)


def _of_leftovers(
    storage: Storage, infos: Sequence[StepInfo], run: str, older_than: float, now: float
) -> Iterator[Finding]:
    try:
        plan = plan_prune(storage, storage.modified, older_than=older_than, now=now)
    except StorageError as error:
        text = f"prune cannot look at the run: {error.message}"
        yield Finding("error", "unreadable", storage.location, text, _rights_advice(storage.location))
        return
    for leftover in (*plan.leftovers, *plan.writing):
        size = f"{gigabytes(leftover.bytes)} in {counted(len(leftover.files), 'file')} that no manifest names"
        written = now if leftover.modified is None else leftover.modified
        if written > now + _CLOCK_SECONDS:
            text = f"{size}, last written {age(written - now)} in the future, so prune takes them for new"
            yield Finding("warning", "clock", leftover.folder, text, _SYNCHRONIZE)
        elif leftover in plan.writing:
            text = f"{size}, last written {_ago(now, written)}: a save may be in progress"
            yield Finding("note", "in progress", leftover.folder, text, f"shardproof watch {run}")
        else:
            text = f"{size}, last written {_ago(now, written)}: their save died"
            yield Finding("warning", "leftover", leftover.folder, text, f"shardproof prune {run}")
    committed = {info.name for info in infos if info.whole}
    repairable = {info.name for info in infos if info.status == Verdict.REPAIRABLE}  # `_of_steps` names them
    for leftover in plan.complete:
        if leftover.folder not in repairable:
            yield from _of_complete_save(storage, leftover, run, is_replaced=leftover.folder in committed)
    yield from _of_uploads(plan, storage.location, run, now)


def _of_complete_save(
    storage: Storage, leftover: Leftover, run: str, *, is_replaced: bool
) -> Iterator[Finding]:
    """The finding of a save whose shard files are all there, and that no manifest names."""
    text = f"all shard files of the save {leftover.attempt} are there ({gigabytes(leftover.bytes)})"
    if is_replaced:
        text = f"{text}, and another save of this step is committed"
        fix = f"shardproof prune {run} --complete --yes"
        yield Finding("warning", "leftover", leftover.folder, text, fix)
    elif not leftover.committed:
        text = f"{text}, and its manifest is missing. {repair_refusal(storage, leftover.folder)}"
        yield Finding("warning", "no manifest", leftover.folder, text)


def _ago(now: float, then: float) -> str:
    return f"{age(max(0.0, now - then))} ago"


def _of_space(location: str, needed: int, space: FreeSpace | None, run: str, steps: int) -> Iterator[Finding]:
    if space is None or needed <= space.free:
        return
    fix = f"shardproof prune {run} --keep 1 --yes" if steps > 1 else "remove other files, or save elsewhere"
    have = f"the next full save writes {gigabytes(needed)}, and {gigabytes(space.free)} is free"
    if space.upper_bound is not None and needed > space.upper_bound:
        yield Finding("error", "space", location, f"{have}: it will be refused", fix)
    else:
        yield Finding("warning", "space", location, f"{have}: it may fail", fix)


def _of_clocks(storage: Storage, infos: Sequence[StepInfo], now: float) -> Iterator[Finding]:
    for info in infos:
        if info.status == Verdict.UNREADABLE:
            continue
        written = storage.modified(MANIFEST_NAME if info.name == "." else f"{info.name}/{MANIFEST_NAME}")
        if info.time is not None and info.time > now + _CLOCK_SECONDS:
            text = f"saved {age(info.time - now)} in the future, by the clock of this machine"
        elif written is not None and written > now + _CLOCK_SECONDS:
            text = (
                f"its manifest was written {age(written - now)} in the future, by the clock of this machine: "
                "prune misjudges ages"
            )
        elif info.time is not None and written is not None and info.time > written + _CLOCK_SECONDS:
            text = f"the clock of its writer was {age(info.time - written)} ahead of the clock of the storage"
        else:
            continue
        yield Finding("warning", "clock", info.name, text, _SYNCHRONIZE)


def _of_permissions(storage: Storage, infos: Sequence[StepInfo]) -> Iterator[Finding]:
    """Folders in which this user can remove or make no files. Only a probe shows the rights in a bucket."""
    if storage.path is None:
        return
    with suppress(OSError):  # the folder is gone
        if os.statvfs(storage.path).f_flag & _NO_CHANGE:
            text = "the file system is mounted read-only, so no step can be saved or removed"
            fix = f"findmnt --target {shlex.quote(str(storage.path))}"
            yield Finding("warning", "permissions", ".", text, fix)
            return
    for folder in [".", *(info.name for info in infos if info.name != "." and not info.linked)]:
        path = storage.path / folder
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            doing = "save a step" if folder == "." else "remove this step"
            text = f"this user cannot write to the folder, and so cannot {doing}"
            yield Finding("warning", "permissions", folder, text, f"ls -ld {shlex.quote(str(path))}")


def _rights_advice(place: str) -> str:
    """What to check if a run cannot be read or written."""
    if "://" in place:
        return "check the credentials, and the policy of the bucket or the server"
    return "check the mount, and owner and mode of the folder"


def _of_uploads(plan: PrunePlan, location: str, run: str, now: float) -> Iterator[Finding]:
    """Multipart uploads that did not complete. The store charges for their parts, which no list shows."""
    folders = sorted({upload.name.partition("/")[0] for upload in (*plan.uploads, *plan.recent_uploads)})
    for folder in folders:
        dead, recent = (
            [upload for upload in uploads if upload.name.startswith(f"{folder}/")]
            for uploads in (plan.uploads, plan.recent_uploads)
        )
        if dead:
            size = gigabytes(sum(upload.bytes or 0 for upload in dead))
            last = _ago(now, max(upload.modified for upload in dead))
            text = f"{size} in {counted(len(dead), 'upload')} that did not complete, last written {last}"
            yield Finding("warning", "uploads", folder, f"{text}: their save died", f"shardproof prune {run}")
        if recent:
            last = _ago(now, max(upload.modified for upload in recent))
            text = f"{counted(len(recent), 'upload')} that did not complete, last written {last}"
            fix = f"shardproof watch {run}"
            yield Finding("note", "in progress", folder, f"{text}: a save may be in progress", fix)
    if plan.uploads_fault:
        fix = "set a lifecycle rule of the bucket that aborts incomplete multipart uploads after some days"
        yield Finding("note", "uploads", location, plan.uploads_fault, fix)


def probe_storage(storage: Storage) -> list[Finding]:
    """Writes, publishes, replaces, reads and removes a file of its own in a run, as a save does.

    Returns:
        An error for the operation that failed; a warning if the clock of the storage differs from the clock
        of this machine.
    """
    name = f"doctor-{secrets.token_hex(8)}.probe"
    findings: list[Finding] = []

    def run(doing: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except StorageError as error:
            text = f"this user cannot {doing} a file here: {error.message}"
            advice = _rights_advice(storage.location)
            findings.append(Finding("error", "permissions", storage.location, text, advice))
            return False
        return True

    draft, before = f"{name}.draft", time.time()
    is_written = run("write", lambda: write_file(storage, draft, b"1"))
    after = time.time()
    if is_written:
        written = storage.modified(draft)
        ahead = 0.0 if written is None else max(written - after, before - written)
        if written is not None and ahead > _CLOCK_SECONDS:
            side = "ahead of" if written > after else "behind"
            text = f"the clock of the storage is {age(ahead)} {side} the clock of this machine"
            fix = "synchronize the clocks (see `timedatectl`), or prune with a larger --older-than"
            findings.append(Finding("warning", "clock", storage.location, text, fix))
    published = run("publish", lambda: storage.publish(name, b"1")) and run(
        "replace", lambda: storage.publish(name, b"2", replace=True)
    )
    if published:
        run("read", lambda: storage.read(name))
    for file in (draft, name):
        run("remove", lambda file=file: storage.delete(file))  # type: ignore[misc]
    return findings


def scrub_run(
    storage: Storage, run: str, *, bandwidth: int | None, on_progress: Callable[[int, int], None]
) -> list[Finding]:
    """Reads every readable checkpoint of a run and compares every byte with what was saved.

    The folder of one node has only some files of a step. The function then reads these files.

    Args:
        storage: the run's folder.
        run: the run, as commands name it.
        bandwidth: bytes to read a second, at most; None: no limit.
        on_progress: called with bytes done and bytes in all, of one checkpoint after the other.

    Returns:
        An error for each damaged step, and a warning for each step that could not be read.
    """
    from shardproof.runs.maintenance import verify_files_here  # imports torch

    findings = []
    mark = read_node_mark(storage)
    uncached = storage if storage.path is None else UncachedStorage(storage.path)
    infos = [info for info in scan_run(storage) if info.whole or info.status == Verdict.PARTIAL]
    damaged: dict[str, Judgement] = {}
    whole: set[str] = set()
    for info in infos:
        begun = time.monotonic()

        def read(done: int, total: int, begun: float = begun) -> None:
            on_progress(done, total)
            if bandwidth is not None:
                time.sleep(max(0.0, begun + done / bandwidth - time.monotonic()))

        faults: Sequence[ShardproofError] = ()
        found = None
        if info.whole:  # reads from the device, not from the page cache
            found = judge(uncached, info.name, depth="bytes", plan_repairs=False, on_progress=read)
            if found is None or isinstance(found.error, NotCommittedError):
                continue  # retention removed it meanwhile
            faults = found.faults or (() if found.error is None else (found.error,))
            if found.verdict is Verdict.COMMITTED:
                whole.add(info.name)
        else:
            try:
                faults = verify_files_here(place_of(uncached, info.name), read)
            except NotCommittedError:
                continue  # retention removed it meanwhile
        if faults and mark is not None and mark.replicas:
            findings.append(_of_node_faults(storage.location, info.name, faults))
        elif found is not None and found.verdict is Verdict.DAMAGED:
            damaged[info.name] = found
        elif faults:
            findings.append(_of_faults(info.name, faults, f"{shlex.quote(run)}/{info.name}"))
    good = [info for info in infos if info.is_step and info.name in whole]
    findings += [
        _of_damaged_bytes(name, found, run, restored=good[-1].name if good else None)
        for name, found in damaged.items()
    ]
    if damaged and not good:
        text = "no step of the run can be restored: every step is damaged or cannot be read"
        findings.append(Finding("error", "no steps", ".", text))
    return findings


def _of_damaged_bytes(folder: str, found: Judgement, run: str, *, restored: str | None) -> Finding:
    """The finding of a step with damaged bytes. A restore takes `restored` instead, if there is one."""
    path = shlex.quote(f"{run}/{folder}")
    disk = "do not trust this disk (see `dmesg`)"
    if restored is None:
        text = (
            f"damaged: {found.reason}. Keep the folder, and {disk}: sp.load(..., exclude=) loads the tensors "
            "without damage"
        )
    else:
        text = f"damaged, and restore passes over it: {found.reason}. {restored} is whole; {disk}"
    return Finding("error", "damaged", folder, text, f"shardproof verify {path}")


def _of_node_faults(run: str, folder: str, faults: Sequence[ShardproofError]) -> Finding:
    """The finding for damage on a node whose files have copies on another node."""
    found = [Damage.of(fault, run, folder) for fault in faults if is_damage(fault)]
    files = sorted({one.file for one in found if one is not None})
    if not files:
        return _of_faults(folder, faults, shlex.quote(f"{run}/{folder}"))
    text = f"damaged, and restore reads the copy on another node: {faults[0].message}"
    remove = shlex.join(["rm", *(f"{run}/{file}" for file in files)])
    fix = f"{remove}; the next restore of this step copies them again. Do not trust this disk (see `dmesg`)"
    return Finding("error", "damaged", folder, text, fix)


def _of_faults(folder: str, faults: Sequence[ShardproofError], path: str) -> Finding:
    more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
    damage = [fault for fault in faults if is_damage(fault)]
    if not damage:
        text = f"could not be read: {faults[0].message}{more}"
        return Finding("warning", "unreadable", folder, text, f"shardproof verify {path}")
    text = f"damaged, and restore passes over it: {damage[0].message}{more}"
    fix = f"shardproof verify {path}; then remove the folder, and do not trust this disk (see `dmesg`)"
    return Finding("error", "damaged", folder, text, fix)


def compare_tiers(
    first: Storage, second: Storage, run: str, other: str, *, older_than: float, now: float
) -> list[Finding]:
    """Finds committed steps of a run that its second tier lacks.

    Args:
        first: the run's folder.
        second: the folder of the same run on the second tier, with the same layout.
        run: the run, as commands name it.
        other: the second tier, as commands name it.
        older_than: seconds. A younger step may still be in upload, and is a note.
        now: Unix seconds.

    Raises:
        StorageError: a storage cannot list its run.
    """
    there = {info.name: info for info in scan_run(second) if info.is_step}
    found = [info for info in scan_run(first) if info.is_step]
    findings = []
    for info in found:
        copy = there.get(info.name)
        fix = (
            f"shardproof convert {shlex.quote(run)}/{info.name} {shlex.quote(other)}/{info.name} --standalone"
        )
        if copy is None and info.time is not None and now - info.time < older_than:
            text = f"not on {second.location} yet: saved {_ago(now, info.time)}"
            findings.append(Finding("note", "one copy", info.name, text))
        elif copy is None:
            findings.append(
                Finding("warning", "one copy", info.name, f"not committed on {second.location}", fix)
            )
        elif copy.save.attempt != info.save.attempt and (copy.time or 0) < (info.time or 0):
            text = f"{second.location} has an older checkpoint of the step"
            findings.append(
                Finding("warning", "other copy", info.name, text, f"remove the step there, then {fix}")
            )
    if not there and any(not finding.is_healthy for finding in findings):
        steps = listed((info.name for info in found), 3)
        text = f"no step is committed there, and all copies of {steps} are on one tier"
        findings.append(Finding("error", "no copies", second.location, text))
    return findings

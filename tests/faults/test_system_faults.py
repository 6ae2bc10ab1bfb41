"""Each system call of a save fails in turn: the error states the commit as a fresh reader sees it.

A failed save committed nothing, unless its error says so. If the storage could not flush a commit, the error
says that it is committed, but not known to be durable. Such a commit keeps its files, and is not trusted
before it is confirmed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, locate_files, read_manifest
from shardproof.errors import AlreadyCommittedError, ShardproofError, StorageError
from shardproof.runs.maintenance import make_standalone, repair, verify
from shardproof.storage import LocalStorage
from tests.faulty_system import Fault, faulty_system

NOTHING = "nothing was committed"
UNCONFIRMED = "committed, but not known to be durable"
UNKNOWN = "it is unknown whether it was committed"
CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)


@pytest.fixture(autouse=True)
def _fast(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hundreds of failed saves log an error each; no machine crashes, so nothing has to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with caplog.at_level(logging.CRITICAL, "shardproof"):
        yield


def state(salt: int) -> dict[str, Any]:
    return {"same": torch.ones(6), "w": torch.full((8,), float(salt)), "n": salt}


@dataclass(frozen=True)
class Way:
    """One way to save step 2 of a run that has step 1."""

    options: dict[str, Any]
    arguments: dict[str, Any]
    before: bool = False
    """Whether step 2 is committed already."""

    @property
    def folder(self) -> str:
        return "suspect-00000002" if self.arguments.get("suspect") else "step-00000002"


WAYS = {
    "new": Way({}, {}),
    "overwriting": Way({}, {"overwrite": True}, before=True),
    "incremental": Way({"incremental": True}, {}),
    "suspect": Way({}, {"suspect": True}),
}


def attempt_in(folder: Path) -> str | None:
    """The attempt that a fresh reader finds, every byte of it read and verified."""
    storage = LocalStorage(folder)
    if not (folder / MANIFEST_NAME).exists():
        return None
    assert verify(storage).faults == []
    return read_manifest(storage).attempt


def files_in(folder: Path) -> list[Path]:
    """The files that the manifest in a folder names."""
    if not (folder / MANIFEST_NAME).exists():
        return []
    storage = LocalStorage(folder)
    manifest = read_manifest(storage)
    named = [Path(place.location) / name for place, name in locate_files(storage, manifest)]
    return [*named, folder / manifest.index.name]


def faults_of(
    calls: list[tuple[str, str]], publishing: int, codes: tuple[int, ...] = (errno.EIO, errno.EROFS)
) -> Iterator[Fault]:
    """Each mode at every call. From the publishing on, mode "onward" has each of `codes`."""
    for at in range(len(calls)):
        code = CODES[at % len(CODES)]
        yield Fault(at, code, "once")
        yield Fault(at, code, "late")
        for each in codes if at >= publishing else (code,):
            yield Fault(at, each, "onward")


class Trial:
    """A fresh run for each fault."""

    def __init__(self, top: Path, way: Way) -> None:
        self.top, self.way, self.count = top, way, 0

    def run(self, fault: Fault) -> tuple[list[tuple[str, str]], str]:
        """Saves step 2 with the fault and checks what the error claims. Returns the calls and the claim."""
        self.count += 1
        root = self.top / str(self.count)
        way, folder = self.way, root / self.way.folder
        checkpointer = sp.Checkpointer(root, cache="none", **way.options)
        checkpointer.save(1, state(1)).result()
        if way.before:
            checkpointer.save(2, state(9)).result()
        old, old_files = attempt_in(folder), files_in(folder)
        with faulty_system(root, fault) as calls:
            text = ""
            pending = None
            try:
                pending = checkpointer.save(2, state(2), **way.arguments)
                committed = pending.result()
            except ShardproofError as error:
                text = error.message
            seen = list(calls)
        found = attempt_in(folder)
        if not text:
            assert found == committed.attempt
            return seen, "committed"
        claim = self._claim(text)
        new = found is not None and found != old
        assert claim == UNKNOWN or new == (claim == UNCONFIRMED), (fault, seen[fault.at or 0], text)
        if claim == UNCONFIRMED:  # a crash of the machine may bring the old manifest back
            assert all(file.exists() for file in old_files)
        self._goes_on(root, checkpointer, new)
        return seen, claim

    def _claim(self, text: str) -> str:
        claims = [claim for claim in (NOTHING, UNCONFIRMED, UNKNOWN) if claim in text]
        assert len(claims) <= 1, text
        return claims[0] if claims else NOTHING

    def _goes_on(self, root: Path, checkpointer: sp.Checkpointer, new: bool) -> None:
        """A fresh checkpointer restores what is there. The old one saves the step again."""
        suspect = bool(self.way.arguments.get("suspect"))
        target = state(0)
        found = sp.Checkpointer(root).restore(target, suspect=suspect)
        salt = 2 if new else 9 if self.way.before else 1
        assert (found, target["n"], target["w"].tolist()) == (1 if salt == 1 else 2, salt, [float(salt)] * 8)
        checkpointer.save(2, state(3), **self.way.arguments).result()
        assert attempt_in(root / self.way.folder) is not None
        assert sp.Checkpointer(root).restore(target, suspect=suspect) == 2
        assert target["n"] == 3


@pytest.mark.parametrize(
    ("name", "every"),
    [("overwriting", 5), ("incremental", 5), *(pytest.param(way, 1, marks=pytest.mark.slow) for way in WAYS)],
)
def test_every_system_call_of_a_save_fails_in_turn(name: str, every: int, tmp_path: Path) -> None:
    """Each call fails in three ways, and from the publishing on in four, so each fifth fault has all ways."""
    trial = Trial(tmp_path, WAYS[name])
    calls, claim = trial.run(Fault())
    assert claim == "committed" and len(calls) > 30
    published = [at for at, (call, path) in enumerate(calls) if call in ("link", "replace")]
    codes = CODES if name == "new" else (errno.EIO, errno.EROFS)
    faults = list(faults_of(calls, published[-1], codes))[::every]
    claims = [trial.run(fault)[1] for fault in faults]
    assert claims.count(UNCONFIRMED) > 10 // every and claims.count(NOTHING) > 30 // every
    assert 0 < claims.count(UNKNOWN) < 40


def unconfirmed_save(checkpointer: sp.Checkpointer, step: int, salt: int, **arguments: Any) -> None:
    """Saves a step whose manifest gets its name and whose folder then cannot be flushed."""
    folder = Path(checkpointer.root, f"step-{step:08d}")
    with pytest.raises(ShardproofError, match=UNCONFIRMED), FlushFails(folder):
        checkpointer.save(step, state(salt), **arguments).result()
    assert attempt_in(folder) is not None


class FlushFails:
    """The flush of a folder fails as soon as it holds a new file of a name.

    Args:
        folder: of the file.
        name: of the file.
    """

    def __init__(self, folder: Path, name: str = MANIFEST_NAME) -> None:
        self._folder, self._file = folder, folder / name
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        real = os.fsync
        before = self._file.stat().st_ino if self._file.exists() else None

        def fsync(descriptor: int) -> None:
            there = self._file.exists() and self._file.stat().st_ino != before
            if there and os.readlink(f"/proc/self/fd/{descriptor}") == str(self._folder):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(descriptor)

        self._patch.setattr(os, "fsync", fsync)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def test_no_incremental_save_refers_to_a_commit_that_is_not_confirmed(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    checkpointer.save(1, state(1)).result()
    unconfirmed_save(checkpointer, 2, 2)
    checkpointer.save(3, state(2)).result()
    manifest = read_manifest(LocalStorage(tmp_path / "step-00000003"))
    assert {record.folder for record in manifest.referenced_files} == {"step-00000001"}
    checkpointer.save(2, state(2), overwrite=True).result()  # confirmed: saves may refer to it again
    checkpointer.save(4, state(5)).result()
    again = sp.Checkpointer(tmp_path, incremental=True)
    again.save(5, state(6)).result()
    assert attempt_in(tmp_path / "step-00000005") is not None


def test_retention_does_not_count_a_commit_that_is_not_confirmed(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    checkpointer.save(1, state(1)).result()
    unconfirmed_save(checkpointer, 2, 2)
    checkpointer.save(3, state(3)).result()
    assert checkpointer.steps() == [1, 2, 3]  # 1 and 3 are the two that are known to be durable
    checkpointer.save(4, state(4)).result()
    assert checkpointer.steps() == [3, 4]


def test_a_restore_that_flushes_and_reads_all_of_it_confirms_a_commit(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    checkpointer.save(1, state(1)).result()
    unconfirmed_save(checkpointer, 2, 2)
    target = state(0)
    assert checkpointer.restore(target) == 2 and target["n"] == 2
    checkpointer.save(3, state(3)).result()
    assert checkpointer.steps() == [2, 3]


def test_a_restore_that_cannot_flush_says_so_and_does_not_trust_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        first.save(step, state(step)).result()
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    target = state(0)
    with (
        caplog.at_level(logging.WARNING, "shardproof"),
        faulty_system(tmp_path / "step-00000002", Fault(0, errno.ENOSPC, "onward")),
    ):
        assert checkpointer.restore(target) == 2 and target["n"] == 2
    assert "not known to be durable" in caplog.text
    checkpointer.save(3, state(3)).result()
    assert checkpointer.steps() == [1, 2, 3]
    with pytest.raises(AlreadyCommittedError):  # another process committed it, so it is not replaced unasked
        checkpointer.save(2, state(2)).result()


each_fifth_or_every = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""Each call fails in three ways or in four, so each fifth fault has all ways."""


def every_fault_of(
    top: Path, make: Callable[[Path], Path], work: Callable[[Path], Any], every: int
) -> Iterator[tuple[Path, ShardproofError | None]]:
    """Runs `work` with each `every`-th fault in a fresh folder. Yields the folder and the error."""
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        return make(top / str(number))

    folder = fresh()
    with faulty_system(folder, Fault()) as calls:
        work(folder)
        seen = list(calls)
    publishing = max(at for at, call in enumerate(seen) if call[0] in ("link", "replace"))
    for fault in list(faults_of(seen, publishing))[::every]:
        folder = fresh()
        error = None
        with faulty_system(folder, fault):
            try:
                work(folder)
            except ShardproofError as caught:
                error = caught
        yield folder, error


@each_fifth_or_every
def test_every_system_call_of_a_repair_fails_in_turn(every: int, tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        sp.save(folder, state(1))
        (folder / MANIFEST_NAME).unlink()
        return folder

    in_place = 0
    for folder, error in every_fault_of(tmp_path, make, lambda at: repair(LocalStorage(at)), every):
        found = attempt_in(folder)
        if error is None or error.details.get("in_place"):
            assert found is not None
            in_place += error is not None
            with pytest.raises(AlreadyCommittedError):
                repair(LocalStorage(folder))
        elif found is None:
            repair(LocalStorage(folder))
        assert attempt_in(folder) is not None
    assert in_place > 10 // every


def test_a_repair_raises_if_it_cannot_flush_a_whole_commit(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", state(1))
    with pytest.raises(StorageError, match="ENOSPC"), faulty_system(tmp_path, Fault(0, errno.ENOSPC)):
        repair(LocalStorage(tmp_path / "c"))


@each_fifth_or_every
def test_every_system_call_of_a_standalone_copy_fails_in_turn(every: int, tmp_path: Path) -> None:
    def make(run: Path) -> Path:
        checkpointer = sp.Checkpointer(run, incremental=True)
        for step in (1, 2):
            checkpointer.save(step, state(step)).result()
        return run

    def copy(run: Path) -> None:
        make_standalone(LocalStorage(run / "step-00000002"), LocalStorage(run / "copy"))

    in_place = 0
    for run, error in every_fault_of(tmp_path, make, copy, every):
        found = attempt_in(run / "copy")
        assert error is not None or found is not None
        if error is not None and error.details.get("in_place"):
            assert found is not None
            in_place += 1
        assert attempt_in(run / "step-00000002") is not None
    assert in_place > 10 // every


@each_fifth_or_every
def test_every_system_call_of_settling_fails_in_turn(every: int, tmp_path: Path) -> None:
    def make(run: Path) -> Path:
        sp.Checkpointer(run).save(2, state(2), suspect=True).result()
        return run

    def settle(run: Path) -> None:
        sp.Checkpointer(run).settle_suspect(2, "transient fault")

    in_place = 0
    for run, error in every_fault_of(tmp_path, make, settle, every):
        suspects = sp.Checkpointer(run).suspects()
        if error is None or error.details.get("in_place"):
            assert suspects == []
            in_place += error is not None
        assert attempt_in(run / "suspect-00000002") is not None
    assert in_place > 10 // every


def test_prune_removes_nothing_beside_a_manifest_that_it_cannot_flush(tmp_path: Path) -> None:
    from shardproof.runs.checkpointer.retention import leftovers, remove_leftover

    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(2, state(1)).result()
    old = files_in(tmp_path / "step-00000002")
    unconfirmed_save(checkpointer, 2, 2, overwrite=True)
    run = LocalStorage(tmp_path)
    (leftover,) = leftovers(run, lambda name: 0.0)
    assert {tmp_path / "step-00000002" / file for file in leftover.files} == set(old)
    with pytest.raises(StorageError), faulty_system(tmp_path, Fault(0, errno.EIO)):
        remove_leftover(run, leftover)
    assert all(file.exists() for file in old)
    assert remove_leftover(run, leftover)
    assert not any(file.exists() for file in old)
    assert attempt_in(tmp_path / "step-00000002") is not None


def save_and_restore(run: Path) -> None:
    checkpointer = sp.Checkpointer(run, incremental=True, keep=sp.KeepLatest(2))
    checkpointer.save(3, state(3)).result()
    assert checkpointer.restore(state(0)) in (2, 3)  # a step that cannot be read (EIO) is passed over


def verify_and_open(run: Path) -> None:
    for fault in verify(LocalStorage(run / "step-00000002")).faults:
        raise fault
    with sp.open(run / "step-00000002") as checkpoint:
        checkpoint["w"].read()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "work",
    [
        save_and_restore,
        verify_and_open,
        lambda run: sp.load(run / "step-00000002", state(0)),
        lambda run: make_standalone(LocalStorage(run / "step-00000002"), LocalStorage(run / "copy")),
        lambda run: repair(LocalStorage(run / "step-00000002")),
        lambda run: sp.Checkpointer(run).settle_suspect(2, "transient fault"),
    ],
    ids=["save and restore", "verify and open", "load", "copy", "repair", "settle"],
)
def test_a_failed_read_of_the_storage_is_an_error_of_ours(
    work: Callable[[Path], Any], every: int, tmp_path: Path
) -> None:
    """Each n-th call that only reads fails in a run of its own."""
    checkpointer = sp.Checkpointer(tmp_path / "template", incremental=True)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    checkpointer.save(2, state(2), suspect=True).result()
    at = failed = 0
    while True:
        run = Path(shutil.copytree(tmp_path / "template", tmp_path / str(at)))
        with faulty_system(run, Fault(at, errno.EIO, looks=True)) as calls:
            try:
                work(run)
            except ShardproofError as error:
                failed += "EIO" in error.message
        if len(calls) <= at:
            break
        assert attempt_in(run / "step-00000002") is not None
        at += every
    assert failed > 2

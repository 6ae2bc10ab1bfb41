"""Arbitrary operations and faults: no committed step is lost, no broken one is accepted, nothing grows.

The seeds are fixed. Ranks are threads, so a seed does not fix in which order they come: a failure prints what
the machine did. The last tests break the package in some places, and the machine must notice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import shardproof as sp
from shardproof.checkpointer import delete_steps
from shardproof.engine.format.chunk_verifier import ChunkVerifier
from shardproof.engine.storage.durable import flush_folders
from shardproof.errors import CorruptChunkError, ShardproofError
from shardproof.runs.checkpointer.tiers import TieredRun, Uploader
from shardproof.storage import LocalSink
from tests.soak.machine import Census, RunMachine
from tests.soak.tiered_machine import TieredMachine, UploadMachine

STEPS = 1000


def run(machine: type[RunMachine], examples: int, steps: int, *, number: int | None = None) -> None:
    """Runs examples of the machine, the first of which is the plainest. Does not shrink: threads differ."""
    options = settings(
        deadline=None,
        database=None,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=number is None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine if number is None else seed(number)(machine), settings=options)


@pytest.mark.parametrize("machine", [RunMachine, TieredMachine], ids=["one tier", "two tiers"])
def test_no_committed_step_is_lost_and_no_broken_one_accepted(machine: type[RunMachine]) -> None:
    run(machine, 4, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("machine", "number"), [(RunMachine, 1), (RunMachine, 2), (TieredMachine, 1), (TieredMachine, 2)]
)
def test_a_thousand_steps_lose_nothing_and_leak_nothing(machine: type[RunMachine], number: int) -> None:
    class CountedMachine(machine):  # type: ignore[misc,valid-type]
        census: ClassVar[list[Census] | None] = []
        total_steps = 0

    run(CountedMachine, 4, STEPS // 2, number=number)
    assert CountedMachine.total_steps >= STEPS
    found = CountedMachine.census
    assert found is not None
    assert len(found) > 40
    early, late = found[len(found) // 4 : len(found) // 2], found[-len(found) // 4 :]
    for what, slack in (("descriptors", 0), ("threads", 0), ("shared", 0), ("keys", 0), ("memory", 32 << 20)):
        most, least = (
            choose(getattr(one, what) for one in part) for choose, part in ((max, early), (min, late))
        )
        assert least <= most + slack, f"{what} grew from {most} to {least}"


def retention_first(patch: pytest.MonkeyPatch) -> None:
    """Retention removes the steps before a step while that step is being saved."""
    save = sp.Checkpointer.save

    def removing(self: Any, step: int, state: Any, **options: Any) -> Any:
        if self._rendezvous.rank == 0 and self._keep is not None:
            steps = self.steps()
            kept = {int(one) for one in self._run.facts.select(self._keep, [*steps])[0]}
            names = [f"step-{one:08d}" for one in steps if one not in kept or one == min(steps, default=0)]
            with suppress(ShardproofError):
                delete_steps(self._run.storage, names)
        return save(self, step, state, **options)

    patch.setattr(sp.Checkpointer, "save", removing)


def bytes_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A load compares no digest, so a restore accepts changed bytes."""
    for name in ("check", "check_data", "check_blocks"):
        patch.setattr(ChunkVerifier, name, lambda *arguments, **options: None)


def flush_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Shard files are not flushed before the manifest is published."""

    def finish(self: LocalSink, size: int) -> None:
        os.ftruncate(self._buffered, size)
        self._close()
        flush_folders(self._path.parent, self._topmost())

    patch.setattr(LocalSink, "finish", finish)


def copies_unverified(patch: pytest.MonkeyPatch) -> None:
    """An upload compares no digest of a chunk, so damage of the first tier reaches the second."""
    check = ChunkVerifier.check_pieces

    def unchecked(self: ChunkVerifier, at: int, pieces: Iterable[memoryview]) -> list[bytes]:
        with suppress(CorruptChunkError):
            return check(self, at, pieces)
        return []

    patch.setattr(ChunkVerifier, "check_pieces", unchecked)


def leftovers_trusted(patch: pytest.MonkeyPatch) -> None:
    """An upload does not verify a file that a killed upload left."""
    patch.setattr(
        Uploader, "_is_whole", lambda self, target, record, alive: target.size(record.name) is not None
    )


def damage_ends_the_restore(patch: pytest.MonkeyPatch) -> None:
    """A step whose first copy is damaged is passed over, although the second tier has a good one."""
    patch.setattr(TieredRun, "next_copy", lambda self, folder, error: False)


def waiting_steps_unprotected(patch: pytest.MonkeyPatch) -> None:
    """Retention of the first tier removes steps that wait for their upload."""
    patch.setattr(Uploader, "protect", lambda self, steps: set())


def overwrites_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a restart, an overwritten step is not replaced on the second tier."""
    patch.setattr("shardproof.runs.checkpointer.tiers.upload_coordinator.is_overwrite", lambda attempt: False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("machine", "break_it", "found"),
    [
        (RunMachine, retention_first, r"are lost"),
        (RunMachine, flush_after_the_commit, r"hash to|expected .* bytes|cannot be read|damaged"),
        (RunMachine, bytes_unchecked, r"has other values|has salt|is mixed"),
        (UploadMachine, waiting_steps_unprotected, r"were removed before their upload|No such file"),
        (UploadMachine, copies_unverified, r"CorruptChunkError|other values"),
        (UploadMachine, leftovers_trusted, r"was uploaded with damage"),
        (UploadMachine, overwrites_forgotten, r"were overwritten, and were not replaced"),
        (UploadMachine, damage_ends_the_restore, r"is whole|was not restored|was passed over|step \d+: "),
    ],
)
def test_the_machine_finds_a_broken_package(
    machine: type[RunMachine],
    break_it: Callable[[pytest.MonkeyPatch], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    failures: list[str] = []

    class RecordingMachine(machine):  # type: ignore[misc,valid-type]
        def failed(self, error: BaseException) -> None:
            failures.append(repr(error))

    with pytest.raises(BaseException):  # noqa: B017, PT011 a group, where threads came in another order
        run(RecordingMachine, 12, 100, number=3)
    assert re.search(found, failures[0]), failures[0]

"""Runs on local disks: each node is a folder, which only its own ranks open.

One start of processes plays many jobs. Between two jobs a folder is deleted, emptied, replaced by an older
one, or damaged; the ranks are renumbered, or their number changes. What is restored has to be the saved
state, bit for bit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
import torch

import shardproof as sp
from shardproof.checkpointer import RestoredStep
from shardproof.format import MANIFEST_NAME, read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import StoreRendezvous
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.scenarios.states import blanked, differences, rows, whole

HEIGHT = 12
RANKS = 4
T = TypeVar("T")
Work: TypeAlias = Callable[[sp.Checkpointer, int, int], T]
"""The program of a job: takes the run, the rank and the number of ranks."""


def part(salt: int, rank: int, ranks: int) -> dict[str, Any]:
    """A rank's rows of a state that does not depend on the number of ranks."""
    return {
        "model": {
            "weight": rows(whole((HEIGHT, 3), salt), HEIGHT * rank // ranks, HEIGHT * (rank + 1) // ranks),
            "bias": whole((5,), salt + 1),
        },
        "alone": whole((2, 2), salt + 2, torch.int64),
        "epoch": salt,
    }


class Stage:
    """The processes of a test, on which one job after the other runs.

    Args:
        root: the folder that has the folders of the nodes.
    """

    def __init__(self, root: str) -> None:
        from torch.distributed import TCPStore

        self.root = Path(root)
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            None,
            is_master=False,
            timeout=timedelta(seconds=60),
        )
        self._jobs = 0
        self._barrier = rendezvous(deadline=20.0)

    def together(self) -> None:
        """Waits for all processes."""
        self._barrier.meet("test", "together", b"", lambda posts: b"")

    def alone(self, work: Callable[[], object]) -> None:
        """One process does something while no job runs."""
        self.together()
        if rank() == 0:
            work()
        self.together()

    def job(self, places: Sequence[str], work: Work[T], **options: Any) -> T | None:
        """Runs a job whose rank r is on the node ``places[r]``. None on processes outside of it."""
        self._jobs += 1
        result = None
        if rank() < len(places):
            result = self.job_of(f"job-{self._jobs}", rank(), places, work, **options)
        self.together()
        return result

    def job_of(
        self,
        name: str,
        rank: int,
        places: Sequence[str],
        work: Work[T],
        **options: Any,
    ) -> T:
        """This process's part of a job."""
        meetings = StoreRendezvous(
            self._store, rank, len(places), deadline=options.pop("deadline", 60.0), name=name
        )
        run = sp.Checkpointer(
            self.root / places[rank],
            **{"node_local": True, "rendezvous": meetings, "cache": "none", **options},
        )
        return work(run, rank, len(places))

    def save(self, places: Sequence[str], step: int, salt: int | None = None, **options: Any) -> None:
        """A job that saves one step."""
        overwrite = options.pop("overwrite", False)

        def work(run: sp.Checkpointer, rank: int, ranks: int) -> None:
            run.save(step, part(salt or step, rank, ranks), overwrite=overwrite).result()
            run.wait_for_uploads(60)

        self.job(places, work, **options)

    def restore(self, places: Sequence[str], salt: int | None, **options: Any) -> RestoredStep | None:
        """A job that restores the state with this salt; any state of a step without."""

        def work(run: sp.Checkpointer, rank: int, ranks: int) -> RestoredStep:
            target = blanked(part(0, rank, ranks))
            restored = run.restore(target)
            assert restored is not None
            assert differences(target, part(int(restored) if salt is None else salt, rank, ranks)) == []
            return restored

        return self.job(places, work, **options)

    def shards(self, node: str, step: int) -> set[int]:
        """Ranks whose files of a step a node has."""
        return {int(path.name[:5]) for path in (self.root / node / f"step-{step:08d}" / "shards").glob("*")}


def _flip(root: Path, step: int, writer: int) -> None:
    """Changes a byte of a tensor in the file of a rank, in one node's folder."""
    folder = LocalStorage(root / f"step-{step:08d}")
    (record,) = (one for one in read_manifest(folder).files if one.rank == writer)
    path = folder.path / record.name
    data = bytearray(path.read_bytes())
    data[record.data_start + 4] ^= 1
    path.write_bytes(data)


def play(jobs: Callable[[str], None], root: Path) -> None:
    """Plays the jobs; the first process that failed fails the test."""
    outcomes = run_ranks(RANKS, jobs, str(root), timeout=120)
    for outcome in sorted(outcomes, key=lambda one: one.seconds if one.error is not None else 1e9):
        assert outcome.value is None


def _without_copies(root: str) -> None:
    stage = Stage(root)
    three = ["a", "a", "b"]
    stage.save(["a", "a"], 1)
    stage.save(three, 2)
    assert (stage.shards("a", 2), stage.shards("b", 2)) == ({0, 1}, {2})
    for node in ("a", "b"):
        assert (stage.root / node / "step-00000002" / MANIFEST_NAME).exists()
    for places in (three, ["b", "a", "b", "a"], ["a", "b"], ["b", "b", "a"]):
        restored = stage.restore(places, 2)
        if restored is not None:
            assert restored == 2 and restored.passed_over == ()
            assert restored.tier == str(stage.root / places[0])

    # Without node b, step 2 is passed over, and the reason names the file and the rank that wrote it.
    stage.alone(lambda: os.rename(stage.root / "b", stage.root / "lost"))
    restored = stage.restore(["a", "a"], 1)
    if restored is not None:
        (passed,) = restored.passed_over
        assert (restored, passed.step, passed.tier, passed.damaged) == (1, 2, "", True)
        assert "shards/00002-" in passed.reason and "it is missing" in passed.reason
        assert "Rank 2 wrote it" in passed.reason
    # A later job saves the step again, and then the node returns with the older save of it.
    stage.save(["a", "c"], 2, salt=7, overwrite=True)
    stage.alone(lambda: shutil.rmtree(stage.root / "b", ignore_errors=True))
    stage.alone(lambda: os.rename(stage.root / "lost", stage.root / "b"))
    for places in (["b", "a", "c"], ["a", "c", "b"]):
        restored = stage.restore(places, 7)
        if restored is not None:
            (passed,) = restored.passed_over
            assert restored == 2 and passed.tier.endswith(str(stage.root / "b"))
            assert "stale" in passed.reason and not passed.damaged

    # Retention removes a step from all nodes.
    stage.save(["a", "b", "c"], 3, keep=sp.KeepLatest(1))
    stage.alone(lambda: None)
    for node in ("a", "b", "c"):
        assert [path.name for path in (stage.root / node).iterdir()] == ["step-00000003"]

    # The second tier has what a lost node had.
    far = stage.root / "far"
    stage.save(three, 4, then=far)
    assert verify(LocalStorage(far / "step-00000004")).ok
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    restored = stage.restore(["a", "a"], 4, then=far)
    if restored is not None:
        (passed,) = restored.passed_over
        assert restored == 4 and "shards/00002-" in passed.reason and str(far) in passed.reason

    def differs(run: sp.Checkpointer, rank: int, ranks: int) -> None:
        raise AssertionError("not reached")

    with pytest.raises(sp.StructureError, match="rank 0 passes replicas=0, and rank 1 replicas=1"):
        stage.job_of("differing", rank(), ["a", "b", "a", "b"], differs, replicas=rank() % 2)


def test_nodes_without_copies(tmp_path: Path) -> None:
    play(_without_copies, tmp_path)


def _with_copies(root: str) -> None:
    stage = Stage(root)
    three = ["a", "a", "b"]
    stage.save(["a", "a"], 1, replicas=1)
    stage.save(three, 2, replicas=1)
    assert stage.shards("a", 2) == stage.shards("b", 2) == {0, 1, 2}
    for node in ("a", "b"):
        report = verify(LocalStorage(stage.root / node / "step-00000002"))
        assert report.ok, report.faults  # a step of two nodes is whole in either folder
    original = stage.root / "original"
    stage.alone(lambda: shutil.copytree(stage.root / "b", original))

    for lost, places in (("b", ["a", "a"]), ("a", ["b"])):
        stage.alone(lambda lost=lost: os.rename(stage.root / lost, stage.root / "lost"))
        restored = stage.restore(places, 2, replicas=1)
        assert restored is None or (restored == 2 and restored.passed_over == ())
        # The lost node comes back empty.
        for places in (three, ["b", "a"]):
            restored = stage.restore(places, 2, replicas=1)
            if restored is not None:
                (passed,) = restored.passed_over
                assert restored == 2 and passed.tier.endswith(str(stage.root / lost))
                assert "was emptied" in passed.reason and not passed.damaged
        stage.alone(lambda lost=lost: shutil.rmtree(stage.root / lost))
        stage.alone(lambda lost=lost: os.rename(stage.root / "lost", stage.root / lost))

    # Damage in the folder of one node is read from the other one, by the ranks of both.
    stage.alone(lambda: _flip(stage.root / "b", 2, 2))
    for places in (three, ["b", "a", "b"]):
        restored = stage.restore(places, 2, replicas=1)
        if restored is not None:
            (passed,) = restored.passed_over
            assert restored == 2 and passed.tier.endswith(str(stage.root / "b")) and not passed.damaged
    stage.alone(lambda: _flip(stage.root / "a", 2, 2))
    restored = stage.restore(three, 1, replicas=1)
    assert restored is None or (restored == 1 and restored.passed_over[0].step == 2)

    # A stale node has the step as it was before it was saved again.
    stage.save(three, 2, salt=8, replicas=1, overwrite=True)
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    stage.alone(lambda: os.rename(original, stage.root / "b"))
    for places in (three, ["b", "b", "a", "a"]):
        restored = stage.restore(places, 8, replicas=1)
        if restored is not None:
            assert restored == 2 and [passed.tier.endswith("/b") for passed in restored.passed_over] == [True]
            assert "stale" in restored.passed_over[0].reason


def test_nodes_with_copies(tmp_path: Path) -> None:
    play(_with_copies, tmp_path)

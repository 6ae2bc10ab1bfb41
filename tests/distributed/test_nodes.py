"""Runs on local disks: each node is a folder, which only its own ranks open.

The processes of a test run many jobs. Between two jobs a folder is deleted, emptied, replaced by an older
one, or damaged; the ranks are renumbered, or their number changes. Each restore must give the saved state,
bit for bit.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import StoreRendezvous
from shardproof.runs.checkpointer import RestoredStep, find_missing_copies
from shardproof.runs.checkpointer.step_folders import PINNED_NAME
from shardproof.storage import LocalStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import attempt, blanked, differences, rows, whole

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

    def posts(self, post: bytes) -> list[bytes]:
        """The posts of all processes."""
        answer = self._barrier.meet("test", "posts", post, msgspec.msgpack.encode)
        return msgspec.msgpack.decode(answer, type=list[bytes])

    def alone(self, work: Callable[[], object]) -> None:
        """Calls `work` in one process while no job runs."""
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
        options = {"rendezvous": meetings, "cache": "none", **options}
        return work(self.checkpointer(places[rank], options), rank, len(places))

    def checkpointer(self, node: str, options: dict[str, Any]) -> sp.Checkpointer:
        """The run of a rank on a node."""
        return sp.Checkpointer(self.root / node, **{"node_local": True, **options})

    def folder(self, node: str) -> Path:
        """The run's folder on a node."""
        return self.root / node

    def save(self, places: Sequence[str], step: int, salt: int | None = None, **options: Any) -> None:
        """A job that saves one step."""
        overwrite = options.pop("overwrite", False)

        def work(run: sp.Checkpointer, rank: int, ranks: int) -> None:
            run.save(step, part(salt or step, rank, ranks), overwrite=overwrite).result()
            run.wait_for_uploads(60)

        self.job(places, work, **options)

    def restore(self, places: Sequence[str], salt: int | None, **options: Any) -> RestoredStep | None:
        """A job that restores the state with this salt. None: the salt is the restored step."""

        def work(run: sp.Checkpointer, rank: int, ranks: int) -> RestoredStep:
            target = blanked(part(0, rank, ranks))
            restored = run.restore(target)
            assert restored is not None
            assert differences(target, part(int(restored) if salt is None else salt, rank, ranks)) == []
            run.wait_for_copies(60)
            return restored

        return self.job(places, work, **options)

    def shards(self, node: str, step: int) -> set[int]:
        """Ranks whose files of a step a node has."""
        return {int(path.name[:5]) for path in (self.folder(node) / f"step-{step:08d}" / "shards").glob("*")}


def _flip(root: Path, step: int, writer: int | None) -> None:
    """Changes a byte of a tensor in the file of a rank, in one node's folder. None: a byte of the index."""
    folder = LocalStorage(root / f"step-{step:08d}")
    manifest = read_manifest(folder)
    record = next((one for one in manifest.files if one.rank == writer), manifest.index)
    path = folder.path / record.name
    data = bytearray(path.read_bytes())
    data[record.data_start + 4] ^= 1
    path.write_bytes(data)


def play(jobs: Callable[[str], None], root: Path) -> None:
    """Runs the jobs. The first process that failed fails the test."""
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
    restored = stage.restore(["b", "a", "c"], 7)
    if restored is not None:
        (passed,) = restored.passed_over
        assert restored == 2 and passed.tier.endswith(str(stage.root / "b"))
        assert "stale" in passed.reason and not passed.damaged
    restored = stage.restore(["a", "c", "b"], 7)
    assert restored is None or restored.passed_over == ()  # node b has the later manifest now

    # Retention removes a step from all nodes.
    stage.save(["a", "b", "c"], 3, keep=sp.KeepLatest(1))
    stage.alone(lambda: None)
    for node in ("a", "b", "c"):
        assert [path.name for path in (stage.root / node).glob("s*")] == ["step-00000003"]

    # The second tier has the files of a lost node.
    far = stage.root / "far"
    stage.save(three, 4, second_tier=far)
    assert verify(LocalStorage(far / "step-00000004")).ok
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    restored = stage.restore(["a", "a"], 4, second_tier=far)
    if restored is not None:
        (passed,) = restored.passed_over
        assert restored == 4 and "shards/00002-" in passed.reason and str(far) in passed.reason

    def differs(run: sp.Checkpointer, rank: int, ranks: int) -> None:
        raise AssertionError("not reached")

    with pytest.raises(sp.StructureError, match="rank 0 passes replicas=0, and rank 1 replicas=1"):
        stage.job_of(
            "differing", rank(), ["a", "b", "a", "b"], differs, node_local=sp.NodeLocal(replicas=rank() % 2)
        )


def test_nodes_without_copies(tmp_path: Path) -> None:
    play(_without_copies, tmp_path)


def _with_copies(root: str) -> None:
    stage = Stage(root)
    three = ["a", "a", "b"]
    stage.save(["a", "a"], 1, node_local=sp.NodeLocal(replicas=1))
    stage.save(three, 2, node_local=sp.NodeLocal(replicas=1))
    assert stage.shards("a", 2) == stage.shards("b", 2) == {0, 1, 2}
    for node in ("a", "b"):
        report = verify(LocalStorage(stage.root / node / "step-00000002"))
        assert report.ok, report.faults  # a step of two nodes is whole in either folder
    original = stage.root / "original"
    stage.alone(lambda: shutil.copytree(stage.root / "b", original))

    for lost, places in (("b", ["a", "a"]), ("a", ["b"])):
        stage.alone(partial(os.rename, stage.root / lost, stage.root / "lost"))
        restored = stage.restore(places, 2, node_local=sp.NodeLocal(replicas=1))
        assert restored is None or (restored == 2 and restored.passed_over == ())
        # The lost node comes back empty.
        restored = stage.restore(three, 2, node_local=sp.NodeLocal(replicas=1))
        if restored is not None:
            (passed,) = restored.passed_over
            assert restored == 2 and passed.tier.endswith(str(stage.root / lost))
            assert "was emptied" in passed.reason and not passed.damaged
        restored = stage.restore(["b", "a"], 2, node_local=sp.NodeLocal(replicas=1))
        assert restored is None or restored.passed_over == ()  # it has the manifest again
        stage.alone(partial(shutil.rmtree, stage.root / lost))
        stage.alone(partial(os.rename, stage.root / "lost", stage.root / lost))

    # Damage in the folder of one node is read from the other one, by the ranks of both, and replaced.
    for places in (three, ["b", "a", "b"]):
        stage.alone(lambda: _flip(stage.root / "b", 2, 2))
        restored = stage.restore(places, 2, node_local=sp.NodeLocal(replicas=1))
        if restored is not None:
            (passed,) = restored.passed_over
            assert restored == 2 and passed.tier.endswith(str(stage.root / "b")) and not passed.damaged
        assert verify(LocalStorage(stage.root / "b" / "step-00000002")).ok
    for node in ("a", "b"):
        stage.alone(partial(_flip, stage.root / node, 2, 2))
    restored = stage.restore(three, 1, node_local=sp.NodeLocal(replicas=1))
    assert restored is None or (restored == 1 and restored.passed_over[0].step == 2)

    # A stale node has the step as it was before it was saved again.
    stage.save(three, 2, salt=8, node_local=sp.NodeLocal(replicas=1), overwrite=True)
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    stage.alone(lambda: os.rename(original, stage.root / "b"))
    restored = stage.restore(["b", "b", "a", "a"], 8, node_local=sp.NodeLocal(replicas=1))
    if restored is not None:
        assert restored == 2 and [passed.tier.endswith("/b") for passed in restored.passed_over] == [True]
        assert "stale" in restored.passed_over[0].reason

    # A file with one copy is no base of an incremental save: the step after it has all chunks, twice.
    options = {
        "node_local": sp.NodeLocal(replicas=1),
        "incremental": sp.Incremental(scrub=None),
    }
    stage.save(["a", "b"], 4, salt=9, **options)
    stage.save(["a", "b"], 5, salt=9, **options)
    assert stage.shards("a", 5) == stage.shards("b", 5) == {0}, "rank 0 wrote the plain values"
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    stage.save(["a", "b"], 6, salt=9, **options)
    assert stage.shards("a", 6) == stage.shards("b", 6) == {0, 1}
    # After a restore has made the copies again, the file is a base.
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    stage.restore(["a", "b"], 9, **options)
    stage.save(["a", "b"], 7, salt=9, **options)
    assert stage.shards("a", 7) == stage.shards("b", 7) == {0}
    stage.alone(lambda: shutil.rmtree(stage.root / "a"))
    restored = stage.restore(["a", "b"], 9, **options)
    assert restored is None or restored == 7

    # Two jobs on the same nodes: one commits, and all ranks of the other one get an error.
    places = ["a", "b"] if rank() < 2 else ["b", "a"]
    salt = 20 + rank() // 2

    def save(run: sp.Checkpointer, rank: int, ranks: int) -> str:
        stage.together()
        return attempt(lambda: run.save(9, part(salt, rank, ranks)).result()).kind

    name = f"job of two {rank() // 2}"
    ended = stage.job_of(name, rank() % 2, places, save, node_local=sp.NodeLocal(replicas=1))
    kinds = [post.decode() for post in stage.posts(ended.encode())]
    assert kinds in (["", "", *["AlreadyCommittedError"] * 2], [*["AlreadyCommittedError"] * 2, "", ""])
    stage.restore(["a", "b"], 20 + kinds.index("") // 2, node_local=sp.NodeLocal(replicas=1))


def test_nodes_with_copies(tmp_path: Path) -> None:
    play(_with_copies, tmp_path)


def _copies_made_again(root: str) -> None:
    stage = Stage(root)
    nodes = ["a", "b", "c"]

    def save_and_pin(run: sp.Checkpointer, rank: int, ranks: int) -> None:
        run.save(1, part(1, rank, ranks)).result()
        run.pin(1, "good")

    stage.job(nodes, save_and_pin, node_local=sp.NodeLocal(replicas=1))
    held = {node: stage.shards(node, 1) for node in nodes}
    assert held == {"a": {0, 2}, "b": {0, 1}, "c": {1, 2}}
    # All nodes are replaced, one after the other. Each restore makes the lost copies again.
    for lost in ("b", "a", "c"):
        stage.alone(partial(shutil.rmtree, stage.root / lost))
        restored = stage.restore(nodes, 1, node_local=sp.NodeLocal(replicas=1))
        assert restored is None or restored == 1
        assert {node: stage.shards(node, 1) for node in nodes} == held
        folders = [stage.root / node for node in nodes]
        assert sum(len(list(folder.glob("step-00000001/index-*"))) for folder in folders) == 2
        assert all((folder / "step-00000001" / PINNED_NAME).exists() for folder in folders)
        assert not any(list(folder.rglob("*.tmp")) for folder in folders)
        assert find_missing_copies(LocalStorage(folders[0]), list(map(LocalStorage, folders[1:]))) == []

    # Neither the restore nor a save waits for the copies. Retention removes the step before they are made.
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))

    def ends_before_its_copies(run: sp.Checkpointer, rank: int, ranks: int) -> None:
        may_copy, phases = threading.Event(), []

        def hold(event: sp.events.Event) -> None:
            if event.action == "nodes" and event.phase == "copy":
                phases.append((event.kind, event.step))
                assert may_copy.wait(60)

        with sp.events.subscribe(hold):
            assert run.restore(blanked(part(0, rank, ranks))) == 1
            with pytest.raises(TimeoutError):
                run.wait_for_copies(0.0)
            run.unpin(1)
            run.save(2, part(2, rank, ranks)).result()
            may_copy.set()
            run.wait_for_copies(60)
        assert phases == [("begin", 1), ("end", 1)]

    stage.job(nodes, ends_before_its_copies, node_local=sp.NodeLocal(replicas=1), keep=sp.KeepLatest(1))
    for node in nodes:
        assert [path.name for path in (stage.root / node).glob("step-*")] == ["step-00000002"]

    # A copy that cannot be made is an error of `wait_for_copies` on all ranks, and of no save.
    stage.alone(lambda: shutil.rmtree(stage.root / "b"))
    stage.alone(lambda: LocalStorage(stage.root / "b").publish("step-00000002/shards", b"not a folder"))

    def cannot_copy(run: sp.Checkpointer, rank: int, ranks: int) -> None:
        failed: list[sp.events.Event] = []
        with sp.events.subscribe(lambda event: failed.append(event) if event.kind == "failed" else None):
            assert run.restore(blanked(part(0, rank, ranks))) == 2
            ended = attempt(lambda: run.wait_for_copies(60))
        assert ended.kind == "RankFailure" and "rank 1" in ended.text and "step-00000002/shards" in ended.text
        assert [(event.phase, event.action) for event in failed] == [("copy", "nodes")] * (rank == 1)
        run.save(3, part(3, rank, ranks)).result()

    stage.job(nodes, cannot_copy, node_local=sp.NodeLocal(replicas=1))
    found = find_missing_copies(LocalStorage(stage.root / "a"), [LocalStorage(stage.root / "b")])
    assert [(one.severity, one.kind, one.where) for one in found] == [
        ("note", "one copy", "step-00000002"),
        ("note", "other nodes", str(stage.root / "a")),
    ]


def test_copies_that_were_lost_are_made_again(tmp_path: Path) -> None:
    play(_copies_made_again, tmp_path)


def _uploads_of_copies(root: str) -> None:
    stage = Stage(root)
    places, far = ["a", "a", "b"], stage.root / "far"
    for step in (1, 2, 3):
        stage.save(places, step, node_local=sp.NodeLocal(replicas=1))

    def damage() -> None:
        _flip(stage.root / "b", 1, 2)  # the own file of rank 2
        _flip(stage.root / "a", 1, None)
        next((stage.root / "a" / "step-00000002" / "shards").glob("00001-*")).write_bytes(b"cut")
        for node in ("a", "b"):
            _flip(stage.root / node, 3, 0)

    stage.alone(damage)
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardproof").addHandler(handler)
    stage.save(places, 4, node_local=sp.NodeLocal(replicas=1), second_tier=far)
    logging.getLogger("shardproof").removeHandler(handler)
    copies = [text for text in logged if "is uploaded in its place" in text]
    for writer, file in ((0, "step-00000001/index-"), (1, "shards/00001-"), (2, "shards/00002-")):
        assert any(file in text for text in copies) == (rank() == writer), copies
    assert any("step 3 is damaged, and is not uploaded" in text for text in logged) == (rank() == 0)
    for step in (1, 2, 4):
        assert verify(LocalStorage(far / f"step-{step:08d}")).ok
    assert not (far / "step-00000003" / MANIFEST_NAME).exists(), "both copies are damaged"


def test_a_damaged_file_is_uploaded_from_its_copy(tmp_path: Path) -> None:
    play(_uploads_of_copies, tmp_path)


def _stopped_and_killed(root: str) -> list[str]:
    """Rank 0 lists the steps while the other node is stopped, and after it was killed."""
    run = sp.Checkpointer(
        Path(root) / f"node-{rank()}", node_local=True, rendezvous=rendezvous(deadline=3.0), cache="none"
    )
    run.save(1, part(1, rank(), world_size())).result()
    if rank() == 1:
        reach("waiting")
        return []
    ended = []
    for point in ("stopped", "killed"):
        reach(point)
        began = time.monotonic()
        ended.append(attempt(run.steps).text)
        assert time.monotonic() - began < 3.0, "within the deadline"
    return ended


def test_a_stopped_node_and_a_dead_one_are_named_within_the_deadline(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(1, "waiting")
        job.until_held(0, "stopped")
        job.stop(1)
        job.go(0)
        job.until_held(0, "killed")
        job.kill(1)
        job.go(0)

    outcomes = run_ranks(
        2, _stopped_and_killed, str(tmp_path), hold={0: ["stopped", "killed"], 1: "waiting"}, script=script
    )
    silent, dead = outcomes[0].value
    assert "node 1 (" in silent and "does not answer within 1.5 s" in silent
    assert "node 1 (" in dead and "cannot be reached" in dead


def _with_secrets(root: str) -> tuple[str, str]:
    """Jobs whose ranks have one secret of the user, one of two secrets, and one or none."""
    stage = Stage(root)
    os.environ["SHARDPROOF_NODES_INTERFACE"] = "lo"
    os.environ["SHARDPROOF_NODES_SECRET"] = "a secret of the user"
    stage.save(["a", "b"], 1)
    stage.restore(["a", "b"], 1)
    os.environ["SHARDPROOF_NODES_SECRET"] = f"a secret of rank {rank()}"
    other = attempt(lambda: stage.save(["a", "b"], 2, deadline=10.0)).text
    stage.together()
    if rank():
        del os.environ["SHARDPROOF_NODES_SECRET"]
    return other, attempt(lambda: stage.save(["a", "b"], 2)).text


def test_ranks_need_the_same_secret_of_the_user(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _with_secrets, str(tmp_path)):
        other, without = outcome.value
        assert "give the same secret to all ranks" in other
        assert "rank 0 has a secret in SHARDPROOF_NODES_SECRET" in without and "rank 1 none" in without

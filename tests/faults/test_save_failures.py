"""A rank fails in `state_dict`, planning, writing or committing. All ranks name that rank and the cause.

Each case is a save between two saves that work. It commits nothing, the save before it restores bit for bit,
and the save after it works.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.engine.saving import Saver, SaveRequest
from shardproof.engine.storage.paths import storage_error
from shardproof.rendezvous import StoreRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    CallResult,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    files_below,
    plain_state,
    rows,
    same_on_all_ranks,
    whole,
)
from tests.small_disk import small_disk

RANKS = 3
DEADLINE = 20.0
SOON = 4.0
"""Seconds within which all ranks learn of a rank's failure, long before the deadline."""


class Loader:
    """A stateful object whose `state_dict` raises on one rank."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.position = 7

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def state_of(salt: int, error: BaseException | None = None) -> dict[str, Any]:
    return plain_state(rank(), world_size(), salt) | {"loader": Loader(error)}


class Run:
    """One rank's side of a case: a good save, a failing one, checks of what is left, and another good one."""

    def __init__(self, root: str) -> None:
        self.storage = FaultyStorage(LocalStorage(root))  # does not tell how much space is free
        self.checkpointer = sp.Checkpointer(self.storage, rendezvous=rendezvous(deadline=DEADLINE))
        self.step = 0

    def case(self, save: Callable[[int], Any]) -> CallResult:
        before, failing, after = self.step + 1, self.step + 2, self.step + 3
        self.step += 3
        self.checkpointer.save(before, state_of(before)).result()
        result = attempt(lambda: save(failing))
        result.after["wrong before"] = self.restored(before)
        self.checkpointer.save(after, state_of(after)).result()
        result.after["wrong after"] = self.restored(after)
        result.after["steps"] = self.checkpointer.steps()[-2:] == [before, after]
        return result

    def restored(self, step: int) -> list[str]:
        """What a restore of the newest step gets wrong."""
        target = blanked(plain_state(rank(), world_size(), 0)) | {"loader": Loader(None)}
        found = self.checkpointer.restore(target)
        loader = target.pop("loader")
        wrong = differences(target, plain_state(rank(), world_size(), step))
        if found != step or loader.position != 7:
            wrong.append(f"restored step {found}, position {loader.position}")
        return wrong

    @contextmanager
    def faulty(self, at: int | None, fault: Any, *only: str, after: bool = False) -> Iterator[None]:
        """Saves meet a fault of the storage."""
        self.storage.arm(at, fault, only=only, after=after)
        try:
            yield
        finally:
            self.storage.disarm()


def collect_fails(run: Run, who: int) -> Callable[[int], Any]:
    error = RuntimeError("the sampler is gone") if rank() == who else None
    return lambda step: run.checkpointer.save(step, state_of(step, error)).result()


def planning_fails(run: Run, who: int) -> Callable[[int], Any]:
    def save(step: int) -> Any:
        changed = state_of(step) | {f"new-{step}": torch.ones(2)}  # no cached plan
        with mock.patch(
            "shardproof.engine.saving.coordinator.plan_writes", side_effect=MemoryError("no room to plan")
        ):
            return run.checkpointer.save(step, changed).result()

    return save


def preparing_fails(run: Run, who: int) -> Callable[[int], Any]:
    """A rank fails to prepare its part of the plan that it received."""

    def save(step: int) -> Any:
        changed = state_of(step) | {f"new-{step}": torch.ones(2)}
        error = MemoryError("no room for a header")
        if rank() != who:
            return run.checkpointer.save(step, changed).result()
        with mock.patch("shardproof.engine.saving.save_protocol.prepare_shard", side_effect=error):
            return run.checkpointer.save(step, changed).result()

    return save


def storage_fails(
    operation: str, at: int, code: int, *, after: bool = False
) -> Callable[[Run, int], Callable[[int], Any]]:
    """A case in which an operation of the storage fails on one rank with an error of the operating system."""

    def case(run: Run, who: int) -> Callable[[int], Any]:
        def save(step: int) -> Any:
            error = storage_error(OSError(code, os.strerror(code)), operation, "the file")
            with run.faulty(at if rank() == who else None, error, operation, after=after):
                return run.checkpointer.save(step, state_of(step)).result()

        return save

    return case


def file_size_limit(run: Run, who: int) -> Callable[[int], Any]:
    """The operating system refuses to let one rank's file grow."""

    def save(step: int) -> Any:
        large = state_of(step) | {
            "large": rows(whole((3 * 4096, 16), step), 4096 * rank(), 4096 * (rank() + 1))
        }
        if rank() != who:
            return run.checkpointer.save(step, large).result()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            return run.checkpointer.save(step, large).result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return save


def file_instead_of_folder(run: Run, who: int) -> Callable[[int], Any]:
    """A file has the name of the folder for shards, on every rank."""

    def save(step: int) -> Any:
        folder = Path(run.checkpointer.root, f"step-{step:08d}")
        folder.mkdir(exist_ok=True)
        (folder / "shards").touch()
        return run.checkpointer.save(step, state_of(step)).result()

    return save


CASES: dict[str, tuple[Callable[[Run, int], Callable[[int], Any]], int, str, str]] = {
    "state_dict": (collect_fails, 1, "collect", "RuntimeError: the sampler is gone"),
    "state_dict of the coordinator": (collect_fails, 0, "collect", "RuntimeError: the sampler is gone"),
    "planning": (planning_fails, 0, "plan", "MemoryError: no room to plan"),
    "taking the plan": (preparing_fails, 2, "write", "MemoryError: no room for a header"),
    "taking the plan on the coordinator": (preparing_fails, 0, "write", "MemoryError: no room for a header"),
    "creating the shard": (storage_fails("create", 0, errno.EACCES), 1, "write", "EACCES"),
    "full disk": (storage_fails("write_at", 0, errno.ENOSPC), 2, "write", "ENOSPC"),
    "full disk at the coordinator": (storage_fails("write_at", 0, errno.ENOSPC), 0, "write", "ENOSPC"),
    "flushing": (storage_fails("finish", 0, errno.EIO), 1, "write", "EIO"),
    "file size limit": (file_size_limit, 1, "write", "EFBIG"),
    "writing the index": (storage_fails("write_at", 1, errno.ENOSPC), 0, "commit", "ENOSPC"),
    "flushing the index": (storage_fails("finish", 1, errno.EIO), 0, "commit", "EIO"),
    "publishing the manifest": (storage_fails("publish", 0, errno.EROFS), 0, "commit", "EROFS"),
}


def run_cases(root: str) -> dict[str, CallResult]:
    run = Run(root)
    return {name: run.case(case(run, who)) for name, (case, who, _, _) in CASES.items()}


@pytest.fixture(scope="module")
def case_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[CallResult]]]:
    root = tmp_path_factory.mktemp("run")
    outcomes = run_ranks(RANKS, run_cases, str(root), timeout=120)
    return root, {name: [outcome.value[name] for outcome in outcomes] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_learns_rank_phase_and_cause(
    name: str, case_results: tuple[Path, dict[str, list[CallResult]]]
) -> None:
    _, who, phase, cause = CASES[name]
    result = same_on_all_ranks(case_results[1][name])
    assert result.kind == "RankFailure", result.text
    assert result.details["phase"] == phase
    assert list(result.details["causes"]) == [str(who)]
    assert cause in result.details["causes"][str(who)]
    assert f"rank {who}" in result.text
    assert phase in result.text
    assert cause in result.text
    assert max(one.seconds for one in case_results[1][name]) < SOON


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_committed_and_the_steps_around_it_are_good(
    name: str, case_results: tuple[Path, dict[str, list[CallResult]]]
) -> None:
    root, results = case_results
    for result in results[name]:
        assert result.after == {"wrong before": [], "wrong after": [], "steps": True}
    step = 3 * list(CASES).index(name) + 2
    assert files_below(root / f"step-{step:08d}") == []
    assert_one_attempt(root / f"step-{step - 1:08d}")
    assert_one_attempt(root / f"step-{step + 1:08d}")


def save_beside_a_file(root: str) -> CallResult:
    run = Run(root)
    return run.case(file_instead_of_folder(run, 0))


def test_a_file_in_place_of_a_folder_fails_all_ranks(tmp_path: Path) -> None:
    results = [outcome.value for outcome in run_ranks(RANKS, save_beside_a_file, str(tmp_path))]
    result = same_on_all_ranks(results)
    assert (result.kind, result.details["phase"]) == ("RankFailure", "write")
    assert result.details["causes"].keys() == {"0", "1", "2"}
    assert all("shards" in cause and "StorageError" in cause for cause in result.details["causes"].values())
    assert results[0].after == {"wrong before": [], "wrong after": [], "steps": True}


def save_as_user_nobody(root: str) -> CallResult:
    """Rank 1 has no right to write into the run's folder."""
    run = Run(root)

    def save(step: int) -> Any:
        if rank() != 1:
            return run.checkpointer.save(step, state_of(step)).result()
        os.seteuid(65534)
        try:
            return run.checkpointer.save(step, state_of(step)).result()
        finally:
            os.seteuid(0)

    return run.case(save)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_rank_without_write_permission_fails_all_ranks(tmp_path: Path) -> None:
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)  # rank 1 may read, not write
    root = tmp_path / "run"
    root.mkdir(mode=0o755)
    results = [outcome.value for outcome in run_ranks(2, save_as_user_nobody, str(root))]
    result = same_on_all_ranks(results)
    assert (result.kind, result.details["phase"]) == ("RankFailure", "write")
    assert list(result.details["causes"]) == ["1"]
    assert "EACCES" in result.details["causes"]["1"]
    assert [one.after for one in results] == [{"wrong before": [], "wrong after": [], "steps": True}] * 2
    assert files_below(root / "step-00000002") == []


def fill_the_disk(root: str) -> CallResult:
    run = Run(root)

    def save(step: int) -> Any:
        mine = rows(whole((1024, 1024), step), 0, 1024 if rank() == 1 else 0)  # 4 MiB, all on rank 1
        return run.checkpointer.save(step, state_of(step) | {"large": mine}).result()

    return run.case(save)


def test_a_full_disk_fails_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with small_disk(root, 1 << 20):
        results = [outcome.value for outcome in run_ranks(2, fill_the_disk, str(root))]
        result = same_on_all_ranks(results)
        assert (result.kind, result.details["phase"]) == ("RankFailure", "write")
        causes = result.details["causes"]
        assert "1" in causes  # and rank 0, too, if it writes before the large file is removed again
        assert all("ENOSPC" in cause for cause in causes.values())
        assert "The disk is full" in result.text
        assert [one.after for one in results] == [{"wrong before": [], "wrong after": [], "steps": True}] * 2
        assert files_below(root / "step-00000002") == []
        assert_one_attempt(root / "step-00000003")


def value_differs(root: str) -> CallResult:
    run = Run(root)
    return run.case(lambda step: run.checkpointer.save(step, state_of(step) | {"seed": rank() // 2}).result())


def test_a_plain_value_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    results = [outcome.value for outcome in run_ranks(RANKS, value_differs, str(tmp_path))]
    result = same_on_all_ranks(results)
    assert result.kind == "StructureError"
    assert result.details["key"] == "seed"
    assert result.details["ranks"] == [0, 2]
    assert "sp.PerRank" in result.text
    assert results[0].after == {"wrong before": [], "wrong after": [], "steps": True}
    assert files_below(tmp_path / "step-00000002") == []


def one_exits(root: str) -> CallResult | str:
    run = Run(root)
    error = SystemExit("out of quota") if rank() == 1 else None
    try:
        return attempt(lambda: run.checkpointer.save(1, state_of(1, error)).result())
    except SystemExit as caught:
        return str(caught)


def test_a_rank_that_exits_tells_the_others_and_exits(tmp_path: Path) -> None:
    result, exited = (outcome.value for outcome in run_ranks(2, one_exits, str(tmp_path)))
    assert exited == "out of quota"
    assert (result.kind, result.details["phase"]) == ("RankFailure", "collect")
    assert result.details["causes"] == {"1": "SystemExit: out of quota"}
    assert files_below(tmp_path) == []


INTERRUPTED = "interrupted beside the meetings"


def one_is_interrupted(root: str, within: str, begin: bool) -> tuple[CallResult | str, CallResult]:
    """Rank 1 is interrupted between two meetings of a save. Then all ranks save the step again."""
    saver = Saver(rendezvous(deadline=DEADLINE))
    storage = LocalStorage(f"{root}/c")

    def save() -> Any:
        state = plain_state(rank(), world_size(), 1)
        if begin:
            return saver.begin(storage, state, SaveRequest(check_replicas="all")).result()
        return saver.save(storage, state, check_replicas="all")

    result: CallResult | str
    with ExitStack() as stack:
        if rank() == 1:
            error = KeyboardInterrupt(INTERRUPTED)
            stack.enter_context(mock.patch(f"shardproof.engine.saving.{within}", side_effect=error))
        try:
            result = attempt(save)
        except KeyboardInterrupt as caught:
            result = str(caught)
    return result, attempt(save)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("within", ["save_protocol.prepare_shard", "replica_check.hash_replicas"])
def test_a_rank_interrupted_between_two_meetings_tells_the_others(
    within: str, begin: bool, tmp_path: Path
) -> None:
    outcomes = run_ranks(RANKS, one_is_interrupted, str(tmp_path), within, begin)
    (first, _), (interrupted, _), (third, _) = (outcome.value for outcome in outcomes)
    assert interrupted == INTERRUPTED
    result = same_on_all_ranks([first, third])
    assert (result.kind, result.details["phase"]) == ("RankFailure", "write")
    assert result.details["causes"] == {"1": f"KeyboardInterrupt: {INTERRUPTED}"}
    assert max(first.seconds, third.seconds) < SOON
    assert [outcome.value[1].error for outcome in outcomes] == [("", "", {})] * RANKS


def one_cannot_start_a_thread(root: str) -> tuple[CallResult, CallResult]:
    """Rank 1 opens its background connections while the process may start no more threads."""
    run = Run(root)
    refused = RuntimeError("can't start new thread")
    with ExitStack() as stack:
        if rank() == 1:
            stack.enter_context(mock.patch.object(StoreRendezvous, "start_heartbeat", side_effect=refused))
        result = attempt(lambda: run.checkpointer.save(1, state_of(1)).result())
    return result, attempt(lambda: run.checkpointer.save(1, state_of(1)).result())


def test_a_rank_that_cannot_start_a_thread_tells_the_others_and_stays_in_step(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, one_cannot_start_a_thread, str(tmp_path))
    result = same_on_all_ranks([outcome.value[0] for outcome in outcomes])
    assert (result.kind, result.details["phase"]) == ("RankFailure", "write")
    assert result.details["causes"] == {"1": "RuntimeError: can't start new thread"}
    assert max(outcome.value[0].seconds for outcome in outcomes) < SOON
    assert [outcome.value[1].error for outcome in outcomes] == [("", "", {})] * RANKS


def published_then_fails(root: str) -> CallResult:
    """The manifest is in place, and then the flush of its folder fails."""
    run = Run(root)
    error = storage_error(OSError(errno.EIO, os.strerror(errno.EIO)), "publish", "manifest.json")
    run.checkpointer.save(1, state_of(1)).result()
    with run.faulty(0 if rank() == 0 else None, error, "publish", after=True):
        result = attempt(lambda: run.checkpointer.save(2, state_of(2)).result())
    result.after["wrong"] = run.restored(2)
    return result


def test_a_visible_manifest_keeps_its_files(tmp_path: Path) -> None:
    results = [outcome.value for outcome in run_ranks(2, published_then_fails, str(tmp_path))]
    result = same_on_all_ranks(results)
    assert (result.kind, result.details["phase"]) == ("RankFailure", "commit")
    assert "EIO" in result.text
    assert "committed, but not known to be durable" in result.text
    assert [one.after["wrong"] for one in results] == [[], []]
    assert_one_attempt(tmp_path / "step-00000002")


class StaleView(LocalStorage):
    """A storage as a node with a stale cache sees it: without the new manifest."""

    def size(self, name: str) -> int | None:
        return None if name == MANIFEST_NAME else super().size(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name == MANIFEST_NAME:
            raise storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), "read", name)
        return super().read(name, start, stop)


def published_and_seen_late(root: str) -> CallResult:
    """The flush after the commit fails on rank 0; rank 1 does not see the manifest."""
    saver = Saver(rendezvous(deadline=DEADLINE))
    inner = LocalStorage(f"{root}/c")
    error = storage_error(OSError(errno.EIO, os.strerror(errno.EIO)), "flush", "manifest.json")
    faulty = FaultyStorage(inner, 0, error, only=("publish",), after=True)
    storage: Any = faulty if rank() == 0 else StaleView(inner.path)
    return attempt(lambda: saver.save(storage, state_of(1)))


def test_a_rank_that_does_not_see_the_manifest_yet_keeps_its_file(tmp_path: Path) -> None:
    result = same_on_all_ranks(
        [outcome.value for outcome in run_ranks(2, published_and_seen_late, str(tmp_path))]
    )
    assert "committed, but not known to be durable" in result.text
    assert result.details["committed"] is True
    assert_one_attempt(tmp_path / "c")

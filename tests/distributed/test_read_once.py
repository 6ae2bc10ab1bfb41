"""The read-once exchange between real ranks: layouts, failures, and the bytes that are read."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.engine.loading import LoadOptions, LoadReport, load_from, load_protocol
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.read_once import agreement, node_transfer
from shardproof.engine.loading.read_once.group_plan import plan_once
from shardproof.engine.loading.read_once.node_memory import PeerMemory
from shardproof.engine.loading.read_once.node_plan import plan_node
from shardproof.engine.saving import Saver
from shardproof.errors import CorruptChunkError, RankFailure, ShardproofError
from shardproof.rendezvous import LocalRendezvous, connect
from shardproof.storage import LocalStorage
from tests.harness import Job, open_files, process_group, rank, reach, rendezvous, run_ranks, world_size

ROWS, COLUMNS = 24, 36


class CountingStorage(LocalStorage):
    """Counts the bytes that are read from shard files."""

    count = 0

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.count += len(buffer)
        super().read_into(name, start, buffer)


def stored() -> dict[str, torch.Tensor]:
    """Several dtypes; each row of a matrix is a chunk. The 13 bytes misalign the tensors after them."""
    grid = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    tensors = {
        "a.bytes": torch.arange(13, dtype=torch.uint8),
        "w": grid.float(),
        "half": grid.bfloat16(),
        "whole": torch.arange(7.0),
        "scalar": torch.tensor(3.0),
    }
    return tensors | {"double": grid.double() * 3}


def save(folder: Path, chunk_bytes: int = 300) -> int:
    Saver(LocalRendezvous(), chunk_bytes=chunk_bytes).save(LocalStorage(folder), stored())
    return sum(value.nbytes for value in stored().values())


def part(key: str, dim: int | None, number: int, of: int, dtype: torch.dtype, *, wide: bool) -> Any:
    """This rank's target of one tensor: a share along a dimension, or all of it."""
    value = stored()[key]
    if dim is None or value.dim() < 2:
        return torch.nn.Parameter(torch.zeros_like(value), requires_grad=value.is_floating_point())
    share = list(torch.arange(value.shape[dim]).chunk(of))
    index = share[number].tolist() if number < len(share) else []
    shape = [len(index) if k == dim else size for k, size in enumerate(value.shape)]
    view = (
        torch.zeros(shape[0], shape[1] * 2, dtype=dtype)[:, ::2] if wide else torch.zeros(shape, dtype=dtype)
    )
    offsets = [index[0] if k == dim and index else 0 for k in range(2)]
    return sp.LocalShards(value.shape, [(view, offsets)] if index else [], dtype=dtype)


def expected(key: str, target: Any) -> bool:
    value = stored()[key]
    if isinstance(target, torch.Tensor):
        return torch.equal(target, value)
    return all(
        torch.equal(
            view,
            value[top : top + view.shape[0], left : left + view.shape[1]].to(view.dtype),
        )
        for view, (top, left) in target.pieces
    )


def small_rounds(round_bytes: int) -> None:
    """Makes this process plan rounds of `round_bytes`, memory for three rounds, and units of 512 bytes."""
    over_group: Any = partial(plan_once, round_bytes=round_bytes, unit_bytes=512)
    on_node: Any = partial(plan_node, round_bytes=round_bytes, ring_bytes=3 * round_bytes, unit_bytes=512)
    agreement.plan_once, agreement.plan_node = over_group, on_node  # type: ignore[attr-defined]
    node_transfer.CUT_BYTES = 64


def transfer_only_through(way: str) -> None:
    """Makes this process transfer only through shared memory, or only over the group."""
    if way == "memory":
        for name in ("all_reduce", "all_to_all_single"):
            setattr(dist, name, _no_collective)
    else:
        socket.gethostname = lambda: f"node-{rank()}"


def _no_collective(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an unexpected collective")


WAYS = pytest.mark.parametrize("way", ["memory", "group"])


def load_layout(
    folder: str, way: str, dim: int | None, cast: bool, wide: bool, round_bytes: int
) -> tuple[LoadReport, int]:
    transfer_only_through(way)
    small_rounds(round_bytes)
    storage = CountingStorage(folder)
    with process_group():
        state = {
            key: part(
                key, dim, rank(), world_size(), torch.float64 if cast else value.dtype, wide=wide and dim == 1
            )
            for key, value in stored().items()
        }
        options = LoadOptions(cast=["w", "half", "double"] if cast else False, read_once=True)
        report = load_from(storage, state, connect(), options)
        wrong = [key for key, target in state.items() if not expected(key, target)]
        assert not wrong
        assert storage.count == report.bytes
        return report, storage.count


@WAYS
@pytest.mark.parametrize(
    ("ranks", "dim", "cast", "wide", "round_bytes"),
    [
        (4, 1, False, False, 1 << 20),  # rows to columns
        (4, 1, True, True, 700),  # the same into strided memory of another dtype, in many small rounds
        (3, 0, False, False, 2000),  # 4 chunks of rows that do not end where ranks do
        (2, None, False, False, 1 << 20),  # replicas
        (3, None, False, False, 1),  # every message a round of its own
    ],
)
def test_every_byte_is_read_by_one_rank(
    tmp_path: Path, way: str, ranks: int, dim: int | None, cast: bool, wide: bool, round_bytes: int
) -> None:
    nbytes = save(tmp_path, 300 if dim != 0 else 700)
    outcomes = run_ranks(ranks, load_layout, str(tmp_path), way, dim, cast, wide, round_bytes, timeout=120)
    reports = [outcome.value[0] for outcome in outcomes]
    assert sum(outcome.value[1] for outcome in outcomes) == nbytes
    assert all(report.read_once for report in reports)
    if dim is None:
        assert all(report.received + report.bytes == report.needed == nbytes for report in reports)
        assert max(report.bytes for report in reports) < nbytes * 0.7
    if dim == 1:
        replicated = sum(value.nbytes for value in stored().values() if value.dim() < 2)
        assert sum(report.needed for report in reports) == nbytes + (ranks - 1) * replicated


def record_meetings_and_progress(folder: str, way: str) -> tuple[list[str], int, LoadReport]:
    """Phases of the meetings, and the bytes that were reported as progress."""
    phases: list[str] = []
    counts: list[int] = []
    meet, moved = load_protocol.MeetingSequence.meet, load_protocol._ByteProgress.__call__

    def noted(self: Any, phase: str, *rest: Any) -> bytes:
        phases.append(phase)
        return meet(self, phase, *rest)

    def counted(self: Any, count: int) -> None:
        counts.append(count)
        moved(self, count)

    load_protocol.MeetingSequence.meet = noted  # type: ignore[method-assign]
    load_protocol._ByteProgress.__call__ = counted  # type: ignore[method-assign]
    report, _ = load_layout(folder, way, 1, False, False, 600)
    return phases, sum(counts), report


def test_ranks_of_a_node_meet_once_for_their_plan_and_all_bytes_are_reported(tmp_path: Path) -> None:
    save(tmp_path)
    for outcome in run_ranks(3, record_meetings_and_progress, str(tmp_path), "memory"):
        phases, moved, report = outcome.value
        assert phases == ["match", "share", "read"]
        assert report.received and moved == report.bytes + report.received


def with_threads(folder: str, threads: int) -> LoadReport:
    load_protocol.reading_threads = lambda: threads  # type: ignore[attr-defined]
    return load_layout(folder, "memory", 1, False, False, 600)[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_in_flight_stay_within_the_free_memory(tmp_path: Path, threads: int) -> None:
    nbytes = save(tmp_path)
    for _ in range(3):
        outcomes = run_ranks(4, with_threads, str(tmp_path), threads, timeout=120)
        assert sum(outcome.value.bytes for outcome in outcomes) == nbytes


def load_on_a_two_by_two_mesh(folder: str, way: str) -> float:
    transfer_only_through(way)
    with process_group():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2))
        placements: list[Any] = [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Replicate()]]
        values = [torch.arange(48.0).reshape(6, 8) + at for at in range(3)]
        if rank() == 0:
            Saver(LocalRendezvous(), chunk_bytes=64).save(
                LocalStorage(folder), {str(at): value for at, value in enumerate(values)}
            )
        dist.barrier()
        state: dict[str, Any] = {
            str(at): distribute_tensor(torch.zeros(6, 8), mesh, placement)
            for at, placement in enumerate(placements)
        }
        report = sp.load(folder, state, read_once=True)
        for at, value in enumerate(values):
            assert torch.equal(state[str(at)].full_tensor(), value)
        return float(report.bytes)


@WAYS
def test_dtensors_of_a_two_by_two_mesh_are_read_once(way: str, tmp_path: Path) -> None:
    outcomes = run_ranks(4, load_on_a_two_by_two_mesh, str(tmp_path), way)
    assert sum(outcome.value for outcome in outcomes) == 3 * 48 * 4


def load_tied_and_empty(folder: str, way: str) -> tuple[int, int]:
    """Rank 0 loads two names into one tensor, rank 1 into two, and rank 2 has no elements of them."""
    transfer_only_through(way)
    storage = CountingStorage(folder)
    with process_group():
        if rank() == 2:
            state: dict[str, Any] = {
                "one": sp.LocalShards((50, 4), [], dtype=torch.float32),
                "two": sp.LocalShards((50, 4), [], dtype=torch.float32),
            }
        elif rank() == 1:
            state = {"one": torch.zeros(50, 4), "two": torch.zeros(50, 4)}
        else:
            one = torch.zeros(50, 4)
            state = {"one": one, "two": one}
        report = load_from(storage, state, connect(), LoadOptions(read_once=True))
        if rank() < 2:
            assert all(torch.equal(state[key], torch.arange(200.0).reshape(50, 4)) for key in state)
        return report.bytes, storage.count


@WAYS
def test_tied_tensors_and_ranks_without_elements(way: str, tmp_path: Path) -> None:
    value = torch.arange(200.0).reshape(50, 4)
    sp.save(tmp_path, {"one": value, "two": value})
    outcomes = run_ranks(3, load_tied_and_empty, str(tmp_path), way)
    assert [outcome.value[0] for outcome in outcomes][2] == 0
    assert sum(outcome.value[0] for outcome in outcomes) == 800


def plain_load(folder: str) -> int:
    with process_group():
        for name in ("all_reduce", "all_to_all_single", "barrier", "broadcast", "all_gather"):
            setattr(dist, name, _no_collective)
        target = {key: torch.zeros_like(value) for key, value in stored().items()}
        report = sp.load(folder, target)
        assert not report.read_once and report.received == 0
        return report.bytes


def test_by_default_every_rank_reads_and_no_collective_runs(tmp_path: Path) -> None:
    nbytes = save(tmp_path)
    assert [outcome.value for outcome in run_ranks(2, plain_load, str(tmp_path))] == [nbytes] * 2


def damage(folder: Path, key: str) -> None:
    with NativeCheckpoint(LocalStorage(folder)) as opened:
        rows = np.flatnonzero(opened.table.tensor == opened.row(key))
        at = int(opened.table.byte_start[rows[len(rows) // 2]])
        name = opened.manifest.files[int(opened.table.file[rows[0]])].name
    raw = bytearray((folder / name).read_bytes())
    raw[at] ^= 1
    (folder / name).write_bytes(raw)


def failing(folder: str, way: str, round_bytes: int, unreadable_on: int | None) -> dict[str, Any]:
    transfer_only_through(way)
    small_rounds(round_bytes)
    storage = LocalStorage(folder)
    if unreadable_on == rank():

        def stuck(name: str, start: int, buffer: memoryview) -> None:
            raise MemoryError("no room")

        storage.read_into = stuck  # type: ignore[method-assign]
    with process_group():
        target = {key: torch.zeros_like(value) for key, value in stored().items()}
        try:
            load_from(storage, target, connect(), LoadOptions(read_once=True))
        except ShardproofError as error:
            dist.barrier()  # the group is still in step
            return error.to_wire()
        raise AssertionError("it loaded")


@WAYS
@pytest.mark.parametrize("round_bytes", [1 << 20, 600], ids=["one round", "many rounds"])
def test_a_corrupt_chunk_is_the_same_error_on_every_rank(tmp_path: Path, way: str, round_bytes: int) -> None:
    save(tmp_path)
    damage(tmp_path, "double")
    outcomes = run_ranks(3, failing, str(tmp_path), way, round_bytes, None, timeout=120)
    errors = [outcome.value for outcome in outcomes]
    assert errors[0] == errors[1] == errors[2]
    assert errors[0]["type"] == CorruptChunkError.__name__
    assert errors[0]["details"]["key"] == "double" and errors[0]["details"]["overwritten"]


@WAYS
def test_a_read_that_fails_on_one_rank_is_an_error_on_all_ranks(way: str, tmp_path: Path) -> None:
    save(tmp_path)
    outcomes = run_ranks(3, failing, str(tmp_path), way, 600, 1, timeout=120)
    errors = [outcome.value for outcome in outcomes]
    assert errors[0] == errors[1] == errors[2]
    assert errors[0]["type"] == RankFailure.__name__
    assert list(errors[0]["details"]["causes"]) == ["1"] and "no room" in errors[0]["message"]


def in_third_read(folder: str, act: Callable[[], None]) -> str:
    """Rank 1 calls `act` in its third read. Returns the error of this rank's load."""
    small_rounds(600)
    storage = LocalStorage(folder)
    read_into, reads = storage.read_into, []

    def act_in_third(name: str, start: int, buffer: memoryview) -> None:
        reads.append(start)
        if rank() == 1 and len(reads) == 3:
            act()
        read_into(name, start, buffer)

    storage.read_into = act_in_third  # type: ignore[method-assign]
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    with pytest.raises(ShardproofError) as caught:
        load_from(storage, target, rendezvous(deadline=4.0), LoadOptions(read_once=True))
    return str(caught.value)


def dying(folder: str, way: str) -> str:
    transfer_only_through(way)
    return in_third_read(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


@WAYS
def test_a_rank_that_is_killed_in_the_exchange_ends_it_for_all(way: str, tmp_path: Path) -> None:
    save(tmp_path)
    outcomes = run_ranks(3, dying, str(tmp_path), way, timeout=120)
    assert outcomes[1].exit_code == -signal.SIGKILL
    texts = [outcomes[0].value, outcomes[2].value]
    assert texts[0] == texts[1]
    assert "partly overwritten" in texts[0] and "rank 1" in texts[0], texts[0]


def stuck(folder: str) -> str:
    """Rank 1 stays in its read until the loads of the other ranks have failed."""
    return in_third_read(folder, lambda: reach("third read"))


def hold_rank_1_until_the_others_end(job: Job) -> None:
    job.until_held(1, "third read")
    job.until_done(0, 2)
    job.go(1)


def test_a_rank_that_is_stuck_in_a_read_fails_the_load_of_all(tmp_path: Path) -> None:
    save(tmp_path)
    outcomes = run_ranks(
        3, stuck, str(tmp_path), timeout=60, hold={1: "third read"}, script=hold_rank_1_until_the_others_end
    )
    texts = [outcome.value for outcome in outcomes]
    assert texts[0] == texts[2]
    assert "partly overwritten" in texts[0] and "rank 1" in texts[0], texts[0]
    assert "partly overwritten" in texts[1], texts[1]


def behind_a_slow_reader(folder: str, way: str) -> LoadReport:
    """Rank 1 reads tensors of ranks 1 and 3 for longer than the deadline, and then one of rank 2."""
    transfer_only_through(way)
    small_rounds(400)
    wanted = [f"a{number:02}" for number in range(32)]
    asks = [[], [*wanted, "z"], ["big 2", "z"], [*wanted, "big 3"]][rank()]
    storage = LocalStorage(folder)
    read_into = storage.read_into

    def slowly(name: str, start: int, buffer: memoryview) -> None:
        if len(buffer) == 400:
            time.sleep(0.4)
        read_into(name, start, buffer)

    storage.read_into = slowly  # type: ignore[method-assign]
    with process_group():
        target = {key: torch.zeros(5000 if key.startswith("big") else 100) for key in asks}
        report = load_from(storage, target, rendezvous(deadline=4.0), LoadOptions(read_once=True))
        assert all(value.eq(1).all() for value in target.values())
        return report


@WAYS
def test_a_rank_that_waits_for_a_slow_reader_is_not_silent(way: str, tmp_path: Path) -> None:
    sizes = {"big 2": 5000, "big 3": 5000, "z": 100} | {f"a{number:02}": 100 for number in range(32)}
    state = {key: torch.ones(size) for key, size in sizes.items()}
    Saver(LocalRendezvous(), chunk_bytes=40_000).save(LocalStorage(tmp_path), state)
    outcomes = run_ranks(4, behind_a_slow_reader, str(tmp_path), way, timeout=60)
    assert all(outcome.value.read_once for outcome in outcomes)
    assert outcomes[1].value.seconds > 4.0, "it took longer than the deadline"


def failing_before(folder: str, way: str) -> dict[str, Any]:
    if rank() == 1:
        NativeCheckpoint.reads = _no_room  # type: ignore[method-assign]
    return failing(folder, way, 600, None)


def _no_room(*args: Any) -> Any:
    raise MemoryError("no room")


@WAYS
def test_a_failure_before_the_transfers_is_an_error_on_all_ranks(way: str, tmp_path: Path) -> None:
    save(tmp_path)
    errors = [outcome.value for outcome in run_ranks(3, failing_before, str(tmp_path), way, timeout=60)]
    assert errors[0] == errors[1] == errors[2]
    assert list(errors[0]["details"]["causes"]) == ["1"] and "no room" in errors[0]["message"]


def without_reach(folder: str) -> tuple[bool, int]:
    """Rank 1 cannot open the memory of the others, as in a container of its own."""
    if rank() == 1:
        PeerMemory.opened = staticmethod(lambda handle: None)  # type: ignore[method-assign]
    with process_group():
        target = {key: torch.zeros_like(value) for key, value in stored().items()}
        report = sp.load(folder, target, read_once=True)
        assert all(expected(key, value) for key, value in target.items())
        return report.read_once, report.bytes


def without_files(folder: str) -> tuple[bool, int]:
    """The system refuses anonymous files to rank 1."""

    def refused(*given: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if rank() == 1:
        os.memfd_create = refused
    with process_group():
        target = {key: torch.zeros_like(value) for key, value in stored().items()}
        report = sp.load(folder, target, read_once=True)
        assert all(expected(key, value) for key, value in target.items())
        return report.read_once, report.bytes


@pytest.mark.parametrize("lacking", [without_reach, without_files])
def test_without_shared_memory_the_group_transfers(tmp_path: Path, lacking: Any) -> None:
    nbytes = save(tmp_path)
    found = [outcome.value for outcome in run_ranks(2, lacking, str(tmp_path))]
    assert [once for once, _ in found] == [True] * 2
    assert sum(count for _, count in found) == nbytes


def without_memory(folder: str) -> dict[str, Any]:
    """Rank 1 gets no memory to share."""

    def refused(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank() == 1:
        os.posix_fallocate = refused
    return failing(folder, "memory", 1 << 20, None)


def test_too_little_memory_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path)
    errors = [outcome.value for outcome in run_ranks(2, without_memory, str(tmp_path))]
    assert errors[0] == errors[1]
    assert "read_once=False" in errors[0]["message"] and "rank 1" in errors[0]["message"]
    assert errors[0]["details"]["errno"] == "ENOSPC", "so restore does not take it for damage"


def descriptors(folder: str) -> tuple[list[str], list[str]]:
    with process_group():
        found = []
        for _ in range(3):
            target = {key: torch.zeros_like(value) for key, value in stored().items()}
            assert sp.load(folder, target, read_once=True).read_once
            found.append(open_files())
        return found[0], found[2]


def test_each_load_closes_its_shared_memory(tmp_path: Path) -> None:
    save(tmp_path)
    for outcome in run_ranks(2, descriptors, str(tmp_path)):
        first, last = outcome.value
        assert last == first


def peers_open(folder: str) -> dict[bool, tuple[bool, int]]:
    """By `shares`: if ranks exchanged data, and the number of processes watched during the reads."""
    watched: list[int] = []
    load_protocol.check_shared_memory = lambda *given: watched.append(
        open_files().count("anon_inode:[pidfd]")
    )  # type: ignore[assignment]
    found = {}
    with process_group():
        for shares in (False, True):
            target = {key: torch.zeros_like(value) for key, value in stored().items()}
            if not shares:  # each rank needs other bytes
                key = ["w", "half", "double"][rank()]
                target = {key: target[key]}
            report = sp.load(folder, target, read_once=True, strict=False)
            found[shares] = report.read_once, watched.pop()
    return found


def test_shared_memory_of_peers_is_closed_if_every_rank_reads(tmp_path: Path) -> None:
    save(tmp_path)
    for outcome in run_ranks(3, peers_open, str(tmp_path)):
        assert outcome.value == {False: (False, 0), True: (True, 2)}


def failing_to_prepare(folder: str) -> str:
    def refused(*given: Any) -> None:
        raise MemoryError("no room")

    if rank() == 1:
        load_protocol.DestinationWriter = refused  # type: ignore[assignment, misc]
    with pytest.raises(RankFailure) as caught:
        sp.load(folder, {key: torch.zeros_like(value) for key, value in stored().items()})
    return caught.value.message


def test_a_rank_that_fails_to_prepare_is_named_on_all_ranks(tmp_path: Path) -> None:
    save(tmp_path)
    messages = [outcome.value for outcome in run_ranks(2, failing_to_prepare, str(tmp_path))]
    assert messages[0] == messages[1] and "rank 1" in messages[0] and "no room" in messages[0]


def misused(folder: str) -> list[str]:
    texts = []
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    meetings = rendezvous(deadline=20.0)
    for read_once in (True, rank() == 0):
        with pytest.raises(ShardproofError) as caught:
            sp.load(folder, target, rendezvous=meetings, read_once=read_once)
        texts.append(str(caught.value))
    with process_group():
        group = dist.new_group([rank()], use_local_synchronization=True)
        with pytest.raises(ShardproofError) as caught:
            sp.load(folder, target, rendezvous=meetings, read_once=True, group=group)
        texts.append(str(caught.value))
    assert not any(value.any() for value in target.values()), "nothing was touched"
    return texts


def test_without_a_group_of_these_ranks_read_once_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    one, other = (outcome.value for outcome in run_ranks(2, misused, str(tmp_path)))
    assert one == other
    assert "initialise torch.distributed" in one[0]
    assert "read_once=True" in one[1] and "read_once=False" in one[1]
    assert "the process group has this process as rank 0 of 1" in one[2]


def subgroup(folder: str) -> int | None:
    with process_group():
        group = dist.new_group([1, 2])
        if rank() == 0:
            return None
        from shardproof.engine.rendezvous.store_requests import new_client
        from shardproof.rendezvous import StoreRendezvous

        store: Any = dist.distributed_c10d._get_default_store()
        meetings = StoreRendezvous(new_client(store), rank() - 1, 2, name="two")
        target = {key: torch.zeros_like(value) for key, value in stored().items()}
        report = sp.load(folder, target, read_once=True, group=group, rendezvous=meetings)
        assert all(expected(key, value) for key, value in target.items())
        meetings.close()
        return report.bytes


def test_some_ranks_read_once_over_a_group_of_their_own(tmp_path: Path) -> None:
    nbytes = save(tmp_path)
    found = [outcome.value for outcome in run_ranks(3, subgroup, str(tmp_path))]
    assert found[0] is None and found[1] + found[2] == nbytes


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    nbytes = save(tmp_path)
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    report = sp.load(tmp_path, target, read_once=True)
    assert (report.bytes, report.read_once) == (nbytes, False)
    with pytest.raises(TypeError, match="read_once is True or False, not 'auto'"):
        sp.load(tmp_path, target, read_once="auto")  # type: ignore[arg-type]

"""The read-once plan of one node: which rank reads each chunk into its memory, and which ranks take it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections import defaultdict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardproof.engine.loading.read_once import node_memory
from shardproof.engine.loading.read_once.node_memory import Message, MessageKind, NodeMemory, PeerMemory
from shardproof.engine.loading.read_once.node_plan import AHEAD, _ring, plan_node
from shardproof.engine.loading.read_once.node_transfer import MOST_RANKS
from shardproof.engine.loading.read_once.units import ChunkRequest
from shardproof.engine.planning import ChunkTable
from tests.harness import open_files
from tests.unit.engine.loading.test_once_plan import jobs, shared_chunks


def column(data: bytes, width: int) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(data, np.int64).reshape(-1, width).tolist()
    return rows


@given(jobs(), st.integers(1, 4000))
def test_every_shared_chunk_is_read_once_and_taken_by_all_ranks_that_want_it(
    job: tuple[ChunkTable, list[ChunkRequest], int, int], ring_bytes: int
) -> None:
    table, requests, round_bytes, unit_bytes = job
    orders, _ = plan_node(
        table, requests, round_bytes=round_bytes, ring_bytes=ring_bytes, unit_bytes=unit_bytes
    )
    wanted_by = defaultdict(set)
    for rank, request in enumerate(requests):
        for chunk in request.chunk.tolist():
            wanted_by[chunk].add(rank)
    shared = shared_chunks(table, requests)
    assert {order.nbytes for order in orders} == {orders[0].nbytes}

    location: dict[int, tuple[int, int, int]] = {}
    for rank, order in enumerate(orders):
        chunks = iter(column(order.read_chunks, 1))
        rounds = column(order.rounds, 2)
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, begin, count in column(order.read, 3):
            byte, previous = rounds[number][0] + begin, None
            first = byte
            for _ in range(count):
                chunk = next(chunks)[0]
                assert chunk not in location, "read twice"
                assert rank in wanted_by[chunk]
                if previous is not None:
                    assert table.file[chunk] == table.file[previous]
                    assert table.byte_start[chunk] == table.byte_start[previous] + table.byte_count[previous]
                location[chunk] = (rank, number, byte)
                byte += int(table.byte_count[chunk])
                previous = chunk
            taken[number].append((first, byte))
        assert next(chunks, None) is None
        assert sorted(taken) == list(range(len(rounds)))
        for spans in taken.values():
            ordered = sorted(spans)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ordered))
            assert ordered[-1][1] <= order.nbytes[rank]
            assert len(spans) == 1 or sum(end - begin for begin, end in spans) <= round_bytes
        for number, (_, after) in enumerate(rounds):  # chunks that a rank may still need are not overwritten
            assert number - AHEAD < after <= number
            for there in range(after, number):
                for begin, end in taken[there]:
                    assert all(end <= one or other <= begin for one, other in taken[number])
        receivers = defaultdict(set)
        for number, receiver in column(order.receivers, 2):
            receivers[number].add(receiver)
        assert receivers == {
            number: {
                receiver
                for chunk, (reader, at, _) in location.items()
                if (reader, at) == (rank, number)
                for receiver in wanted_by[chunk]
            }
            for number in range(len(rounds))
        }
    assert set(location) == shared

    for rank, order in enumerate(orders):
        rows = column(order.copies, 4)
        assert [row[:2] for row in rows] == sorted(row[:2] for row in rows)
        assert {row[3]: tuple(row[:3]) for row in rows} == {
            chunk: location[chunk] for chunk in shared if rank in wanted_by[chunk]
        }
        assert len(rows) == len({row[3] for row in rows})
        read = {chunk for chunk, (reader, _, _) in location.items() if reader == rank}
        assert set(order.shared_chunks().tolist()) == read | {row[3] for row in rows}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 100))
@example([1] * 20, 100)
def test_a_ring_has_room_for_two_of_the_largest_rounds_and_no_more_than_it_needs(
    sizes: list[int], ring_bytes: int
) -> None:
    places, nbytes = _ring(sizes, ring_bytes)
    assert nbytes == min(sum(sizes), max(ring_bytes, 2 * max(sizes)))
    assert all(0 <= begin <= nbytes - size for begin, size in zip(places[:, 0], sizes, strict=True))
    assert all(before <= after for before, after in itertools.pairwise(places[:, 1].tolist()))
    assert all(number - AHEAD < after <= number for number, after in enumerate(places[:, 1].tolist()))
    if sum(sizes) <= ring_bytes and len(sizes) <= AHEAD:
        assert not places[:, 1].any(), "no round overwrites another"


def test_another_process_maps_the_memory_and_refuses_a_wrong_handle() -> None:
    memory = NodeMemory()
    data = memory.reserve(3000)
    data[:] = torch.arange(3000) % 251
    handle = memory.handle
    script = (
        "import torch\n"
        "from shardproof.engine.loading.read_once import node_memory\n"
        "from shardproof.engine.loading.read_once.node_memory import Handle, Message, MessageKind\n"
        f"peer = node_memory.PeerMemory.opened(Handle(*{tuple(msgspec.structs.astuple(handle))!r}))\n"
        "mapped = peer.map(3000)\n"
        "assert torch.equal(mapped, (torch.arange(3000) % 251).to(torch.uint8))\n"
        "mapped[0] = 77\n"
        "assert peer.ticks() == 2\n"
        "peer.outbox.send(Message(MessageKind.COPIED, 5, 70000))\n"
    )
    memory.tick()
    memory.tick()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert data[0] == 77
    assert memory.inbox.take(1.0) == [Message(MessageKind.COPIED, 5, 70000)]
    assert memory.inbox.take(0.0) == []
    before = open_files()
    for wrong in (
        msgspec.structs.replace(handle, token=bytes(16)),
        msgspec.structs.replace(handle, memory=handle.inbox),
        msgspec.structs.replace(handle, inbox=handle.memory),
        msgspec.structs.replace(handle, inbox=1 << 20),
        msgspec.structs.replace(handle, pipe=handle.pipe + 1),
    ):
        assert PeerMemory.opened(wrong) is None
    assert open_files() == before, "nothing stays open"
    memory.close()
    assert PeerMemory.opened(handle) is None


def test_the_end_of_a_process_arrives_as_a_message() -> None:
    memory = NodeMemory()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(child.pid)
    try:
        memory.inbox.watch([(3, descriptor)])
        assert memory.inbox.take(0.0) == []
        memory.inbox.outbox.send(Message(MessageKind.READ, 0, 1))
        child.communicate(b"\n", timeout=60)
        assert memory.inbox.take(60.0) == [Message(MessageKind.READ, 0, 1), Message(MessageKind.ENDED, 3)]
    finally:
        child.kill()
        child.wait(60)
        os.close(descriptor)
        memory.close()


def test_all_messages_that_can_be_in_flight_fit_into_the_smallest_pipe() -> None:
    memory = NodeMemory()
    fcntl.fcntl(memory.inbox.outbox.descriptor, fcntl.F_SETPIPE_SZ, 1)
    most = (MOST_RANKS - 1) * (2 * AHEAD + 1)
    for number in range(most):
        memory.inbox.outbox.send(Message(MessageKind.READ, 1, number))
    heard: list[Message] = []
    while len(heard) < most:
        heard += memory.inbox.take(1.0)
    assert [message.number for message in heard] == list(range(most))
    memory.close()


def test_messages_that_are_sent_together_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, writes, write = NodeMemory(), [], os.write

    def counted(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    messages = [Message(MessageKind.COPIED, 2, number) for number in range(3)]
    memory.inbox.outbox.send(*messages)
    assert memory.inbox.take(1.0) == messages
    assert len(writes) == 1
    memory.close()


def test_memory_that_cannot_be_made_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_files()
    monkeypatch.setattr(node_memory, "Inbox", refused)
    assert NodeMemory.made() is None
    assert open_files() == before

"""The read-once plan of a process group, compared with a slow reference, and run in one process."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.destinations import DestinationWriter
from shardproof.engine.loading.matching import LoadOptions, match
from shardproof.engine.loading.read_once.group_plan import plan_once
from shardproof.engine.loading.read_once.group_transfer import Receiver, Sender
from shardproof.engine.loading.read_once.units import ChunkRequest, Orders
from shardproof.engine.planning import ChunkTable, ReadPlan
from shardproof.engine.saving import Saver
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage


def column(raw: bytes, width: int) -> list[list[int]]:
    return np.frombuffer(raw, np.int64).reshape(-1, width).tolist()


@dataclass
class Message:
    source: int
    target: int
    round: int
    nbytes: int
    chunks: list[tuple[int, int]]


def sent_of(rank: int, orders: Orders) -> list[Message]:
    chunks = [(chunk, parts) for chunk, parts in column(orders.sent_chunks, 2)]
    messages = []
    for _, target, number, nbytes, count in column(orders.sent, 5):
        messages.append(Message(rank, target, number, nbytes, chunks[:count]))
        chunks = chunks[count:]
    assert not chunks
    return messages


def received_of(rank: int, orders: Orders) -> list[Message]:
    chunks = [(chunk, parts) for chunk, parts in column(orders.received_chunks, 2)]
    messages = []
    for source, number, nbytes, count in column(orders.received, 4):
        messages.append(Message(source, rank, number, nbytes, chunks[:count]))
        chunks = chunks[count:]
    assert not chunks
    return messages


def table_of(files: list[int], gaps: list[int], counts: list[int], draw: Any) -> ChunkTable:
    """One chunk for each of several 1-D tensors of bytes. Rows are not in the order of the files."""
    n = len(files)
    file, start, end = np.sort(np.array(files, np.int64)), np.zeros(n, np.int64), 0
    for at in range(n):
        end = 8 if at and file[at] != file[at - 1] else end + gaps[at]
        start[at] = end
        end += counts[at]
    order = np.array(draw(st.permutations(range(n))), np.int64)
    sizes = np.array(counts, np.int64)[order]
    return ChunkTable(
        np.arange(n),
        file[order],
        start[order],
        sizes,
        np.zeros((n, 2), np.uint64),
        np.arange(n + 1),
        np.zeros(n, np.int64),
        sizes,
    )


@st.composite
def jobs(draw: Any) -> tuple[ChunkTable, list[ChunkRequest], int, int]:
    n, world_size = draw(st.integers(1, 12)), draw(st.integers(1, 5))

    def numbers(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=n, max_size=n))

    counts = [8 + count for count in numbers(40)]
    table = table_of(numbers(2), [gap if gap > 5 else 0 for gap in numbers(7)], counts, draw)
    requests = []
    for rank in range(world_size):
        wanted = [at for at in range(n) if draw(st.booleans())]
        columns: list[list[int]] = [[], [], [], []]
        boxes = []
        for chunk in wanted:
            parts = draw(st.integers(0, 2))
            sizes = [draw(st.integers(1, 3)) for _ in range(parts)]
            columns[0].append(chunk)
            columns[1].append(sum(sizes) if parts else int(table.byte_count[chunk]))
            count = int(table.byte_count[chunk])
            columns[2].append(draw(st.integers(1, count)) if parts and count else count)
            columns[3].append(parts)
            boxes += [(draw(st.integers(0, 4)), size) for size in sizes]
        in_chunk, sizes_of = (np.array([box[k] for box in boxes], np.int64).reshape(-1, 1) for k in (0, 1))
        request = ChunkRequest(
            f"node{rank // 2}", *(np.array(values, np.int64) for values in columns), in_chunk, sizes_of
        )
        requests.append(ChunkRequest.decode(request.encode()))
    return table, requests, draw(st.integers(1, 120)), draw(st.integers(1, 100))


def shared_chunks(table: ChunkTable, requests: list[ChunkRequest]) -> set[int]:
    """Chunks to read once: those of which several ranks together would read more than 17/16 of the bytes."""
    reads: dict[int, list[int]] = defaultdict(list)
    for request in requests:
        for chunk, read in zip(request.chunk.tolist(), request.read.tolist(), strict=True):
            reads[chunk].append(read)
    return {
        chunk
        for chunk, each in reads.items()
        if len(each) > 1 and 16 * sum(each) > 17 * int(table.byte_count[chunk])
    }


def reads_of(opened: NativeCheckpoint, writer: DestinationWriter, plan: ReadPlan) -> np.ndarray[Any, Any]:
    rows = np.unique(plan.chunk)
    begin, end = opened.blocks.covering(rows, writer.wanted(rows))
    return end - begin


@given(jobs())
def test_every_shared_chunk_is_read_once_and_sent_to_all_ranks_that_want_it(
    job: tuple[ChunkTable, list[ChunkRequest], int, int],
) -> None:
    table, requests, round_bytes, unit_bytes = job
    orders, saved = plan_once(table, requests, round_bytes=round_bytes, unit_bytes=unit_bytes)
    wanted_by: dict[int, list[int]] = defaultdict(list)
    message_bytes, boxes = {}, {}
    for rank, request in enumerate(requests):
        first = 0
        for chunk, nbytes, parts in np.column_stack((request.chunk, request.nbytes, request.parts)).tolist():
            wanted_by[chunk].append(rank)
            message_bytes[rank, chunk] = nbytes
            of_chunk = slice(first, first + parts)
            boxes[rank, chunk] = np.hstack((request.in_chunk[of_chunk], request.sizes[of_chunk])).tolist()
            first += parts
    shared = shared_chunks(table, requests)
    reader: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for (chunk,) in column(order.read_chunks, 1):
            assert chunk not in reader, "read twice"
            assert rank in wanted_by[chunk]
            reader[chunk] = rank
    assert set(reader) == shared

    sent = [message for rank, order in enumerate(orders) for message in sent_of(rank, order)]
    received = [message for rank, order in enumerate(orders) for message in received_of(rank, order)]
    for source in range(len(requests)):
        for target in range(len(requests)):
            for number in range(orders[0].rounds):
                key = (source, target, number)
                one, other = (
                    [message for message in side if (message.source, message.target, message.round) == key]
                    for side in (sent, received)
                )
                assert one == other, "the two sides pack and unpack alike"
    handed = sorted((message.target, chunk) for message in sent for chunk, _ in message.chunks)
    assert handed == sorted(
        (rank, chunk) for chunk in shared for rank in wanted_by[chunk] if rank != reader[chunk]
    )
    for message in sent:
        assert message.nbytes == sum(message_bytes[message.target, chunk] for chunk, _ in message.chunks)
    for rank, order in enumerate(orders):
        assert {order.rounds for order in orders} == {orders[0].rounds}
        flat = iter(column(order.sent_boxes, 2 * order.sent_width) if order.sent_width else [])
        for message in sent_of(rank, order):
            for chunk, parts in message.chunks:
                assert [next(flat) for _ in range(parts)] == boxes[message.target, chunk]

    def sums(side: list[Message], by: str) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for message in side:
            found[getattr(message, by), message.round].append(message.nbytes)
        return found

    for sizes in (*sums(sent, "source").values(), *sums(received, "target").values()):
        assert sum(sizes) <= round_bytes or len(sizes) == 1
    for order in orders:
        begins = [number for (number,) in column(order.read_rounds, 1)]
        assert begins == sorted(begins)
        for unit, _, number, _, _ in column(order.sent, 5):
            assert begins[unit] <= number
    own = [
        sum(
            read if chunk not in shared else int(table.byte_count[chunk]) * (reader[chunk] == rank)
            for chunk, read in zip(request.chunk.tolist(), request.read.tolist(), strict=True)
        )
        for rank, request in enumerate(requests)
    ]
    assert saved == sum(int(request.read.sum()) for request in requests) - sum(own)


@pytest.mark.parametrize(("first", "second", "is_shared"), [(60, 46, False), (60, 47, True), (100, 1, False)])
def test_a_chunk_is_read_once_if_that_saves_more_than_a_sixteenth(
    first: int, second: int, is_shared: bool
) -> None:
    one, none = np.array([0]), np.zeros((0, 1), np.int64)
    table = ChunkTable(
        one, one, one, one + 100, np.zeros((1, 2), np.uint64), np.array([0, 1]), one, one + 100
    )
    requests = [ChunkRequest("node", one, one + 100, one + read, one, none, none) for read in (first, second)]
    orders, saved = plan_once(table, requests)
    assert any(len(order.shared_chunks()) for order in orders) == is_shared
    assert saved == (first + second - 100 if is_shared else 0)


def test_replicas_are_read_in_even_shares() -> None:
    n, world_size = 64, 4
    sizes = np.full(n, 1 << 20)
    zeros = np.zeros(n, np.int64)
    table = ChunkTable(
        np.arange(n),
        zeros,
        np.arange(n) << 20,
        sizes,
        np.zeros((n, 2), np.uint64),
        np.arange(n + 1),
        zeros,
        sizes,
    )
    none = np.zeros((0, 1), np.int64)
    requests = [
        ChunkRequest(f"node{rank // 2}", np.arange(n), sizes, sizes, zeros, none, none)
        for rank in range(world_size)
    ]
    orders, saved = plan_once(table, requests, unit_bytes=4 << 20)
    assert saved == 3 * 64 << 20
    for rank, order in enumerate(orders):
        assert len(column(order.read_chunks, 1)) == 16
        for side in (sent_of(rank, order), received_of(rank, order)):
            assert sum(message.nbytes for message in side) == 48 << 20
    assert orders[0].rounds <= 3  # 48 MiB in rounds of 32 MiB: the ranks do not wait for one that all send to


def _boxes(world_size: int, draw: Any, rows: int, columns: int) -> list[list[tuple[int, int, int, int]]]:
    """For each rank up to two random boxes. Some of them are the whole tensor."""
    found = []
    for _ in range(world_size):
        boxes = []
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.integers(0, 3)) == 0:
                boxes.append((0, 0, rows, columns))
                continue
            top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
            boxes.append((top, left, draw(st.integers(1, rows - top)), draw(st.integers(1, columns - left))))
        found.append(boxes)
    return found


@settings(max_examples=40)
@given(st.data())
def test_rounds_between_ranks_of_one_process_fill_every_destination(data: st.DataObject) -> None:
    draw = data.draw
    rows, columns, world_size = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.complex128]))
    values = torch.arange(rows * columns).reshape(rows, columns).to(dtype)
    byte = torch.arange(5, dtype=torch.uint8)  # chunks after it begin anywhere
    with tempfile.TemporaryDirectory() as folder:
        Saver(LocalRendezvous(), chunk_bytes=draw(st.sampled_from([16, 64, 1000]))).save(
            LocalStorage(folder), {"a": byte, "w": values}
        )
        wanted = _boxes(world_size, draw, rows, columns)
        cast = torch.float64 if dtype == torch.float32 and draw(st.booleans()) else dtype
        strided = draw(st.booleans())
        wide = (1, 2) if strided else (1, 1)
        states = [
            [
                torch.zeros(height * wide[0], width * wide[1], dtype=cast)[:, :: wide[1]]
                for _, _, height, width in boxes
            ]
            for boxes in wanted
        ]
        opened = NativeCheckpoint(LocalStorage(folder))
        matched = []
        for boxes, views in zip(wanted, states, strict=True):
            pieces = [(view, box[:2]) for view, box in zip(views, boxes, strict=True)]
            state = {"a": torch.zeros_like(byte), "w": sp.LocalShards((rows, columns), pieces, dtype=cast)}
            matched.append((match(opened, state, LoadOptions(cast=True), 0, 1), state))
        writers = [
            DestinationWriter(opened.tensors, opened.table, found.plan, found.destinations)
            for found, _ in matched
        ]
        requests = [
            ChunkRequest.of(
                "node", opened.table, found.plan, writer.part_bytes, reads_of(opened, writer, found.plan)
            )
            for (found, _), writer in zip(matched, writers, strict=True)
        ]
        orders, saved = plan_once(
            opened.table, requests, round_bytes=draw(st.sampled_from([1, 100, 1 << 20])), unit_bytes=64
        )
        senders = [
            Sender(opened.files, opened.manifest, opened.table, writer, order, world_size, 1)
            for writer, order in zip(writers, orders, strict=True)
        ]
        receivers = [
            Receiver(opened.table, writer, order, world_size)
            for writer, order in zip(writers, orders, strict=True)
        ]
        for number in range(orders[0].rounds):
            for sender in senders:
                sender.pack(number)
            for rank, receiver in enumerate(receivers):
                parts = [
                    sender.buffer(number)[: sum(sender.sizes[number])].split(sender.sizes[number])[rank]
                    for sender in senders
                ]
                assert [len(part) for part in parts] == receiver.sizes[number]
                arrived = torch.cat(parts)
                receiver.buffer[: len(arrived)].copy_(arrived)
                receiver.unpack(number)
        shared = {chunk for order in orders for chunk in order.shared_chunks().tolist()}
        for (found, state), boxes, views in zip(matched, wanted, states, strict=True):
            everything = set(found.plan.chunk.tolist())
            for (top, left, height, width), view in zip(boxes, views, strict=True):
                if everything <= shared:
                    expected = values[top : top + height, left : left + width].to(cast)
                    assert torch.equal(view, expected)
            if everything <= shared:
                assert torch.equal(state["a"], byte)
        assert sum(sender.read for sender in senders) == int(opened.table.byte_count[sorted(shared)].sum())
        if world_size > 1:
            assert saved >= 0

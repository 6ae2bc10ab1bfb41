"""Reading once on one node: who reads what into its memory, where, and who finds it there."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict

import numpy as np
import torch
from hypothesis import given

from shardproof.loading.node_memory import Handle, NodeMemory, PeerMemory
from shardproof.loading.node_plan import plan_node
from shardproof.loading.once_orders import Wish
from shardproof.planning import ChunkTable
from tests.unit.loading.test_once_plan import jobs


def column(data: bytes, width: int) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(data, np.int64).reshape(-1, width).tolist()
    return rows


@given(jobs())
def test_every_shared_chunk_is_read_once_and_found_by_all_who_want_it(
    job: tuple[ChunkTable, list[Wish], int, int],
) -> None:
    table, wishes, round_bytes, unit_bytes = job
    orders, _ = plan_node(table, wishes, round_bytes=round_bytes, unit_bytes=unit_bytes)
    wanted_by = defaultdict(set)
    for rank, wish in enumerate(wishes):
        for chunk in wish.chunk.tolist():
            wanted_by[chunk].add(rank)
    shared = {chunk for chunk, ranks in wanted_by.items() if len(ranks) > 1}
    assert {order.rounds for order in orders} == {orders[0].rounds}
    assert {order.nbytes for order in orders} == {orders[0].nbytes}

    lies: dict[int, tuple[int, int, int]] = {}
    for rank, order in enumerate(orders):
        chunks = iter(column(order.read_chunks, 1))
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, begin, count in column(order.read, 3):
            assert 0 <= number < order.rounds
            byte, previous = begin, None
            for _ in range(count):
                chunk = next(chunks)[0]
                assert chunk not in lies, "read twice"
                assert rank in wanted_by[chunk]
                if previous is not None:
                    assert table.file[chunk] == table.file[previous]
                    assert table.byte_start[chunk] == table.byte_start[previous] + table.byte_count[previous]
                lies[chunk] = (number, rank, byte)
                byte += int(table.byte_count[chunk])
                previous = chunk
            taken[number].append((begin, byte))
        assert next(chunks, None) is None
        for spans in taken.values():
            ordered = sorted(spans)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ordered))
            assert ordered[-1][1] <= order.nbytes[rank]
            assert len(spans) == 1 or sum(end - begin for begin, end in spans) <= round_bytes
    assert set(lies) == shared

    for rank, order in enumerate(orders):
        placed = column(order.placed, 4)
        assert [row[0] for row in placed] == sorted(row[0] for row in placed)
        assert {row[3]: tuple(row[:3]) for row in placed} == {
            chunk: lies[chunk] for chunk in shared if rank in wanted_by[chunk]
        }
        assert len(placed) == len({row[3] for row in placed})
        read = {chunk for chunk, (_, reader, _) in lies.items() if reader == rank}
        assert set(order.shared_chunks().tolist()) == read | {row[3] for row in placed}


def test_another_process_sees_the_memory_and_none_that_is_not_it() -> None:
    memory = NodeMemory()
    data = memory.reserve(3000)
    data[:] = torch.arange(3000) % 251
    handle = memory.handle
    script = (
        "import torch\n"
        "from shardproof.loading.node_memory import Handle, PeerMemory\n"
        f"peer = PeerMemory.opened(Handle({handle.process}, {handle.descriptor}, {handle.token!r}))\n"
        "mapped = peer.map(3000)\n"
        "assert torch.equal(mapped, (torch.arange(3000) % 251).to(torch.uint8))\n"
        "mapped[0] = 77\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert data[0] == 77
    assert PeerMemory.opened(Handle(handle.process, handle.descriptor, bytes(16))) is None
    memory.close()
    assert PeerMemory.opened(handle) is None

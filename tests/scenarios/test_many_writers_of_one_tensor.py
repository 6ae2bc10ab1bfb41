"""Many ranks write parts of one tensor at once, delayed in any order: no element is lost.

Elsewhere, the shards of an optimizer came back as zeros: several ranks wrote slices of one chunk of an array,
each by reading the chunk, changing its slice and writing the chunk back, and the last to finish undid the
others. No error was raised.

Here four ranks are held at their file operations: all begin before any rank writes, and all write before any
rank finishes, in another order each time. In a broken storage, all ranks read, change and write back one
chunk. It shows that the test finds such a loss.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import NativeCheckpoint, load_from
from shardproof.engine.saving import Saver
from shardproof.errors import ShardproofError
from shardproof.geometry import Boxes, IndexMap
from shardproof.storage import LocalStorage, Sink, Storage
from tests.faulty_storage import FaultyStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.scenarios.states import whole

RANKS = 4
REPETITIONS = 100
STAGES = ("create", "write", "finish")
CHUNK_BYTES = 64
"""Small, so that one rank's part of a tensor is many chunks."""


def cuts(draw: random.Random, count: int, parts: int) -> list[tuple[int, int]]:
    """[0, count) in parts, some of them perhaps empty."""
    edges = [0, *sorted(draw.randint(0, count) for _ in range(parts - 1)), count]
    return list(pairwise(edges))


def split(
    shapes: random.Random, draw: random.Random, salt: int, who: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Tensors of random shapes, cut at random: one rank's shards of them, and the whole tensors.

    All ranks draw the same numbers. The ranks get the parts of each tensor in a random order.
    """
    state: dict[str, Any] = {}
    every: dict[str, torch.Tensor] = {}

    def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        every[name] = whole(shape, salt + len(every), dtype)
        return every[name]

    def seat() -> int:
        return draw.sample(range(RANKS), RANKS)[who]

    flat = tensor("flat", shapes.randint(3, 9), shapes.randint(2, 7))
    start, stop = cuts(draw, flat.numel(), RANKS)[seat()]
    state["flat"] = sp.FlatShard(flat.flatten()[start:stop].clone(), flat.shape, start, stop)

    grid = tensor("grid", shapes.randint(2, 9), shapes.randint(2, 9), dtype=torch.bfloat16)
    sides = [cuts(draw, size, 2) for size in grid.shape]
    place = seat()
    (top, bottom), (left, right) = sides[0][place // 2], sides[1][place % 2]
    state["grid"] = sp.LocalShards(grid.shape, [(grid[top:bottom, left:right].clone(), (top, left))])

    # Gate and up on rows, both cut by tensor parallel rank, then dealt out flat to data parallel ranks.
    half, width = shapes.randint(2, 5), shapes.randint(1, 4)
    fused = tensor("fused", 2 * half, width, dtype=torch.int64)
    middle = draw.randint(1, half - 1)
    ranges = [cuts(draw, 2 * size * width, 2) for size in (middle, half - middle)]
    place = seat()
    first, size = ((0, middle), (middle, half - middle))[place // 2]
    start, stop = ranges[place // 2][place % 2]
    both = Boxes.of(((0, 0), (size, width)), ((size, 0), (size, width)))
    index_map = IndexMap(
        (2 * size, width), (2 * half, width), both, np.array([[first, 0], [half + first, 0]])
    )
    mine = torch.cat([fused[first : first + size], fused[half + first : half + first + size]]).flatten()
    state["fused"] = sp.FlatShard(mine[start:stop].clone(), fused.shape, start, stop, index_map)

    twice = tensor("twice", shapes.randint(2, 6), 3)  # each box is on two ranks, of which one writes
    top, bottom = cuts(draw, len(twice), 2)[seat() // 2]
    state["twice"] = sp.LocalShards(twice.shape, [(twice[top:bottom].clone(), (top, 0))])

    row = tensor("row", RANKS, 2)  # something of its own for every rank, so that all four create a file
    place = seat()
    state["row"] = sp.LocalShards(row.shape, [(row[place : place + 1].clone(), (place, 0))])
    return state, every


def parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Views of one rank's shards, by name and offsets."""
    found = {}
    for name, value in state.items():
        sharded = value.sharded() if isinstance(value, sp.FlatShard) else value
        found |= {f"{name}{list(offsets)}": view for view, offsets in sharded.pieces}
    return found


Schedule = list[tuple[str, int]]
"""Stages of ranks, in the order in which they run."""


def interleaved(draw: random.Random) -> Schedule:
    """All ranks create, then all write, then all finish; each time in another order."""
    return [(stage, who) for stage in STAGES for who in draw.sample(range(RANKS), RANKS)]


def one_after_another(draw: random.Random) -> Schedule:
    """A rank has finished before the next one creates."""
    return [(stage, who) for who in draw.sample(range(RANKS), RANKS) for stage in STAGES]


@dataclass
class Turns:
    """Holds a rank before each stage until all earlier stages of the schedule are done."""

    store: Any
    name: str
    schedule: Schedule

    def take(self, stage: str, work: Callable[[], None]) -> None:
        turn = self.schedule.index((stage, rank()))
        if turn:
            self.store.wait([f"{self.name}/{turn - 1}"], timedelta(seconds=30))
        work()
        self.store.set(f"{self.name}/{turn}", b"through")


class HeldStorage(FaultyStorage):
    """A storage in which this rank waits for its turn in `create`, in its one write and in `finish`."""

    def __init__(self, inner: Storage, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns
        self.created: list[str] = []

    def create(self, name: str) -> Sink:
        if not name.startswith("shards/"):
            return self._inner.create(name)  # the index: the coordinator writes it after all ranks
        self.created.append(name)
        sinks: list[Sink] = []
        self._turns.take("create", lambda: sinks.append(self._inner.create(name)))
        return _HeldSink(sinks[0], self._turns)


class _HeldSink:
    def __init__(self, inner: Sink, turns: Turns) -> None:
        self._inner = inner
        self._turns = turns

    def write_at(self, start: int, buffer: memoryview) -> None:
        self._turns.take("write", lambda: self._inner.write_at(start, buffer))

    def finish(self, size: int) -> None:
        self._turns.take("finish", lambda: self._inner.finish(size))

    def abort(self) -> None:
        self._inner.abort()


class SharedChunk(FaultyStorage):
    """A broken storage: the shard files of all ranks are slices of one chunk. Each rank reads, changes and
    writes back that chunk, as writers of an array with shared chunks do."""

    SLICE = 1 << 16

    def create(self, name: str) -> Sink:
        if not name.startswith("shards/"):
            return self._inner.create(name)
        there = self._inner.size("chunk") is not None
        chunk = bytearray(self._inner.read("chunk") if there else self.SLICE * RANKS)
        return _Slice(self._inner, name, chunk, self._start(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if not name.startswith("shards/"):
            return self._inner.read(name, start, stop)
        stop = self.size(name) if stop is None else stop
        assert stop is not None
        return self._inner.read("chunk", self._start(name) + start, self._start(name) + stop)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self.read(name, start, start + len(buffer))

    def is_cached(self, name: str, start: int, count: int) -> bool:
        return True

    def size(self, name: str) -> int | None:
        return int(self._inner.read(f"{name}.size")) if name.startswith("shards/") else self._inner.size(name)

    def _start(self, name: str) -> int:
        return self.SLICE * int(name.removeprefix("shards/")[:5])


@dataclass
class _Slice:
    storage: Storage
    name: str
    chunk: bytearray
    start: int

    def write_at(self, start: int, buffer: memoryview) -> None:
        assert start + len(buffer) <= SharedChunk.SLICE
        self.chunk[self.start + start : self.start + start + len(buffer)] = buffer

    def finish(self, size: int) -> None:
        self.storage.publish("chunk", bytes(self.chunk), replace=True)
        self.storage.publish(f"{self.name}.size", str(size).encode())

    def abort(self) -> None:
        pass


def lost(storage: Storage, every: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of a checkpoint, read by one process, with an element that differs from what was saved."""
    wrong = []
    checkpoint = NativeCheckpoint(storage)
    for name, wanted in every.items():
        try:
            found = checkpoint[name][...]
        except ShardproofError as error:
            wrong.append(f"{name}: {type(error).__name__}")
            continue
        missing = int((found != wanted).sum())
        if missing or found.dtype != wanted.dtype:
            wrong.append(f"{name}: {missing} of {wanted.numel()} elements")
    checkpoint.close()
    return wrong


def repeat(
    root: str, repetitions: int, schedule: Callable[[random.Random], Schedule], shared: bool
) -> list[list[str]]:
    """Tensors with lost elements, in each repetition."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False)
    meetings = rendezvous(deadline=30.0)
    saver = Saver(meetings, chunk_bytes=CHUNK_BYTES)
    found: list[list[str]] = []
    for repetition in range(repetitions):
        wrong: list[str] = []
        for again in range(2 if repetition % 8 == 0 else 1):  # again: other values, by the cached plan
            name, salt = f"{repetition}-{again}", 10 * (2 * repetition + again)
            shape = f"shapes {repetition}"
            state, every = split(random.Random(shape), random.Random(f"cuts {repetition}"), salt, rank())
            place = LocalStorage(f"{root}/{name}")
            storage: Storage = SharedChunk(place) if shared else place
            turns = Turns(store, name, schedule(random.Random(f"orders {name}")))
            held = HeldStorage(storage, turns)
            saver.save(held, state)
            assert len(held.created) == 1
            if rank() == 0:
                wrong += lost(storage, every)
            if not shared:
                other = f"other cuts {name}"
                wanted, _ = split(random.Random(shape), random.Random(other), salt, rank())
                target, _ = split(random.Random(shape), random.Random(other), salt + 5, rank())
                load_from(LocalStorage(f"{root}/{name}"), target, meetings)
                loaded = parts(target)
                wrong += [at for at, view in parts(wanted).items() if not torch.equal(loaded[at], view)]
        found.append(wrong)
    meetings.close()
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("repetitions", [30, pytest.param(REPETITIONS, marks=pytest.mark.slow)])
def test_no_element_is_lost(tmp_path: Path, repetitions: int) -> None:
    """Each repetition would show the fault: see `test_a_loss_in_a_shared_chunk_is_found`."""
    outcomes = run_ranks(RANKS, repeat, str(tmp_path), repetitions, interleaved, False, timeout=220)
    assert [outcome.value for outcome in outcomes] == [[[]] * repetitions] * RANKS


def test_a_loss_in_a_shared_chunk_is_found(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, repeat, str(tmp_path), 8, interleaved, True)
    found = outcomes[0].value
    assert all(any(one.startswith("row") for one in wrong) for wrong in found), found
    assert [outcome.value for outcome in outcomes[1:]] == [[[]] * 8] * (RANKS - 1)


def test_no_loss_is_found_where_ranks_write_one_after_another(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, repeat, str(tmp_path), 2, one_after_another, True)
    assert [outcome.value for outcome in outcomes] == [[[]] * 2] * RANKS


def test_splits_differ_and_cover_everything() -> None:
    """Checks the test itself: the shards cover every element of every tensor, and the cuts vary."""
    seen = set()
    for repetition in range(REPETITIONS):
        counts: dict[str, torch.Tensor] = {}
        for who in range(RANKS):
            shapes, draw = random.Random(f"shapes {repetition}"), random.Random(f"cuts {repetition}")
            state, every = split(shapes, draw, 0, who)
            for at, view in parts(state).items():
                name, _, offsets = at.partition("[")
                place = [int(offset) for offset in offsets.rstrip("]").split(", ")]
                box = tuple(slice(o, o + size) for o, size in zip(place, view.shape, strict=True))
                counts.setdefault(name, torch.zeros(every[name].shape, dtype=torch.int64))[box] += 1
                assert torch.equal(every[name][box], view)
            seen.add((who, *parts(state)))
        assert {name: set(count.flatten().tolist()) for name, count in counts.items()} == {
            name: {2 if name == "twice" else 1} for name in every
        }
    assert len(seen) == RANKS * REPETITIONS

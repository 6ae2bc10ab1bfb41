"""The storage speeds at which reading once is faster, by the number of ranks that need the same bytes.

The ranks of one node load a GPT-shaped state that was saved by rows, in four layouts:

- rows: the same layout, so one rank needs each byte;
- rows, twice: by rows over each half of the ranks, so two ranks need each byte;
- whole: whole on every rank, so every rank needs each byte;
- columns: by columns, so every rank needs a part of every chunk.

The benchmark alternates two ways: every rank reads what it needs; one rank reads and sends to the others.

The ranks share a storage of limited speed, of two kinds. *Uncached*: every read takes time, as from a store
whose pages the system does not cache. *Cached*: bytes that one rank has read cost the other ranks no time,
as from a disk with pages in the cache of the system. All reads come from the page cache here, and are then
delayed. So the benchmark measures the ways, not a storage.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from common import (
    GIB,
    folder,
    gpt_state,
    is_rank,
    launch,
    machine,
    parser,
    rounds,
    table,
    tensors_of,
    total_bytes,
)
from recording import record
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardproof as sp
from shardproof.engine.loading import LoadOptions, load_from
from shardproof.rendezvous import connect
from shardproof.storage import LocalStorage

LAYOUTS = ("rows", "rows, twice", "whole", "columns")
KINDS = ("uncached", "cached")
BLOCK = 64 << 10
"""Bytes of a block. The cached kind records which blocks were read."""
AHEAD, BEHIND = 2e-5, 1e-4
"""Seconds that a read may end too early; seconds of idle time that the storage makes up for."""
HEADER = 2
"""Words of the shared memory before those of the blocks: when the storage is next free, and the round."""


def main() -> None:
    options = with_points(parser(__doc__, device=False)).parse_args()
    if not is_rank():
        launch(options, options.ranks)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (options.ranks,))
    state = gpt_state(options.gib, mesh)
    nbytes = total_bytes(state)
    sp.save(folder() / "saved", state)
    del state
    points = [(kind, speed) for kind in options.kinds for speed in options.speeds]
    points.append(("unhindered", None))
    for layout in options.layouts:
        target = into(layout, options.gib, mesh)
        random.Random(options.seed).shuffle(points)
        found = {point: measured(target, *point, options.repeats) for point in points}
        if rank == 0:
            print(f"\n### {layout}, {nbytes / GIB:.2f} GiB, {options.ranks} ranks\n\n{machine()}\n")
            table(
                ("storage", "GiB/s", "all s", "once s", "faster", "ratio"),
                [row(*point, found[point]) for point in sorted(points, key=order)],
            )
            for point in sorted(points, key=order):
                kind, speed = point
                limit = "" if speed is None else f" at {speed:g} GiB/s"
                record(
                    options.json,
                    f"crossover, {layout}, {nbytes / GIB:.2f} GiB, {options.ranks} ranks, {kind}{limit}",
                    [(name, "s", way.seconds) for name, way in found[point].items()],
                )
        del target
    dist.barrier()
    dist.destroy_process_group()


def with_points(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that choose what is measured, and in which order."""
    options.set_defaults(ranks=4, gib=0.5, repeats=3)
    speeds = (0.25, 0.5, 1.0, 2.0, 4.0)
    options.add_argument("--speeds", type=float, nargs="*", default=speeds, help="of the storage, in GiB/s")
    options.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of storage")
    options.add_argument("--seed", type=int, default=0, help="seed of the order of the measurements")
    return options


def into(layout: str, gib: float, mesh: DeviceMesh) -> dict[str, Any]:
    """A state to load into, in memory that was already written."""
    if layout in ("rows", "columns"):
        return gpt_state(gib, mesh, placement=LAYOUTS.index(layout) // 3, filled=False)
    ranks = mesh.size()
    copies = 2 if layout == "rows, twice" else ranks
    grid = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("copies", "shards"))
    return replicated(gpt_state(gib, grid["shards"], filled=False), grid)


def replicated(state: Any, grid: DeviceMesh) -> Any:
    """The same state with every DTensor on a grid of copies and shards."""
    if isinstance(state, dict):
        return {key: replicated(value, grid) for key, value in state.items()}
    if not isinstance(state, DTensor):
        return state
    return DTensor.from_local(
        state.to_local(),
        grid,
        [Replicate(), Shard(0)],
        run_check=False,
        shape=state.shape,
        stride=state.stride(),
    )


def measured(target: Any, kind: str, speed: float | None, repeats: int) -> dict[str, Any]:
    """Times of the ways."""
    with Node(folder() / "node", sizes(folder() / "saved")) as node:

        def load(read_once: bool) -> None:
            storage: LocalStorage = LocalStorage(folder() / "saved")
            if speed is not None:
                storage = Slow(folder() / "saved", node, speed * GIB, cached=kind == "cached")
            load_from(storage, target, connect(), LoadOptions(read_once=read_once))

        times = rounds(
            {
                "all": lambda number: load(False),
                "once": lambda number: load(True),
            },
            repeats,
            prepare=lambda name, number: node.forget(),
        )
    assert all((tensor != -1.0).any() for tensor in tensors_of(target) if tensor.numel())
    return times


def row(kind: str, speed: float | None, times: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first, once = times["all"].median, times["once"].median
    return [
        kind,
        "" if speed is None else f"{speed:g}",
        f"{first:.3f}",
        f"{once:.3f}",
        "once" if once < first else "all",
        f"{max(first, once) / min(first, once):.2f}",
    ]


def order(point: tuple[str, float | None]) -> tuple[str, float]:
    """Sort key of a point in the table."""
    kind, speed = point
    return ("uncached", "cached", "unhindered").index(kind), speed or 0.0  # type: ignore[return-value]


def sizes(root: Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


class Node:
    """State that the ranks of the node share: when the storage is free again, and which blocks were read."""

    def __init__(self, path: Path, files: dict[str, int]) -> None:
        counts = [-(-size // BLOCK) for size in files.values()]
        self._first = dict(zip(files, (np.cumsum(counts) - counts).tolist(), strict=True))
        nbytes = 8 * (HEADER + sum(counts))
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._handle, nbytes)
        self._memory = mmap.mmap(self._handle, nbytes)
        self._free = np.frombuffer(self._memory, np.float64, 1)
        words = np.frombuffer(self._memory, np.int64)
        self._round, self._read = words[1:HEADER], words[HEADER:]
        self._lock = threading.Lock()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def forget(self) -> None:
        """Marks all blocks as unread. All ranks call it before they meet."""
        if dist.get_rank() == 0:
            self._round += 1

    def due(self, name: str, start: int, count: int, speed: float, *, cached: bool) -> float:
        """The end of a read that begins now, in seconds of the monotonic clock."""
        with self._lock:  # excludes threads; the lock of the file excludes processes
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                if cached:
                    first = self._first[name]
                    blocks = self._read[first + start // BLOCK : first + -(-(start + count) // BLOCK)]
                    count = min(count, BLOCK * int((blocks != self._round).sum()))
                    blocks[:] = self._round
                now = time.monotonic()
                if count:
                    self._free[0] = max(self._free[0], now - BEHIND) + count / speed
                return float(self._free[0]) if count else now
            finally:
                fcntl.flock(self._handle, fcntl.LOCK_UN)


class Slow(LocalStorage):
    """Reads no faster than the speed that all ranks of the node share."""

    def __init__(self, root: Path, node: Node, speed: float, *, cached: bool) -> None:
        super().__init__(root)
        self._node = node
        self._speed = speed
        self._cached = cached

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        due = self._node.due(name, start, len(buffer), self._speed, cached=self._cached)
        super().read_into(name, start, buffer)
        if (early := due - time.monotonic()) > AHEAD:
            time.sleep(early)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True: the page cache has all bytes, so that only the speed delays a read."""
        return True


if __name__ == "__main__":
    main()

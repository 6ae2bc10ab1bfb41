"""Loading a GPT-shaped state into other layouts than it was saved from: rows to columns, and 4 ranks to 3.

These ways take turns, with a warm page cache:

- shardproof, which verifies every byte: every rank reads all that it needs; or each byte is read once and
  sent on; or the load chooses;
- torch DCP;
- a raw read of as many bytes as each rank needs.

Then follows the crossover between nodes (`crossover.py` has that within one node): the same load of rows into
columns, in both ways and by choice. There each rank has a limited storage speed of its own, as if it were on
a node of its own.

With `--cold` the page cache has none of the files when a load begins. The limit is then a raw read of all
files past the page cache.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cold import RawReads, evict, fill
from common import (
    LARGE_IN_PAGE,
    RawFile,
    folder,
    gpt_state,
    is_rank,
    launch,
    local_bytes,
    parser,
    report,
    rounds,
    tensors_of,
    total_bytes,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof as sp
from shardproof.engine.loading import LoadOptions, LoadReport, load_from
from shardproof.rendezvous import StoreRendezvous, connect
from shardproof.storage import LocalStorage

RANKS = 4
SPEEDS = (0.1, 0.2, 0.4, 0.8, 1.6, None)
"""GB/s of storage for each rank in the crossover; None for no limit."""
CROSSOVER_GIB = 0.25


def main() -> None:
    given = parser(__doc__, device=False)
    given.add_argument("--cold", action="store_true", help="with no file in the page cache")
    options = given.parse_args()
    if not is_rank():
        launch(options, RANKS)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    state = gpt_state(options.gib, mesh)
    nbytes = total_bytes(state)
    sp.save(folder() / "ours", state)
    dcp.save(state, checkpoint_id=folder() / "dcp")
    del state
    if not options.cold:
        fill(folder() / "ours")
    columns = gpt_state(options.gib, mesh, placement=1, filled=False)
    compare("rows to columns, 4 ranks", columns, nbytes, options, ranks=RANKS)
    del columns
    of_three = DeviceMesh("cpu", torch.arange(RANKS - 1))  # made by all ranks
    fewer = gpt_state(options.gib, of_three, filled=False) if rank < RANKS - 1 else {}
    compare("4 ranks to 3", fewer, nbytes, options, ranks=RANKS - 1)
    del fewer
    if not options.cold:
        crossover(mesh, options)
    dist.barrier()
    dist.destroy_process_group()


def compare(title: str, target: dict[str, Any], nbytes: int, options: Any, *, ranks: int) -> None:
    """Measures all ways of loading into a target that the first `ranks` ranks have."""
    rank = dist.get_rank()
    taking_part = rank < ranks
    group = dist.new_group(list(range(ranks)))
    store: Any = distributed_c10d._get_default_store()
    meeting = StoreRendezvous(store.clone(), rank, ranks, name=title) if taking_part else None
    raw = RawFile(folder() / f"raw-{rank}", max(local_bytes(target), 1))
    raw.write(direct=False)
    reports: dict[str, LoadReport] = {}

    def ours(read_once: Any) -> Callable[[int], None]:
        def load(number: int) -> None:
            if taking_part:
                reports[str(read_once)] = sp.load(
                    folder() / "ours", target, read_once=read_once, group=group, rendezvous=meeting
                )

        return load

    def dcp_load(number: int) -> None:
        if taking_part:
            dcp.load(target, checkpoint_id=folder() / "dcp", process_group=group)

    limits: dict[str, Callable[[int], Any]] = {
        "raw read of what is needed": lambda number: raw.read(tensors_of(target), LARGE_IN_PAGE),
        "the same, hashed": lambda number: raw.read_and_hash(tensors_of(target)),
    }
    if options.cold:
        files = RawReads(sorted((folder() / "ours" / "shards").iterdir()))
        limits = {
            f"raw, past the cache, {depth} x 4096 KiB": (
                lambda number, depth=depth: files.read(direct=True, depth=depth, request=4 << 20)
            )
            for depth in (2, 4)
        }
    measured = rounds(
        {
            **limits,
            "shardproof, read all": ours(False),
            "shardproof, read once": ours(True),
            "torch DCP": dcp_load,
        },
        options.repeats,
        prepare=(lambda name, number: evict(folder() / "ours", folder() / "dcp")) if options.cold else None,
    )
    raw.remove()
    notes: dict[str, Any] = {}
    needed = summed(next(iter(reports.values())).needed if reports else 0)
    for name, way in (("read all", "False"), ("read once", "True")):
        read, received = (
            summed(getattr(reports[way], field) if reports else 0) for field in ("bytes", "received")
        )
        notes[f"bytes read over bytes needed, {name}"] = round(read / needed, 3)
        notes[f"bytes handed on over bytes needed, {name}"] = round(received / needed, 3)
    report(
        f"load, {title}",
        measured,
        ours="shardproof, read once",
        nbytes=nbytes,
        to=options.json,
        notes=notes,
    )
    if meeting is not None:
        meeting.close()


def crossover(mesh: DeviceMesh, options: Any) -> None:
    """Measures both ways at storage speeds from slow to unlimited."""
    socket.gethostname = lambda: f"node-{dist.get_rank()}"
    state = gpt_state(CROSSOVER_GIB, mesh)
    sp.save(folder() / "small", state)
    columns = gpt_state(CROSSOVER_GIB, mesh, placement=1, filled=False)
    nbytes = total_bytes(state)
    for speed in SPEEDS:

        def load(read_once: Any, speed: float | None = speed) -> None:
            storage = Throttled(folder() / "small", speed)
            load_from(storage, columns, connect(), LoadOptions(read_once=read_once))

        measured = rounds(
            {
                "read all": lambda number: load(False),
                "read once": lambda number: load(True),
            },
            min(options.repeats, 3),
        )
        limit = "storage as fast as it is" if speed is None else f"storage of {speed} GB/s a rank"
        report(
            f"crossover, rows to columns, 4 nodes of one rank, {limit}",
            measured,
            ours="read once",
            nbytes=nbytes,
            to=options.json,
        )


class Throttled(LocalStorage):
    """Reads no faster than a speed in GB/s."""

    def __init__(self, root: Path, speed: float | None) -> None:
        super().__init__(root)
        self._speed = speed
        self._due = 0.0

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        begun = time.perf_counter()
        super().read_into(name, start, buffer)
        if self._speed is not None:
            self._due = max(self._due, begun) + len(buffer) / self._speed / 1e9
            time.sleep(max(0.0, self._due - time.perf_counter()))

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """The page cache has all, so that nothing but the throttle slows a read."""
        return True


def summed(value: int) -> int:
    """The sum over all ranks."""
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item())


if __name__ == "__main__":
    main()

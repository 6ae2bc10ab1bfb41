"""What a user compares first: save, load, load again; and what training pays for a save in the background.

The first table: a durable save of a GPT-shaped state, the load after it, and a second load, by shardproof and
by torch DCP. The limits are raw writes of as many bytes, past the page cache and through it with early
write-back, each with 1, 2 and 4 threads, and a raw read of a file in the page cache.

The second table: six steps of `--step` seconds, with a save that begins before the first. Each step computes,
waits until the save permits a change (the fence of shardproof), and changes a tensor. `cost` is the time of
the six steps less the time of six steps without a save. `held` is the time until the call returns. `restore`
is the time of the first load after the save, in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    Measured,
    folder,
    gpt_state,
    is_rank,
    launch,
    local_bytes,
    parser,
    remove,
    report,
    rounds,
    start,
    tensors_of,
    total_bytes,
)

import shardproof as sp
from shardproof.engine.storage.durable import WriteBack
from shardproof.storage import aligned_buffer

_STEPS = 6
_BLOCK = 8 << 20
_THREADS = (1, 2, 4)


class Raw:
    """One file of a rank, written and read without a format."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._starts = range(0, -(-nbytes // _BLOCK) * _BLOCK, _BLOCK)
        self._buffer = aligned_buffer(_BLOCK)

    def remove(self) -> None:
        """Removes the file of the round before."""
        self._path.unlink(missing_ok=True)

    def write(self, *, direct: bool, threads: int) -> None:
        """Writes and flushes a new file, with `threads` writes in flight."""
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o644)
        early = WriteBack(handle)

        def put(at: int) -> None:
            if os.pwrite(handle, self._buffer, at) != _BLOCK:
                raise OSError("a write was cut short")
            if not direct:
                early.wrote(at, _BLOCK)

        try:
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(put, self._starts):
                    pass
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, into: list[torch.Tensor]) -> None:
        """Reads the file into existing tensors."""
        handle, at = os.open(self._path, os.O_RDONLY), 0
        try:
            for tensor in into:
                at += os.preadv(handle, [memoryview(tensor.reshape(-1).view(torch.uint8).numpy())], at)
        finally:
            os.close(handle)


def save_and_loads(given: Any, state: dict[str, Any], target: dict[str, Any]) -> None:
    """The first table."""
    raw = Raw(folder() / f"raw-{dist.get_rank()}", local_bytes(state))
    ours, theirs = folder() / "ours", folder() / "dcp"
    writes: dict[str, Callable[[int], object]] = {
        f"raw write, {way}, {threads} threads": (
            lambda number, direct=direct, threads=threads: raw.write(direct=direct, threads=threads)
        )
        for way, direct in (("direct", True), ("early write-back", False))
        for threads in _THREADS
    }
    ways = writes | {
        "raw read, warm": lambda number: raw.read(tensors_of(target)),
        "shardproof, save": lambda number: sp.save(ours, state),
        "shardproof, first load": lambda number: sp.load(ours, target),
        "shardproof, second load": lambda number: sp.load(ours, target),
        "torch DCP, save": lambda number: dcp.save(state, checkpoint_id=theirs),
        "torch DCP, first load": lambda number: dcp.load(target, checkpoint_id=theirs),
        "torch DCP, second load": lambda number: dcp.load(target, checkpoint_id=theirs),
    }

    def prepare(name: str, number: int) -> None:
        if name in writes:
            raw.remove()
            remove(folder() / "none")
        elif name.endswith("save"):
            remove(ours if name.startswith("shardproof") else theirs)

    measured = rounds(ways, given.repeats, prepare=prepare)
    median = {name: one.median for name, one in measured.items()}
    best = min(median[name] for name in writes)
    report(
        f"save, load, load again, {given.ranks} ranks",
        measured,
        ours="shardproof, save",
        nbytes=total_bytes(state),
        to=given.json,
        notes={
            "save, of the best raw write's speed": round(best / median["shardproof, save"], 2),
            **{
                f"{load} load, times as fast as DCP": round(
                    median[f"torch DCP, {load} load"] / median[f"shardproof, {load} load"], 2
                )
                for load in ("first", "second")
            },
            **{
                f"{load} load, of a warm raw read's speed": round(
                    median["raw read, warm"] / median[f"shardproof, {load} load"], 2
                )
                for load in ("first", "second")
            },
        },
    )


class Training:
    """Steps of one length, which compute and change a tensor of the state."""

    def __init__(self, seconds: float, state: dict[str, Any]) -> None:
        self._matrix = torch.randn(384, 384)
        self._changed = tensors_of(state)[0]
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < 1:
            self._matrix @ self._matrix
            count += 1
        products = torch.tensor(int(count * seconds))
        dist.all_reduce(products, dist.ReduceOp.MIN)
        self._products = int(products.item())

    def steps(self, may_change: Callable[[], object]) -> list[float]:
        """Seconds of each of the six steps."""
        found = []
        for _ in range(_STEPS):
            begun = time.perf_counter()
            for _ in range(self._products):
                self._matrix @ self._matrix
            may_change()
            self._changed.add_(1)
            dist.barrier()
            found.append(time.perf_counter() - begun)
        return found


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors as parameters of a module, and as the state of its optimizer."""
    module = torch.nn.Module()
    for key, tensor in state["model"].items():
        module.register_parameter(key.replace(".", "_"), torch.nn.Parameter(tensor))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for parameter, slots in zip(module.parameters(), state["optimizer"].values(), strict=True):
        optimizer.state[parameter] = slots
    return {"model": module, "optimizer": optimizer}


def background(given: Any, state: dict[str, Any], target: dict[str, Any]) -> None:
    """The second table. shardproof saves a module and its optimizer, DCP a dict of the same tensors."""
    training = Training(given.step, state)
    group = dist.new_group(backend="gloo")
    figures: dict[str, Measured] = {}
    ours, our_target = trained(state), trained(target)

    def note(name: str, seconds: float) -> None:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        figures.setdefault(name, Measured(name)).seconds.append(slowest.item())

    def measure(name: str, place: Path, begin: Callable[[], Any], change: Callable[[], object]) -> None:
        remove(place)
        alone = sum(training.steps(lambda: None))
        begun = time.perf_counter()
        saving = begin()
        held = time.perf_counter() - begun
        steps = training.steps(change)
        whole = time.perf_counter() - begun
        saving.result()
        dist.barrier()
        begun = time.perf_counter()
        if name == "torch DCP":
            dcp.load(target, checkpoint_id=place)
        else:
            sp.Checkpointer(place).restore(our_target)
        restore = time.perf_counter() - begun
        for what, seconds in (
            ("held", held),
            ("cost", whole - alone),
            ("worst step", max(steps)),
            ("step alone", alone / _STEPS),
            ("restore", restore),
        ):
            note(f"{name}, {what}", seconds)

    caches: tuple[Literal["auto", "none"], ...] = ("auto", "none")
    savers = [(cache, sp.Checkpointer(folder() / f"run-{cache}", cache=cache)) for cache in caches]
    for number in range(-1, given.repeats):
        if number == 0:
            figures.clear()  # the first round is not measured
        for cache, saver in savers:
            measure(
                f"shardproof, cache={cache}",
                folder() / f"run-{cache}",
                lambda saver=saver, number=number: saver.save(number + 2, ours),
                saver.fence,
            )
        measure(
            "torch DCP",
            folder() / "dcp",
            lambda: dcp.async_save(state, checkpoint_id=folder() / "dcp", process_group=group),
            lambda: None,
        )
    report(
        f"training during a background save, {given.ranks} ranks, {_STEPS} steps of {given.step} s",
        figures,
        ours="shardproof, cache=auto, cost",
        nbytes=None,
        to=given.json,
        notes={
            "cost, share of DCP's": round(
                figures["shardproof, cache=auto, cost"].median / figures["torch DCP, cost"].median, 2
            )
        },
    )


def main() -> None:
    options = parser(__doc__, device=False)
    options.set_defaults(gib=1.13)
    options.add_argument("--step", type=float, default=0.4, help="seconds of a step (default 0.4)")
    options.add_argument("--only", choices=("loads", "training"), help="one of the two tables")
    given = options.parse_args()
    given.device = "cpu"
    if not is_rank():
        launch(given, given.ranks)
    mesh = start(given)
    state = gpt_state(given.gib, mesh)
    target = gpt_state(given.gib, mesh, filled=False)
    if given.only != "training":
        save_and_loads(given, state, target)
    if given.only != "loads":
        background(given, state, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

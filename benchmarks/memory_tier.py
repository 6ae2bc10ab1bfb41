"""A save and a restore of steps in memory (`MemoryStorage`), compared with those on disk.

    save: until the commit. On disk the step is then durable; in memory it lasts as long as its keeper
    blocked: until `save` returns, with the fence
    restore: from memory; from disk through the page cache; from disk with a cold page cache

One process also fills 1 GiB of anonymous memory in the two ways that a save could use: "copied, written"
through a write buffer, and "mapped" straight into a mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from cold import drop_all
from common import (
    GIB,
    Measured,
    folder,
    gpt_state,
    is_rank,
    launch,
    machine,
    parser,
    report,
    rounds,
    table,
    tensors_of,
    total_bytes,
)
from recording import STDOUT, record
from torch.distributed.device_mesh import init_device_mesh

import shardproof as sp
from shardproof._utils.memcpy import address
from shardproof.storage import MemoryStorage, aligned_buffer

_BUFFER = 8 << 20


def main() -> None:
    options = parser(__doc__, device=False).parse_args()
    if not is_rank():
        launch(options, options.ranks)
    dist.init_process_group("gloo")
    state = gpt_state(options.gib, init_device_mesh("cpu", (options.ranks,)))
    nbytes = total_bytes(state)
    memory = MemoryStorage(f"memory://{folder().name}", budget=3 * nbytes, idle_timeout=60)
    keep = sp.KeepLatest(1)
    in_memory, on_disk = sp.Checkpointer(memory, keep=keep), sp.Checkpointer(folder() / "run", keep=keep)
    blocked = {"memory": Measured("blocked, memory"), "disk": Measured("blocked, disk")}

    def save(name: str, checkpointer: sp.Checkpointer) -> Callable[[int], None]:
        def once(number: int) -> None:
            begun = time.perf_counter()
            pending = checkpointer.save(number + 1, state)
            if number >= 0:
                blocked[name].seconds.append(time.perf_counter() - begun)
            pending.result()

        return once

    def prepare(name: str, number: int) -> None:
        dist.barrier()
        os.sync()

    try:
        saves = rounds(
            {"memory": save("memory", in_memory), "disk": save("disk", on_disk)},
            options.repeats,
            prepare=prepare,
        )
        saves |= {item.name: item for item in blocked.values()}
        title = f"save, {options.ranks} ranks, memory and disk"
        report(title, saves, ours="memory", nbytes=nbytes, to=options.json)

        def restore(checkpointer: sp.Checkpointer) -> Callable[[int], None]:
            def once(number: int) -> None:
                assert checkpointer.restore(state) == options.repeats

            return once

        def forget(name: str, number: int) -> None:
            for tensor in tensors_of(state):
                tensor.fill_(-1)
            if dist.get_rank() == 0 and "device" in name:
                drop_all(folder() / "run")
            dist.barrier()

        ways = {"memory": in_memory, "disk, page cache": on_disk, "disk, from the device": on_disk}
        restores = rounds(
            {name: restore(checkpointer) for name, checkpointer in ways.items()},
            options.repeats,
            prepare=forget,
        )
        title = f"restore, {options.ranks} ranks, memory and disk"
        report(title, restores, ours="memory", nbytes=nbytes, to=options.json)
        dist.barrier()
        if dist.get_rank() == 0:
            report_fills(options.repeats, options.json)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            memory.drop()
        dist.destroy_process_group()


def report_fills(repeats: int, to: str | None) -> None:
    """Measures two ways to fill anonymous memory, in only this process."""
    source, buffer = torch.ones(GIB, dtype=torch.uint8), aligned_buffer(_BUFFER)

    def written(descriptor: int) -> None:
        for start in range(0, GIB, _BUFFER):
            ctypes.memmove(address(buffer), source.data_ptr() + start, _BUFFER)
            os.pwrite(descriptor, buffer, start)

    def mapped(descriptor: int) -> None:
        os.ftruncate(descriptor, GIB)
        with mmap.mmap(descriptor, GIB) as memory:
            ctypes.memmove(address(memoryview(memory)), source.data_ptr(), GIB)

    figures: list[tuple[str, str, list[float]]] = []
    for name, fill in (("copied, written", written), ("mapped", mapped)):
        seconds = []
        for _ in range(repeats):
            descriptor = os.memfd_create("bench", os.MFD_CLOEXEC)
            begun = time.perf_counter()
            fill(descriptor)
            seconds.append(time.perf_counter() - begun)
            os.close(descriptor)
        figures.append((name, "s", seconds))
    if to == STDOUT:
        return
    record(to, "1 GiB into anonymous memory", figures)
    print(f"\n### 1 GiB into anonymous memory\n\n{machine()}\n")
    table(("way", "median s"), [(name, f"{statistics.median(each):.3f}") for name, _, each in figures])


if __name__ == "__main__":
    main()

"""A save and a restore of steps in memory (`MemoryStorage`), compared with those on disk.

save: until the commit. On disk the step is then durable; in memory it lasts as long as the node
blocked: until `save` returns, with the fence
restore: from memory; from disk through the page cache; from disk with a cold page cache
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch.distributed as dist
from cold import drop_all, fill
from common import (
    Measured,
    folder,
    gpt_state,
    is_rank,
    launch,
    parser,
    report,
    rounds,
    tensors_of,
    total_bytes,
)
from torch.distributed.device_mesh import init_device_mesh

import shardproof as sp
from shardproof.storage import MemoryStorage


def main() -> None:
    options = parser(__doc__, device=False).parse_args()
    if not is_rank():
        launch(options, options.ranks)
    dist.init_process_group("gloo")
    state = gpt_state(options.gib, init_device_mesh("cpu", (options.ranks,)))
    nbytes = total_bytes(state)
    memory = MemoryStorage(f"memory://{folder().name}")
    keep = sp.KeepLatest(1)
    in_memory = sp.Checkpointer(memory, keep=keep)
    on_disk = sp.Checkpointer(folder() / "run", keep=keep, cache="none")
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
            elif dist.get_rank() == 0 and "cache" in name:
                fill(folder() / "run")
            dist.barrier()

        ways = {"memory": in_memory, "disk, page cache": on_disk, "disk, from the device": on_disk}
        restores = rounds(
            {name: restore(checkpointer) for name, checkpointer in ways.items()},
            options.repeats,
            prepare=forget,
        )
        title = f"restore, {options.ranks} ranks, memory and disk"
        report(title, restores, ours="memory", nbytes=nbytes, to=options.json)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            memory.drop()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Loading a GPT-shaped state into other layouts than it was saved from: rows to columns, and 4 ranks to 3.

shardproof (every byte verified) and torch DCP in turn, warm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import folder, gpt_state, is_rank, launch, parser, report, rounds, total_bytes
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof as sp
from shardproof.rendezvous import StoreRendezvous


def main() -> None:
    options = parser(__doc__).parse_args()
    ranks = 4
    if not is_rank():
        launch(options, ranks)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    state = gpt_state(options.gib, mesh)
    nbytes = total_bytes(state)
    sp.save(folder() / "ours", state)
    dcp.save(state, checkpoint_id=folder() / "dcp")
    columns = gpt_state(options.gib, mesh, placement=1, filled=False)
    fewer = DeviceMesh("cpu", torch.arange(ranks - 1))
    group = dist.new_group(list(range(ranks - 1)))
    on_fewer: dict[str, Any] = gpt_state(options.gib, fewer, filled=False) if rank < ranks - 1 else {}
    meeting = (
        StoreRendezvous(distributed_c10d._get_default_store(), rank, ranks - 1, name="fewer")
        if rank < ranks - 1
        else None
    )
    read: dict[str, int] = {}

    def ours(name: str, target: dict[str, Any], **options: Any) -> None:
        read[name] = sp.load(folder() / "ours", target, **options).bytes

    def with_fewer(load: Any) -> Any:
        return lambda number: load() if rank < ranks - 1 else None

    for title, ways in {
        "rows to columns, 4 ranks": {
            "shardproof": lambda number: ours("columns", columns),
            "torch DCP": lambda number: dcp.load(columns, checkpoint_id=folder() / "dcp"),
        },
        "4 ranks to 3": {
            "shardproof": with_fewer(lambda: ours("fewer", on_fewer, rendezvous=meeting)),
            "torch DCP": with_fewer(
                lambda: dcp.load(on_fewer, checkpoint_id=folder() / "dcp", process_group=group)
            ),
        },
    }.items():
        measured = rounds(ways, options.repeats)
        total = torch.tensor(read.get("columns" if "columns" in title else "fewer", 0), dtype=torch.int64)
        dist.all_reduce(total)
        report(
            f"load, {title}",
            measured,
            ours="shardproof",
            nbytes=nbytes,
            as_json=options.json,
            notes={"bytes read over bytes needed": round(total.item() / nbytes, 3)},
        )
    if meeting is not None:
        meeting.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

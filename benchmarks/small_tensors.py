"""Saving and loading 20,000 tensors of 4 KiB on each rank: the cost of a tensor, not of its bytes.

Saves are measured until they are durable: with a `Checkpointer`, which reuses the plan of its previous save,
and with `sp.save`, which makes a new plan, as DCP does. "Blocked" is the time until
`Checkpointer.save` returns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    folder,
    is_rank,
    launch,
    parser,
    remove,
    report,
    rounds,
    sharded,
    start,
    tensors_of,
    total_bytes,
)

import shardproof as sp


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tensors", type=int, default=20_000, help="tensors (default 20,000)")
    options.add_argument("--kib", type=int, default=4, help="KiB of a tensor on each rank (default 4)")
    options = options.parse_args()
    if not is_rank():
        launch(options, options.ranks)
    mesh = start(options)
    names = [f"layers.{number // 20}.part.{number % 20}" for number in range(options.tensors)]

    def build(filled: bool) -> dict[str, torch.Tensor]:
        return {name: sharded((256 * options.kib * options.ranks,), mesh, 0, filled) for name in names}

    state, target = build(True), build(False)
    checkpointer = sp.Checkpointer(folder() / "checkpointer")
    background = sp.Checkpointer(folder() / "background")
    folders = {
        "shardproof": "checkpointer",
        "shardproof, `sp.save`": "new_plan",
        "shardproof, blocked": "background",
        "torch DCP": "dcp",
    }

    def prepare(name: str, number: int) -> None:
        background.wait()
        remove(folder() / folders[name])

    saved = rounds(
        {
            "shardproof": lambda number: checkpointer.save(number + 1, state).result(),
            "shardproof, `sp.save`": lambda number: sp.save(folder() / "new_plan", state),
            "shardproof, blocked": lambda number: background.save(number + 1, state),
            "torch DCP": lambda number: dcp.save(state, checkpoint_id=folder() / "dcp"),
        },
        options.repeats,
        prepare=prepare,
    )
    title = f"{options.tensors} tensors of {options.kib} KiB a rank, {options.ranks} ranks"
    nbytes = total_bytes(state)
    report(f"save {title}", saved, ours="shardproof", nbytes=nbytes, to=options.json)
    step = checkpointer.steps()[-1]
    loaded = rounds(
        {
            "shardproof": lambda number: checkpointer.restore(target, step=step),
            "torch DCP": lambda number: dcp.load(target, checkpoint_id=folder() / "dcp"),
        },
        options.repeats,
    )
    for tensor in tensors_of(target):
        tensor.fill_(-1)
    checkpointer.restore(target)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(target), strict=True))
    report(f"load {title}", loaded, ours="shardproof", nbytes=nbytes, to=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

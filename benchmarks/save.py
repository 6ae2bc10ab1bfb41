"""Saving a GPT-shaped state (parameters and Adam moments, sharded by rows) until it is durable.

shardproof, torch DCP (with its defaults, so it flushes its files) and raw flushed writes of the same bytes
take turns.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    RawFile,
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
    total_bytes,
)

import shardproof as sp


def main() -> None:
    options = parser(__doc__).parse_args()
    if not is_rank():
        launch(options, options.ranks)
    state = gpt_state(options.gib, start(options))
    nbytes = total_bytes(state)
    checkpointer = sp.Checkpointer(folder() / "ours")
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", local_bytes(state))

    def prepare(name: str, number: int) -> None:
        raw.remove()
        remove(folder() / {"shardproof": "ours", "torch DCP": "dcp"}.get(name, "none"))

    measured = rounds(
        {
            "raw write, O_DIRECT, flushed": lambda number: raw.write(direct=True),
            "raw write, buffered, flushed": lambda number: raw.write(direct=False),
            "shardproof": lambda number: checkpointer.save(number + 1, state).result(),
            "torch DCP": lambda number: dcp.save(state, checkpoint_id=folder() / "dcp"),
        },
        options.repeats,
        prepare=prepare,
    )
    report(f"save, {options.ranks} ranks", measured, ours="shardproof", nbytes=nbytes, to=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

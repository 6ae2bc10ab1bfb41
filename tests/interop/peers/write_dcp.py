"""Writes a checkpoint of torch.distributed.checkpoint: FSDP2 and AdamW after two steps, on every rank given.

`write_dcp.py PATH [WIDTH]` saves the keys `model.*`, `optim.*` and `step`. WIDTH makes the model larger
than that of the golden checkpoints: 1024 gives 28 MiB. The result is the state that was saved, every
tensor whole.
"""

from __future__ import annotations

import sys

import torch.distributed.checkpoint as dcp
from peer_result import Result, join_ranks, leave_ranks
from tiny_model import fresh, gathered_state, train
from torch.distributed.checkpoint.state_dict import get_state_dict


def main() -> None:
    path = sys.argv[1]
    sizes = {}
    if len(sys.argv) > 2:
        width = int(sys.argv[2])
        sizes = {"vocabulary": width + 5, "width": width, "hidden": width + 1, "narrow": 2}
    join_ranks()
    model, optimizer = fresh(seed=0, **sizes)
    train(model, optimizer, steps=2, vocabulary=sizes.get("vocabulary", 11))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state, "step": 2}, checkpoint_id=path)
    result = Result()
    result.add_tree(gathered_state(model, optimizer))
    result.add_object("step", 2)
    leave_ranks(result)


if __name__ == "__main__":
    main()

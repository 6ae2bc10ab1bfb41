"""Reads a checkpoint of Megatron-FSDP: `read_fsdp_dtensor.py PATH [ZERO]`.

It resumes training on the ranks given, with ZeRO stage 3 or the one given: it loads into a sharded model,
whose DTensors are uneven, and into the state of its AdamW. The result is the state that both then have,
every tensor whole. The model is that of the golden checkpoint `mfsdp_z3_w3`.
"""

from __future__ import annotations

import sys
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_result import Result, flattened, join_ranks, leave_ranks, rank, world_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

cpu_stubs.install(current_device=0)

from megatron_fsdp import fully_shard  # noqa: E402


class Model(nn.Module):
    """Rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.a = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.b = nn.Linear(13, 5)
        self.c = nn.Linear(5, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(self.norm(self.a(self.emb(tokens))))))


def gathered(tree: Any) -> dict[str, Any]:
    """The leaves of every rank's state, each tensor put together from the boxes of the ranks.

    A rank without elements of a parameter has no optimizer state of it, so one collective has all keys.
    """
    own = {}
    for key, leaf in flattened(tree).items():
        if isinstance(leaf, DTensor):
            local = leaf._local_tensor  # `to_local` makes a view, which lacks the attribute below
            (chunk,) = local.__create_chunk_list__()  # Megatron-FSDP puts it there for DCP
            own[key] = (list(leaf.shape), list(chunk.offsets), local.detach().clone())
        else:
            own[key] = leaf
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, own)
    leaves: dict[str, Any] = {}
    for of_rank in everyone:
        for key, value in of_rank.items():
            if not isinstance(value, tuple) or not value or not isinstance(value[-1], torch.Tensor):
                leaves[key] = value
                continue
            shape, offsets, local = value
            if key not in leaves:
                leaves[key] = torch.full(shape, torch.nan, dtype=local.dtype)
            box = zip(offsets, local.shape, strict=True)
            leaves[key][tuple(slice(start, start + size) for start, size in box)] = local
    return leaves


def main() -> None:
    path = sys.argv[1]
    stage = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    join_ranks()
    torch.manual_seed(100)
    model = Model()
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_mesh=init_device_mesh("cpu", (world_size(), 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=stage,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # gloo has no product with a scale
    )
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    result = Result()
    result.add_tree(gathered({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    result.facts["rank_0_shapes"] = {
        key: list(value.to_local().shape)
        for key, value in model.state_dict().items()
        if isinstance(value, DTensor) and rank() == 0
    }
    leave_ranks(result)


if __name__ == "__main__":
    main()

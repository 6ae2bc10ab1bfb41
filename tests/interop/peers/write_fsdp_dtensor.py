"""Writes a checkpoint of Megatron-Core in the format `fsdp_dtensor`: `write_fsdp_dtensor.py PATH`.

Megatron-FSDP shards a model with SwiGLU layers, which takes a step. Megatron-Core splits the joined weights
in two, as its training loop does before each save. The result is the state before the split, every tensor
whole.
"""

from __future__ import annotations

import sys

import cpu_stubs
import torch
import torch.distributed.checkpoint as dcp
from peer_result import Result, join_ranks, leave_ranks, world_size
from read_fsdp_dtensor import gathered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

cpu_stubs.install(current_device=0)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard  # noqa: E402
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict  # noqa: E402


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(6, 16, bias=False)
        self.linear_fc2 = nn.Linear(8, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(hidden).chunk(2, -1)
        return self.linear_fc2(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return hidden


def main() -> None:
    join_ranks()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    model = Model()
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_mesh=init_device_mesh("cpu", (world_size(), 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=3,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # gloo has no product with a scale
    )
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    wrapper = nn.Module()  # as Megatron-Core's own, whose names begin with another "module."
    wrapper.module, wrapper.config = model, None
    names = [name for name, _ in wrapper.named_parameters()]
    slots = {f"module.{names[at]}": slots for at, slots in optimizer.state_dict()["state"].items()}
    state = {"model": model.state_dict(), "optimizer": {"state": slots}}
    whole = gathered(state)
    model_state, optimizer_state = handle_swiglu_in_state_dict(wrapper, state["model"], state["optimizer"])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=sys.argv[1])
    result = Result()
    result.add_tree(whole)
    leave_ranks(result)


if __name__ == "__main__":
    main()

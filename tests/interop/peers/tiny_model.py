"""A small model that is awkward to shard: uneven rows, an empty shard, tied weights, buffers, two groups.

Its keys and shapes are those of the golden checkpoint `dcp_fsdp2_adamw_w3`.
"""

from __future__ import annotations

from typing import Any

import torch
from peer_result import world_size
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["TinyModel", "fresh", "gathered_state", "train"]


class TinyModel(nn.Module):
    """An embedding, layers of 7 and of 2 rows, and a head that shares its weight with the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 6, hidden: int = 7, narrow: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.l1 = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.small = nn.Linear(hidden, narrow)
        self.out = nn.Linear(narrow, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.l1(self.emb(tokens))))
        return self.head(self.out(self.small(hidden)) * self.gain)


def fresh(seed: int, **sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with random weights, sharded by FSDP2 over all ranks, and its AdamW with two groups."""
    torch.manual_seed(seed)
    model = TinyModel(**sizes)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-4, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, vocabulary: int = 11) -> None:
    """Takes a few steps, so that every slot of the optimizer has values."""
    for step in range(steps):
        tokens = (torch.arange(12).reshape(2, 6) * (step + 3)) % vocabulary
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1


def gathered_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, model_key: str = "model", optimizer_key: str = "optim"
) -> dict[str, Any]:
    """The state of both, every tensor whole. All ranks call this."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return _whole({model_key: model_state, optimizer_key: optimizer_state})


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value

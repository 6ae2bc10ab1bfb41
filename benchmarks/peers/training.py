"""A training loop whose whole state is the subject: GPT blocks under tensor parallelism, with AdamW.

The weights are DTensors sharded by rows, so a rank computes its share of the features of each linear layer.
The exchange of these shares is left out: a rank repeats its own in place of the others'. So a step is only
computing and memory traffic, and only the save slows it. The number of tokens sets the length of a step. Its
minimum is the optimizer's pass over parameters, gradients and moments.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import settle_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from peers.subject import Subject
from peers.way import local

HEADS = 16


class Trainer:
    """Steps the subject's own module and optimizer.

    Args:
        subject: from `gpt`.
        mesh: of all ranks.
        tokens: in one micro batch.
        batches: micro batches of one step.
    """

    def __init__(self, subject: Subject, mesh: DeviceMesh, *, tokens: int = 16, batches: int = 1) -> None:
        assert subject.module is not None
        assert subject.optimizer is not None
        self.module, self.optimizer, self.mesh = subject.module, subject.optimizer, mesh
        self.tokens, self.batches = tokens, batches

    def gradients(self) -> None:
        """Forward and backward of all micro batches."""
        self.optimizer.zero_grad(set_to_none=False)
        blocks = self.module.get_submodule("h")
        width = blocks.get_submodule("0.ln_1").weight.shape[0]
        for _ in range(self.batches):
            hidden = torch.randn(self.tokens, width, device=self.mesh.device_type)
            for block in blocks.children():
                hidden = _block(block, hidden)
            (hidden.square().mean() / self.batches).backward()

    def step(self, before_change: object = None) -> float:
        """Runs one step on all ranks. Returns its seconds.

        Args:
            before_change: called without arguments before the optimizer changes a tensor; None for no call.
        """
        dist.barrier()
        begun = time.perf_counter()
        self.gradients()
        if callable(before_change):
            before_change()
        self.optimizer.step()
        settle_device()
        dist.barrier()
        return time.perf_counter() - begun


def _block(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    normed = _norm(block.get_submodule("ln_1"), hidden)
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(0, 1)
        for part in _linear(block.get_submodule("attn.c_attn"), normed).chunk(3, -1)
    )
    weights = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).softmax(-1)
    mixed = (weights @ value).transpose(0, 1).flatten(1)
    hidden = hidden + _linear(block.get_submodule("attn.c_proj"), mixed)
    normed = _norm(block.get_submodule("ln_2"), hidden)
    inner = F.gelu(_linear(block.get_submodule("mlp.c_fc"), normed))
    return hidden + _linear(block.get_submodule("mlp.c_proj"), inner)


def _linear(layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """This rank's features, repeated to the layer's width."""
    weight, bias = local(layer.weight), local(layer.bias)
    return F.linear(given, weight, bias).repeat(1, len(layer.bias) // len(bias))


def _norm(layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
    weight, bias = (local(part).repeat(len(part) // len(local(part))) for part in (layer.weight, layer.bias))
    return F.layer_norm(given, given.shape[-1:], weight, bias)

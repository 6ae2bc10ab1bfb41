"""Models whose parameters no number of ranks divides."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import nn

__all__ = ["GatedLayer", "GatedModel", "UnevenModel"]


class UnevenModel(nn.Module):
    """Rows that no number of ranks divides, tied and frozen parameters, a bias of one element, a buffer."""

    config = SimpleNamespace(num_moe_experts=None)

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.a = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.b = nn.Linear(13, 6)
        self.small = nn.Linear(6, 1)
        self.frozen = nn.Linear(6, 2)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.b(torch.tanh(self.norm(self.a(self.emb(tokens)))))
        return self.head(hidden) * self.small(hidden) + self.frozen(hidden).sum(-1, keepdim=True)


class GatedModel(nn.Module):
    """Layers with SwiGLU, fused as Megatron-Core fuses it and named as it names them, and with experts.

    Args:
        experts: the numbers of the experts of this rank.
        layers: number of layers.
        bias: whether the fused weights have a bias.
    """

    config = SimpleNamespace(num_moe_experts=None)

    def __init__(self, experts: Sequence[int] = (0, 1), *, layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.first_expert = experts[0] if experts else 0
        self.emb = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(GatedLayer(experts, bias) for _ in range(layers))
        self.small = nn.Linear(6, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) * self.small(hidden)


class GatedLayer(nn.Module):
    def __init__(self, experts: Sequence[int], bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = GatedMlp(6, 5, bias)
        self.mlp.experts = nn.Module()
        self.mlp.experts.local_experts = nn.ModuleList(GatedMlp(6, 4, bias) for _ in experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + sum(expert(normed) for expert in (self.mlp, *self.mlp.experts.local_experts))


class GatedMlp(nn.Module):
    config = SimpleNamespace(gated_linear_unit=True)

    def __init__(self, size: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(size, 2 * inner, bias=bias)
        self.linear_fc2 = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(hidden).chunk(2, dim=-1)
        return self.linear_fc2(nn.functional.silu(gate) * up)

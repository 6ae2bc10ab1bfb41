"""A model whose parameters no number of ranks divides."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["UnevenModel"]


class UnevenModel(nn.Module):
    """Rows that no number of ranks divides, tied and frozen parameters, a bias of one element, a buffer."""

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

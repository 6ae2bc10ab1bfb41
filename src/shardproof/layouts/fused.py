"""Weights that concatenate several weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from shardproof.layouts.module_tensors import declare_along
from shardproof.layouts.parts import Part, blocks_of

__all__ = ["fused", "swiglu"]


def fused(
    module: torch.nn.Module,
    name: str,
    sizes: Sequence[int | Part],
    *,
    rank: int = 0,
    ranks: int = 1,
    dim: int = 0,
    replicated: Collection[int] = (),
) -> None:
    """Declares that a tensor concatenates parts, each divided over the tensor parallel ranks.

    The model's tensor is the concatenation of the whole parts. A single part is a tensor that the ranks
    divide without fusion.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        sizes: size of each part in the whole model, or a `Part` if the ranks do not divide it evenly.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.
        dim: dimension along which the parts are concatenated.
        replicated: positions of the parts that every rank holds whole.

    Raises:
        ValueError: the ranks cannot divide the parts.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    A plain parameter holds its rank's share of each part:

    >>> from shardproof.state import collect
    >>> linear = torch.nn.Linear(2, 5, bias=False)  # rank 1 of 2: half of 6 rows, half of 2, a copy of 1
    >>> fused(linear, "weight", (6, 2, 1), rank=1, ranks=2, replicated=[2])
    >>> [(entry.shape, [piece.offsets for piece in entry.pieces]) for entry in collect(linear).tensors]
    [((9, 2), [(3, 0), (7, 0), (8, 0)])]
    """
    parts = [part if isinstance(part, Part) else Part(part) for part in sizes]
    for at in replicated:
        parts[at] = replace(parts[at], pieces=1, sizes=None)
    declare_along(module, name, dim, blocks_of(parts, ranks), sum(part.size for part in parts), rank)


def swiglu(
    module: torch.nn.Module, name: str, size: int, *, rank: int = 0, ranks: int = 1, dim: int = 0
) -> None:
    """Declares that a tensor is the gate and the up projection of a SwiGLU layer: [gate; up].

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        size: hidden size of the layer in the whole model, the number of rows of each projection.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.
        dim: dimension along which the two projections are concatenated.

    Raises:
        ValueError: the ranks do not divide the size.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    >>> swiglu(torch.nn.Linear(2, 4), "weight", 4, rank=1, ranks=2)
    """
    fused(module, name, (size, size), rank=rank, ranks=ranks, dim=dim)

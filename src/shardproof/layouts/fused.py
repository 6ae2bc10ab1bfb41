"""Weights that are several in one."""

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
    """Declares that a tensor is a concatenation of parts, each cut over the tensor parallel ranks.

    The model's tensor is the whole parts one after the other. One part alone is a tensor that is cut over
    ranks as it is.

    Args:
        module: that owns the tensor, or has below it the one that does.
        name: of the tensor, with dots.
        sizes: of the parts in the whole model; a `Part` where a part is not cut evenly over all ranks.
        rank: tensor parallel rank of this process.
        ranks: tensor parallel ranks.
        dim: dimension along which the parts are put together.
        replicated: positions of parts of which every rank holds the whole.

    Raises:
        ValueError: the ranks cannot share the parts.
        StructureError: there is no such tensor, it has other sizes, or its layout is declared already.

    A plain parameter holds the part of its rank:

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
        module: that owns the tensor, or has below it the one that does.
        name: of the tensor, with dots.
        size: hidden size of the layer in the whole model: rows of the gate, and as many of the up projection.
        rank: tensor parallel rank of this process.
        ranks: tensor parallel ranks.
        dim: dimension along which gate and up projection are put together.

    Raises:
        ValueError: the ranks do not divide the size.
        StructureError: there is no such tensor, it has other sizes, or its layout is declared already.

    >>> swiglu(torch.nn.Linear(2, 4), "weight", 4, rank=1, ranks=2)
    """
    fused(module, name, (size, size), rank=rank, ranks=ranks, dim=dim)

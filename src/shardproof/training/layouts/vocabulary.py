"""Vocabularies with padding, so that ranks can divide them."""

from __future__ import annotations

import torch

from shardproof.engine.state import is_dtensor
from shardproof.errors import StructureError
from shardproof.training.layouts.parts import Owned, check_rank


def vocabulary(
    module: torch.nn.Module, name: str, size: int, *, rank: int = 0, ranks: int = 1, dim: int = 0
) -> None:
    """Declares that a tensor has a row for each token, then rows of padding.

    A save does not store padding, and a load does not change it. So runs may pad differently, and a rank may
    have only padding.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        size: number of tokens in the vocabulary, without padding.
        rank: tensor parallel rank of this process. All ranks have the same number of rows.
        ranks: number of tensor parallel ranks.
        dim: dimension of the tokens.

    Raises:
        StructureError: there is no such tensor, or the ranks together have fewer rows than tokens.

    Rank 1 of 2 has rows 4 to 7 of a vocabulary of 7 tokens, and one row of padding:

    >>> from shardproof.state import collect
    >>> table = torch.nn.Embedding(4, 2)
    >>> vocabulary(table, "weight", 7, rank=1, ranks=2)
    >>> [(entry.shape, entry.pieces[0].view.shape) for entry in collect(table).tensors]
    [((7, 2), torch.Size([3, 2]))]
    """
    check_rank(rank, ranks)
    item = Owned(module, name)
    axis = item.axis(dim)
    rows = item.tensor.shape[axis]
    whole = is_dtensor(item.tensor) and rows >= size
    start, total = (0, rows) if whole else (rank * rows, ranks * rows)
    if total < size:
        raise StructureError(
            f"{item.where} has {rows} rows, which makes {total} on {ranks} tensor parallel ranks: too few "
            f"for {size} tokens"
        )
    item.declare_axis(axis, [(start, min(max(size - start, 0), rows))], size)

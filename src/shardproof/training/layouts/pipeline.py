"""Pipeline stages: the numbers of layers in the whole model, shared parameters, and padded vocabularies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardproof.engine.state import Layout, is_dtensor, rename, share
from shardproof.errors import StructureError
from shardproof.training.layouts.parts import Owned, check_rank


def layers(modules: Iterable[torch.nn.Module], first: int) -> None:
    """Gives the layers of a pipeline stage, or depths of multi-token prediction, their numbers in the model.

    Args:
        modules: the layers of this stage, in order, for example a `ModuleList`.
        first: number of the stage's first layer in the model.

    >>> from shardproof.state import collect
    >>> stage = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    >>> layers(stage, 6)
    >>> [entry.key for entry in collect(stage).tensors]
    ['6.weight', '7.weight']
    """
    if first < 0:
        raise ValueError(f"the number of the first layer must not be negative, found {first}")
    for number, module in enumerate(modules, first):
        rename(module, str(number))


def shared(module: torch.nn.Module, name: str, key: str) -> None:
    """Declares that a parameter is a copy of one with another key in the model.

    The last stage of a pipeline has a copy of the embedding for its output, or for multi-token prediction. A
    save stores the parameter once. A load fills all copies, on any rank.

    Args:
        module: the module that owns the parameter, or one above it.
        name: dotted name of the parameter in `module`.
        key: key of the parameter in the whole model, relative to the saved module: ``embedding.weight``.

    Raises:
        StructureError: there is no such parameter.

    >>> from shardproof.state import collect
    >>> stage = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 3, bias=False)})
    >>> shared(stage, "head.weight", "embedding.weight")
    >>> [entry.key for entry in collect(stage).tensors]
    ['embedding.weight']
    """
    item = Owned(module, name)
    if item.layout is None:
        item.declare(Layout.whole(item.tensor.shape))  # several tensors may have one key if they have layouts
    share(item.module, item.name, key)


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

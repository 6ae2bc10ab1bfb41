"""Layers of pipeline stages with their numbers in the whole model, and parameters that stages share."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardproof.engine.state import Layout, rename, share
from shardproof.training.layouts.parts import Owned


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

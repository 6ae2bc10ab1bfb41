"""Numbers of layers in the whole model, and parameters that pipeline stages hold copies of."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardproof.layouts.module_tensors import Owned
from shardproof.state import Layout, rename, share

__all__ = ["layers", "shared"]


def layers(modules: Iterable[torch.nn.Module], first: int) -> None:
    """Numbers the layers of a pipeline stage as the whole model does, or depths of multi-token prediction.

    Args:
        modules: the layers of this stage, in order, as a `ModuleList` or any other container has them.
        first: number of the first one in the model.

    >>> from shardproof.state import collect
    >>> stage = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    >>> layers(stage, 6)
    >>> [entry.key for entry in collect(stage).tensors]
    ['6.weight', '7.weight']
    """
    if first < 0:
        raise ValueError(f"the first layer has the number {first}")
    for number, module in enumerate(modules, first):
        rename(module, str(number))


def shared(module: torch.nn.Module, name: str, key: str) -> None:
    """Declares that a parameter is a copy of one that the model keeps under another key.

    The last stage of a pipeline has a copy of the embedding for its output, or for multi-token prediction.
    It is stored once, and loaded into all copies, wherever they are.

    Args:
        module: that owns the parameter, or has below it the one that does.
        name: of the parameter, with dots.
        key: in the module that is saved, as the model has it: ``embedding.weight``.

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
        item.declare(Layout.whole(item.tensor.shape))  # what has a layout may be kept together with others
    share(item.module, item.name, key)

"""Both ways over a state tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import StructureError
from shardproof.state.binder import Binder
from shardproof.state.collector import Collector
from shardproof.state.last_walk import LastWalk
from shardproof.state.records import Binding, Catalogue, Collected
from shardproof.state.visitor import Place
from shardproof.state.walk import handler_of

__all__ = ["bind", "collect"]


def collect(tree: Any, *, rank: int = 0, world_size: int = 1, last: LastWalk | None = None) -> Collected:
    """What this rank holds of a state tree. Communicates with nobody and changes nothing.

    The memory of tensors is looked at when the whole tree is walked: code that hands over one tensor object
    several times, with other memory each time, must hand over a tensor for each.

    Args:
        tree: nested dicts, lists and tuples of tensors, modules, optimizers, objects with state_dict and
            load_state_dict, or with state_tree, and plain values.
        rank: of this process; per-rank values are stored under it.
        world_size: number of ranks.
        last: what is known of the walk before, over this tree or another; changed.

    Raises:
        StructureError, PlainDataError: something cannot be kept; the text says where and what to do.

    >>> import torch
    >>> collected = collect({"w": torch.ones(2), "epoch": 3})
    >>> [entry.key for entry in collected.tensors], collected.objects
    (['w'], (ObjectEntry(key='epoch', value=3),))
    """
    out = Collector(handler_of, rank, world_size, last=last or LastWalk())
    with no_garbage_collection():
        _walk(out.visit, tree)
        return out.result()


def bind(
    tree: Any,
    catalogue: Catalogue,
    *,
    rank: int = 0,
    world_size: int = 1,
    selected: Callable[[str], bool] = lambda key: True,
    strict: bool = True,
) -> Binding:
    """How a state tree takes what a checkpoint holds. Touches nothing: see `Binding`.

    The memory of tensors is looked at when the whole tree is walked, as in `collect`.

    Args:
        tree: as for `collect`; the target.
        catalogue: what the checkpoint holds.
        rank: of this process.
        world_size: number of ranks that load.
        selected: whether the value under a key takes part.
        strict: whether options that differ between the parameters of one optimizer group are a mismatch;
            otherwise the group keeps its own.

    Raises:
        StructureError: the target holds something that cannot be loaded into.

    >>> tree = {"epoch": 0}
    >>> binding = bind(tree, Catalogue({}, {}, {"epoch": 3}, 1))
    >>> for act in binding.finish: act()
    >>> tree
    {'epoch': 3}
    """
    to = Binder(handler_of, rank, world_size, catalogue=catalogue, selected=selected, strict=strict)
    with no_garbage_collection():
        _walk(to.visit, tree)
        return to.result()


def _walk(visit: Callable[[Place, Any], None], tree: Any) -> None:
    if isinstance(tree, dict) and not tree:
        return  # inside a tree it would be a plain value; the tree itself has no key
    made = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if made is not torch.Tensor:
        raise StructureError(
            f"every new tensor is a {made.__module__}.{made.__qualname__} here, which has no bytes. Save and "
            "load outside of the mode that makes them, such as FakeTensorMode"
        )
    if not isinstance(tree, (dict, list, tuple, torch.nn.Module, torch.optim.Optimizer)):
        raise StructureError(
            f"a state tree is a dict (or a list, tuple, module or optimizer), not a {type(tree).__name__}: "
            'the value has no key. Hand over {"name": value}'
        )
    try:
        visit(Place("", "state"), tree)
    except RecursionError:
        raise StructureError("the state tree is nested too deeply, or contains itself") from None

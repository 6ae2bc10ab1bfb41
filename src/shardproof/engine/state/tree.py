"""Collects a state tree for a save, and binds a state tree for a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.engine.state.binder import Binder
from shardproof.engine.state.collector import Collector
from shardproof.engine.state.framework_modules import parallel_state_of, refuse_loose_parts
from shardproof.engine.state.last_walk import LastWalk
from shardproof.engine.state.optimizer.collect import OptimizerState
from shardproof.engine.state.records import Binding, Catalogue, Collected
from shardproof.engine.state.visitor import Place
from shardproof.engine.state.walk import handler_of
from shardproof.errors import StructureError


def collect(tree: Any, *, rank: int = 0, world_size: int = 1, last: LastWalk | None = None) -> Collected:
    """Collects this rank's part of a state tree. It does not communicate or change the tree.

    `collect` reads the addresses of tensors after it has walked the whole tree. An object that returns the
    same tensor several times, with different memory each time, must return separate tensors instead.

    Args:
        tree: nested dicts, lists and tuples of tensors, modules, optimizers, objects with state_dict and
            load_state_dict, or with state_tree, and plain values.
        rank: rank of this process, which is part of the keys of per-rank values.
        world_size: number of ranks.
        last: cache of the previous walk, over this tree or another. It is updated. None: the next walk finds
            nothing to reuse, and this one is faster.

    Returns:
        The tensors and objects of this rank, each sorted by key.

    Raises:
        StructureError, PlainDataError: a value cannot be stored. The message says where, and what to do.

    >>> import torch
    >>> collected = collect({"w": torch.ones(2), "epoch": 3})
    >>> [entry.key for entry in collected.tensors], collected.objects
    (['w'], (ObjectEntry(key='epoch', value=3),))
    """
    collector = Collector(handler_of, rank, world_size, parallel_state_of(world_size), last=last)
    with no_garbage_collection():
        _walk(collector.visit, tree)
        refuse_loose_parts(collector.loose, collector.parallel)
        return collector.result()


def bind(
    tree: Any,
    catalogue: Catalogue,
    *,
    rank: int = 0,
    world_size: int = 1,
    selected: Callable[[str], bool] = lambda key: True,
    strict: bool = True,
) -> Binding:
    """Binds a state tree to a checkpoint. It does not change the tree: see `Binding`.

    `bind` reads the addresses of tensors after it has walked the whole tree, as `collect` does.

    Args:
        tree: the target, as for `collect`.
        catalogue: the contents of the checkpoint.
        rank: rank of this process.
        world_size: number of ranks that load.
        selected: returns True for each key to load.
        strict: True if options that differ between the parameters of one optimizer group are a mismatch.
            Otherwise the group's options do not change.

    Returns:
        The destinations, and the calls that complete the load.

    Raises:
        StructureError: the target has a value that cannot be loaded.

    >>> tree = {"epoch": 0}
    >>> binding = bind(tree, Catalogue({}, {}, {"epoch": 3}, 1))
    >>> for act in binding.finish: act()
    >>> tree
    {'epoch': 3}
    """
    binder = Binder(
        handler_of,
        rank,
        world_size,
        parallel_state_of(world_size),
        binding=Binding(catalogue),
        selected=selected,
        strict=strict,
    )
    with no_garbage_collection():
        _walk(binder.visit, tree)
        refuse_loose_parts(
            {key: tensor for key, tensor in binder.loose.items() if selected(key)}, binder.parallel
        )
        return binder.result()


def _walk(visit: Callable[[Place, Any], None], tree: Any) -> None:
    if isinstance(tree, dict) and not tree:
        return  # an empty dict below the root is a plain value; the root has no key
    kind = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kind is not torch.Tensor:
        raise StructureError(
            f"the active torch mode creates tensors of {kind.__module__}.{kind.__qualname__}, which have "
            "no bytes. Save and load outside the mode, such as FakeTensorMode"
        )
    if not isinstance(tree, (dict, list, tuple, torch.nn.Module, torch.optim.Optimizer, OptimizerState)):
        raise StructureError(
            f"a state tree is a dict (or a list, tuple, module or optimizer), not a {type(tree).__name__}: "
            'the value has no key. Use {"name": value}'
        )
    try:
        visit(Place("", "state"), tree)
    except RecursionError:
        raise StructureError("the state tree is nested too deeply, or contains itself") from None

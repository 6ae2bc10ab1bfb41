"""The state of Megatron's DistributedOptimizer on each rank: flat ranges of main weights and moments.

Megatron's ``fully_reshardable`` gathers the state over the data parallel ranks before a save, with one
collective a tensor. It reads moments that exist only after the first step. In this module, each rank
describes its own ranges, and only existing ones. Keys are those of ``fully_reshardable``, so each of the two
loads the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

import shardproof as sp
from shardproof.frameworks.megatron_options import optimizers_in, options_for

__all__ = ["FlatRange", "box_of", "load_optimizer_state", "optimizer_state", "sharded"]

_PREFIX = "optimizer.state"
_SLOTS = ("exp_avg", "exp_avg_sq")
_INSTEAD = (
    "Save the result of the optimizer's sharded_state_dict of Megatron with `save`, and load it with `load`"
)


@dataclass
class FlatRange(ShardedBase):
    """A flat range of the local part of a tensor.

    Args:
        key: key of the tensor.
        data: 1-D, the elements of the range; live memory of the optimizer.
        shape: global shape.
        boxes: the boxes of the local part in the global tensor, in the row-major order of the local part.
        start: first element of the range in the local part.
    """

    key: str
    data: Any
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    start: int
    replica_id: Any = 0

    def validate_metadata_integrity(self) -> None:
        """Checks nothing: `pieces` does."""

    def without_data(self) -> FlatRange:
        """The same range without its memory."""
        return replace(self, data=None)

    def pieces(self) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """The range as boxes of the global tensor: views of the data and their offsets."""
        pieces: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        first = 0
        stop = self.start + self.data.numel()
        for offsets, sizes in self.boxes:
            end = first + torch.Size(sizes).numel()
            low, high = max(self.start, first), min(stop, end)
            if low < high:
                part = sp.FlatShard(
                    self.data[low - self.start : high - self.start], sizes, low - first, high - first
                ).sharded()
                pieces += [(view, tuple(map(int.__add__, offsets, inner))) for view, inner in part.pieces]
            first = end
        return pieces


def sharded(ranges: Sequence[FlatRange]) -> sp.LocalShards:
    """All ranges of one tensor on this rank."""
    pieces = [piece for item in ranges for piece in item.pieces()]
    return sp.LocalShards(ranges[0].shape, pieces, dtype=ranges[0].data.dtype)


def optimizer_state(
    optimizer: Any, model_sharded_state_dict: Mapping[str, Any], stored: Iterable[str] | None = None
) -> dict[Any, Any]:
    """The state of Megatron's DistributedOptimizer, to save or to load. Runs no collective.

    Args:
        optimizer: a DistributedOptimizer with a fused Adam, or a ChainedOptimizer of these, such as those of
            dense and expert weights.
        model_sharded_state_dict: the model's, made with its live parameters.
        stored: for a load, the keys of the checkpoint. Moments that it has are allocated here, and the load
            fills them in place. Moments that it lacks, because it was saved before the first step, are
            removed.

    Returns:
        Options of the parameter groups and the loss scale, as Megatron stores them, and under "param_state" a
        `FlatRange` for each range. For several optimizers, such a dict by the number of each. Keys of tensors
        do not depend on the number of optimizers, as with Megatron's ``chained_optim_avoid_prefix``. Pass the
        result to a load, and the result of the load to `load_optimizer_state`.

    Raises:
        StructureError: the optimizer is of another kind, is precision-aware, or has state other than
            ``exp_avg`` and ``exp_avg_sq``.
    """
    parts = {}
    model, _ = extract_sharded_tensors_and_factories(dict(model_sharded_state_dict))
    for item in nested_values(model):
        parts[id(item.data)] = item
    keys = None if stored is None else set(stored)
    found = [_state_of(inner, parts, keys) for inner in _optimizers(optimizer)]
    return dict(enumerate(found)) if len(found) > 1 else found[0]


def load_optimizer_state(optimizer: Any, state: Mapping[Any, Any]) -> None:
    """Sets the options of the parameter groups and the loss scale after a load, which filled the tensors.

    Args:
        optimizer: the optimizer that `optimizer_state` was called with.
        state: the result of the load.

    Raises:
        StructureError: the checkpoint has the options of another number of optimizers, and these options
            differ.
    """
    optimizers = _optimizers(optimizer)
    for inner, options in zip(optimizers, _options(state, optimizers), strict=True):
        moments = dict(inner.optimizer.state)
        inner.load_state_dict(options)
        inner.optimizer.state.clear()  # Megatron allocates missing moments as uninitialised memory
        inner.optimizer.state.update(moments)


def _state_of(inner: Any, parts: Mapping[int, Any], keys: set[str] | None) -> dict[str, Any]:
    """The state of one DistributedOptimizer; see `optimizer_state`.

    `parts` has the model's description of each parameter by the parameter's id, and `keys`, for a load, the
    keys of the checkpoint.
    """
    ranges: list[FlatRange] = []
    for parameter, main, start in _ranges(inner):
        item = parts[id(parameter)]
        shape, boxes = _boxes(item)
        is_main = not any(item.replica_id[:-1]) if isinstance(item.replica_id, tuple) else True
        for name, tensor in {"param": main, **_slots(inner.optimizer.state, main, item.key, keys)}.items():
            key = f"{_PREFIX}.{name}.{item.key}"
            ranges.append(FlatRange(key, tensor.detach(), shape, boxes, start, 0 if is_main else 1))
    state = {**inner.state_dict(), "param_state_sharding_type": "fully_reshardable"}
    return state | ({"param_state": dict(enumerate(ranges))} if ranges else {})


def _options(state: Mapping[Any, Any], optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """The options of each optimizer, from those of the optimizers that saved; see `options_for`."""
    targets = [{"optimizer": {"param_groups": inner.optimizer.param_groups}} for inner in optimizers]
    return [
        {key: value for key, value in options.items() if not str(key).startswith("param_state")}
        for options in options_for(optimizers_in(state), targets)
    ]


def _optimizers(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers. Checks that their state is main weights and the moments of `_SLOTS`."""
    found = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    if not found or not all(hasattr(one, "gbuf_ranges") for one in found):
        kinds = ", ".join(type(one).__name__ for one in found) or "none"
        raise sp.StructureError(f"expected DistributedOptimizers, found {kinds}. {_INSTEAD}")
    for one in found:
        _check_slots(one)
    return found


def _check_slots(optimizer: Any) -> None:
    """Refuses an optimizer with other state than main weights and the moments of `_SLOTS`.

    The first two checks give the same result on all ranks. A rank without elements has no slots.
    """
    base = optimizer.optimizer
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        raise sp.StructureError(
            "the DistributedOptimizer has use_precision_aware_optimizer=True: its main weights are in "
            f"the slot 'master_param', and its moments may be scaled. {_INSTEAD}"
        )
    if isinstance(base, torch.optim.Adam | torch.optim.AdamW) or hasattr(base, "sub_optimizers"):
        raise sp.StructureError(
            f"the DistributedOptimizer has a {type(base).__name__}, which counts steps in the slot 'step' of "
            f"each parameter; expected a fused Adam, which counts them in the parameter groups. {_INSTEAD}"
        )
    expected = set(getattr(optimizer, "optimizer_state_keys", _SLOTS))
    found = sorted(expected.symmetric_difference(_SLOTS) | set().union(*base.state.values()) - set(_SLOTS))
    if found:
        raise sp.StructureError(
            f"the {type(base).__name__} of the DistributedOptimizer differs in the slots {', '.join(found)} "
            f"from a fused Adam, which has {' and '.join(_SLOTS)}. {_INSTEAD}"
        )


def _ranges(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """Yields each parameter with a range on this rank, its main weight, and the range's first element."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][order]
                    yield parameter, main, ranges["param"].start


def _slots(state: Any, main: torch.Tensor, key: str, stored: Any) -> dict[str, torch.Tensor]:
    """The moments of a main weight: those that exist, or for a load those that the checkpoint has."""
    if stored is not None:
        wanted = [name for name in _SLOTS if f"{_PREFIX}.{name}.{key}" in stored]
        for name in _SLOTS:
            if name not in wanted:
                state[main].pop(name, None)
            elif name not in state[main]:
                state[main][name] = torch.zeros_like(main)
        if not state[main]:
            del state[main]
    return {name: state[main][name] for name in _SLOTS if name in state.get(main, {})}


def _boxes(item: Any) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The global shape, and the boxes of a local part in the order of the local part."""
    # A factory builds the parts of a fused weight along its first axis.
    tensors = [item] if isinstance(item, ShardedTensor) else list(nested_values({"built": item.build()}))
    return tuple(map(int, tensors[0].global_shape)), [box_of(one) for one in tensors]


def box_of(item: ShardedTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a ShardedTensor in the global tensor. Prepended axes have length 1."""
    return tuple(map(int, item.global_offset)), (*[1] * item.prepend_axis_num, *map(int, item.local_shape))

"""The state of Megatron's optimizers: flat ranges of the DistributedOptimizer on each rank, and options.

Megatron's ``fully_reshardable`` gathers the state over the data parallel ranks before a save, with one
collective a tensor. It reads moments that exist only after the first step. In this module, each rank
describes its own ranges, and only existing ones. Keys are those of ``fully_reshardable``, so each of the two
loads the other's checkpoints. The inner optimizer is a fused Adam, torch's Adam or AdamW, or Megatron's
HybridDeviceOptimizer of them: `shardproof.state` names the slots of each alike.

From expert parallel size 2 on, experts have an optimizer of their own. The tensors of both optimizers have
the keys of one, but the state dict has the options of each optimizer: at the top for one, below the number
of each for several.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

import shardproof as sp
from shardproof.engine.state import (
    EXECUTION_OPTIONS,
    MASTER,
    StoredSlot,
    by_name,
    has_names,
    is_hybrid_device,
    options_of,
    receiver,
    slots_of,
)

_PREFIX = "optimizer.state"
_SLOTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
"""The count of steps, one for all parameters: an option of the groups, as in Megatron's own state dict."""
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
        optimizer: a DistributedOptimizer, or a ChainedOptimizer of these, such as those of dense and expert
            weights. Its inner optimizer is a fused Adam, torch's Adam or AdamW, or a HybridDeviceOptimizer.
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
        StructureError: the optimizer is of another kind, has state other than ``exp_avg``, ``exp_avg_sq`` and
            counts of steps, or has parameters with different counts; or it is precision-aware, and its inner
            optimizer is no HybridDeviceOptimizer.
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
        StructureError: the checkpoint lacks a group of parameters that the optimizer has; or it has the
            options of another number of optimizers, and these options differ.
    """
    optimizers = _optimizers(optimizer)
    targets = [{"optimizer": {"param_groups": inner.optimizer.param_groups}} for inner in optimizers]
    for inner, options in zip(optimizers, _options_for(_optimizers_in(state), targets), strict=True):
        _load_options(inner, options["optimizer"]["param_groups"])
        if inner.grad_scaler and "grad_scaler" in options:
            inner.grad_scaler.load_state_dict(options["grad_scaler"])


def mend_distributed_optimizer() -> None:
    """Replaces two methods of Megatron's DistributedOptimizer by ones that call them and mend what they miss.

    - ``sharded_state_dict`` raises KeyError before the first step, on the ranks with a part of a weight, and
      the others wait for them in a gather. Here, it describes moments that do not exist yet as zeros. With a
      count of zero steps, they give the same first step as none. During a save, they exist in the optimizer
      until the call returns. For a load, they stay.
    - ``load_state_dict`` gives all parameters one tensor with the count of steps, which each of them
      increments, and leaves an old count in the groups of a HybridDeviceOptimizer, which each step copies to
      its sub-optimizers. Here, each parameter has its own count.
    """
    for name, mended in (("sharded_state_dict", _mended_description), ("load_state_dict", _mended_load)):
        own = getattr(DistributedOptimizer, name)
        if not hasattr(own, "mended_by_shardproof"):
            method = mended(own)
            method.mended_by_shardproof = True
            setattr(DistributedOptimizer, name, method)


def _mended_description(own: Any) -> Any:
    arguments = inspect.signature(own)

    @functools.wraps(own)
    def sharded_state_dict(self: Any, *args: Any, **options: Any) -> Any:
        base = self.optimizer
        if not _has_adam(self):
            return own(self, *args, **options)
        absent = {id(main) for _, main, tensors in _slots(base) if not set(_SLOTS) <= tensors.keys()}
        if absent:
            _allocate(base, lambda slot, main: True)
        try:
            return own(self, *args, **options)
        finally:
            if absent and not arguments.bind(self, *args, **options).arguments.get("is_loading"):
                _allocate(base, lambda slot, main: id(main) not in absent)

    return sharded_state_dict


def _mended_load(own: Any) -> Any:
    @functools.wraps(own)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        if not _has_adam(self):
            return own(self, state_dict)
        base = self.optimizer
        counts = [group[_STEP] for group in state_dict["optimizer"]["param_groups"] if _STEP in group]
        is_hybrid = is_hybrid_device(base)
        if (
            is_hybrid
            and base.param_update_in_fp32
            and any(main not in base.param_to_fp32_param for _, main, _ in _slots(base))
        ):
            raise sp.StructureError(
                "load_state_dict of Megatron's HybridDeviceOptimizer fails with KeyError for float32 "
                "weights, which have no masters. Load the checkpoint, also one of fully_reshardable, with "
                "`live_state` and `load_live_state` of shardproof.frameworks.megatron_core"
            )
        own(self, state_dict)
        if is_hybrid and state_dict.get("param_state_sharding_type") == "dp_reshardable":
            base._sync_hdo_state_to_sub_optimizers()  # as own does for its other sharding types
        if _counts_in_state(base) and counts:
            _separate_counts(base, int(counts[0]))
        return None

    return load_state_dict


def _separate_counts(optimizer: Any, count: int) -> None:
    """Gives each main weight a count of its own. Their other slots stay."""
    receive = receiver(optimizer)
    for group, main, tensors in _slots(optimizer):
        kept = {slot: StoredSlot(item.dtype, tuple(item.shape)) for slot, item in tensors.items()}
        kept.pop(_STEP, None)
        receive(main, group, kept).attach({}, frozenset(kept))
        receipt: Any = receive(main, group, {**kept, _STEP: StoredSlot(torch.float32, ())})
        receipt.tensors[_STEP].fill_(count)
        receipt.attach({}, frozenset(receipt.tensors))
        group.pop(_STEP, None)


def _has_adam(optimizer: Any) -> bool:
    """True if a DistributedOptimizer shards an Adam whose moments are stored as they are, without a scale."""
    base, config = optimizer.optimizer, optimizer.config
    if not getattr(optimizer, "gbuf_ranges", None):
        return False
    is_hybrid = is_hybrid_device(base)
    rule = (base.cpu_optimizer_cls or base.gpu_optimizer_cls) if is_hybrid else type(base)
    rule = rule.func if isinstance(rule, functools.partial) else rule
    is_plain = is_hybrid or not getattr(config, "use_precision_aware_optimizer", False)
    return is_plain and "Adam" in getattr(rule, "__name__", "")


def _state_of(inner: Any, parts: Mapping[int, Any], keys: set[str] | None) -> dict[str, Any]:
    """The state of one DistributedOptimizer; see `optimizer_state`.

    `parts` has the model's description of each parameter by the parameter's id, and `keys`, for a load, the
    keys of the checkpoint.
    """
    found = list(_ranges(inner))
    if keys is not None:
        names = {id(main): parts[id(parameter)].key for parameter, main, _ in found}
        _allocate(inner.optimizer, lambda slot, main: f"{_PREFIX}.{slot}.{names[id(main)]}" in keys)
    slots = {id(main): tensors for _, main, tensors in _slots(inner.optimizer)}
    ranges: list[FlatRange] = []
    for parameter, main, start in found:
        item = parts[id(parameter)]
        # A factory builds the parts of a fused weight along its first axis, in the order of the local part.
        built = [item] if isinstance(item, ShardedTensor) else list(nested_values({"built": item.build()}))
        shape, boxes = tuple(map(int, built[0].global_shape)), [box_of(one) for one in built]
        is_main = not any(item.replica_id[:-1]) if isinstance(item.replica_id, tuple) else True
        tensors = slots[id(main)]
        moments = {name: tensors[name] for name in _SLOTS if name in tensors}
        for name, tensor in {"param": tensors.get(MASTER, main), **moments}.items():
            key = f"{_PREFIX}.{name}.{item.key}"
            ranges.append(FlatRange(key, tensor.detach(), shape, boxes, start, 0 if is_main else 1))
    state: dict[str, Any] = {
        "optimizer": {"param_groups": _groups(inner.optimizer, slots.values())},
        "param_state_sharding_type": "fully_reshardable",
    }
    if inner.grad_scaler:
        state["grad_scaler"] = inner.grad_scaler.state_dict()
    return state | ({"param_state": dict(enumerate(ranges))} if ranges else {})


def _slots(optimizer: Any) -> Iterator[tuple[dict[str, Any], Any, Mapping[str, Any]]]:
    """Yields the group, the main weight and its slots, for each main weight of this rank."""
    slots = {id(item.parameter): item.tensors for item in slots_of(optimizer)}
    for group in optimizer.param_groups:
        for main in group["params"]:
            yield group, main, slots[id(main)]


def _groups(optimizer: Any, slots: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of the groups, with the count of steps, as in the state dict of a DistributedOptimizer."""
    groups = [options_of(group) for group in optimizer.param_groups]
    counts = {int(tensors[_STEP]) for tensors in slots if _STEP in tensors}
    if not counts:  # a fused Adam counts in its groups, but not in those without parameters on this rank
        counts = {int(group[_STEP]) for group in groups if _STEP in group}
    if len(counts) > 1:
        raise sp.StructureError(
            f"the parameters of the DistributedOptimizer have taken different numbers of steps: "
            f"{', '.join(map(str, sorted(counts)))}. Megatron-Core stores one number. {_INSTEAD}"
        )
    return [group | dict.fromkeys([_STEP] if counts else [], *counts) for group in groups]


def _allocate(optimizer: Any, is_wanted: Callable[[str, Any], bool]) -> None:
    """Allocates moments as zeros, with a count of zero steps, where they do not exist. Removes the others.

    Args:
        optimizer: the inner optimizer.
        is_wanted: whether a main weight has a moment. Arguments: the moment, the main weight.
    """
    receive = receiver(optimizer)
    for group, main, tensors in _slots(optimizer):
        dtype = tensors.get(MASTER, main).dtype
        stored = {slot: StoredSlot(dtype, tuple(main.shape)) for slot in _SLOTS if is_wanted(slot, main)}
        if stored and _counts_in_state(optimizer):
            stored[_STEP] = StoredSlot(torch.float32, ())
        receive(main, group, stored).attach({}, frozenset((*stored, MASTER)))


def _load_options(inner: Any, stored: list[dict[str, Any]]) -> None:
    """Sets the options and the counts of steps, and gives copies of the main weights their values.

    Classes, functions and the options of the offload are those of the target.
    """
    optimizer = inner.optimizer
    chosen = {id(group): _matching(group, stored) for group in optimizer.param_groups}
    receive = receiver(optimizer)
    for group, main, tensors in _slots(optimizer):
        present = {slot: StoredSlot(item.dtype, tuple(item.shape)) for slot, item in tensors.items()}
        receipt: Any = receive(main, group, present)
        if _STEP in present:
            receipt.tensors[_STEP].fill_(chosen[id(group)].get(_STEP, 0))
        receipt.attach({}, frozenset(receipt.tensors))
    for group in optimizer.param_groups:
        group.pop(_STEP, None)
        not_options = {_STEP, *EXECUTION_OPTIONS} if _counts_in_state(optimizer) else EXECUTION_OPTIONS
        for name, value in options_of(chosen[id(group)], not_options).items():
            if by_name(group.get(name)) is None and not has_names(value):
                group[name] = copy.deepcopy(value)


def _matching(group: Mapping[str, Any], stored: list[dict[str, Any]]) -> dict[str, Any]:
    """The stored group for a group of the optimizer: that with the same options that name a group."""

    def identity(one: Mapping[str, Any]) -> tuple[Any, ...]:
        # NeMo calls some of these options pre_<name>.
        return tuple(one.get(key, one.get(f"pre_{key}")) for key in param_group_identifier_keys)

    found = [one for one in stored if identity(one) == identity(group)]
    if not found:
        named = dict(zip(param_group_identifier_keys, identity(group), strict=True))
        raise sp.StructureError(
            f"the checkpoint has no group of parameters with the options {named}; it has "
            f"{[identity(one) for one in stored]}. Build the optimizer with the options of the saved run"
        )
    return found[-1]


def _counts_in_state(optimizer: Any) -> bool:
    """True if `step` is a slot of each parameter. A fused Adam has it in its groups."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or is_hybrid_device(optimizer)


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
    """Refuses an optimizer with other state than main weights, the moments of `_SLOTS` and counts of steps.

    The first check gives the same result on all ranks. A rank without elements has no slots.
    """
    base = optimizer.optimizer
    is_aware = getattr(optimizer.config, "use_precision_aware_optimizer", False)
    if is_aware and not is_hybrid_device(base):
        raise sp.StructureError(
            "the DistributedOptimizer has use_precision_aware_optimizer=True: its main weights are in "
            f"the slot 'master_param', and its moments may be scaled. {_INSTEAD}"
        )
    expected = set(getattr(optimizer, "optimizer_state_keys", _SLOTS))
    present = {slot for slots in slots_of(base) for slot in (*slots.tensors, *slots.values)}
    found = sorted(expected.symmetric_difference(_SLOTS) | present - {*_SLOTS, _STEP, MASTER})
    if found:
        raise sp.StructureError(
            f"the {type(base).__name__} of the DistributedOptimizer differs in the slots {', '.join(found)} "
            f"from Adam, which has {' and '.join(_SLOTS)}. {_INSTEAD}"
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


def box_of(item: ShardedTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a ShardedTensor in the global tensor. Prepended axes have length 1."""
    return tuple(map(int, item.global_offset)), (*[1] * item.prepend_axis_num, *map(int, item.local_shape))


def fit_options(state: dict[Any, Any], asked: Mapping[Any, Any]) -> None:
    """Gives each optimizer of a sharded state dict its options, in place.

    Args:
        state: the state of a checkpoint, before or after its tensors were added.
        asked: the sharded state dict to load.

    Raises:
        StructureError: the numbers of optimizers differ, and so do the options of the saved ones.
    """
    for key in state.keys() & asked.keys():
        stored, wanted = state[key], asked[key]
        if not (isinstance(stored, dict) and isinstance(wanted, Mapping)):
            continue
        saved, targets = _optimizers_in(stored), _optimizers_in(wanted)
        if not (saved and targets):
            fit_options(stored, wanted)
        elif len(saved) != len(targets):
            found = _options_for(saved, targets)
            own = {name: value for name, value in stored.items() if not isinstance(name, int)}
            if len(targets) == 1:
                state[key] = {**found[0], **own}
            else:
                numbers = sorted(name for name in wanted if isinstance(name, int))
                state[key] = {
                    number: {**options, **stored.get(number, {})}
                    for number, options in zip(numbers, found, strict=True)
                }


def _optimizers_in(state: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The states with options of groups, of one optimizer or several; none if it is another state."""
    if _has_groups(state):
        return [state]
    numbered = [state[number] for number in sorted(name for name in state if isinstance(name, int))]
    return numbered if all(map(_has_groups, numbered)) else []


def _options_for(
    saved: Sequence[Mapping[Any, Any]], targets: Sequence[Mapping[Any, Any]]
) -> list[dict[Any, Any]]:
    """The options of each target."""
    if len(saved) == len(targets):
        return [dict(options) for options in saved]
    own = ("params", "is_expert_parallel")  # they always differ between dense and expert weights
    groups = [
        [
            {key: value for key, value in group.items() if key not in own}
            for group in options["optimizer"]["param_groups"]
        ]
        for options in saved
    ]
    if any(group not in groups[0] for others in groups[1:] for group in others):
        raise sp.StructureError(
            f"the checkpoint has the options of {len(saved)} optimizers, which differ, and this run has "
            f"{len(targets)}. Load with as many expert parallel ranks as it was saved with"
        )
    found: list[dict[Any, Any]] = []
    for target in targets:
        is_expert = any(group.get("is_expert_parallel") for group in target["optimizer"]["param_groups"])
        options = {
            name: copy.deepcopy(value)
            for name, value in saved[0].items()
            if not isinstance(name, int) and name != "param_state"
        }
        for group in options["optimizer"]["param_groups"]:
            group["is_expert_parallel"] = is_expert
        found.append(options)
    return found


def _has_groups(state: Any) -> bool:
    inner = state.get("optimizer") if isinstance(state, Mapping) else None
    return isinstance(inner, Mapping) and "param_groups" in inner

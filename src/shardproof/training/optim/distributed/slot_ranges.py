"""A distributed optimizer's state as ranges of the parameters' local tensors, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.engine.state import MASTER, LocalRange, ParameterSlots, Receipt, StoredSlot, options_of
from shardproof.training.optim.distributed.flat_bucket import Weight
from shardproof.training.optim.distributed.inner_optimizer import Stepper
from shardproof.training.optim.schema import Spec


def describe(
    weights: Sequence[Weight], stepper: Stepper, groups: Sequence[Mapping[str, Any]]
) -> Iterator[ParameterSlots]:
    """Describe every parameter. Masters always exist, other slots from the first step on."""
    slots_by_weight = stepper.slots()
    options = [options_of(group) for group in groups]
    for weight in weights:
        slots = slots_by_weight[weight]
        tensors: dict[str, torch.Tensor | LocalRange] = {}
        if weight.mastered:
            tensors[MASTER] = LocalRange(weight.fragment, weight.start, weight.stop)
        tensors |= {slot: _ranged(item, weight) for slot, item in slots.tensors.items()}
        yield ParameterSlots(weight.parameter, slots.kind, options[weight.group], tensors, slots.values)


def receipt(
    weight: Weight, stepper: Stepper, schema: Mapping[str, Spec], stored: Mapping[str, StoredSlot]
) -> Receipt:
    """Prepare one parameter for a load of slots that any ranks saved."""
    wanted = {
        slot: _of_fragment(slot, like, weight, stepper, schema)
        for slot, like in stored.items()
        if slot != MASTER or MASTER in schema
    }
    inner = stepper.receive(weight, wanted)
    tensors = {slot: _ranged(item, weight) for slot, item in inner.tensors.items()}
    fresh = None
    if weight.mastered and MASTER not in schema:
        fresh = weight.fragment.clone()  # elements that are not stored (padding) do not change
        tensors[MASTER] = LocalRange(fresh, weight.start, weight.stop)

    def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
        inner.attach(values, filled & inner.tensors.keys())
        if fresh is not None:
            with torch.no_grad():
                weight.fragment.copy_(fresh if MASTER in filled else weight.owned)

    return Receipt(inner.kind, tensors, attach)


def _of_fragment(
    slot: str, like: StoredSlot, weight: Weight, stepper: Stepper, schema: Mapping[str, Spec]
) -> StoredSlot:
    """Convert a stored slot to the shape and dtype of the fragment's slot."""
    spec = schema.get(slot)
    if spec is None:  # another optimizer's slot
        spec = Spec("elements" if like.shape else "scalar", like.dtype)
    if spec.kind != "elements":
        return like
    return StoredSlot(stepper.dtype_of(slot, spec) or like.dtype, (weight.stop - weight.start,))


def _ranged(item: torch.Tensor | LocalRange, weight: Weight) -> torch.Tensor | LocalRange:
    """A fragment's slot as a range of the parameter's local tensor."""
    if isinstance(item, LocalRange):
        return LocalRange(item.buffer, weight.start + item.start, weight.start + item.stop)
    return LocalRange(item, weight.start, weight.stop) if item.dim() else item

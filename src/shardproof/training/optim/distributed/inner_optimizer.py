"""The inner optimizer, over this rank's fragments.

With `DirectStepper`, the inner optimizer steps the fragments themselves and stores its own state.
`LowPrecisionStepper` stores masters and slots in the dtypes that the caller chose. A step casts a bounded
number of elements at a time to fp32, and rounds them again. The optimizer is elementwise, so a fragment can
be stepped in chunks. Each chunk has its slice of the elementwise slots, and a copy of the scalar slots (step
counts).

Every parameter has a fragment on every rank, which is empty if the rank owns no elements. So the inner
optimizer has the same slots, step counts and options on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from shardproof.engine.state import (
    MASTER,
    LocalRange,
    ParameterSlots,
    Receipt,
    SlotProvider,
    StoredSlot,
    options_of,
    receiver,
    slots_of,
)
from shardproof.training.optim.distributed.flat_bucket import Weight
from shardproof.training.optim.schema import Factory, Spec, check_slots, slot_schema

GroupOptions = Sequence[Mapping[str, Any]]
Schemas = Mapping[tuple[int, torch.dtype], Mapping[str, Spec]]
"""Slot schemas by group and by the dtype of the parameters in the inner optimizer."""

_CHUNK = 1 << 22
"""Elements that are cast to fp32 at a time: 16 MiB of each slot."""


def make_stepper(
    factory: Factory,
    weights: Sequence[Weight],
    groups: Sequence[Mapping[str, Any]],
    master_dtype: torch.dtype | None,
    state_dtypes: Mapping[str, torch.dtype],
) -> tuple[Stepper, Schemas]:
    """Makes the inner optimizer of all fragments, and sets the `stepped_dtype` of each weight.

    Raises:
        ValueError: the optimizer is not elementwise; `state_dtypes` names a slot that it does not have; or
            the caller sets dtypes for an optimizer that describes its own slots.
    """
    options = [options_of(group) for group in groups]
    direct = not state_dtypes and (master_dtype is None or master_dtype.itemsize >= 4)
    for weight in weights:
        weight.stepped_dtype = weight.fragment.dtype if direct else torch.float32
    stepper: Stepper = (
        DirectStepper(factory, weights, options)
        if direct
        else LowPrecisionStepper(factory, weights, options, state_dtypes)
    )
    if not direct and isinstance(stepper.inner, SlotProvider):
        raise ValueError(
            f"{type(stepper.inner).__name__} describes its own slots: pass state_dtypes to it (with "
            "functools.partial). A narrow master_dtype requires an optimizer of torch"
        )
    device = weights[0].fragment.device
    schemas = {
        (row, dtype): slot_schema(factory.make, stepper.inner.param_groups[row], dtype, device)
        for row, dtype in {(weight.group, weight.stepped_dtype): None for weight in weights}
    }
    check_slots(state_dtypes, schemas.values())
    return stepper, schemas


class Stepper(Protocol):
    """Steps fragments and describes their slots. Fragments and their slots are 1-D."""

    inner: torch.optim.Optimizer

    def step(self, weights: Sequence[Weight], options: GroupOptions) -> None:
        """Steps the fragments of those parameters with their reduced gradients."""

    def slots(self) -> dict[Weight, ParameterSlots]:
        """The slots of each fragment."""

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """Prepares one fragment for a load of the stored slots."""

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """Dtype in which an elementwise slot with schema `spec` is stored."""


class DirectStepper:
    """The inner optimizer steps the fragments themselves."""

    def __init__(self, factory: Factory, weights: Sequence[Weight], options: GroupOptions) -> None:
        self._weights = weights
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in options]
        for weight in weights:
            groups[weight.group]["params"].append(weight.fragment)
        self.inner = factory(groups)

    def step(self, weights: Sequence[Weight], options: GroupOptions) -> None:
        """Steps with views of the reduced buckets where dtypes agree, else with casts."""
        _copy_options(options, self.inner)
        for bucket in {weight.bucket: None for weight in weights}:
            if bucket.scale != 1.0 and all(w.fragment.dtype == bucket.shard.dtype for w in bucket.weights):
                bucket.shard.mul_(bucket.scale)
                bucket.scale = 1.0
        for weight in weights:
            gradient = weight.owned_gradient
            if gradient.dtype != weight.fragment.dtype:
                gradient = gradient.to(weight.fragment.dtype)
                if weight.bucket.scale != 1.0:
                    gradient.mul_(weight.bucket.scale)
            weight.fragment.grad = gradient
        try:
            self.inner.step()
        finally:
            for weight in weights:
                weight.fragment.grad = None

    def slots(self) -> dict[Weight, ParameterSlots]:
        """The slots that the inner optimizer describes."""
        by_fragment = {id(slots.parameter): slots for slots in slots_of(self.inner)}
        return {weight: by_fragment[id(weight.fragment)] for weight in self._weights}

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """Asks the inner optimizer for the destination."""
        return receiver(self.inner)(weight.fragment, self.inner.param_groups[weight.group], stored)

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """The dtype that the inner optimizer creates."""
        return spec.dtype


@dataclass(slots=True)
class _Chunk:
    """The elements [start, stop) of a fragment, in fp32."""

    weight: Weight
    start: int
    stop: int
    values: torch.Tensor


@dataclass(slots=True)
class _Slots:
    """Slots of one fragment."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class LowPrecisionStepper:
    """Stores slots in chosen dtypes, and steps chunks in fp32 with the inner optimizer.

    Args:
        factory: factory of the inner optimizer.
        weights: parameters whose fragments are stepped.
        options: options of the groups.
        dtypes: stored dtypes by slot; fp32 for other slots.
    """

    def __init__(
        self,
        factory: Factory,
        weights: Sequence[Weight],
        options: GroupOptions,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._dtypes, self._kind = dict(dtypes), factory.kind
        self._slots: dict[Weight, _Slots] = {}
        device = weights[0].fragment.device
        self.inner = factory(
            [{**group, "params": [torch.zeros(0, dtype=torch.float32, device=device)]} for group in options]
        )
        self._weights = weights

    def step(self, weights: Sequence[Weight], options: GroupOptions) -> None:
        """One inner step for each chunk, with the chunk's slice of the state."""
        _copy_options(options, self.inner)
        before = {weight: self._slots.get(weight) for weight in weights}
        after: dict[Weight, _Slots] = {weight: _Slots() for weight in weights}
        for chunks in _chunks(weights):
            self.inner.state.clear()
            for group in self.inner.param_groups:
                group["params"] = []
            for chunk in chunks:
                stored = before[chunk.weight]
                if stored is not None:
                    part = slice(chunk.start, chunk.stop)
                    self.inner.state[chunk.values] = dict(stored.values) | {
                        # Scalars are copies, because each chunk's step increments them.
                        slot: item[part].to(torch.float32) if item.dim() else item.clone()
                        for slot, item in stored.tensors.items()
                    }
                self.inner.param_groups[chunk.weight.group]["params"].append(chunk.values)
            self.inner.step()
            for chunk in chunks:
                destination = chunk.weight.fragment[chunk.start : chunk.stop]
                if destination.data_ptr() != chunk.values.data_ptr():
                    destination.copy_(chunk.values)
                self._round(self.inner.state[chunk.values], chunk, before[chunk.weight], after[chunk.weight])
        self.inner.state.clear()
        self._slots.update(after)

    def _round(self, state: Mapping[str, Any], chunk: _Chunk, before: _Slots | None, after: _Slots) -> None:
        """Round a chunk's slots into the slots of its fragment."""
        fragment = chunk.weight.fragment
        for slot, item in state.items():
            if not isinstance(item, torch.Tensor):
                after.values[slot] = item
            elif item.dim() == 0:
                after.tensors[slot] = item
            else:
                if slot not in after.tensors:
                    present = before.tensors.get(slot) if before is not None else None
                    dtype = self._dtypes.get(slot, torch.float32)
                    after.tensors[slot] = (
                        torch.zeros_like(fragment, dtype=dtype) if present is None else present
                    )
                destination = after.tensors[slot][chunk.start : chunk.stop]
                if destination.data_ptr() != item.data_ptr():
                    destination.copy_(item)

    def slots(self) -> dict[Weight, ParameterSlots]:
        """The stored slots of each fragment."""
        described = {}
        for weight in self._weights:
            stored = self._slots.get(weight) or _Slots()
            described[weight] = ParameterSlots(
                weight.fragment, self._kind, {}, dict(stored.tensors), dict(stored.values)
            )
        return described

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """Allocates new memory for each slot."""
        group, device = self.inner.param_groups[weight.group], weight.fragment.device
        of_scalars = device if group.get("capturable") or group.get("fused") else "cpu"
        tensors = {
            slot: torch.zeros(like.shape, dtype=like.dtype, device=device if like.shape else of_scalars)
            for slot, like in stored.items()
        }
        return Receipt(self._kind, tensors, partial(self._attach, weight, tensors))

    def _attach(
        self,
        weight: Weight,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        filled: frozenset[str],
    ) -> None:
        taken = {slot: item for slot, item in tensors.items() if slot in filled}
        if taken or values:
            self._slots[weight] = _Slots(taken, dict(values))
        else:
            self._slots.pop(weight, None)

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """The chosen dtype, or fp32."""
        return self._dtypes.get(slot, torch.float32)


def _chunks(weights: Sequence[Weight]) -> Iterator[list[_Chunk]]:
    """Lists of chunks, each list with at most `_CHUNK` elements."""
    chunks: list[_Chunk] = []
    filled = 0
    for weight in weights:
        size, start = weight.fragment.numel(), 0
        while True:
            stop = min(size, start + _CHUNK - filled)
            chunks.append(_fp32_chunk(weight, start, stop))
            filled += stop - start
            start = stop
            if filled == _CHUNK:
                yield chunks
                chunks, filled = [], 0
            if start == size:
                break
    if chunks:
        yield chunks


def _fp32_chunk(weight: Weight, start: int, stop: int) -> _Chunk:
    values = weight.fragment[start:stop].to(torch.float32)
    gradient = weight.owned_gradient[start:stop].to(torch.float32)
    if weight.bucket.scale != 1.0:
        gradient = gradient * weight.bucket.scale
    values.grad = gradient
    return _Chunk(weight, start, stop, values)


def _copy_options(options: GroupOptions, inner: torch.optim.Optimizer) -> None:
    """Copies the options of the outer groups, which schedulers change, to the inner groups."""
    for mine, theirs in zip(options, inner.param_groups, strict=True):
        theirs.update(options_of(mine))


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

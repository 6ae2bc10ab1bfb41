"""Masters and slots in chosen dtypes, which a step casts to fp32 and rounds again.

A bounded number of elements is cast at a time. The optimizer is elementwise, so a fragment can be stepped in
chunks. Each chunk has its slice of the elementwise slots, and a copy of the scalar slots (step counts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardproof.optim.distributed.flat_bucket import Weight
from shardproof.optim.distributed.stepping import GroupOptions, copy_options
from shardproof.optim.schema import Factory, Spec
from shardproof.state import ParameterSlots, Receipt, StoredSlot

__all__ = ["LowPrecisionStepper"]

_CHUNK = 1 << 22
"""Elements that are cast to fp32 at a time: 16 MiB of each slot."""


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
        copy_options(options, self.inner)
        before = {weight: self._slots.get(weight) for weight in weights}
        after: dict[Weight, _Slots] = {weight: _Slots() for weight in weights}
        for chunks in _chunks(weights):
            self.inner.state.clear()
            for group in self.inner.param_groups:
                group["params"] = []
            for chunk in chunks:
                stored = before[chunk.weight]
                if stored is not None:
                    self.inner.state[chunk.values] = _fp32_state(stored, chunk)
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
        return self._dtypes.get(slot, torch.float32) if spec.kind == "elements" else spec.dtype


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


def _fp32_state(stored: _Slots, chunk: _Chunk) -> dict[str, Any]:
    """A chunk's slice of the slots in fp32. Scalars are copies, because each chunk's step increments them."""
    state = dict(stored.values)
    for slot, item in stored.tensors.items():
        state[slot] = item[chunk.start : chunk.stop].to(torch.float32) if item.dim() else item.clone()
    return state

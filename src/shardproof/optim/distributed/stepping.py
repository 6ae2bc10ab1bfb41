"""The inner optimizer, over this rank's fragments.

With `DirectStepper` the inner optimizer steps the fragments themselves and keeps its own state.
`LowPrecisionStepper` (in `low_precision`) keeps masters and slots in the dtypes that the caller chose.

Every parameter has a fragment on every rank; it is empty where the rank owns no elements. So the inner
optimizer has the same slots, step counts and options on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from shardproof.optim.distributed.flat_bucket import Weight
from shardproof.optim.schema import Factory, Spec
from shardproof.state import ParameterSlots, Receipt, StoredSlot, options_of, receiver, slots_of

__all__ = ["DirectStepper", "GroupOptions", "Stepper", "copy_options"]

GroupOptions = Sequence[Mapping[str, Any]]


class Stepper(Protocol):
    """Steps fragments, and knows what is kept of them. Slots are those of fragments, which are 1-D."""

    inner: torch.optim.Optimizer

    def step(self, weights: Sequence[Weight], options: GroupOptions) -> None:
        """Step the fragments of those parameters from their reduced gradients."""

    def slots(self) -> dict[Weight, ParameterSlots]:
        """What is kept of each fragment."""

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """How one fragment takes what is stored."""

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """What a slot of elements is kept in, where its schema is `spec`."""


class DirectStepper:
    """The inner optimizer steps the fragments themselves."""

    def __init__(self, factory: Factory, weights: Sequence[Weight], options: GroupOptions) -> None:
        self._weights = weights
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in options]
        for weight in weights:
            groups[weight.group]["params"].append(weight.fragment)
        self.inner = factory(groups)

    def step(self, weights: Sequence[Weight], options: GroupOptions) -> None:
        """A gradient is handed over as it lies in the reduced bucket where dtypes agree, else as a copy."""
        copy_options(options, self.inner)
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
        """As the inner optimizer says it."""
        by_fragment = {id(slots.parameter): slots for slots in slots_of(self.inner)}
        return {weight: by_fragment[id(weight.fragment)] for weight in self._weights}

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """As the inner optimizer takes it."""
        return receiver(self.inner)(weight.fragment, self.inner.param_groups[weight.group], stored)

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """What the inner optimizer makes."""
        return spec.dtype


def copy_options(options: GroupOptions, inner: torch.optim.Optimizer) -> None:
    """The program changes the outer groups (schedulers do); the inner ones follow."""
    for mine, theirs in zip(options, inner.param_groups, strict=True):
        theirs.update(options_of(mine))

"""The inner optimizer, over this rank's fragments.

With `DirectStepper`, the inner optimizer steps the fragments themselves and stores its own state.
`LowPrecisionStepper` (in `low_precision`) stores masters and slots in the dtypes that the caller chose.

Every parameter has a fragment on every rank, which is empty if the rank owns no elements. So the inner
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
        """The slots that the inner optimizer describes."""
        by_fragment = {id(slots.parameter): slots for slots in slots_of(self.inner)}
        return {weight: by_fragment[id(weight.fragment)] for weight in self._weights}

    def receive(self, weight: Weight, stored: Mapping[str, StoredSlot]) -> Receipt:
        """Asks the inner optimizer for the destination."""
        return receiver(self.inner)(weight.fragment, self.inner.param_groups[weight.group], stored)

    def dtype_of(self, slot: str, spec: Spec) -> torch.dtype | None:
        """The dtype that the inner optimizer creates."""
        return spec.dtype


def copy_options(options: GroupOptions, inner: torch.optim.Optimizer) -> None:
    """Copies the options of the outer groups, which schedulers change, to the inner groups."""
    for mine, theirs in zip(options, inner.param_groups, strict=True):
        theirs.update(options_of(mine))

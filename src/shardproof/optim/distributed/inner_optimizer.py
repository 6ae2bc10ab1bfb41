"""What the inner optimizer steps: parameters where they lie, or masters, which follow what others write.

How the inner optimizer is made, and what it is known to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardproof.optim.distributed.flat_buckets import FlatBucket, Weight
from shardproof.optim.distributed.low_precision import LowPrecisionStepper
from shardproof.optim.distributed.stepping import DirectStepper, Stepper
from shardproof.optim.parameter_values import refreshed
from shardproof.optim.schema import Factory, Spec, check_slots, slot_schema
from shardproof.state import SlotKeeper, declare_storage_owner, options_of

__all__ = ["Masters", "Schemas", "make_stepper"]


class Masters:
    """Gives every weight its fragment.

    Args:
        buckets: their parameters have their values.
        dtype: of the masters of parameters that are narrower than fp32; None for no masters.
    """

    def __init__(self, buckets: Sequence[FlatBucket], dtype: torch.dtype | None) -> None:
        self._weights = [weight for bucket in buckets for weight in bucket.weights]
        self._of: dict[FlatBucket, torch.Tensor] = {}
        for bucket in buckets:
            narrow = bucket.parameters.dtype
            mastered = dtype is not None and narrow.itemsize < 4 and narrow != dtype
            if mastered:
                self._of[bucket] = bucket.owned.to(dtype)
            for weight in bucket.weights:
                weight.mastered = mastered
                if mastered:
                    at = weight.offset + weight.start - bucket.first if weight.start < weight.stop else 0
                    weight.fragment = self._of[bucket][at : at + weight.stop - weight.start]
                else:
                    weight.fragment = weight.owned
                declare_storage_owner(weight.fragment, self._of[bucket] if mastered else bucket.parameters)

    def follow_parameters(self) -> None:
        """Take what others wrote to parameters, in the elements where masters do not round to them.

        A fragment without a master is the parameter's own memory; an inner optimizer that keeps copies of it
        is told, since a parameter and its bucket count their versions apart.
        """
        for weight in self._weights:
            if weight.current_version() == weight.version:
                continue
            if not weight.mastered:
                torch.autograd.graph.increment_version(weight.fragment)
            else:
                weight.fragment.copy_(refreshed(weight.fragment, weight.owned))
            weight.version = weight.current_version()

    def round_to_parameters(self, changed: Iterable[FlatBucket]) -> None:
        """This rank's range of those buckets becomes its masters, rounded."""
        for bucket in changed:
            if bucket in self._of:
                bucket.owned.copy_(self._of[bucket])

    def note_versions(self) -> None:
        """What has been written to parameters up to now is known here."""
        for weight in self._weights:
            weight.version = weight.current_version()


Schemas = Mapping[tuple[int, torch.dtype], Mapping[str, Spec]]


"""By group and the dtype in which the inner optimizer sees its parameters."""


def make_stepper(
    factory: Factory,
    weights: Sequence[Weight],
    groups: Sequence[Mapping[str, Any]],
    master_dtype: torch.dtype | None,
    state_dtypes: Mapping[str, torch.dtype],
) -> tuple[Stepper, Schemas]:
    """The inner optimizer over the fragments of all weights, which it gives their `stepped_dtype`.

    Raises:
        ValueError: the optimizer is not elementwise, `state_dtypes` names no slot of it, or dtypes are asked
            for of an optimizer that keeps its state in its own way.
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
    if not direct and isinstance(stepper.inner, SlotKeeper):
        raise ValueError(
            f"{type(stepper.inner).__name__} keeps its state itself: give state_dtypes to it (with "
            "functools.partial). A narrow master_dtype goes with optimizers of torch's"
        )
    schemas = {
        (row, dtype): slot_schema(factory.make, stepper.inner.param_groups[row], dtype)
        for row, dtype in {(weight.group, weight.stepped_dtype): None for weight in weights}
    }
    check_slots(state_dtypes, schemas.values())
    return stepper, schemas

"""Makes the inner optimizer and the schemas of its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardproof.optim.distributed.flat_bucket import Weight
from shardproof.optim.distributed.low_precision import LowPrecisionStepper
from shardproof.optim.distributed.stepping import DirectStepper, Stepper
from shardproof.optim.schema import Factory, Spec, check_slots, slot_schema
from shardproof.state import SlotProvider, options_of

__all__ = ["Schemas", "make_stepper"]

Schemas = Mapping[tuple[int, torch.dtype], Mapping[str, Spec]]
"""Slot schemas by group and by the dtype of the parameters in the inner optimizer."""


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
    schemas = {
        (row, dtype): slot_schema(factory.make, stepper.inner.param_groups[row], dtype)
        for row, dtype in {(weight.group, weight.stepped_dtype): None for weight in weights}
    }
    check_slots(state_dtypes, schemas.values())
    return stepper, schemas

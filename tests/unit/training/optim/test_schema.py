"""`slot_schema`: the slots that an optimizer makes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.optim import Factory, HybridDeviceOptimizer, Spec, slot_schema

ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor(0.1)}),
    (torch.optim.NAdam, {"capturable": True}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (partial(torch.optim.SGD, momentum=0.3), {"lr": 0.1}),
]


@pytest.mark.parametrize(("make", "options"), ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_schema_equals_the_slots_that_the_optimizer_makes(
    make: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    schema = slot_schema(make, options, dtype)
    weight = torch.ones(3, 4, dtype=dtype)
    weight.grad = torch.ones_like(weight)
    optimizer = make([weight], **{**options, "capturable": False} if "capturable" in options else options)
    optimizer.step()
    made = {
        slot: Spec("elements" if item.shape == weight.shape else "scalar", item.dtype)
        for slot, item in optimizer.state[weight].items()
    }
    assert schema == made != {}


@pytest.mark.parametrize("rate", [1e-2, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_that_depends_on_other_elements_is_refused(rate: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="Adafactor is not elementwise"):
        slot_schema(torch.optim.Adafactor, {"lr": rate}, dtype)


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "SparseAdam"])
def test_an_optimizer_that_cannot_step_a_flat_tensor_is_refused(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)
    with pytest.raises(ValueError, match=f"{kind} is not elementwise"):
        slot_schema(optimizer, {}, torch.float32)


class Noisy(torch.optim.SGD):
    """Draws from every generator."""

    def step(self, closure: Any = None) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().step(closure)


def test_random_generators_are_restored() -> None:
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    slot_schema(Noisy, {}, torch.float32)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_options_that_are_tensors_are_not_changed() -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    slot_schema(torch.optim.AdamW, {"lr": rate, "betas": (0.9, 0.99)}, torch.float32)
    assert rate.grad is None
    assert float(rate.detach()) == pytest.approx(0.1)


def test_a_group_of_the_optimizer_serves_as_options() -> None:
    group = torch.optim.AdamW([torch.zeros(2)], amsgrad=True).param_groups[0]
    assert "max_exp_avg_sq" in slot_schema(torch.optim.AdamW, group, torch.float32)


def test_a_slot_provider_describes_its_own_slots() -> None:
    make = partial(HybridDeviceOptimizer, optimizer_class=torch.optim.SGD, cpu_fraction=1.0)
    assert slot_schema(make, {"momentum": 0.9}, torch.float32) == {
        "momentum_buffer": Spec("elements", torch.float32)
    }
    assert Factory(make, {"lr": 0.5}).kind == "SGD"
    assert Factory(make, {"lr": 0.5}).defaults["lr"] == 0.5

"""The hybrid optimizer on an accelerator: real streams, equal to torch's but for the rounding of one step."""

from __future__ import annotations

from itertools import starmap
from typing import Any

import pytest
import torch

from shardproof.optim import HybridDeviceOptimizer
from tests.accelerator import first_device, late_one
from tests.unit.training.optim.hybrid_samples import equal, values

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 512, 6


def model_of(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).to(first_device(), dtype)


def fill_gradients(model: torch.nn.Module, step: int) -> None:
    """Fills gradients by slow work on the device: a copy that does not wait reads other numbers."""
    for place, weight in enumerate(model.parameters()):
        generator = torch.Generator(weight.device).manual_seed(1000 * step + place)
        gradient = torch.randn(weight.shape, generator=generator, device=weight.device)
        weight.grad = (gradient * late_one(weight.device, 3, 1024)).to(weight.dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        fill_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def ulps(one: torch.Tensor, other: torch.Tensor, before: torch.Tensor) -> float:
    """Largest distance in units in the last place of the largest term that a step adds up.

    A step subtracts two terms, so the result may be much smaller than the rounding of either.
    """
    largest = torch.stack([before.abs(), (one - before).abs(), one.abs(), other.abs()]).amax(0)
    spacing = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
    return float(((one.double() - other.double()).abs() / spacing.double()).max())


@pytest.mark.parametrize(
    ("fraction", "pin_memory", "overlap"),
    [
        (0.0, True, True),
        *((0.5, pin_memory, overlap) for pin_memory in (True, False) for overlap in (True, False)),
        (1.0, True, True),
        *(
            pytest.param(fraction, pin_memory, overlap, marks=pytest.mark.slow)
            for fraction in (0.0, 1.0)
            for pin_memory, overlap in ((True, False), (False, True), (False, False))
        ),
    ],
)
def test_each_step_equals_torchs_within_rounding(fraction: float, pin_memory: bool, overlap: bool) -> None:
    """One step at a time from the same state, so that no difference is carried along."""
    model = model_of(torch.float32)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        cpu_fraction=fraction,
        overlap=overlap,
        pin_memory=pin_memory,
        **options,
    )
    reference = model_of(torch.float32)
    plain = torch.optim.AdamW(reference.parameters(), **options)
    for step in range(4):
        fill_gradients(model, step)
        fill_gradients(reference, step)
        before = values(model)
        optimizer.step()
        plain.step()
        assert max(starmap(ulps, zip(values(model), values(reference), before, strict=True))) <= 8
        with torch.no_grad():
            for weight, other in zip(model.parameters(), reference.parameters(), strict=True):
                other.copy_(weight)
                for slot, item in optimizer.state[weight].items():
                    plain.state[other][slot].copy_(item)
        optimizer.zero_grad()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_streams_change_nothing(fraction: float) -> None:
    """Overlapped or not, pinned or not: the same bits, also with bf16 parameters and masters."""
    results = []
    for overlap, pin_memory in ((False, False), (True, False), (True, True)):
        model = model_of(torch.bfloat16)
        optimizer = HybridDeviceOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            cpu_fraction=fraction,
            overlap=overlap,
            pin_memory=pin_memory,
            master_dtype=torch.float32,
            lr=1e-2,
        )
        train(model, optimizer, 5)
        results.append(
            values(model) + [slots.tensors["master"].clone() for slots in optimizer.describe_slots()]  # type: ignore[union-attr]
        )
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_the_cpu_sides_state_is_on_the_host() -> None:
    model = model_of(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), torch.optim.AdamW, pin_memory=True, master_dtype=torch.float32
    )
    train(model, optimizer, 1)
    for slots in optimizer.describe_slots():
        on_cpu = optimizer.is_on_cpu(slots.parameter)
        for name, item in slots.tensors.items():
            assert (item.device.type == "cpu") == (on_cpu or name == "step")  # type: ignore[union-attr]
        if on_cpu:
            assert slots.tensors["master"].is_pinned()  # type: ignore[union-attr]

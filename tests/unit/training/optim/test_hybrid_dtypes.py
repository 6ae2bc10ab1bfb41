"""The hybrid optimizer with `state_dtypes`: slots have dtypes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from tests.unit.training.optim.hybrid_samples import model_of

NARROW = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16}


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(steps: range) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """AdamW whose moments are rounded after each step."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        for state in optimizer.state.values():
            for slot, dtype in NARROW.items():
                state[slot] = state[slot].to(dtype).float()
    return model, optimizer


def narrow(model: torch.nn.Module, fraction: float) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(
        model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, state_dtypes=NARROW, lr=0.02, fused=True
    )


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_slots_are_kept_narrow_and_stepped_wide(fraction: float) -> None:
    expected, reference = by_hand(range(4))
    model = model_of()
    optimizer = narrow(model, fraction)
    train(model, optimizer, range(4))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for slot, dtype in NARROW.items():
            assert optimizer.state[mine][slot].dtype == dtype
            assert torch.equal(optimizer.state[mine][slot].float(), reference.state[theirs][slot])
        assert optimizer.state[mine]["step"].dtype == torch.float32


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_narrow_slots_are_saved_and_loaded_in_their_dtypes(fraction: float, tmp_path: Path) -> None:
    model = model_of()
    optimizer = narrow(model, 0.5)
    train(model, optimizer, range(3))
    sp.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    with sp.open(tmp_path / "step") as checkpoint:
        assert checkpoint["optimizer.0.weight.exp_avg"].dtype == torch.bfloat16
    for fresh in (True, False):
        other = model_of(seed=1)
        target = narrow(other, fraction)
        if not fresh:
            train(other, target, range(2))
        sp.load(tmp_path / "step", {"model": other, "optimizer": target})
        train(other, target, range(3, 5))
        expected, _ = by_hand(range(5))
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))


def test_narrow_slots_inside_a_distributed_optimizer(tmp_path: Path) -> None:
    make = partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, state_dtypes=NARROW)
    model = model_of()
    optimizer = DistributedOptimizer(model, make, lr=0.02, fused=True)
    train(model, optimizer, range(3))
    sp.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    other = model_of(seed=1)
    target = DistributedOptimizer(other, make, lr=0.02, fused=True)
    sp.load(tmp_path / "step", {"model": other, "optimizer": target})
    train(other, target, range(3, 5))
    expected, _ = by_hand(range(5))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))


def test_an_unknown_slot_in_state_dtypes_is_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"state_dtypes names \['momentum'\]; the optimizer's slots are"):
        HybridDeviceOptimizer(
            model.parameters(), torch.optim.AdamW, state_dtypes={"momentum": torch.bfloat16}
        )


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_state_that_was_replaced_stays_while_its_parameter_has_no_gradient(fraction: float) -> None:
    model = model_of()
    optimizer = HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, lr=0.02)
    train(model, optimizer, range(2))
    weight = model[0].weight
    replaced = {slot: item.clone() for slot, item in optimizer.state[weight].items()}
    replaced["exp_avg"].fill_(3.0)
    optimizer.state[weight] = replaced
    give_gradients(model, 2)
    weight.grad = None
    optimizer.step()
    assert bool((optimizer.state[weight]["exp_avg"] == 3.0).all())

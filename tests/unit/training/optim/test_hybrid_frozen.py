"""The hybrid optimizer over a model that trains a few of its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof as sp
from shardproof.optim import HybridDeviceOptimizer

WIDTH = 16


class Adapted(nn.Module):
    """A frozen layer and a trained product of low rank, as in LoRA (Hu et al., 2021, arXiv:2106.09685)."""

    def __init__(self, layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False, dtype=dtype) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False, dtype=dtype) for _ in range(layers))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = frozen(x) + up(down(x))
        return x


def hybrid(model: nn.Module, fraction: float = 0.5, **options: Any) -> HybridDeviceOptimizer:
    options = {"master_dtype": torch.float32, "lr": 0.02, "fused": True, **options}
    return HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(3, WIDTH, generator=generator).to(next(model.parameters()).dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_frozen_parameter_has_no_master_and_no_slot(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = hybrid(model)
    train(model, optimizer, 0, 1)
    slots = {id(slots.parameter): set(slots.tensors) for slots in optimizer.describe_slots()}
    for name, parameter in model.named_parameters():
        assert slots[id(parameter)] == (
            set() if name.startswith("frozen") else {"master", "exp_avg", "exp_avg_sq", "step"}
        )
    assert set(optimizer.state_dict()["state"]) == set(range(8, 16))  # the frozen ones are 0 to 7
    sp.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    with sp.open(tmp_path / "step") as checkpoint:
        stored = [key for key in checkpoint if key.startswith("optimizer.frozen")]
        assert not [key for key in stored if not key.endswith("@options")]


def test_the_fraction_counts_trained_parameters() -> None:
    model = Adapted()
    optimizer = hybrid(model, 0.5)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    on_cpu = sum(weight.numel() for weight in trained if optimizer.is_on_cpu(weight))
    assert on_cpu == sum(weight.numel() for weight in trained) / 2
    assert not any(map(optimizer.is_on_cpu, model.frozen.parameters()))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_unfrozen_later_is_stepped(fraction: float, dtype: torch.dtype) -> None:
    model, reference = Adapted(dtype=dtype), Adapted(dtype=dtype)
    optimizer = hybrid(model, fraction)
    # the same with all parameters in the optimizer from the start: torch steps those with a gradient
    expected = HybridDeviceOptimizer(
        reference.requires_grad_(True).parameters(),
        torch.optim.AdamW,
        cpu_fraction=fraction,
        master_dtype=torch.float32,
        lr=0.02,
        fused=True,
    )
    reference.frozen.requires_grad_(False)
    for start, module in enumerate(("", "frozen.1", "frozen.3")):
        for one in (model, reference):
            if module:
                one.get_submodule(module).requires_grad_(True)
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = 0.02 / (start + 1)  # a scheduler
        train(model, optimizer, 2 * start, 2 * start + 2)
        train(reference, expected, 2 * start, 2 * start + 2)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert optimizer.state[model.frozen[1].weight]["step"] == 4
    assert model.frozen[0].weight not in optimizer.state


def test_state_of_a_parameter_that_is_frozen_in_the_next_run_is_kept(tmp_path: Path) -> None:
    model = Adapted()
    model.frozen[1].requires_grad_(True)
    optimizer = hybrid(model)
    train(model, optimizer, 0, 2)
    sp.save(tmp_path / "trained", {"model": model, "optimizer": optimizer})

    for kind in ("checkpoint", "state_dict"):
        again = Adapted()
        target = hybrid(again, 1.0)
        if kind == "checkpoint":
            sp.load(tmp_path / "trained", {"model": again, "optimizer": target})
        else:
            again.load_state_dict(model.state_dict())
            target.load_state_dict(optimizer.state_dict())
        sp.save(tmp_path / f"again-{kind}", {"model": again, "optimizer": target})
        with sp.open(tmp_path / "trained") as one, sp.open(tmp_path / f"again-{kind}") as other:
            assert one.keys() == other.keys()
        again.frozen[1].requires_grad_(True)
        source = Adapted()
        source.frozen[1].requires_grad_(True)
        reference = hybrid(source)
        sp.load(tmp_path / "trained", {"model": source, "optimizer": reference})
        train(again, target, 2, 4)
        train(source, reference, 2, 4)
        assert all(map(torch.equal, again.parameters(), source.parameters())), kind


def test_a_model_without_a_trained_parameter_has_no_state_until_one_is_unfrozen() -> None:
    model = Adapted().requires_grad_(False)
    optimizer = hybrid(model, state_dtypes={"exp_avg": torch.bfloat16})
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    model.up.requires_grad_(True)
    train(model, optimizer, 0, 1)
    assert optimizer.state[model.up[0].weight]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="state_dtypes names"):
        hybrid(Adapted().requires_grad_(False), state_dtypes={"momentum": torch.bfloat16})

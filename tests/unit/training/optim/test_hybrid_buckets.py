"""The CPU's side of the hybrid optimizer steps small parameters together, by a fused step by default."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.optim import HybridDeviceOptimizer

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
]


class FusedCalls(TorchDispatchMode):
    """Counts the tensors of each fused call."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_" in str(function):
            self.sizes.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def on_cpu(parameters: Any, make: Any, **options: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(parameters, make, cpu_fraction=1.0, **options)


@pytest.mark.parametrize(("make", "options"), CLASSES)
def test_the_step_on_the_cpu_is_fused_unless_an_option_says_otherwise(
    make: Any, options: dict[str, Any]
) -> None:
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name, chosen in {"default": {}, "fused": {"fused": True}, "loop": {"fused": False}}.items():
        others = {"fused": True} if name == "default" else chosen
        mine, theirs = parameters_of(999, 40), parameters_of(999, 40)
        found[name] = [
            train(mine, on_cpu(mine, make, **options, **chosen)),
            train(theirs, make(theirs, **options, **others)),
        ]
        assert all(map(torch.equal, *found[name])), name
    assert not all(map(torch.equal, found["fused"][0], found["loop"][0]))


class Eager(torch.optim.Optimizer):
    """Its constructor alone makes the slots, as that of some Adagrads."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, group["start"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sum"] += parameter.grad
                    parameter -= group["lr"] * self.state[parameter]["sum"]


@pytest.mark.parametrize("cpu_fraction", [0.0, 0.5, 1.0])
def test_slots_that_only_a_constructor_makes_are_made_again_after_the_state_is_cleared(
    cpu_fraction: float,
) -> None:
    mine, theirs = parameters_of(40, 30), parameters_of(40, 30)
    groups = [{"params": mine[:1]}, {"params": mine[1:], "start": 2.0}]
    optimizer = HybridDeviceOptimizer(groups, Eager, cpu_fraction=cpu_fraction)
    for _ in range(2):
        optimizer.state.clear()
        expected = Eager([{"params": theirs[:1]}, {"params": theirs[1:], "start": 2.0}])
        for ours, other in zip(train(mine, optimizer), train(theirs, expected), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": False}])
def test_an_option_of_the_program_selects_the_implementation(options: dict[str, Any]) -> None:
    parameters = parameters_of(3)
    optimizer = on_cpu(parameters, torch.optim.AdamW, **options)
    optimizer.load_state_dict(on_cpu(parameters_of(3), torch.optim.AdamW).state_dict())
    with FusedCalls() as calls:
        train(parameters, optimizer)
    assert not calls.sizes
    assert {name: optimizer.param_groups[0][name] for name in options} == options


def test_a_default_step_leaves_the_options_of_the_program() -> None:
    parameters = parameters_of(3)
    optimizer = on_cpu(parameters, torch.optim.AdamW)
    train(parameters, optimizer)
    assert optimizer.param_groups[0]["fused"] is None


def test_small_parameters_are_stepped_in_one_call_and_a_large_one_alone() -> None:
    mebi = 1 << 18  # elements
    small = [7] * 100
    parameters = parameters_of(*small, 5 * mebi, 3 * mebi, 2 * mebi)
    parameters += parameters_of(5, 5, dtype=torch.bfloat16)
    optimizer = on_cpu(parameters, torch.optim.AdamW)
    with FusedCalls() as calls:
        train(parameters, optimizer)
    assert Counter(calls.sizes) == {100: 4, 1: 4 * 3, 2: 4}
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [4] * len(parameters)


def test_a_parameter_whose_first_gradient_is_late_is_stepped_with_the_others() -> None:
    """Torch's fused SGD fails if only some of its parameters have a momentum."""
    early, late = parameters_of(3, 3)
    optimizer = on_cpu([early, late], torch.optim.SGD, lr=1.0, momentum=0.5)
    values = [parameter.detach().clone() for parameter in (early, late)]
    early.grad = torch.ones(3)
    optimizer.step()
    late.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(early, values[0] - 1 - 1.5)
    assert torch.equal(late, values[1] - 1)


def test_a_count_of_steps_that_is_an_integer_is_stepped_by_torchs_loop() -> None:
    """Apex and Transformer Engine store such counts."""
    (weight,) = parameters_of(4)
    optimizer = on_cpu([weight], torch.optim.AdamW)
    train([weight], optimizer)
    optimizer.state[weight]["step"] = torch.tensor(4)
    train([weight], optimizer)
    assert optimizer.state[weight]["step"] == 8


@pytest.mark.parametrize("kind", ["float64", "transposed"])
def test_a_slot_that_a_fused_step_misreads_is_stepped_by_torchs_loop(kind: str) -> None:
    results = []
    for make in (torch.optim.SGD, lambda *args, **options: on_cpu(args[0], torch.optim.SGD, **options)):
        (weight,) = parameters_of(12)
        weight.data = weight.data.reshape(3, 4)
        optimizer = make([weight], lr=1.0, momentum=0.5)
        buffer = torch.arange(12.0).reshape(3, 4)
        optimizer.state[weight] = {
            "momentum_buffer": buffer.double() if kind == "float64" else buffer.t().contiguous().t()
        }
        weight.grad = torch.ones(3, 4)
        optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_a_complex_parameter_is_stepped_apart_from_the_others() -> None:
    """Torch has no fused step of complex numbers."""
    results = []
    for make in (torch.optim.AdamW, lambda items, **others: on_cpu(items, torch.optim.AdamW, **others)):
        (real,) = parameters_of(3)
        number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        real.grad, number.grad = torch.ones(3), torch.full((2,), 1 + 2j)
        make([real, number], lr=0.1).step()
        results.append(number.detach())
    assert torch.equal(*results)

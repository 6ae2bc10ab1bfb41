"""Parts of flat units in one process: memory pool, lanes, divisors, doctests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardproof.training.fsdp
from shardproof.fsdp import fully_shard
from shardproof.training.fsdp.flat_buffer import GradientPool, Reduction
from shardproof.training.fsdp.lanes import Lane
from shardproof.training.fsdp.unit import ShardedUnit, unit_of

NAMES = sorted(module.name for module in pkgutil.iter_modules(shardproof.training.fsdp.__path__))


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"shardproof.training.fsdp.{name}")).failed == 0


def unit(module: nn.Module) -> ShardedUnit:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    made = unit_of(module)
    assert made is not None
    return made


@pytest.mark.usefixtures("process_group")
def test_gradient_memory_is_reused_and_few_reductions_are_in_flight() -> None:
    pool, lane = GradientPool(), Lane(torch.device("cpu"))
    (buffer,) = unit(nn.Linear(4, 4)).buffers
    seen = set()
    for value in range(6):
        memory = pool.take(buffer.packing.size, torch.float32, torch.device("cpu"))
        seen.add(memory.data_ptr())
        weight = buffer.parameters[0]
        buffer.gradients = memory
        buffer.add_gradient(weight, torch.full((4, 4), float(value)))
        buffer.add_gradient(weight, torch.ones(4, 4))
        pool.make_room()
        reduction = Reduction(buffer, 2.0, lane, pool.give_back)
        pool.launched(reduction)
    pool.finish()
    assert len(seen) <= 3
    assert (weight.part(reduction.result) == (5 + 1) / 2).all()
    assert (
        buffer.parameters[1].part(reduction.result) == 0
    ).all()  # no gradient arrived: zeros, not the former contents
    assert reduction.arrived == {weight.member}


@pytest.mark.usefixtures("process_group")
def test_half_precision_sums_are_divided_before_and_after() -> None:
    pool, lane = GradientPool(), Lane(torch.device("cpu"))
    (buffer,) = unit(nn.Linear(4, 4).half()).buffers
    buffer.gradients = pool.take(buffer.packing.size, torch.float16, torch.device("cpu"))
    buffer.add_gradient(buffer.parameters[0], torch.full((4, 4), 60000.0, dtype=torch.float16))
    reduction = Reduction(buffer, 6.0, lane, pool.give_back)
    pool.launched(reduction)
    pool.finish()
    assert torch.allclose(buffer.parameters[0].part(reduction.result).float(), torch.tensor(10000.0))


@pytest.mark.usefixtures("process_group")
def test_a_failed_backward_leaves_nothing_behind() -> None:
    model = Fragile()
    for part in (model.first, model.second, model):
        unit(part)
    model.breaks = True
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    model.breaks = False
    gradients = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        gradients.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken")


class Fragile(nn.Module):
    """With `breaks`, its backward fails when half of the gradients have been handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(2, 2) for _ in range(3))
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.second(Breaks.apply(x) if self.breaks else x))


@pytest.mark.usefixtures("process_group")
def test_strides_that_flat_buffers_do_not_have_are_named() -> None:
    with pytest.warns(UserWarning, match=r"fully_shard moves 1 parameters .* The first is 0\.weight"):
        unit(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2)).to(memory_format=torch.channels_last))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unit(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 2)))

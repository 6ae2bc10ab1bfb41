"""Flat buffers on an accelerator: gathers and reductions on streams of their own change no value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.fsdp import MixedPrecision, fully_shard
from tests.accelerator import first_device, late_one

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

WIDTH, STEPS = 32, 5


def trained(device: torch.device, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps. Slow work on the device delays the batch of each step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).to(device)
    torch.accelerator.set_device_index(first_device())
    mesh = init_device_mesh(device.type, (1,))
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batch = torch.linspace(-1, step, 8 * WIDTH).view(8, WIDTH).to(device)
        if device.type != "cpu":
            batch.mul_(late_one(device, 5, 1024))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().to_local().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["all", "optimizer_gradients"])
def test_training_equals_training_on_the_cpu(strategy: str, precision: torch.dtype | None) -> None:
    options: dict[str, Any] = {"strategy": strategy}
    if precision is not None:
        options["mixed_precision"] = MixedPrecision(precision)
    tolerance = 1e-5 if precision is None else 2e-2
    expected, found = trained(torch.device("cpu"), **options), trained(first_device(), **options)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)

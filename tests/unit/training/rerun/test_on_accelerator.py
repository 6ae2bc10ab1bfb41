"""The rerun machine with steps on an accelerator: generators, microbatches and device identity."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from shardproof import rerun
from shardproof.training.rerun.injection import FaultInjector
from shardproof.training.rerun.step_start import pack, unpack
from tests.accelerator import first_device

pytestmark = pytest.mark.gpu


def batches() -> Iterator[dict[str, torch.Tensor]]:
    for number in range(100):
        yield {"x": torch.full((4, 8), float(number), device=first_device())}


def trained(machine: rerun.RerunMachine, steps: int) -> tuple[torch.Tensor, int]:
    """The weights after some steps with dropout, and how often a step ran."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)).to(
        first_device()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, ran = rerun.ReplayableIterator(batches()), 0
    for _ in range(steps):
        while machine.should_run(data):
            ran += 1
            optimizer.zero_grad()
            batch = next(data)["x"]
            loss = model(batch + torch.rand_like(batch)).square().mean()
            loss.backward()
            batch.zero_()
            machine.validate(loss, rejected=math.isnan, message="loss")
        assert not machine.decide().exit
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).cpu(), ran


def test_a_rerun_has_the_same_draws_on_the_device() -> None:
    clean, once = trained(rerun.RerunMachine(), 5)
    faulty = rerun.RerunMachine(inject=FaultInjector("transient", steps=[2]))
    found, ran = trained(faulty, 5)
    assert (once, ran) == (5, 6)
    assert torch.equal(clean, found)


def test_report_mode_finds_no_difference_in_a_deterministic_program() -> None:
    machine = rerun.RerunMachine("report")
    _, ran = trained(machine, 3)
    assert ran == 6
    assert "loss: 3 compared, none differed" in machine.report()


def test_unpacked_microbatches_are_on_the_device() -> None:
    batch = next(batches())
    back = unpack(pack({"microbatches": [batch]}, "step"))["microbatches"][0]
    assert back["x"].device.type == first_device().type
    assert torch.equal(back["x"], batch["x"])


def test_the_identity_of_a_device_has_its_uuid() -> None:
    here = rerun.DeviceIdentity.here()
    assert here == rerun.DeviceIdentity.here()
    if first_device().type == "cuda":
        assert str(torch.cuda.get_device_properties(here.index).uuid) in here.uuid

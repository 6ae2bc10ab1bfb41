"""Every way to write to parameters while a save is under way: each row of the table in docs/snapshots.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardproof as sp
from shardproof.errors import StructureError
from shardproof.optim import DistributedOptimizer
from shardproof.rendezvous import LocalRendezvous
from shardproof.state import collect
from tests.accelerator import first_device
from tests.gate import LIMIT, Gate

PAGE = Path(__file__).parents[4] / "docs" / "snapshots.md"

AS_OF_THE_SAVE, FAILS = "as of the save", "the save fails"


class Job:
    """A model, its optimizer, and a save whose writes wait."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.gradients()
        self.optimizer.step()
        self.gradients()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self) -> None:
        self.model(torch.ones(2, 40)).sum().backward()

    def flatten(self) -> torch.Tensor:
        """Make all parameters views of one buffer."""
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        at = 0
        for parameter in self.parameters:
            parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        return flat


Write = Callable[[], object]
Case = Callable[[], tuple[Job, Write]]
CASES: dict[str, tuple[str, Case]] = {}


def case(row: str, outcome: str) -> Callable[[Case], Case]:
    def register(prepare: Case) -> Case:
        CASES[row] = outcome, prepare
        return prepare

    return register


@case("the step of an optimizer in the state", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, job.optimizer.step


@case("the step of another optimizer of the same parameters", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, torch.optim.SGD(job.model.parameters(), lr=1.0).step


@case("a wrapper that calls the optimizer's step", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    class Wrapper(torch.optim.Optimizer):  # as Accelerate's and Fabric's: without Optimizer.__init__
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    job = Job()
    return job, Wrapper(job.optimizer).step


@case("a subclass with its own step", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    class Mine(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1)

    job = Job(Mine)
    return job, job.optimizer.step


@case("a step without torch's hooks", FAILS)
def _() -> tuple[Job, Write]:
    class Mine(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)  # takes over the mark that torch has added its hooks
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1)

    job = Job(Mine)
    return job, job.optimizer.step


@case("a step replaced on the optimizer", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()

    @torch.no_grad()
    def step() -> None:
        for parameter in job.parameters:
            parameter.add_(1)

    job.optimizer.step = step  # type: ignore[method-assign, assignment]
    return job, job.optimizer.step


@case("a compiled optimizer step", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, torch.compile(job.optimizer.step, backend="eager")


@case("compiled code that writes to parameters", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    weight = job.model[0].weight

    def write() -> None:
        with torch.no_grad():
            weight.add_(1)

    return job, torch.compile(write, backend="eager")


@case("an optimizer for each parameter, stepped in backward", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    for parameter in job.parameters:
        own = torch.optim.SGD([parameter], lr=1.0)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]
    return job, job.gradients


@case("an update written in a backward hook", FAILS)
def _() -> tuple[Job, Write]:
    @torch.no_grad()
    def update(parameter: torch.Tensor) -> None:
        parameter.sub_(parameter.grad)  # type: ignore[arg-type]

    job = Job()
    for parameter in job.parameters:
        parameter.register_post_accumulate_grad_hook(update)
    return job, job.gradients


@case("`parameter.add_(x)` and other operations in place", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, lambda: job.parameters[2].detach().add_(1)


@case("`torch._foreach_add_(parameters, x)`", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, lambda: torch._foreach_add_([parameter.detach() for parameter in job.parameters], 1)


@case("`parameter.data.add_(x)`", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, lambda: job.parameters[2].data.add_(1)


@case("`parameter.data = tensor`", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()

    def write() -> None:
        for parameter in job.parameters:
            parameter.data = parameter.data + 1

    return job, write


@case("`parameter.untyped_storage().resize_(0)`", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, lambda: job.parameters[2].untyped_storage().resize_(0)


@case("`torch.utils.swap_tensors(parameter, tensor)`", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    job.model.zero_grad()

    def write() -> None:
        other = nn.Parameter(torch.zeros_like(job.model[1].weight))
        torch.utils.swap_tensors(job.model[1].weight, other)

    return job, write


@case("`torch.nn.utils.vector_to_parameters`", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    vector = torch.zeros(sum(parameter.numel() for parameter in job.parameters))
    return job, lambda: nn.utils.vector_to_parameters(vector, job.model.parameters())


@case("`model.load_state_dict(state)`", FAILS)
def _() -> tuple[Job, Write]:
    job, other = Job(), Job()
    values = {name: value + 1 for name, value in other.model.state_dict().items()}
    return job, lambda: job.model.load_state_dict(values)


@case("a write to a buffer that parameters are parts of", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    flat = job.flatten()
    return job, lambda: flat.add_(1)


@case("a write to a parameter that is a part of a buffer", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    job.flatten()
    return job, lambda: job.parameters[0].data.add_(1)


@case("a write to the flat buffer of `sp.optim.DistributedOptimizer`", FAILS)
def _() -> tuple[Job, Write]:
    job = Job()
    job.optimizer = DistributedOptimizer(job.model, torch.optim.AdamW, lr=0.1)
    job.state["optimizer"] = job.optimizer
    (bucket,) = {id(weight.bucket): weight.bucket for weight in job.optimizer._weights}.values()
    return job, lambda: bucket.parameters.add_(1)


@case("a numpy array over a parameter", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    array = job.parameters[0].detach().numpy()
    return job, lambda: np.add(array, 1, out=array)


@case("another process that shares the memory", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    job.model.share_memory()
    return job, lambda: job.parameters[0].data.add_(1)  # as another process does: without a count


@case("a step that a CUDA graph replays (`capturable=True`)", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    for group in job.optimizer.param_groups:
        group["capturable"] = True
    return job, lambda: job.parameters[0].data.add_(1)  # as the replay does: without hooks or a count


@case("an average of the weights (`AveragedModel`)", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    average = job.state["average"] = torch.optim.swa_utils.AveragedModel(job.model)
    average.update_parameters(job.model)
    return job, lambda: [parameter.data.add_(1) for parameter in average.parameters()]


@case("`sp.load` into the state", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    other = Job()
    _zero(other.model)
    sp.save("other", other.state)
    return job, lambda: sp.load("other", job.state)


@case("any write after `checkpointer.fence()`", AS_OF_THE_SAVE)
def _() -> tuple[Job, Write]:
    job = Job()
    return job, lambda: job.parameters[0].data.add_(1)


@torch.no_grad()
def _zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def bits(state: Any) -> dict[str, torch.Tensor]:
    return {entry.key: piece.view.clone() for entry in collect(state).tensors for piece in entry.pieces}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("row", CASES)
def test_a_write_while_saving(row: str, gate: Gate) -> None:
    outcome, prepare = CASES[row]
    gate.open()
    job, write = prepare()
    gate.close()
    want = bits(job.state)
    checkpointer = sp.Checkpointer("run", rendezvous=LocalRendezvous())
    pending = checkpointer.save(1, job.state)
    assert gate.reached.wait(LIMIT)
    if "fence()" in row:
        checkpointer.fence()
    write()
    gate.open()
    if outcome == FAILS:
        with pytest.raises(StructureError, match=r"was changed while it was being saved.*fence\(\)"):
            pending.result(LIMIT)
        assert checkpointer.steps() == []
        return
    pending.result(LIMIT)
    with sp.open("run/step-00000001") as checkpoint:
        for key, value in want.items():
            assert torch.equal(checkpoint[key][...], value), key


@pytest.mark.parametrize("write", ["_foreach", "data"])
def test_writes_to_dtensors_that_torch_does_not_count(write: str, mesh: DeviceMesh, gate: Gate) -> None:
    weight = nn.Parameter(DTensor.from_local(torch.ones(64, 64), mesh, [Shard(0)], run_check=False))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    checkpointer = sp.Checkpointer("run", rendezvous=LocalRendezvous())
    state = {"net": nn.ParameterDict({"weight": weight}), "optimizer": optimizer}
    pending = checkpointer.save(1, state)
    assert gate.reached.wait(LIMIT)
    with torch.no_grad():
        if write == "_foreach":
            torch._foreach_add_([weight], 1)
        else:
            weight.to_local().data.add_(1)
    gate.open()
    with pytest.raises(StructureError, match=r"net\.weight was changed"):
        pending.result(LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
def test_a_write_to_device_memory_that_torch_does_not_count(strided: bool, gate: Gate) -> None:
    net = nn.Linear(64, 64, device=first_device())
    if strided:
        net.weight = nn.Parameter(net.weight.detach().t())
    checkpointer = sp.Checkpointer("run")
    state = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=1.0)}
    want = bits(state)
    gate.open()
    checkpointer.save(1, state).result(LIMIT)
    assert all(torch.equal(sp.open("run/step-00000001")[key][...], want[key].cpu()) for key in want)
    gate.close()
    pending = checkpointer.save(2, state)
    assert gate.reached.wait(LIMIT)
    net.weight.data.add_(1)
    gate.open()
    with pytest.raises(StructureError, match=r"net\.weight was changed"):
        pending.result(LIMIT)


def test_the_page_has_every_row_and_its_outcome() -> None:
    rows = re.findall(r"^\| (.+?) \| (as of the save|the save fails)\b.* \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {row: outcome for row, (outcome, _) in CASES.items()}

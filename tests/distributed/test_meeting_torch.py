"""Checkpoints of torch's ways to distribute training, and of ours, each loaded into each other, bit for bit.

Every job trains from a seed of its own. Its values are gathered for comparison without this package:
`full_tensor` of DTensors, `consolidate_state_dict` of a ZeroRedundancyOptimizer, the stages of a pipeline,
the parts of our own optimizer and shards end to end. In a save and a load every collective is an error. A job
is one entry of `JOBS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardproof as sp
import shardproof.fsdp
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from shardproof.state import LocalRange, collect, slots_of
from tests.harness import process_group, rank, run_ranks, world_size
from tests.scenarios.collectives import no_collectives

RANKS = 4
WIDTH = 7
FRESH = 1000
"""Seed of the targets, which no source has."""

Values = dict[str, Any]


class Block(nn.Module):
    """Widths that neither 3 nor 4 ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A chain of layers by name, so that a pipeline's stage is the same module with layers left out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = {"first": Block(), "second": Block(), "third": Block(), "head": nn.Linear(WIDTH, 1)}
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def batch(step: int) -> torch.Tensor:
    return torch.arange(4.0 * WIDTH).reshape(4, WIDTH).add(step).sin()


def loss_of(output: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    return (output - 0.5).square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the others do not and learn faster."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01)


def slots_by_torch(job: Job) -> Values:
    """Every slot, whole, of an optimizer that has them in `state`."""
    return {
        f"{name} {slot}": job.whole(value)
        for name, parameter in job.parameters().items()
        for slot, value in job.optimizer.state[parameter].items()
    }


@dataclass
class Job:
    """A model and its optimizer on this rank, and how torch itself would train and gather them."""

    group: dist.ProcessGroup
    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[torch.Tensor], None] | None = None
    """One forward and backward pass. None: `loss_of(model(inputs)).backward()`."""
    slots: Callable[[Job], Values] = slots_by_torch
    uneven: bool = False
    """Whether DTensors are sharded by rows as this package's `fully_shard` does it."""
    scheduler: Any = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            if self.backward is None:
                loss_of(self.model(batch(step))).backward()
            else:
                self.backward(batch(step))
            self.optimizer.step()
            self.scheduler.step()

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def parameters(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {name.removeprefix("module."): parameter for name, parameter in named}

    def gathered(self) -> Values:
        """Parameters, slots and options of all ranks of the job by name, gathered by torch."""
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()
        parameters = self.parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        here: Values = {name: self.whole(parameter) for name, parameter in parameters.items()}
        here |= self.slots(self)
        for group in self.optimizer.param_groups:
            options = {option: group[option] for option in ("lr", "initial_lr", "weight_decay", "betas")}
            here |= {f"{names[id(parameter)]} options": options for parameter in group["params"]}
        here["scheduler"] = self.scheduler.state_dict()
        together: Values = {}
        for one in self.everywhere(here):
            for name, value in one.items():
                assert name not in together or same(together[name], value), f"ranks differ in {name}"
                together[name] = value
        return together

    def everywhere(self, here: Any) -> list[Any]:
        """`here` of each rank of the job."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, here, group=self.group)
        return found

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value.detach().clone()
        if self.uneven:
            return torch.cat(self.everywhere(value.detach().to_local()))
        return value.detach().full_tensor().clone()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def plain(seed: int, mesh: DeviceMesh) -> Job:
    model = Net(seed)
    return Job(mesh.get_group(), model, adamw(model))


def fsdp(seed: int, mesh: DeviceMesh, **options: Any) -> Job:
    model = Net(seed)
    for layer in [*model.layers.values(), model]:
        fully_shard(layer, mesh=mesh, **options)
    return Job(mesh.get_group(), model, adamw(model))


def fsdp_offloaded(seed: int, mesh: DeviceMesh) -> Job:
    return fsdp(seed, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(seed: int, mesh: DeviceMesh) -> Job:
    model = Net(seed)
    uneven = ColwiseParallel(use_local_output=False)  # a plain tensor describes even shards only
    plan = {"layers.*.up": uneven, "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return Job(mesh.get_group(), model, adamw(model))


def zero(seed: int, mesh: DeviceMesh, **options: Any) -> Job:
    group = mesh.get_group()
    model = DistributedDataParallel(Net(seed), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        groups_of(model), torch.optim.AdamW, process_group=group, lr=0.01, **options
    )
    return Job(group, model, optimizer, slots=slots_of_zero)


def zero_in_buckets(seed: int, mesh: DeviceMesh) -> Job:
    return zero(seed, mesh, parameters_as_bucket_view=True)


def slots_of_zero(job: Job) -> Values:
    assert isinstance(job.optimizer, ZeroRedundancyOptimizer)
    job.optimizer.consolidate_state_dict(to=0)
    if dist.get_rank(job.group) != 0:
        return {}
    names = {id(parameter): name for name, parameter in job.parameters().items()}
    order = [parameter for group in job.optimizer.param_groups for parameter in group["params"]]
    state = job.optimizer.state_dict()["state"]
    return {
        f"{names[id(order[number])]} {slot}": job.whole(value)
        for number, slots in state.items()
        for slot, value in slots.items()
    }


def pipeline(seed: int, mesh: DeviceMesh) -> Job:
    """Each rank has some of the layers, one rank perhaps two."""
    model, group = Net(seed), mesh.get_group()
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    names = list(model.layers)
    for number, name in enumerate(names):
        if number * stages // len(names) != stage:
            del model.layers[name]
    schedule = ScheduleGPipe(
        PipelineStage(model, stage, stages, torch.device("cpu"), group=group), 2, loss_of
    )

    def backward(inputs: torch.Tensor) -> None:
        first, last = stage == 0, stage == stages - 1
        schedule.step(*([inputs] if first else []), **({"target": torch.zeros(4, 1)} if last else {}))

    return Job(group, model, adamw(model), backward)


def hybrid(seed: int, mesh: DeviceMesh) -> Job:
    """FSDP2 with half of the parameters updated on the CPU."""
    job = fsdp(seed, mesh)
    optimizer = HybridDeviceOptimizer(groups_of(job.model), torch.optim.AdamW, cpu_fraction=0.5, lr=0.01)
    return Job(job.group, job.model, optimizer, slots=slots_by_shard)


def slots_by_shard(job: Job) -> Values:
    """Slots that are plain tensors of the shape of the rank's shard of an FSDP2 parameter."""
    found: Values = {}
    for name, parameter in job.parameters().items():
        assert isinstance(parameter, DTensor)
        for slot, value in job.optimizer.state[parameter].items():
            if value.dim():
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            found[f"{name} {slot}"] = job.whole(value)
    return found


def distributed(seed: int, mesh: DeviceMesh) -> Job:
    model, group = Net(seed), mesh.get_group()
    optimizer = DistributedOptimizer(
        model,
        torch.optim.AdamW,
        param_groups=groups_of(model),
        process_group=group,
        bucket_bytes=1000,
        lr=0.01,
    )
    return Job(group, model, optimizer, slots=slots_by_range)


def slots_by_range(job: Job) -> Values:
    """Slots of which each rank has a flat range, joined end to end."""
    names = {id(parameter): name for name, parameter in job.parameters().items()}
    found: Values = {}
    for slots in slots_of(job.optimizer):
        for slot, part in slots.tensors.items():
            name = f"{names[id(slots.parameter)]} {slot}"
            if isinstance(part, LocalRange):
                ranges = sorted(job.everywhere((part.start, part.stop, part.buffer)), key=lambda one: one[:2])
                found[name] = torch.cat([buffer for _, _, buffer in ranges]).reshape(slots.parameter.shape)
            else:
                found[name] = part.detach().clone()
    return found


def flat(seed: int, mesh: DeviceMesh) -> Job:
    """Our fully sharded data parallel: some ranks have no elements of some parameters."""
    model = Net(seed)
    for layer in [*model.layers.values()]:
        shardproof.fsdp.fully_shard(layer, mesh=mesh)
    return Job(mesh.get_group(), model, adamw(model), uneven=True)


JOBS: list[tuple[Callable[[int, DeviceMesh], Job], int]] = [
    (plain, 1),
    (fsdp, 4),
    (zero, 2),
    (tensor_parallel, 3),
    (pipeline, 4),
    (distributed, 3),
    (flat, 3),
    (fsdp_offloaded, 3),
    (zero_in_buckets, 4),
    (hybrid, 2),
]
FEW = 7
"""The first jobs. Each of the others is a variant of one of them."""


def save_and_load(folder: str, count: int, every: int) -> tuple[list[str], int]:
    """Loads every n-th pair of the first jobs. Returns the differences, and the number of compared values."""
    from shardproof.rendezvous import LocalRendezvous, StoreRendezvous

    problems: list[str] = []
    compared = 0
    with process_group():
        meshes = {n: DeviceMesh("cpu", torch.arange(n)) for n in range(1, RANKS + 1)}
        store = dist.distributed_c10d._get_default_store()
        meetings: dict[int, Any] = {1: LocalRendezvous()}
        for n in range(2, world_size() + 1):
            if rank() < n:
                meetings[n] = StoreRendezvous(store, rank(), n, deadline=60, name=f"of-{n}")
        sources: list[Job | None] = []
        references: list[Values] = []
        for number, (make, n) in enumerate(JOBS[:count]):
            job, reference = None, {}
            if rank() < n:
                job = make(number, meshes[n])
                job.train(range(3))
                reference = job.gathered()
                with no_collectives():
                    sp.save(f"{folder}/{number}", job.tree, rendezvous=meetings[n])
            shared = [reference]
            dist.broadcast_object_list(shared, src=0)
            sources.append(job)
            references.append(shared[0])
        for target, (make, n) in enumerate(JOBS[:count]):
            if rank() >= n:
                continue
            job = make(FRESH, meshes[n])  # the first load makes its state, the others fill it
            for source, reference in enumerate(references):
                if (source + target) % every:
                    continue
                with no_collectives():
                    sp.load(f"{folder}/{source}", job.tree, rendezvous=meetings[n])
                route = f"{_title(source)} to {_title(target)}"
                problems += _differences(job.gathered(), reference, route)
                compared += len(reference)
            with no_collectives():
                sp.load(f"{folder}/{target}", job.tree, rendezvous=meetings[n])
            uninterrupted = sources[target]
            assert uninterrupted is not None
            for each in (job, uninterrupted):
                each.train(range(3, 5))
            problems += _differences(job.gathered(), uninterrupted.gathered(), f"{_title(target)} trained on")
        dist.barrier()
        for meeting in meetings.values():
            meeting.close()
    return problems, compared


def _title(number: int) -> str:
    make, n = JOBS[number]
    return f"{make.__name__} on {n}"


def _differences(found: Values, wanted: Values, route: str) -> list[str]:
    wrong = sorted(found.keys() ^ wanted.keys())
    wrong += [name for name in found.keys() & wanted.keys() if not same(found[name], wanted[name])]
    return [f"{route}: {name}" for name in wrong]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("count", "every"), [(FEW, 3), pytest.param(len(JOBS), 1, marks=pytest.mark.slow)])
def test_each_job_loads_the_checkpoint_of_every_job(count: int, every: int, tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, save_and_load, str(tmp_path), count, every, timeout=220)
    values = [outcome.value for outcome in outcomes]
    assert [problems for problems, _ in values] == [[]] * RANKS
    loads = sum((source + target) % every == 0 for source in range(count) for target in range(count))
    parameters = 20
    assert loads >= count**2 // every and values[0][1] == loads * (
        parameters * (1 + 3 + 1) + 1
    )  # itself, slots, options


def aliases_on_this_rank() -> list[str]:
    """Keys that this rank takes for aliases of others."""
    with process_group():
        mesh = DeviceMesh("cpu", torch.arange(world_size()))
        model = flat(0, mesh).model
        dist.barrier()
        return [entry.key for entry in collect({"model": model}).tensors if entry.alias_of]


def test_parameters_without_elements_on_a_rank_are_not_taken_for_tied() -> None:
    """Their local tensors are empty parts of one buffer."""
    assert [outcome.value for outcome in run_ranks(3, aliases_on_this_rank)] == [[]] * 3

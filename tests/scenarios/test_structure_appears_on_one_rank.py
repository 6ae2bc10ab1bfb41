"""One rank's state gets a part that no other rank has, in the middle of a run that saves by a cached plan.

Elsewhere, the plan of a save was cached and compared with itself. Then a rank met a fault and its rerun state
had something to save, or a moving average began on one rank: the saves that followed succeeded without it,
and the first restart could not load.

Three ranks train under DDP with ZeroRedundancyOptimizer, through one such change after another. Each save
must hold all of it, load again on the same ranks and in one process, and use the cached plan exactly when
nothing has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardproof as sp
from shardproof.loading import StoredTensor
from tests.harness import process_group, rank, rendezvous, run_ranks
from tests.scenarios.collectives import no_collectives
from tests.scenarios.states import Phases, assert_one_attempt

RANKS = 3
FAULTY, AVERAGING = 1, 2
"""Ranks: the one that meets the fault, and the one that keeps the moving average."""


class Rerun:
    """Keeps nothing until a step gives two results; then the batch and both results."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def fault(self, step: int, rows: int) -> None:
        batch = torch.full((rows, 4), float(step))
        self.seen = {
            "step": step,
            "batch": batch,
            "results": [0.5 * step, {"again": torch.tensor([step + 0.25])}],
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class Job:
    """A rank's part of the run."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.model = DistributedDataParallel(net)
        self.optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.05)
        self.rerun = Rerun()
        self.average: nn.Module | None = None

    @property
    def tree(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer, "rerun": sp.PerRank(self.rerun)}
        return state if self.average is None else state | {"average": self.average}

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.arange(8.0).reshape(2, 4).add(step + rank()).sin()
        self.model(inputs).square().sum().backward()
        self.optimizer.step()
        if self.average is not None:
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.data.lerp_(value.data, 0.5)

    def memory(self) -> dict[str, Any]:
        """All of this rank's values."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found: dict[str, Any] = dict(self.model.named_parameters())
        for parameter, slots in self.optimizer.optim.state.items():
            found |= {f"{names[id(parameter)]} {slot}": value for slot, value in slots.items()}
        found["amsgrad"] = [group["amsgrad"] for group in self.optimizer.param_groups]
        found |= {"rerun": self.rerun.seen}
        if self.average is not None:
            found |= {f"average {name}": value for name, value in self.average.named_parameters()}
        return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Tensors as nested lists, which compare exactly and travel between processes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def nothing(job: Job, step: int) -> None:
    pass


def other_values(job: Job, step: int) -> None:
    """The fault has as many values as before."""
    if rank() == FAULTY:
        job.rerun.fault(step, rows=2)


def longer_batch(job: Job, step: int) -> None:
    """The same keys, with one other shape."""
    if rank() == FAULTY:
        job.rerun.fault(step, rows=3)


def average_begins(job: Job, step: int) -> None:
    if rank() == AVERAGING:
        job.average = copy.deepcopy(job.model.module)


def slot_appears(job: Job, step: int) -> None:
    """Each rank gets a slot more for the parameters that it owns, and no rank has the same."""
    for group in job.optimizer.param_groups:
        group["amsgrad"] = True
    for slots in job.optimizer.optim.state.values():
        slots["max_exp_avg_sq"] = torch.zeros_like(slots["exp_avg_sq"])


def fault_is_over(job: Job, step: int) -> None:
    job.rerun.seen = {}


def average_ends(job: Job, step: int) -> None:
    job.average = None


STEPS: list[tuple[Callable[[Job, int], None], bool]] = [
    (nothing, True),
    (nothing, False),
    (other_values, True),
    (other_values, False),
    (longer_batch, True),
    (average_begins, True),
    (nothing, False),
    (slot_appears, True),
    (nothing, False),
    (fault_is_over, True),
    (average_ends, True),
    (nothing, False),
]
"""What happens before each save, and whether that save needs another plan."""


def train_and_save(root: str) -> tuple[list[bool], list[str], list[dict[str, Any]]]:
    """Whether each save planned, what the restores got wrong, and the values at each save."""
    planned, wrong, memories = [], [], []
    with process_group():
        meetings = Phases(rendezvous(deadline=20.0))
        checkpointer = sp.Checkpointer(root, rendezvous=meetings)
        job = Job(seed=1)
        for step, (happens, _) in enumerate(STEPS):
            happens(job, step)
            job.train(step)
            meetings.met.clear()
            with no_collectives():
                checkpointer.save(step, job.tree).result()
            planned.append("plan" in meetings.met)
            memories.append(job.memory())
            target = Job(seed=2 + step)
            if job.average is not None:
                target.average = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            if checkpointer.restore(target.tree) != step:
                wrong.append(f"step {step} was not restored")
            loaded = target.memory()
            differing = loaded.keys() ^ memories[-1].keys()
            differing |= {name for name in loaded.keys() & memories[-1] if loaded[name] != memories[-1][name]}
            wrong += [f"step {step}, after {happens.__name__}: {name}" for name in sorted(differing)]
        meetings.close()
        dist.barrier()
    return planned, wrong, memories


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("run")
    return root, [outcome.value for outcome in run_ranks(RANKS, train_and_save, str(root), timeout=120)]


def test_state_of_one_rank_is_restored_on_that_rank(run: tuple[Path, list[Any]]) -> None:
    assert [wrong for _, wrong, _ in run[1]] == [[]] * RANKS


def test_a_cached_plan_is_used_exactly_when_nothing_has_changed(run: tuple[Path, list[Any]]) -> None:
    assert [planned for planned, _, _ in run[1]] == [[needed for _, needed in STEPS]] * RANKS


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_one_process_reads_the_state_of_all_ranks(step: int, run: tuple[Path, list[Any]]) -> None:
    root, ranks = run
    folder = root / f"step-{step:08d}"
    assert_one_attempt(folder)
    memories = [dict(memories[step]) for _, _, memories in ranks]
    with sp.open(folder) as checkpoint:
        stored = {key: checkpoint[key] for key in checkpoint.keys()}  # noqa: SIM118
        found = {
            key: plain(value[...] if isinstance(value, StoredTensor) else value)
            for key, value in stored.items()
        }
    wanted: dict[str, Any] = {}
    for number, memory in enumerate(memories):
        wanted[f"rerun.@rank-{number}"] = memory.pop("rerun")
        del memory["amsgrad"]
        for name, value in memory.items():
            name, _, slot = name.removeprefix("module.").partition(" ")
            key = f"average.{slot}" if name == "average" else f"optimizer.{name}.{slot}"
            wanted[key if slot else f"model.{name}"] = value
    assert {key: found.get(key) for key in wanted} == wanted
    beside = {key for key in found.keys() - wanted.keys() if not key.endswith(".@options")}
    assert all(key.startswith(f"rerun.@rank-{FAULTY}.") for key in beside)  # the tensors of its values

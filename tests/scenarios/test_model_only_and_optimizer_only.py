"""Parts of a checkpoint: the model without its optimizer, the optimizer without its model, parameters that
were frozen, added or removed since.

Elsewhere, such loads went wrong without an error. Optimizer state was stored by position, and was loaded for
the parameter that took the place of a removed one. Weights were loaded without the optimizer, and its own
copies of the old weights undid them at the next step. Values that did not fit were skipped.

Each way to train goes through the same cases. The test reads a job's values from a checkpoint of the job, so
that all ways are compared alike. After each case, every way must train on exactly as plain AdamW does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardproof as sp
import shardproof.fsdp
from shardproof.engine.state import LOCAL
from shardproof.loading import StoredTensor
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from tests.harness import process_group, rendezvous, run_ranks
from tests.scenarios.states import CallResult, attempt, same_on_all_ranks

RANKS = 2
SOURCE, TARGET = 1, 2
"""Seeds."""


class Net(nn.Module):
    """Three layers; perhaps one less, one more, or the first frozen."""

    def __init__(self, variant: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(5, 3)
        if variant != "without middle":
            self.middle = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 1)
        if variant == "with adapter":
            self.adapter = nn.Linear(3, 3)
        if variant.startswith("frozen"):
            self.inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        for name in ("middle", "adapter"):
            if hasattr(self, name):
                x = x + torch.tanh(getattr(self, name)(x))
        return self.outer(x)


Parameters = list[nn.Parameter]


def trained(net: nn.Module, variant: str) -> Parameters:
    """The parameters that the optimizer gets."""
    everything = variant == "frozen, in a group"
    return [parameter for parameter in net.parameters() if everything or parameter.requires_grad]


def options_of(seed: int) -> dict[str, float]:
    return {"lr": 0.1 / seed, "weight_decay": 0.25 * seed}


Job = tuple[nn.Module, torch.optim.Optimizer]
Way = Callable[[str, int], Job]


def plain(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    return net, torch.optim.AdamW(trained(net, variant), **options_of(seed))


def fsdp2(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    return net, torch.optim.AdamW(trained(net, variant), **options_of(seed))


def zero_redundancy(variant: str, seed: int) -> Job:
    net = DistributedDataParallel(Net(variant, seed))
    return net, ZeroRedundancyOptimizer(trained(net, variant), torch.optim.AdamW, **options_of(seed))


def hybrid(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    options = options_of(seed)
    return net, HybridDeviceOptimizer(
        trained(net, variant), torch.optim.AdamW, cpu_fraction=0.5, fused=False, **options
    )


def distributed(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    groups = [{"params": trained(net, variant)}]
    return net, DistributedOptimizer(net, torch.optim.AdamW, param_groups=groups, **options_of(seed))


def distributed_hybrid(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    groups = [{"params": trained(net, variant)}]
    inner = partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, cpu_fraction=0.5, fused=False)
    return net, DistributedOptimizer(net, inner, param_groups=groups, **options_of(seed))


def flat(variant: str, seed: int) -> Job:
    net = Net(variant, seed)
    shardproof.fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    return net, torch.optim.AdamW(trained(net, variant), **options_of(seed))


WAYS: dict[str, Way] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "zero_redundancy": zero_redundancy,
    "flat": flat,
    "distributed_hybrid": distributed_hybrid,
    "hybrid": hybrid,
    "distributed": distributed,
}


def train(job: Job, steps: int) -> None:
    """All ranks see the same batch, so that their mean is what one rank alone would compute."""
    net, optimizer = job
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.arange(20.0).reshape(4, 5).add(step).sin()).square().sum().backward()
        optimizer.step()


def weights(job: Job) -> dict[str, torch.Tensor]:
    net, optimizer = job
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.synchronize()
    if any(hasattr(parameter, LOCAL) for parameter in net.parameters()):
        return shardproof.fsdp.full_state_dict(net)
    return {
        name.removeprefix("module."): (item.full_tensor() if isinstance(item, DTensor) else item).detach()
        for name, item in net.named_parameters()
    }


@dataclass(frozen=True)
class Case:
    """One load, and its expected result."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of `sp.load`."""
    taken: Callable[[str], bool] = lambda key: False
    """Keys that get the checkpoint's values. All others stay as they are."""
    refused: tuple[str, ...] = ()
    """Parts of the error's text. If empty, the load succeeds."""
    saved: str = "both"
    """What the checkpoint holds: the model, or both."""
    tree: str = "both"
    """What is loaded into: the model, the optimizer, or both."""
    source: str = "whole"
    target: str = "whole"
    steps: tuple[int, ...] = (2,)
    """Steps of the target before the load."""


def model(key: str) -> bool:
    return key.startswith("model.")


def optimizer(key: str) -> bool:
    return key.startswith("optimizer.")


def all_but(*names: str) -> Callable[[str], bool]:
    return lambda key: not any(key.startswith(f"{name}.") for name in names)


INNER, MIDDLE = "optimizer.inner", ("model.middle", "optimizer.middle")
ADAPTER = ("model.adapter", "optimizer.adapter")

CASES: dict[str, Case] = {
    "a checkpoint of the model": Case({}, model, saved="model", tree="model"),
    "the model, by include": Case({"include": "model"}, model, steps=(0, 2)),
    "the model, by exclude": Case({"exclude": "optimizer"}, model),
    "the model where nothing else is asked for": Case({"include": "model"}, model, tree="model"),
    "optimizer state is asked for and not there": Case(
        refused=("missing in the checkpoint", "optimizer.inner.bias.@options"), saved="model"
    ),
    "optimizer state is asked for, not there, not strict": Case({"strict": False}, model, saved="model"),
    "optimizer state is there and not asked for": Case(
        refused=("not asked for", "optimizer.inner.bias.@options"), tree="model"
    ),
    "the optimizer, by include": Case({"include": "optimizer"}, optimizer, steps=(0, 2)),
    "the optimizer, by exclude": Case({"exclude": "model"}, optimizer),
    "the optimizer where nothing else is asked for": Case(
        {"include": "optimizer"}, optimizer, tree="optimizer"
    ),
    "frozen since": Case(refused=("not asked for", f"{INNER}.weight.exp_avg"), target="frozen"),
    "frozen since, excluded": Case({"exclude": INNER}, all_but(INNER), target="frozen"),
    "frozen since, not strict": Case({"strict": False}, all_but(INNER), target="frozen"),
    "frozen since, still in a group": Case({}, lambda key: True, target="frozen, in a group"),
    "frozen then": Case(refused=("missing in the checkpoint", f"{INNER}.weight.@options"), source="frozen"),
    "frozen then, excluded": Case({"exclude": INNER}, all_but(INNER), source="frozen"),
    "frozen then, not strict": Case({"strict": False}, all_but(INNER), source="frozen", steps=(0, 2)),
    "added": Case(refused=("missing in the checkpoint", "model.adapter.weight"), target="with adapter"),
    "added, excluded": Case({"exclude": ADAPTER}, all_but(*ADAPTER), target="with adapter"),
    "added, not strict": Case({"strict": False}, all_but(*ADAPTER), target="with adapter"),
    "removed": Case(refused=("not asked for", "model.middle.weight"), target="without middle"),
    "removed, excluded": Case({"exclude": MIDDLE}, all_but(*MIDDLE), target="without middle"),
    "removed, not strict": Case({"strict": False}, all_but(*MIDDLE), target="without middle"),
}


def case_of(way: str, title: str) -> tuple[Case, str]:
    """A case, and the case of "plain" that ends with the same weights.

    `DistributedOptimizer` has no state of a parameter that is frozen when it is made, also in a group.
    """
    if way.startswith("distributed") and title == "frozen since, still in a group":
        return replace(CASES["frozen since"], target="frozen, in a group"), "frozen since"
    return CASES[title], title


class Session:
    """The saves of one way to train."""

    def __init__(self, way: Way, folder: str) -> None:
        self.way = way
        self.folder = folder
        self.meetings = rendezvous(deadline=30.0)
        self.saves = 0
        self.sources: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}

    def save(self, tree: dict[str, Any]) -> str:
        self.saves += 1
        path = f"{self.folder}/{self.saves}"
        sp.save(path, tree, rendezvous=self.meetings)
        return path

    def held(self, job: Job) -> dict[str, Any]:
        """All that a job holds, by key."""
        return contents(self.save(tree_of(job, "both")))

    def source(self, variant: str, saved: str) -> tuple[str, dict[str, Any]]:
        """A trained checkpoint and what it holds."""
        if (variant, saved) not in self.sources:
            job = self.way(variant, SOURCE)
            train(job, 3)
            path = self.save(tree_of(job, saved))
            self.sources[variant, saved] = path, contents(path)
        return self.sources[variant, saved]


def tree_of(job: Job, part: str) -> dict[str, Any]:
    net, optimizer = job
    if part == "optimizer":
        return {"optimizer": sp.OptimizerState(optimizer, net)}
    return {"model": net} if part == "model" else {"model": net, "optimizer": optimizer}


def contents(path: str) -> dict[str, Any]:
    """Whole tensors and plain values of a checkpoint, without masters, which not all ways have."""
    with sp.open(path) as checkpoint:
        kept = [key for key in checkpoint.keys() if not key.endswith(".master")]  # noqa: SIM118
        return {
            key: checkpoint[key][...] if isinstance(checkpoint[key], StoredTensor) else checkpoint[key]
            for key in kept
        }


CaseResult = tuple[CallResult, list[str], dict[str, list[float]]]


def run_case(case: Case, steps: int, session: Session) -> CaseResult:
    """The result of the load, the values that are wrong, and the weights after two more steps."""
    path, there = session.source(case.source, case.saved)
    job = session.way(case.target, TARGET)
    train(job, steps)
    before = session.held(job)
    result = attempt(
        lambda: sp.load(path, tree_of(job, case.tree), rendezvous=session.meetings, **case.options)
    )
    result.value = None
    after = session.held(job)
    taken = {} if case.refused else {key: value for key, value in there.items() if case.taken(key)}
    wrong = differing(after, with_group_options(before, taken))
    train(job, 2)
    return result, wrong, {name: weight.flatten().tolist() for name, weight in weights(job).items()}


def with_group_options(before: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """The values that a job must have after a load. Its one group gets the options that were loaded."""
    wanted = before | taken
    options = [value["options"] for key, value in taken.items() if key.endswith(".@options")]
    for key, value in before.items():
        if options and key.endswith(".@options") and key not in taken:
            wanted[key] = value | {"options": options[0]}
    return wanted


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    wrong = sorted(found.keys() ^ wanted.keys())
    for key in sorted(found.keys() & wanted.keys()):
        a, b = found[key], wanted[key]
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if not (a.dtype == b.dtype and torch.equal(a, b) if tensors else a == b):
            wrong.append(f"{key}: {a} instead of {b}")
    return wrong


WayResult = dict[tuple[str, int], CaseResult]


def titles_of(name: str, every: int) -> list[str]:
    """Every n-th case, for each way other ones. "plain" goes through all: the others are compared with it."""
    return list(CASES) if name == "plain" else list(CASES)[list(WAYS).index(name) % every :: every]


def every_case(root: str, name: str, titles: list[str]) -> WayResult:
    with process_group():
        session = Session(WAYS[name], root)
        found = {
            (title, steps): run_case(case_of(name, title)[0], steps, session)
            for title in titles
            for steps in CASES[title].steps
        }
        session.meetings.close()
    return found


class Results(dict[tuple[str, int], list[WayResult]]):
    """Results of the ranks for each way to train and share of the cases, computed at first access."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = str(root)

    def __missing__(self, key: tuple[str, int]) -> list[WayResult]:
        name, every = key
        folder = f"{self._root}/{name}-{every}"
        outcomes = run_ranks(RANKS, every_case, folder, name, titles_of(name, every), timeout=120)
        self[key] = [outcome.value for outcome in outcomes]
        return self[key]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("plain", 1),
        *((name, 4) for name in ("fsdp2", "zero_redundancy", "flat", "distributed_hybrid")),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in WAYS if name != "plain"),
    ],
)
def test_a_load_takes_what_was_asked_for_and_nothing_else(name: str, every: int, results: Results) -> None:
    for title in titles_of(name, every):
        case, like = case_of(name, title)
        for steps in case.steps:
            at = f"{title}, after {steps} steps"
            ranks = [found[title, steps] for found in results[name, every]]
            result = same_on_all_ranks([result for result, _, _ in ranks])
            assert result.kind == ("KeyMismatchError" if case.refused else ""), f"{at}: {result.text}"
            assert all(part in result.text for part in case.refused), f"{at}: {result.text}"
            assert [wrong for _, wrong, _ in ranks] == [[]] * RANKS, at
            reference = results["plain", 1][0][like, steps][2]
            assert [trained_on for _, _, trained_on in ranks] == [reference] * RANKS, at


def hybrid_with_masters(net: nn.Module, seed: int) -> torch.optim.Optimizer:
    options = options_of(seed)
    return HybridDeviceOptimizer(
        net.parameters(), torch.optim.AdamW, cpu_fraction=0.5, master_dtype=torch.float32, **options
    )


def distributed_with_masters(net: nn.Module, seed: int) -> torch.optim.Optimizer:
    return DistributedOptimizer(net, torch.optim.AdamW, **options_of(seed))


def distributed_hybrid_with_masters(net: nn.Module, seed: int) -> torch.optim.Optimizer:
    inner = partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, cpu_fraction=0.5)
    return DistributedOptimizer(net, inner, **options_of(seed))


MASTERS = [hybrid_with_masters, distributed_with_masters, distributed_hybrid_with_masters]


def step_with_masters(root: str) -> list[list[str]]:
    """Weights that a step of length zero changes after they were loaded without the optimizer."""
    with process_group():
        meetings = rendezvous(deadline=30.0)
        source = Net("whole", SOURCE).bfloat16()
        sp.save(f"{root}/model", {"model": source}, rendezvous=meetings)
        changed = []
        for make in MASTERS:
            net = Net("whole", TARGET).bfloat16()
            optimizer = make(net, TARGET)
            for step in range(3):
                if step == 2:
                    sp.load(f"{root}/model", {"model": net}, rendezvous=meetings)
                    for group in optimizer.param_groups:
                        group["lr"] = 0.0
                optimizer.zero_grad()
                net(torch.ones(4, 5, dtype=torch.bfloat16)).square().sum().backward()
                optimizer.step()
            loaded, kept = weights((net, optimizer)), dict(source.named_parameters())
            changed.append([name for name, value in loaded.items() if not torch.equal(value, kept[name])])
        meetings.close()
    return changed


def test_masters_do_not_undo_the_weights_that_were_loaded(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, step_with_masters, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [[[]] * len(MASTERS)] * RANKS

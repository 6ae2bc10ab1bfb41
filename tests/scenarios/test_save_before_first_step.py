"""Optimizers whose state does not exist yet, or never will, are saved without that state or a collective.

Elsewhere, saving before the first step raised `KeyError: 'exp_avg'` on one rank while its peers waited in a
gather, and a rank with an empty shard, which had no state, took part in fewer collectives than the others.
Offloading optimizers took a trial step with zero gradients to make the state they were asked for, which moved
parameters by weight decay and stepped generators. Here two ranks train with torch's optimizers on FSDP2, and
three ranks with distributed, hybrid and flat-sharded ones. Some shards are empty.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardproof as sp
from tests.harness import process_group, rank, run_ranks
from tests.scenarios.collectives import Collective, no_collectives
from tests.scenarios.jobs import Job, Setup, Worlds, content, unequal
from tests.scenarios.states import CallResult, attempt, files_below, same_on_all_ranks

RANKS = 2


class Net(nn.Module):
    """Shards of 2 rows and 1, of 1 row and none; one parameter never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(5, 3)
        self.outer = nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


Optimizer = Callable[[Net], torch.optim.Optimizer]


def adamw(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def momentum(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def two_groups(net: Net) -> torch.optim.Optimizer:
    weights = [net.inner.weight, net.outer.weight]
    biases = [net.outer.bias, net.unused, net.inner.bias]
    groups = [{"params": weights, "lr": 0.05, "weight_decay": 0.3}, {"params": biases, "lr": 0.2}]
    return torch.optim.AdamW(groups)


def four_groups(net: Net) -> torch.optim.Optimizer:
    """The same options as `two_groups`, in another order, divided once more, and with none of the values."""
    groups = [[net.unused], [net.inner.bias, net.outer.bias], [net.outer.weight], [net.inner.weight]]
    return torch.optim.AdamW([{"params": group} for group in groups], lr=0.001, weight_decay=0.0)


def one_group(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters())


def build(seed: int, make: Optimizer) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    return net, make(net)


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs = torch.arange(20.0).reshape(4, 5).add(step).sin()
        optimizer.zero_grad()
        net(inputs).square().sum().backward()
        optimizer.step()


def local(value: Any) -> Any:
    return value.to_local().detach().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def memory(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of this rank's values by name: parameters, slots, options by parameter."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    found: dict[str, Any] = {name: local(parameter) for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]} {slot}": local(value) for slot, value in state.items()}
        found[f"{names[parameter]} slots"] = sorted(state)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        found |= {f"{names[parameter]} options": copy.deepcopy(options) for parameter in group["params"]}
    return found


CASES: dict[str, tuple[Optimizer, int, Optimizer]] = {
    "AdamW before its first step": (adamw, 0, adamw),
    "AdamW with a parameter without gradient": (adamw, 2, adamw),
    "SGD without momentum": (sgd, 2, sgd),
    "SGD with momentum before its first step": (momentum, 0, momentum),
    "SGD with momentum": (momentum, 2, momentum),
    "groups, regrouped, before the first step": (two_groups, 0, four_groups),
    "groups, regrouped": (two_groups, 2, four_groups),
}


def save_and_load(root: str) -> dict[str, dict[str, list[str]]]:
    """Loads each case into targets that have stepped 0 and 3 times; what is wrong, by aspect."""
    found: dict[str, dict[str, list[str]]] = {}
    with process_group():
        for name, (make, steps, make_target) in CASES.items():
            net, optimizer = build(1, make)
            train(net, optimizer, steps)
            before, generator = memory(net, optimizer), torch.get_rng_state()
            with no_collectives():
                sp.save(f"{root}/{name}", {"model": net, "optimizer": optimizer})
            wrong = {"changed by saving": unequal(memory(net, optimizer), before)}
            wrong["generator"] = [] if torch.equal(torch.get_rng_state(), generator) else ["stepped"]
            targets = [build(2, make_target) for _ in range(2)]
            train(*targets[1], 3)
            for target in targets:
                with no_collectives():
                    sp.load(f"{root}/{name}", {"model": target[0], "optimizer": target[1]})
            wrong["loaded"] = unequal(memory(*targets[0]), before)
            wrong["loaded over"] = unequal(memory(*targets[1]), before)
            train(net, optimizer, 2)
            train(*targets[0], 2)
            train(*targets[1], 2)
            wrong["trained on"] = unequal(memory(*targets[0]), memory(net, optimizer))
            wrong["loaded over, trained on"] = unequal(memory(*targets[1]), memory(net, optimizer))
            found[name] = wrong
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, list[str]]]]]:
    root = tmp_path_factory.mktemp("saved")
    return root, [outcome.value for outcome in run_ranks(RANKS, save_and_load, str(root), timeout=120)]


@pytest.mark.parametrize("name", CASES)
def test_a_save_has_the_state_that_exists_and_nothing_else(
    name: str, results: tuple[Path, list[Any]]
) -> None:
    root, found = results
    for wrong in found:
        assert {aspect: keys for aspect, keys in wrong[name].items() if keys} == {}
    make, steps, _ = CASES[name]
    with sp.open(root / name) as checkpoint:
        keys = [key for key in checkpoint.keys() if key.startswith("optimizer.")]  # noqa: SIM118
    slots = [key for key in keys if not key.endswith("@options")]
    assert bool(slots) == (steps > 0 and make is not sgd)
    assert not any(key.startswith("optimizer.unused.") for key in slots)


def state_on_one_rank(root: str) -> list[CallResult]:
    """Saves while rank 1 alone has state, for one parameter; then saves while no rank has state."""
    with process_group():
        net, optimizer = build(1, adamw)
        names = dict(net.named_parameters())
        if rank() == 1:
            weight = names["inner.weight"]
            zeros = torch.zeros_like(weight)
            optimizer.state[weight] = {
                "step": torch.tensor(1.0),
                "exp_avg": zeros,
                "exp_avg_sq": zeros.clone(),
            }
        with no_collectives():
            refused = attempt(lambda: sp.save(f"{root}/refused", {"model": net, "optimizer": optimizer}))
        optimizer.state.clear()
        with no_collectives():
            saved = attempt(lambda: sp.save(f"{root}/saved", {"model": net, "optimizer": optimizer}))
    return [refused, saved]


def test_state_that_one_rank_alone_has_is_refused_on_all_ranks(tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(RANKS, state_on_one_rank, str(tmp_path))]
    refused = same_on_all_ranks([value[0] for value in values])
    assert refused.kind in ("TilingError", "StructureError")
    assert "optimizer.inner.weight" in refused.text
    assert [value[1].kind for value in values] == ["", ""]
    assert not any(name.startswith("refused") for name in files_below(tmp_path))


def load_into_one_group(root: str) -> CallResult:
    """Parameters saved with different learning rates go into one group."""
    with process_group():
        net, optimizer = build(1, two_groups)
        train(net, optimizer, 1)
        sp.save(f"{root}/saved", {"model": net, "optimizer": optimizer})
        target = build(2, one_group)
        before = memory(*target)
        result = attempt(lambda: sp.load(f"{root}/saved", {"model": target[0], "optimizer": target[1]}))
        result.after["changed"] = unequal(memory(*target), before)
    return result


def test_one_group_for_different_options_is_refused(tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(RANKS, load_into_one_group, str(tmp_path))]
    result = same_on_all_ranks(values)
    assert result.kind == "KeyMismatchError"
    assert "lr=" in result.text
    assert "weight_decay=" in result.text
    assert [value.after["changed"] for value in values] == [[], []]


def call_collectives() -> list[str]:
    """The guard itself: each of these must be refused."""
    with process_group():
        net, _ = build(1, adamw)
        weight = net.inner.weight
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
            "all_gather_object": lambda: dist.all_gather_object([None] * RANKS, 1),
            "barrier": lambda: dist.barrier(),
            "full_tensor": lambda: weight.full_tensor(),  # type: ignore[operator]
            "operator": lambda: torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "0"),
        }
        missed = []
        for name, call in calls.items():
            try:
                with no_collectives():
                    call()
                missed.append(name)
            except Collective:
                pass
        dist.barrier()
    return missed


def test_the_guard_refuses_collectives() -> None:
    assert [outcome.value for outcome in run_ranks(RANKS, call_collectives)] == [[], []]


JOBS = [
    Setup("none", "distributed hybrid", 0.5, bf16=True),
    Setup("fsdp2", "hybrid", 0.5),
    Setup("flat all"),
]
MORE_JOBS = [
    Setup("none", "distributed"),
    Setup("flat optimizer_gradients", "hybrid", 0.5, bf16=True),
    Setup("flat optimizer_gradients"),
    *(Setup("flat all", "hybrid", fraction) for fraction in (0.0, 0.5, 1.0)),
    Setup("none", "hybrid", 0.5),
    Setup("none", "hybrid", 1.0, bf16=True),
    Setup("none", "distributed", bf16=True),
    Setup("none", "distributed hybrid", 1.0),
]


def as_if_never_saved(root: str, setup: Setup) -> dict[str, Any]:
    """Trains jobs that were never saved, were saved, or loaded the save; what is wrong, by aspect."""
    found: dict[str, Any] = {}
    with Worlds(3) as worlds:
        never, saved, fresh, trained = (Job(setup, worlds, 3, seed=seed) for seed in (1, 1, 2, 3))
        saved.save(f"{root}/before")
        if rank() == 0:
            made = [key for key in content(f"{root}/before") if key.startswith("optimizer.")]
            found["made"] = [key for key in made if not key.endswith(("@options", ".master"))]
        trained.train(0, 3)
        losses = never.train(0, 4)
        fresh.load(f"{root}/before")
        trained.load(f"{root}/before")
        found["losses"] = saved.train(0, 4) != losses
        for name, job in {"saved": saved, "fresh": fresh, "trained": trained}.items():
            if job is not saved:
                found[f"{name}: losses"] = job.train(0, 4) != losses
            found[f"{name}: trained on"] = unequal(job.memory(), never.memory())
    return {aspect: wrong for aspect, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "setup", [*JOBS, *(pytest.param(setup, marks=pytest.mark.slow) for setup in MORE_JOBS)], ids=str
)
def test_training_goes_on_as_if_never_saved(setup: Setup, tmp_path: Path) -> None:
    outcomes = run_ranks(3, as_if_never_saved, str(tmp_path), setup, timeout=120)
    assert [outcome.value for outcome in outcomes] == [{}] * 3


def stepped_on_one_rank(root: str, setup: Setup) -> CallResult:
    """All ranks have gradients. Rank 0 alone steps, all save; the others step, all save."""
    with Worlds(3) as worlds:
        job, target = (Job(setup, worlds, 3, seed=seed) for seed in (1, 2))
        job.backward(0)
        if rank() == 0:
            job.optimizer.step()
        with no_collectives():
            result = attempt(lambda: sp.save(f"{root}/some", job.state, rendezvous=job.meeting))
        result.value = None
        if rank() != 0:
            job.optimizer.step()
        job.save(f"{root}/all")
        target.load(f"{root}/all")
        same_losses = target.train(1, 3) == job.train(1, 3)
        result.after["trained on"] = [] if same_losses else ["losses"]
        result.after["trained on"] += unequal(target.memory(), job.memory())
    return result


@pytest.mark.parametrize(
    "setup", [Setup("fsdp2"), Setup("fsdp2", "hybrid", 0.5), Setup("flat all", "hybrid", 0.5)], ids=str
)
def test_a_step_that_one_rank_alone_took_is_refused_on_all_ranks(setup: Setup, tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(3, stepped_on_one_rank, str(tmp_path), setup)]
    result = same_on_all_ranks(values)
    assert result.kind in ("StructureError", "TilingError")
    assert "optimizer." in result.text
    assert not any(name.startswith("some/") for name in files_below(tmp_path))
    assert [value.after["trained on"] for value in values] == [[]] * 3

"""The rerun machine on real ranks, with restarts: faults are attributed to the right device, and cost no bit.

A job trains a small network on data-parallel and tensor-parallel ranks, saves every second step, and does
with the machine what its documentation says. A test chooses the node of each start by a made-up name.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof import rerun
from tests.harness import process_group, rank, run_ranks, world_size

STEPS, FAULT = 6, 3
LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
"""World size to data-parallel and tensor-parallel ranks."""
WIDTH, HIDDEN = 6, 8


@dataclass(frozen=True)
class Plan:
    """The options of one start of a job."""

    folder: str
    node: str = "node-a"
    inject: dict[str, Any] | None = None
    fatal: bool = True
    mode: str = "validate"
    steps: int = STEPS
    grouped: bool = False
    noisy_rank: int | None = None
    layout: str = "as it is"
    pending: str = "refuse"


@dataclass
class RankResult:
    """The result of one start on one rank."""

    code: int | None = None
    restored: int | None = None
    decisions: list[str] = field(default_factory=list)
    kinds: list[str | None] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    weights: str = ""
    report: str = ""
    step: int = 0


class Loader:
    """Microbatches of this rank, drawn by position; it moves on as it gives them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.position = seed, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            drawn = torch.Generator().manual_seed(1000 * self.seed + self.position)
            self.position += 1
            yield {"x": torch.randn(4, WIDTH, generator=drawn), "y": torch.randn(4, WIDTH, generator=drawn)}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Summed(torch.autograd.Function):
    """The sum over a group; its gradient goes to every part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Network(torch.nn.Module):
    """This rank's columns of the first matrix and rows of the second, with dropout and running statistics."""

    def __init__(self, part: int, parts: int, group: Any) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(7)
        up = torch.randn(WIDTH, HIDDEN, generator=drawn).chunk(parts, 1)[part]
        down = torch.randn(HIDDEN, WIDTH, generator=drawn).chunk(parts, 0)[part]
        self.up, self.down = torch.nn.Parameter(up.clone()), torch.nn.Parameter(down.clone())
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(x) @ self.up)
        hidden = hidden * (torch.rand_like(hidden) > 0.1) * (0.9 + 0.1 * random.random() + np.random.rand())
        out = hidden @ self.down
        return out if self.group is None else Summed.apply(out, self.group)  # type: ignore[no-any-return]


def groups(data: int, tensor: int) -> tuple[Any, Any]:
    """This rank's data-parallel and tensor-parallel group; None where it would be alone."""
    mine: list[Any] = [None, None]
    for index in range(tensor):
        ranks = list(range(index, data * tensor, tensor))
        group = dist.new_group(ranks)
        if rank() in ranks and data > 1:
            mine[0] = group
    for index in range(data):
        ranks = list(range(index * tensor, (index + 1) * tensor))
        group = dist.new_group(ranks)
        if rank() in ranks and tensor > 1:
            mine[1] = group
    return mine[0], mine[1]


def job(plan: Plan) -> RankResult:
    """One process of a job, from its start to its end or exit."""
    if world_size() == 1:
        return train(plan, None, None, None)
    with process_group():
        data_group, tensor_group = groups(*LAYOUTS[world_size()])
        vote_group = dist.new_group() if plan.grouped else None
        return train(plan, data_group, tensor_group, vote_group)


def train(plan: Plan, data_group: Any, tensor_group: Any, vote_group: Any) -> RankResult:
    _, parts = LAYOUTS[world_size()]
    random.seed(rank())
    np.random.seed(rank())
    torch.manual_seed(rank())
    network = Network(rank() % parts, parts, tensor_group)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    loader = Loader(rank() // parts)
    data = rerun.ReplayableIterator(loader)
    machine = rerun.RerunMachine(
        plan.mode,  # type: ignore[arg-type]
        group=vote_group,
        identity=rerun.DeviceIdentity(plan.node, f"uuid-{plan.node}-{rank()}", rank()),
        step_state=[rerun.BufferState(network)],
        layout=plan.layout,
        pending=plan.pending,  # type: ignore[arg-type]
        log=f"{plan.folder}/rejected.jsonl",
        inject=rerun.FaultInjector(**plan.inject) if plan.inject else None,
    )
    own = {"network": network, "optimizer": optimizer, "loader": loader}
    state = {"own": sp.PerRank(own), "rng": sp.RandomState(), "rerun": machine}
    checkpointer = sp.Checkpointer(f"{plan.folder}/checkpoints")
    result = RankResult(restored=checkpointer.restore(state, suspect=True))
    with machine:
        while machine.step < plan.steps:
            step = machine.step
            while machine.should_run(data):
                optimizer.zero_grad()
                batch = next(data)
                result.batches.append(float(batch["x"].sum()))
                loss = ((network(batch["x"]) - batch["y"]) ** 2).mean()
                loss.backward()
                batch["x"].zero_()
                for parameter in network.parameters():
                    if data_group is not None:
                        dist.all_reduce(parameter.grad, group=data_group)
                seen = float(loss)
                if plan.noisy_rank == rank():
                    seen += len(result.batches) * 1e-6
                machine.validate(seen, math.isnan, fatal=plan.fatal, message="loss")
            decision = machine.decide()
            result.decisions.append(f"{step}: checkpoint {decision.checkpoint} code {decision.code}")
            result.kinds.append(decision.attribution and str(decision.attribution))
            if decision.checkpoint:
                checkpointer.save(step, state, suspect=True).result()
            if decision.settles:
                checkpointer.settle_suspect(step, str(decision.attribution))
            if decision.exit:
                result.code = decision.code
                break
            optimizer.step()
            if machine.step % 2 == 0:
                checkpointer.save(machine.step, state).result()
    result.step = machine.step
    result.report = machine.report()
    digest = hashlib.sha256()
    for tensor in (*network.state_dict().values(), torch.get_rng_state()):
        digest.update(tensor.detach().numpy().tobytes())
    result.weights = digest.hexdigest()
    return result


def start(ranks: int, plan: Plan, **options: Any) -> list[RankResult]:
    return [outcome.value for outcome in run_ranks(ranks, job, plan, timeout=60, **options)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By world size, the results of all ranks without a fault."""
    known: dict[int, list[RankResult]] = {}

    def of(ranks: int) -> list[RankResult]:
        if ranks not in known:
            known[ranks] = start(ranks, Plan(str(tmp_path_factory.mktemp(f"clean-{ranks}")), mode="disabled"))
        return known[ranks]

    return of


def same_end(results: list[RankResult], clean: list[RankResult]) -> None:
    assert [one.weights for one in results] == [one.weights for one in clean]
    assert all(one.code is None and one.step == STEPS for one in results)


def equal_on_all(results: list[RankResult]) -> list[str]:
    """The decisions, which must be the same on all ranks."""
    assert all((one.decisions, one.kinds) == (results[0].decisions, results[0].kinds) for one in results)
    return results[0].decisions


CASES = [(1, 0), (2, 1), (4, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0), (4, 3)))]


@pytest.mark.parametrize(("ranks", "faulty"), CASES)
def test_a_transient_fault_is_found_in_place_and_costs_no_bit(
    ranks: int, faulty: int, tmp_path: Path, clean: Any
) -> None:
    inject = {"kind": "transient", "steps": [FAULT], "ranks": [faulty]}
    results = start(ranks, Plan(str(tmp_path), inject=inject))
    assert equal_on_all(results) == [f"{step}: checkpoint False code 0" for step in range(STEPS)]
    assert [kind is not None for kind in results[0].kinds] == [step == FAULT for step in range(STEPS)]
    (record,) = rerun.read_rejected(tmp_path / "rejected.jsonl")
    assert (record.verdict, record.step, record.rank) == ("transient fault", FAULT, faulty)
    assert (record.node, record.device, record.index) == ("node-a", f"uuid-node-a-{faulty}", faulty)
    assert math.isnan(record.first) and math.isfinite(record.second)
    assert sp.Checkpointer(tmp_path / "checkpoints").suspects() == []
    for one in results:
        assert len(one.batches) == STEPS + 1 and one.batches[FAULT] == one.batches[FAULT + 1]
    same_end(results, clean(ranks))


@pytest.mark.parametrize(("ranks", "faulty"), CASES)
def test_a_persistent_fault_is_found_on_another_device_and_not_on_the_same_one(
    ranks: int, faulty: int, tmp_path: Path, clean: Any
) -> None:
    plan = Plan(str(tmp_path), inject={"kind": "persistent", "steps": [FAULT], "ranks": [faulty]})
    checkpointer = sp.Checkpointer(tmp_path / "checkpoints")
    first = start(ranks, plan)
    assert equal_on_all(first)[-1] == f"{FAULT}: checkpoint True code 16" and first[0].code == 16
    assert checkpointer.suspects() == [FAULT] and checkpointer.steps() == [2]

    manifest = tmp_path / "checkpoints" / f"suspect-{FAULT:08}" / "manifest.json"
    before = manifest.read_bytes()
    again = start(ranks, plan)
    assert again[0].restored == FAULT
    assert equal_on_all(again) == [f"{FAULT}: checkpoint False code 16"]
    assert manifest.read_bytes() == before and rerun.read_rejected(tmp_path / "rejected.jsonl") == []

    other = start(ranks, replace(plan, node="node-b"))
    assert equal_on_all(other) == [f"{step}: checkpoint False code 0" for step in range(FAULT, STEPS)]
    assert "persistent fault in step 3: " in other[0].kinds[0]
    (record,) = rerun.read_rejected(tmp_path / "rejected.jsonl")
    assert (record.verdict, record.step, record.rank) == ("persistent fault", FAULT, faulty)
    assert (record.node, record.device) == ("node-a", f"uuid-node-a-{faulty}")
    assert checkpointer.suspects() == []
    for one, then in zip(other, first, strict=True):
        assert one.batches[0] == then.batches[-1]
    same_end(other, clean(ranks))


@pytest.mark.parametrize(("ranks", "faulty"), CASES)
def test_a_result_that_another_device_repeats_is_correct(
    ranks: int, faulty: int, tmp_path: Path, clean: Any
) -> None:
    plan = Plan(str(tmp_path), fatal=False, inject={"kind": "correct", "steps": [FAULT], "ranks": [faulty]})
    assert start(ranks, plan)[0].code == 16
    other = start(ranks, replace(plan, node="node-b"))
    assert equal_on_all(other) == [f"{step}: checkpoint False code 0" for step in range(FAULT, STEPS)]
    assert other[0].kinds[0].startswith("correct result in step 3: ")
    (record,) = rerun.read_rejected(tmp_path / "rejected.jsonl")
    assert (record.verdict, record.step, record.rank) == ("correct result", FAULT, faulty)
    assert rerun.steps_to_skip(tmp_path / "rejected.jsonl") == {FAULT}
    assert sp.Checkpointer(tmp_path / "checkpoints").suspects() == []
    same_end(other, clean(ranks))


def test_a_correct_result_that_is_fatal_ends_the_job_and_the_next_restores_the_step_before(
    tmp_path: Path,
) -> None:
    plan = Plan(str(tmp_path), inject={"kind": "correct", "steps": [FAULT], "ranks": [1]})
    assert start(2, plan)[0].code == 16
    other = start(2, replace(plan, node="node-b"))
    assert equal_on_all(other) == [f"{FAULT}: checkpoint False code 17"]
    assert sp.Checkpointer(tmp_path / "checkpoints").suspects() == []
    third = start(2, replace(plan, inject=None))
    assert third[0].restored == 2 and third[0].code is None


@pytest.mark.parametrize("kind", ["transient", "persistent"])
def test_votes_over_a_group_decide_the_same(kind: str, tmp_path: Path, clean: Any) -> None:
    plan = Plan(str(tmp_path), grouped=True, inject={"kind": kind, "steps": [FAULT], "ranks": [1]})
    results = start(2, plan)
    if kind == "persistent":
        assert results[0].code == 16
        results = start(2, replace(plan, node="node-b"))
    (record,) = rerun.read_rejected(tmp_path / "rejected.jsonl")
    assert (record.verdict, record.rank) == (f"{kind} fault", 1)
    same_end(results, clean(2))


def test_report_mode_counts_the_results_that_differ_when_run_again(tmp_path: Path, clean: Any) -> None:
    results = start(2, Plan(str(tmp_path), mode="report", noisy_rank=1))
    assert f"loss: {STEPS} compared, none differed" in results[0].report
    assert f"loss: {STEPS} compared, {STEPS} differed" in results[1].report
    same_end(results, clean(2))


def test_a_pending_rerun_needs_the_layout_that_saved_it_or_is_dropped(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), inject={"kind": "persistent", "steps": [FAULT], "ranks": [0]})
    start(2, plan)
    for outcome in run_ranks(2, job, replace(plan, layout="another"), timeout=60):
        assert isinstance(outcome.error, sp.StructureError)
        assert "layout 'as it is', now 'another'" in str(outcome.error)
    dropped = start(2, replace(plan, layout="another", pending="drop", inject=None))
    assert dropped[0].restored == FAULT and dropped[0].code is None and dropped[0].step == STEPS

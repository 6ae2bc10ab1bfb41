"""Replicas that differ silently are found when a save compares them, and the rank at fault is named."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.engine.planning import SAMPLE_BYTES
from shardproof.engine.saving import Saver, SaveRequest, SaveResult
from shardproof.errors import ShardproofError
from shardproof.storage import LocalStorage
from tests.gate import Gate
from tests.harness import process_group, rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import Phases

LIMIT = 60.0


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Flips one bit of this rank's memory of a tensor, unseen by torch, as a faulty device would."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    memory = local.detach().data
    assert memory.is_contiguous()
    raw = memory.reshape(-1).view(torch.uint8)
    raw[(bit // 8) % len(raw)] ^= 1 << bit % 8


@dataclass
class Job:
    """A model in training, and its state."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    width: int

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "own": sp.PerRank(rank())}

    def step(self) -> None:
        self.model(torch.ones(2, self.width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Block(torch.nn.Module):
    """A norm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


def replicas_of_all() -> Job:
    """DistributedDataParallel."""
    model = torch.nn.parallel.DistributedDataParallel(Block(12))
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.1), 12)


def hybrid_shards() -> Job:
    """Two replicas, each sharded over half of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = Block(12)
    fully_shard(model, mesh=mesh)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.1), 12)


def tensor_parallel() -> Job:
    """Weights are split over all ranks; every rank has the whole norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world_size(),))
    model = Block(12)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False), 12)


Place = Callable[[Job], torch.Tensor]


def norm(job: Job) -> torch.Tensor:
    return dict(job.model.named_parameters())[
        "module.norm.weight" if hasattr(job.model, "module") else "norm.weight"
    ]


def up(job: Job) -> torch.Tensor:
    return dict(job.model.named_parameters())[
        "module.up.weight" if hasattr(job.model, "module") else "up.weight"
    ]


def slot(job: Job) -> torch.Tensor:
    return job.optimizer.state[norm(job)]["exp_avg_sq"]


def saves_with_a_flip(
    root: str, make: Callable[[], Job], where: Place, culprit: int, incremental: bool
) -> tuple[tuple[Any, ...], ...]:
    """Three saves: with equal replicas, with a flipped bit on one rank, and with the bit flipped back."""
    torch.manual_seed(0)
    with process_group():
        job = make()
        for _ in range(2):
            job.step()
        saver = Saver(rendezvous(deadline=20.0))
        results: list[tuple[Any, ...]] = []
        for number, flips in enumerate([False, True, False]):
            if rank() == culprit and number > 0:
                flip(where(job), bit=5)
            base = None
            if incremental:
                earlier = LocalStorage(f"{root}/{number - 1}") if number else None
                base = lambda earlier=earlier: earlier  # noqa: E731
            done = saver.begin(
                LocalStorage(f"{root}/{number}"),
                job.state,
                SaveRequest(number, base=base, check_replicas="all"),
            ).result(LIMIT)
            assert len(done.diverged) == done.diverged_count
            assert flips or done.diverged == ()
            results.append(done.diverged)
        return tuple(results)


@pytest.mark.parametrize(
    ("ranks", "make", "where", "culprit", "holders", "by_majority", "incremental"),
    [
        pytest.param(2, replicas_of_all, up, 1, (0, 1), False, False, id="DDP of two"),
        pytest.param(3, replicas_of_all, up, 1, (0, 1, 2), True, False, id="DDP of three"),
        pytest.param(3, replicas_of_all, up, 1, (0, 1, 2), True, True, id="DDP, incremental"),
        pytest.param(3, replicas_of_all, slot, 0, (0, 1, 2), True, False, id="DDP, a slot, rank 0"),
        pytest.param(4, replicas_of_all, norm, 3, (0, 1, 2, 3), True, False, id="DDP of four"),
        pytest.param(4, hybrid_shards, up, 3, (1, 3), False, False, id="HSDP"),
        pytest.param(4, hybrid_shards, slot, 2, (0, 2), False, True, id="HSDP, a slot, incremental"),
        pytest.param(3, tensor_parallel, norm, 2, (0, 1, 2), True, False, id="TP, a norm"),
        pytest.param(2, tensor_parallel, norm, 0, (0, 1), False, False, id="TP of two, a norm"),
    ],
)
def test_one_bit_is_found_and_its_rank_named(
    ranks: int,
    make: Callable[[], Job],
    where: Place,
    culprit: int,
    holders: tuple[int, ...],
    by_majority: bool,
    incremental: bool,
    tmp_path: Path,
) -> None:
    outcomes = run_ranks(ranks, saves_with_a_flip, str(tmp_path), make, where, culprit, incremental)
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * ranks
    before, (found,), after = outcomes[0].value
    assert before == after == ()
    assert ("exp_avg_sq" in found.key) == (where is slot)
    assert ("norm" in found.key) == (where is not up)
    assert found.holders == holders
    assert found.by_majority == by_majority
    assert found.ranks == ((culprit,) if by_majority else holders)


def state_of(value: float) -> dict[str, Any]:
    """Replicas of several kinds, and a value of each rank's own."""
    return {
        "weight": torch.arange(200.0).reshape(20, 10) + value,
        "turned": torch.arange(60.0).reshape(6, 10).t(),
        "half": torch.full((33,), value, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "imaginary": torch.full((5,), 1j * value, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 4),
        "own": sp.PerRank(torch.full((7,), float(rank()))),
        "none": torch.full((3,), float("nan")),
    }


SAMPLE = 128


def samples(root: str, culprit: int) -> list[tuple[int, list[str], int]]:
    """Samples while one rank has a wrong bit in `weight`: bytes compared, keys that differ, meetings."""
    meetings = Phases(rendezvous(deadline=20.0))
    saver = Saver(meetings, sample_bytes=SAMPLE)
    state = state_of(1.0)
    if rank() == culprit:
        flip(state["weight"], bit=12345 % (200 * 32))
    compared: list[int] = []

    def listen(event: events.Event) -> None:
        if event.phase == "replicas" and event.kind == "end":
            compared.append(event.done)

    results = []
    with events.subscribe(listen):
        for number in range(20):
            meetings.met.clear()
            done = saver.begin(
                LocalStorage(f"{root}/{number}"), state, SaveRequest(number, check_replicas="sample")
            ).result(LIMIT)
            results.append((compared[-1], [one.key for one in done.diverged], len(meetings.met)))
    return results


def test_samples_cover_everything_and_cost_at_most_their_bound(tmp_path: Path) -> None:
    outcomes = run_ranks(3, samples, str(tmp_path), 1)
    results = outcomes[0].value
    assert [outcome.value for outcome in outcomes] == [results] * 3
    sizes = [size for size, _, _ in results]
    assert max(sizes) <= SAMPLE
    total = 4 * 200 + 4 * 60 + 2 * 33 + 8 + 8 * 5 + 4 * 3
    turns = next(at for at in range(1, 20) if sum(sizes[:at]) >= total)
    assert sum(sizes[:turns]) == total
    assert sizes[turns:] == sizes[: 20 - turns], "the same again, in the same order"
    found = [at for at, (_, keys, _) in enumerate(results) if keys]
    assert len([at for at in found if at < turns]) == 1
    assert {tuple(keys) for _, keys, _ in results} == {(), ("weight",)}
    assert [number for _, _, number in results[1:]] == [2] * 19, (
        "a cached save meets twice, whatever it compares"
    )


def test_a_sample_is_64_mib_by_default() -> None:
    assert SAMPLE_BYTES == 64 << 20


def flip_while_training(root: str) -> list[list[str]]:
    """Saves while training goes on. After the third save has begun, a bit of one rank is flipped."""
    torch.manual_seed(0)
    with process_group():
        job = replicas_of_all()
        job.step()
        saver, gate = Saver(rendezvous(deadline=20.0)), Gate(pytest.MonkeyPatch())
        gate.open()
        saver.save(LocalStorage(f"{root}/first"), job.state)
        results = []
        for number in range(4):
            gate.close()  # nothing is written until it is opened
            pending = saver.begin(
                LocalStorage(f"{root}/{number}"), job.state, SaveRequest(check_replicas="all")
            )
            if number == 2 and rank() == 1:
                saver.fence()  # otherwise the save fails: its memory was written to
                flip(norm(job))
            gate.open()
            job.step()
            job.step()
            results.append([one.key for one in pending.result(LIMIT).diverged])
        return results


def test_a_bit_that_flips_after_a_save_began_is_found_by_the_next(tmp_path: Path) -> None:
    outcomes = run_ranks(2, flip_while_training, str(tmp_path))
    first, second, third, fourth = outcomes[0].value
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * 2
    assert (first, second, third) == ([], [], [])
    assert any("norm.weight" in key for key in fourth)


def modes(root: str, asked: list[Any]) -> list[tuple[list[str], int, bool]]:
    meetings = Phases(rendezvous(deadline=20.0))
    saver = Saver(meetings)
    state = state_of(2.0)
    if rank() == 0:
        flip(state["half"])
    results = []
    for number, mode in enumerate(asked):
        meetings.met.clear()
        storage = LocalStorage(f"{root}/{number}")
        done: SaveResult = saver.begin(storage, state, SaveRequest(check_replicas=mode)).result(LIMIT)
        results.append(([one.key for one in done.diverged], done.diverged_count, "plan" in str(meetings.met)))
    done = saver.save(LocalStorage(f"{root}/waited"), state, check_replicas="all")
    results.append(([one.key for one in done.diverged], done.diverged_count, False))
    done = sp.save(
        f"{root}/once", state, check_replicas="sample", rendezvous=rendezvous(deadline=20.0, name="b")
    )
    results.append(([one.key for one in done.diverged], done.diverged_count, False))
    return results


def test_the_mode_may_change_with_a_cached_plan(tmp_path: Path) -> None:
    outcomes = run_ranks(3, modes, str(tmp_path), [None, "all", None, "sample", "all"])
    found = ["half"], 1
    expected = [([], 0, True), (*found, False), ([], 0, False), (*found, False), (*found, False)]
    assert [outcome.value for outcome in outcomes] == [[*expected, (*found, False), (*found, False)]] * 3


def asked_differently(root: str, asked: list[Any]) -> tuple[str, str]:
    saver = Saver(rendezvous(deadline=20.0))
    with pytest.raises(ShardproofError) as failed:
        saver.begin(LocalStorage(f"{root}/0"), state_of(1.0), SaveRequest(check_replicas=asked[rank()]))
    done = saver.begin(LocalStorage(f"{root}/1"), state_of(1.0), SaveRequest(check_replicas="all")).result(
        LIMIT
    )
    assert done.diverged == ()
    return type(failed.value).__name__, str(failed.value)


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        (["all", "sample"], "StructureError", "check_replicas='all'"),
        ([None, "sample"], "StructureError", "rank 1 is step None, .*check_replicas='sample'"),
        (["all", "most"], "RankFailure", "check_replicas is 'sample', 'all' or None, not 'most'"),
    ],
)
def test_all_ranks_must_ask_for_the_same_comparison(
    asked: list[Any], kind: str, text: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, asked_differently, str(tmp_path), asked)
    assert outcomes[0].value == outcomes[1].value
    assert outcomes[0].value[0] == kind
    assert re.search(text, outcomes[0].value[1], re.DOTALL), outcomes[0].value[1]


def save_and_log(root: str, culprits: list[int]) -> tuple[list[str], list[Any]]:
    """This rank's warnings, and the number of differences in its events of "commit"."""
    logged: list[str] = []
    facts: list[Any] = []

    class LogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    def listen(event: events.Event) -> None:
        if event.phase == "commit" and event.kind == "end":
            facts.append(event.facts.get("diverged"))

    logging.getLogger("shardproof").addHandler(LogHandler(logging.WARNING))
    state = {f"weight-{number}": torch.ones(4, 4) for number in range(12)}
    if rank() in culprits:
        for tensor in state.values():
            flip(tensor, bit=rank())
    with ExitStack() as stack:
        stack.enter_context(events.subscribe(listen))
        saver = Saver(rendezvous(deadline=20.0))
        saver.save(LocalStorage(f"{root}/0"), state)
        saver.save(LocalStorage(f"{root}/1"), state, check_replicas="all")
    return logged, facts


def test_rank_0_and_the_ranks_at_fault_log_the_differences(tmp_path: Path) -> None:
    outcomes = run_ranks(4, save_and_log, str(tmp_path), [2])
    for outcome in outcomes:
        logged, facts = outcome.value
        assert facts == [None, 12]
        if outcome.rank not in (0, 2):
            assert logged == []
            continue
        (line,) = logged
        assert line.startswith(
            f"{tmp_path}/1: replicas differ in 12 places: 'weight-0'[0:4,0:4]: rank 2 differs "
        )
        assert "from the others of ranks 0-3;" in line
        assert line.endswith("; ...")


def hashing_fails(root: str, culprit: int) -> tuple[str, str]:
    from shardproof.engine.saving import replica_check

    saver = Saver(rendezvous(deadline=20.0))
    hash_replicas = replica_check.hash_replicas
    if rank() == culprit:

        def fails(*_: Any) -> bytes:
            raise MemoryError("no room to hash")

        replica_check.hash_replicas = fails  # type: ignore[assignment]
    pending = saver.begin(LocalStorage(f"{root}/0"), state_of(1.0), SaveRequest(check_replicas="all"))
    with pytest.raises(ShardproofError) as failed:
        pending.result(LIMIT)
    replica_check.hash_replicas = hash_replicas
    assert saver.begin(LocalStorage(f"{root}/1"), state_of(1.0), SaveRequest(check_replicas="all")).result(
        LIMIT
    )
    return type(failed.value).__name__, str(failed.value)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_compare_fails_the_save_of_all(culprit: int, tmp_path: Path) -> None:
    outcomes = run_ranks(2, hashing_fails, str(tmp_path), culprit)
    assert outcomes[0].value == outcomes[1].value
    kind, text = outcomes[0].value
    assert kind == "RankFailure"
    assert f"rank {culprit}" in text
    assert "no room to hash" in text
    assert not (tmp_path / "0" / "manifest.json").exists()


def hashes_slowly(root: str) -> int:
    """Rank 1 hashes its replicas for longer than the deadline, but each one in less."""
    import shardproof.engine.saving.replica_check as replicas

    meetings = rendezvous(deadline=20.0)
    saver = Saver(meetings)
    saver.save(LocalStorage(f"{root}/0"), {"w": torch.ones(3)})
    meetings.deadline = 3.0
    digest, never = replicas.xxhash.xxh3_128_digest, threading.Event()

    class Slow:
        @staticmethod
        def xxh3_128_digest(data: Any) -> bytes:
            never.wait(0.5)
            return digest(data)

    if rank() == 1:
        replicas.xxhash = Slow  # type: ignore[assignment]
    state = {f"w{number}": torch.ones(4) for number in range(10)}
    pending = saver.begin(LocalStorage(f"{root}/1"), state, SaveRequest(check_replicas="all"))
    return len(pending.result(LIMIT).diverged)


def test_a_rank_that_takes_long_to_compare_is_not_silent(tmp_path: Path) -> None:
    outcomes = run_ranks(2, hashes_slowly, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [0, 0]

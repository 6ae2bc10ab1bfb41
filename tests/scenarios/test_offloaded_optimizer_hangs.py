"""Sharded models whose optimizer lives on the CPU in part: saved without a collective, loaded anywhere.

Elsewhere, saving the optimizer of such a job hung for 30 minutes in an all-gather, then the job died; saves
of the model alone passed. Describing a shard took one collective for each tensor, and ranks whose shard was
empty, or whose parameter had no gradient yet, had no optimizer state and so took part in fewer of them. Jobs
that did load had lost their fp32 masters, stepped parameters with the gradients of the step before, or could
not load with another fraction on the CPU.

Here every job has gains of one element (empty on all ranks but one), a parameter that never gets a gradient
and one that gets one in odd steps only. It is saved after some of 0, 1 and 5 steps, with every collective
an error meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import rank, run_ranks
from tests.scenarios.jobs import Job, Setup, Worlds, content, unequal

SAVED = (0, 1, 5)
"""Steps after which a job is saved. `test_save_before_first_step.py` has more cases of 0."""
END = 7
MOVED = 3
"""Steps, at most, that a job is trained after it was loaded on another size."""
STRATEGIES = ("all", "optimizer_gradients")
SHARDINGS = ("fsdp2", *(f"flat {strategy}" for strategy in STRATEGIES))

FAST = {
    Setup("fsdp2", "hybrid", 0.5): 2,
    Setup("flat all", "hybrid", 0.5): 1,
    Setup("none", "distributed hybrid", 0.5, bf16=True): 2,
}
"""Each with the number of other ranks that its saves are loaded on."""
ALL = (
    [
        Setup(sharding, "hybrid", fraction, bf16)
        for sharding in ("none", *SHARDINGS)
        for fraction in (0.0, 0.5, 1.0)
        for bf16 in (False, True)
    ]
    + [
        Setup("none", optimizer, fraction, bf16)
        for optimizer in ("distributed", "distributed hybrid")
        for fraction in (0.0, 0.5, 1.0)
        for bf16 in (False, True)
        if fraction == 0.0 or "hybrid" in optimizer
    ]
    + [
        Setup("none", "distributed", bf16=True, aware=True),
        Setup("fsdp2", "hybrid", 1.0, bf16=True, aware=True),
        Setup("none", "distributed hybrid", 0.5, bf16=True, aware=True),
        *(Setup(f"flat {strategy}", "hybrid", 0.5, bf16=True, aware=True) for strategy in STRATEGIES),
        *(Setup(f"flat {strategy}", "hybrid", 0.5, mixed=True) for strategy in STRATEGIES),
    ]
)
TENSOR_PARALLEL = [
    Setup("fsdp2", "hybrid", 0.5, tensor=2),
    Setup("flat all", "hybrid", 0.5, tensor=2),
    Setup("none", "distributed hybrid", 0.5, tensor=2),
]

Size = tuple[int, int]
"""Number of ranks, and tensor-parallel size."""


def train_save_and_resume(
    root: str, setup: Setup, sizes: list[Size], saves: tuple[int, ...]
) -> dict[str, Any]:
    """Trains and saves on the first size. Each save is loaded there, on all other sizes, and there again.

    Returns:
        What is wrong, by aspect: names, or losses.
    """
    found: dict[str, Any] = {}
    with Worlds(sizes[0][0]) as worlds:
        first = Job(setup, worlds, sizes[0][0])
        losses: list[float] = []
        for start, stop in zip((0, *saves), (*saves, END), strict=True):
            losses += first.train(start, stop)
            if stop in saves:
                first.save(f"{root}/{stop}")
        if rank() == 0:
            for saved in saves:
                stored = content(f"{root}/{saved}")
                if setup.bf16:
                    found[f"{saved}: masters"] = _masters(stored, worlds, f"{root}/{saved}")
                elif not setup.mixed:
                    found[f"{saved}: not plain training"] = _unlike_plain(stored, worlds, saved)
        for saved in saves:
            again = Job(setup, worlds, sizes[0][0], seed=2)
            again.load(f"{root}/{saved}")
            found[f"{saved}: losses"] = again.train(saved, END) != losses[saved:]
            found[f"{saved}: trained on"] = unequal(again.memory(), first.memory())
        for saved in saves:
            at = f"{root}/{saved}"
            for n, tensor in sizes[1:]:
                if rank() >= n:
                    break
                to = f"{root}/{saved} on {n}"
                found |= _moved(at, to, replace(setup, tensor=tensor), worlds, n, saved, losses)
                at = to
        torch.distributed.barrier()  # the last save may be of fewer ranks than all
        for saved in saves:
            until = min(saved + MOVED, END)
            back = Job(setup, worlds, sizes[0][0], seed=9)
            back.load(f"{root}/{saved} on {sizes[-1][0]}")
            found[f"{saved}, there and back: losses"] = back.train(saved, until) != losses[saved:until]
            if until == END:
                found[f"{saved}, there and back: trained on"] = unequal(back.memory(), first.memory())
    return {aspect: wrong for aspect, wrong in found.items() if wrong}


def _moved(
    at: str, to: str, setup: Setup, worlds: Worlds, n: int, saved: int, losses: list[float]
) -> dict[str, Any]:
    """Loads a checkpoint on other ranks, with other fractions and without offload: all train on alike."""
    found: dict[str, Any] = {}
    jobs = [Job(other, worlds, n, seed=3 + number) for number, other in enumerate(_others(setup))]
    jobs[0].train(0, 2)  # a target may have trained
    for job in jobs:
        job.load(at)
    jobs[0].save(to)
    if rank() == 0:
        found[f"{to}: stored"] = unequal(content(to), content(at))
    until = min(saved + MOVED, END)
    trained = [job.train(saved, until) for job in jobs]
    rough = 2e-2 if setup.bf16 or setup.mixed else 1e-5
    expected = torch.tensor(losses[saved:until])
    for job, own in zip(jobs, trained, strict=True):
        found[f"{to}: {job.setup}: losses"] = own != trained[0]
        found[f"{to}: {job.setup}: trained on"] = unequal(job.memory(), jobs[0].memory())
        if not torch.allclose(torch.tensor(own), expected, rtol=rough, atol=0):
            found[f"{to}: {job.setup}: far losses"] = own, losses[saved:until]
    return found


def _unlike_plain(stored: dict[str, Any], worlds: Worlds, steps: int) -> list[str]:
    """Keys whose values differ, by more than rounding, from those of AdamW on one rank."""
    job = Job(Setup(), worlds, 1)
    job.train(0, steps)
    expected = {f"model.{name}": parameter for name, parameter in job.net.named_parameters()}
    for name, parameter in job.net.named_parameters():
        slots = job.optimizer.state.get(parameter, {})
        expected |= {f"optimizer.{name}.{slot}": item for slot, item in slots.items()}
    found = {key: value for key, value in stored.items() if not key.endswith("@options")}
    wrong = sorted(found.keys() ^ expected.keys())
    for key in found.keys() & expected.keys():
        if not torch.allclose(found[key], expected[key], rtol=1e-3, atol=1e-5):
            wrong.append(key)
    return wrong


def _masters(stored: dict[str, Any], worlds: Worlds, path: str) -> list[str]:
    """Parameters that are not their fp32 master's rounding, or whose fp32 target is not the master."""
    target = Job(Setup(), worlds, 1, seed=4)
    target.load(path, cast=True)
    wrong = []
    for name, parameter in target.net.named_parameters():
        master = stored[f"optimizer.{name}.master"]
        if not torch.equal(master.bfloat16(), stored[f"model.{name}"]):
            wrong.append(name)
        if not torch.equal(parameter, master):
            wrong.append(f"{name} of a target without masters")
    return wrong


def _others(setup: Setup) -> list[Setup]:
    """Other fractions, and none: a plain optimizer, where nothing needs a master."""
    fractions = [
        replace(setup, fraction=fraction) for fraction in (0.0, 0.5, 1.0) if fraction != setup.fraction
    ]
    if "hybrid" not in setup.optimizer:
        return [setup]
    if setup.optimizer == "hybrid" and setup.bf16:
        return fractions
    plain = "adamw" if setup.optimizer == "hybrid" else "distributed"
    return [*fractions, replace(setup, optimizer=plain, fraction=0.0)]


def check(root: Path, setup: Setup, sizes: list[Size], saves: tuple[int, ...] = SAVED) -> None:
    ranks = sizes[0][0]
    outcomes = run_ranks(ranks, train_save_and_resume, str(root), setup, sizes, saves, timeout=180)
    assert [outcome.value for outcome in outcomes] == [{}] * ranks


@pytest.mark.parametrize(("setup", "ranks"), FAST.items(), ids=str)
def test_a_loaded_job_trains_on_bit_for_bit(setup: Setup, ranks: int, tmp_path: Path) -> None:
    check(tmp_path, setup, [(3, 1), (ranks, 1)], SAVED[1:])


@pytest.mark.slow
@pytest.mark.parametrize("setup", ALL, ids=str)
def test_a_loaded_job_trains_on_bit_for_bit_in_every_combination(setup: Setup, tmp_path: Path) -> None:
    check(tmp_path, setup, [(3, 1), (2, 1), (1, 1)])


def test_a_loaded_job_trains_on_without_tensor_parallelism(tmp_path: Path) -> None:
    check(tmp_path, TENSOR_PARALLEL[-1], [(4, 2), (3, 1)], SAVED[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("setup", TENSOR_PARALLEL, ids=str)
def test_a_loaded_job_trains_on_with_every_tensor_parallel_size(setup: Setup, tmp_path: Path) -> None:
    check(tmp_path, setup, [(4, 2), (3, 1), (2, 2), (1, 1)])

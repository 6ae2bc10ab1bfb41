"""A process group that is destroyed and made again in the same processes: saves and restores work in each."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.errors import RankSilent, StructureError
from tests import harness
from tests.harness import Job, reach, run_ranks
from tests.newer_torch import OLDER

Lives = list[list[int]]
"""The ranks of each process group, in order. A life is the time of one process group."""


def save_in_each(folder: str, lives: Lives, address: str) -> list[Any]:
    """Returns for each life the restored step and the saved value. All ranks begin a life together."""
    seen: list[Any] = []
    for number, ranks in enumerate(lives, 1):
        reach(f"life {number}")
        if harness.rank() not in ranks:
            seen.append(None)
            continue
        join_group(number, len(ranks), address)
        try:
            checkpointer = sp.Checkpointer(folder, deadline=20.0)
            state = {"weight": torch.zeros(4)}
            restored = checkpointer.restore(state)
            state["weight"] += 1
            checkpointer.save(number, state).result()
            seen.append((restored, int(state["weight"][0])))
        finally:
            dist.destroy_process_group()
    return seen


def join_group(number: int, world_size: int, address: str) -> None:
    """A process group at an address of the environment, or at a store that outlives it."""
    store = None
    if address == "one store":
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    elif address == "new":
        os.environ["MASTER_PORT"] = os.environ[f"PORT_{number}"]
    dist.init_process_group("gloo", store=store, rank=harness.rank(), world_size=world_size)


def run_lives(folder: str, lives: Lives, address: str) -> list[Any]:
    world_size = max(max(ranks) for ranks in lives) + 1

    def script(job: Job) -> None:
        for number in range(1, len(lives) + 1):
            for rank in range(world_size):
                job.until_held(rank, f"life {number}")
            for rank in range(world_size):
                job.go(rank)

    environment = {}
    for number in range(1, len(lives) + 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment[f"PORT_{number}"] = str(free.getsockname()[1])
    # In a store that outlives a life, gloo finds the addresses of that life, and may connect to them.
    environment["TORCH_GLOO_LAZY_INIT"] = "1"
    points = [f"life {number}" for number in range(1, len(lives) + 1)]
    outcomes = run_ranks(
        world_size,
        save_in_each,
        folder,
        lives,
        address,
        hold=dict.fromkeys(range(world_size), points),
        script=script,
        store="parent" if address == "one store" else "rank 0",
        environment=environment,
    )
    return [outcome.value for outcome in outcomes]


one_store = pytest.param(
    "one store",
    marks=pytest.mark.skipif(OLDER, reason="an older gloo connects to the addresses of an earlier group"),
)


@pytest.mark.parametrize("address", ["same", "new", one_store])
@pytest.mark.parametrize("lives", [[[0, 1]] * 3, [[0, 1], [0, 1, 2], [0], [0, 1]]], ids=["same", "other"])
def test_saves_in_each_process_group(tmp_path: Any, lives: Lives, address: str) -> None:
    seen = run_lives(str(tmp_path / "run"), lives, address)
    for rank, values in enumerate(seen):
        expected = [
            ((number - 1) or None, number) if rank in ranks else None for number, ranks in enumerate(lives, 1)
        ]
        assert values == expected


def keep_the_checkpointer(folder: str) -> list[str]:
    """Uses the checkpointer of one process group in the next, smaller one. Returns its error texts."""
    join_group(1, 2, "one store")
    checkpointer, state = sp.Checkpointer(folder, deadline=20.0), {"weight": torch.ones(4)}
    checkpointer.save(1, state).result()
    dist.destroy_process_group()
    if harness.rank() == 1:
        return []
    join_group(2, 1, "one store")
    texts = []
    for again in (partial(checkpointer.save, 2, state), partial(checkpointer.restore, state)):
        with pytest.raises(StructureError) as caught:
            again()
        texts.append(caught.value.message)
    sp.Checkpointer(folder).save(2, state).result()
    dist.destroy_process_group()
    return texts


def test_a_checkpointer_of_another_process_group_says_what_to_do(tmp_path: Any) -> None:
    first, second = run_ranks(2, keep_the_checkpointer, str(tmp_path / "run"))
    assert second.value == []
    for text in first.value:
        assert "rank 0 of 1" in text and "rank 0 of 2" in text
        assert "Make a new Checkpointer after init_process_group" in text


def keep_the_checkpointer_of_a_store_that_ended(folder: str) -> str:
    join_group(1, 2, "same")
    checkpointer, state = sp.Checkpointer(folder, deadline=20.0), {"weight": torch.ones(4)}
    checkpointer.save(1, state).result()
    dist.destroy_process_group()
    reach("made again")
    join_group(2, 2, "same")
    with pytest.raises(RankSilent) as caught:
        checkpointer.save(2, state).result()
    sp.Checkpointer(folder).save(2, state).result()
    dist.destroy_process_group()
    return caught.value.message


def test_a_checkpointer_whose_store_ended_with_its_group_says_what_to_do(tmp_path: Any) -> None:
    def script(job: Job) -> None:
        for rank in range(2):
            job.until_held(rank, "made again")
        for rank in range(2):
            job.go(rank)

    hold = dict.fromkeys(range(2), "made again")
    path = str(tmp_path / "run")
    for outcome in run_ranks(
        2, keep_the_checkpointer_of_a_store_that_ended, path, hold=hold, script=script, store="rank 0"
    ):
        assert "after another init_process_group, make a new Checkpointer" in outcome.value

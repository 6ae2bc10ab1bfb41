"""The processors of its node that a rank may use, by the variables of launchers."""

from __future__ import annotations

import os

import pytest

from shardproof._utils import topology
from shardproof.engine.loading.read_executor import reading_threads

NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher has set a variable. All 64 processors are usable."""
    for name in (*NAMES, "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    return monkeypatch


def test_a_rank_is_alone_without_a_launcher(launched: pytest.MonkeyPatch) -> None:
    assert topology.ranks_here() == 1 and topology.processors() == 64 and reading_threads() == 8


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_launcher_sets_the_number_of_ranks_on_a_node(launched: pytest.MonkeyPatch, name: str) -> None:
    launched.setenv(name, "16")
    assert topology.ranks_here() == 16 and topology.processors() == 4 and reading_threads() == 4


@pytest.mark.parametrize("text", ["", "0", "-1", "many"])
def test_invalid_numbers_are_ignored(launched: pytest.MonkeyPatch, text: str) -> None:
    for name in (*NAMES, "SLURM_NODEID"):
        launched.setenv(name, text)
    assert topology.ranks_here() == 1


@pytest.mark.parametrize(
    ("tasks", "expected"), [("8", [8]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])]
)
def test_slurm_counts_by_node(launched: pytest.MonkeyPatch, tasks: str, expected: list[int]) -> None:
    launched.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    found = []
    for number in range(len(expected)):
        launched.setenv("SLURM_NODEID", str(number))
        found.append(topology.ranks_here())
    assert found == expected
    launched.setenv("SLURM_NODEID", str(len(expected)))
    assert topology.ranks_here() == 1


def test_a_rank_that_is_bound_to_processors_has_them_for_itself(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "16")
    launched.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5}, raising=False)
    assert topology.processors() == 3 and reading_threads() == 3


def test_ranks_that_are_bound_to_the_same_processors_share_them(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "4")
    launched.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert topology.processors() == 8


def test_more_ranks_than_processors_share_them(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "128")
    assert topology.processors() == 0.5 and reading_threads() == 1

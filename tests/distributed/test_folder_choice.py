"""Every rank resumes from the folder that rank 0 chooses, even if it sees other folders."""

from __future__ import annotations

import pytest

import shardproof as sp
from shardproof.frameworks.shared.folder_saves import FolderSaves
from tests.harness import rank, run_ranks

pytestmark = pytest.mark.processes


def choose(kind: str) -> list[str | None]:
    own = f"run/checkpoint-{rank()}"

    def fail() -> str:
        raise OSError("stale file handle")

    find = {"path": lambda: own, "none": lambda: own if rank() else None, "failure": fail}[kind]
    return [FolderSaves().choose("run", find) for _ in range(2)]


@pytest.mark.parametrize(("kind", "expected"), [("path", "run/checkpoint-0"), ("none", None)])
def test_the_choice_is_that_of_rank_0(kind: str, expected: str | None) -> None:
    assert [outcome.value for outcome in run_ranks(3, choose, kind, timeout=60)] == [[expected] * 2] * 3


def find_format(fails: bool) -> bool:
    def ask() -> bool:
        if fails:
            raise OSError("stale file handle")
        return rank() == 0

    return FolderSaves().agree("run/checkpoint-1", ask)


def test_the_format_is_what_rank_0_finds() -> None:
    assert [outcome.value for outcome in run_ranks(2, find_format, False, timeout=60)] == [True, True]
    for outcome in run_ranks(2, find_format, True, timeout=60):
        assert isinstance(outcome.error, sp.RankFailure) and "stale file handle" in str(outcome.error)


def test_a_failed_choice_fails_on_every_rank() -> None:
    for outcome in run_ranks(2, choose, "failure", timeout=60):
        assert isinstance(outcome.error, sp.RankFailure) and "stale file handle" in str(outcome.error)

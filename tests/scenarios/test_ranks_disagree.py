"""Ranks that call with different arguments all get an error, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks


def _disagree(root: str) -> list[str]:
    meeting = rendezvous(deadline=10)
    checkpointer = sp.Checkpointer(root, rendezvous=meeting)
    state = {"w": torch.ones(3)}
    checkpointer.save(1, state).result()
    checkpointer.save(2, state).result()
    first = rank() == 0
    calls = [
        lambda: checkpointer.restore({"w": torch.zeros(3)}, step=None if first else 1),
        lambda: checkpointer.restore({"w": torch.zeros(3)}, strict=first),
        lambda: checkpointer.save(2, state, overwrite=first).result(),
        lambda: checkpointer.save(3, state, metadata={"rank": rank()}).result(),
        lambda: checkpointer.save(3 + rank(), state).result(),
        lambda: checkpointer.save(3, {"gen": torch.Generator().manual_seed(rank())}).result(),
    ]
    ends = []
    for call in calls:
        try:
            call()
            ends.append("done")
        except sp.StructureError as error:
            ends.append(error.message)
    assert checkpointer.steps() == [1, 2]
    checkpointer.save(5, state).result()
    return ends


def test_calls_with_different_arguments_are_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _disagree, str(tmp_path), timeout=60)
    ends = outcomes[0].value
    assert outcomes[1].value == ends
    for text, expected in zip(
        ends,
        ["different steps", "strict=", "overwrite=", "metadata", "step-00000003", "sp.PerRank"],
        strict=True,
    ):
        assert expected in text

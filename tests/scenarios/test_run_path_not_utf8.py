"""A run whose path is not UTF-8, on two ranks: posts, answers and errors carry it in valid Unicode."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import shardproof as sp
from tests.harness import rendezvous, run_ranks


def save_and_restore(root: str) -> tuple[int | None, list[str]]:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10), keep=sp.KeepLatest(1))
    state = {"w": torch.ones(10), "own": sp.PerRank(torch.ones(2))}
    for step in (1, 2):
        checkpointer.save(step, state).result()
    texts = []
    for fail in (
        lambda: checkpointer.save(2, state).result(),
        lambda: checkpointer.restore({"other": torch.ones(1)}),
        lambda: checkpointer.restore(state, step=1),
    ):
        try:
            fail()
        except sp.ShardproofError as error:
            texts.append(str(error))
    return checkpointer.restore(state), texts


def test_two_ranks(tmp_path: Path) -> None:
    root = os.path.join(tmp_path, os.fsdecode(b"caf\xe9"))
    for outcome in run_ranks(2, save_and_restore, root):
        step, texts = outcome.value
        assert step == 2 and len(texts) == 3
        assert all(r"/caf\xe9/step-" in text for text in texts)

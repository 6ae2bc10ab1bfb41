"""Ranks pin a step together, and restore the best step that rank 0 sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks


def _pin(root: str) -> tuple[list[int], str, int | None, float]:
    keep = sp.KeepLatest(1) | sp.KeepBest("loss")
    checkpointer = sp.Checkpointer(root, keep=keep, rendezvous=rendezvous(deadline=60.0))
    refused = ""
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.3)):
        state = {"w": torch.full((4,), float(step))}
        checkpointer.save(step, state, metadata={"loss": loss}).result()
        if step == 1:
            with pytest.raises(sp.StructureError) as caught:
                checkpointer.pin(1, f"rank {rank()}")
            refused = caught.value.message
            assert checkpointer.pins() == {}
            checkpointer.pin(1, "baseline")
    target = {"w": torch.zeros(4)}
    best = checkpointer.restore(target, step="best")
    return checkpointer.steps(), refused, best and int(best), float(target["w"][0])


def test_ranks_pin_alike_and_restore_the_best_step(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _pin, str(tmp_path)):
        steps, refused, best, value = outcome.value
        assert steps == [1, 2, 4]
        assert "rank 0 and rank 1 pin different steps, or with different labels" in refused
        assert (best, value) == (2, 2.0)

"""The value that a restore returns is the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

RANKS = 2


def _restore(root: str) -> tuple[sp.RestoredStep | None, bool]:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10))
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((1000,), float(step))}).result()
    if rank() == 0:
        (shard,) = Path(root, "step-00000002", "shards").iterdir()
        raw = bytearray(shard.read_bytes())
        raw[-1000] ^= 1
        shard.write_bytes(raw)
    checkpointer.save(0, {"w": torch.zeros(1)}).result()  # all ranks wait for the damage
    found = checkpointer.restore({"w": torch.zeros(1000)})
    return found, found is not None and found.report is checkpointer.last_restore


def test_all_ranks_get_the_same_step_and_reasons(tmp_path: Path) -> None:
    found = [outcome.value for outcome in run_ranks(RANKS, _restore, str(tmp_path))]
    steps = [step for step, _ in found]
    assert [type(step) for step in steps] == [sp.RestoredStep] * RANKS
    assert steps == [1] * RANKS and all(own_report for _, own_report in found)
    assert [item.step for item in steps[0].passed_over] == [2]
    assert "digest" in steps[0].passed_over[0].reason
    assert steps[0].passed_over == steps[1].passed_over

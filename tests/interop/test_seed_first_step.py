"""A save before the first optimizer step fails on one rank, and the others wait: replayed with Megatron-Core.

`DistributedOptimizer.sharded_state_dict` reads moments that exist only after the first step, and then gathers
them over the data parallel ranks. A rank whose shard is padding reads none, so it waits for the others in the
gather.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.peer import PeerTimedOut, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
SCRIPT = "seed_first_step.py"


def test_megatron_fails_on_one_rank_and_the_other_hangs(tmp_path: Path) -> None:
    with pytest.raises(PeerTimedOut) as caught:
        run_peer("megatron", SCRIPT, "own", tmp_path / "own", nproc=2, timeout=75)
    text = str(caught.value)
    assert "rank 0 failed: KeyError: 'exp_avg'" in text
    assert "rank 1 is back" not in text and not (tmp_path / "own").exists()


def test_shardproof_saves_and_loads_before_and_after_the_step(tmp_path: Path) -> None:
    """The script asserts that training goes on to the same bits from both, in fresh and in stepped
    optimizers."""
    facts = run_peer("megatron", SCRIPT, "ours", tmp_path, nproc=2, timeout=240).facts
    assert facts["before"] == ["optimizer.state.param.weight", "weight"]
    assert facts["after"] == sorted(
        ["weight", *(f"optimizer.state.{slot}.weight" for slot in ("param", "exp_avg", "exp_avg_sq"))]
    )


def test_megatrons_sharded_state_dict_works_with_the_drop_in(tmp_path: Path) -> None:
    """`fully_reshardable` before the first step: moments of zeros on the rank that has the weight.

    The script asserts that training goes on to the same bits, as above, and that a save leaves the optimizer
    without moments.
    """
    facts = run_peer("megatron", SCRIPT, "drop_in", tmp_path, nproc=2, timeout=240).facts
    keys = sorted(
        ["weight", *(f"optimizer.state.{slot}.weight" for slot in ("param", "exp_avg", "exp_avg_sq"))]
    )
    assert facts["before"] == facts["after"] == keys

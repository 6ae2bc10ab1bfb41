"""A cached plan outlives a change of the state, and an entry is dropped: replayed with Megatron-Core.

Megatron's strategy with a cached structure (`--ckpt-assume-constant-structure`) reuses the local plan of the
save before, without a look at the state. In 0.16.1 the state of the rerun state machine appears when a step
is to run again, which is when it matters. In 0.19.2 the machine always has its state; any other new entry is
dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.peer import PeerResult, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def replay(environment: str, who: str, folder: Path) -> PeerResult:
    """Two saves with the strategy of Megatron (`own`) or of shardproof (`ours`), on two ranks."""
    arguments = (who, folder / who)
    return run_peer(environment, "seed_cached_plan.py", *arguments, nproc=2, timeout=240)


@pytest.mark.parametrize(
    ("environment", "machine_appears", "key"),
    [("megatron16", True, "rerun_state_machine_state"), ("megatron", False, "more")],
)
def test_a_new_entry_is_dropped_by_megatron_and_saved_by_us(
    environment: str, machine_appears: bool, key: str, tmp_path: Path
) -> None:
    own = replay(environment, "own", tmp_path).facts
    assert (own["machine_appears"], own["found"]) == (machine_appears, [])  # no error, no entry
    ours = replay(environment, "ours", tmp_path).facts
    assert ours["found"] == [f"{key}/shard_0_2", f"{key}/shard_1_2"]

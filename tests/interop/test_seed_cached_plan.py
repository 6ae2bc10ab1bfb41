"""A cached plan outlives a change of the state, and an entry is dropped: replayed with Megatron-Core.

Megatron's strategy with a cached structure (`--ckpt-assume-constant-structure`) reuses the local plan of the
save before, without a look at the state. New tensors and objects are dropped, and an object in the place of a
tensor is an error. In 0.16.1 the state of the rerun state machine appears when a step is to run again, which
is when it matters. In 0.19.2 the machine always has its state. With shardproof, no change is dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.peer import PeerResult, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def replay(environment: str, who: str, folder: Path, change: str) -> PeerResult:
    """Two saves with the strategy of Megatron (`own`) or of shardproof (`ours`), on two ranks."""
    arguments = (who, folder / who, change)
    return run_peer(environment, "seed_cached_plan.py", *arguments, nproc=2, timeout=240)


NEW = [
    ("megatron16", "machine"),
    *(
        (environment, change)
        for environment in ("megatron16", "megatron")
        for change in ("object", "tensor", "one_rank")
    ),
]


@pytest.mark.parametrize(("environment", "change"), NEW)
def test_a_new_entry_is_dropped_by_megatron(environment: str, change: str, tmp_path: Path) -> None:
    """No rank raises, and the checkpoint lacks the entry. The machine of 0.19.2 always has its state."""
    own = replay(environment, "own", tmp_path, change).facts
    assert own["appears"] == (environment == "megatron16")
    assert (own["errors"], own["found"]) == (["", ""], [])


@pytest.mark.parametrize("environment", ["megatron16", "megatron"])
def test_a_replaced_entry_is_an_error_of_megatron(environment: str, tmp_path: Path) -> None:
    """The tensor that the cached plan writes is not in the state."""
    errors = replay(environment, "own", tmp_path, "replaced").facts["errors"]
    assert errors == ["ValueError: Could not find FQN: 'more'"] * 2


@pytest.mark.parametrize(
    ("environment", "change", "key"),
    [("megatron16", "machine", "rerun_state_machine_state"), ("megatron", "object", "more")],
)
def test_a_new_entry_is_saved_by_us(environment: str, change: str, key: str, tmp_path: Path) -> None:
    facts = replay(environment, "ours", tmp_path, change).facts
    assert facts["found"] == [f"{key}/shard_0_2", f"{key}/shard_1_2"]


@pytest.mark.parametrize(
    ("change", "found", "values"),
    [
        ("tensor", ["more"], [[5.0, 5.0], [6.0, 6.0]]),
        ("replaced", ["more/shard_0_2", "more/shard_1_2"], [7, 7]),
        ("one_rank", ["more/shard_0_1"], [None, 7]),
    ],
)
def test_no_change_of_the_state_is_dropped_by_us(
    change: str, found: list[str], values: list[object], tmp_path: Path
) -> None:
    """The second save has a plan in its cache. What it stored loads with its new value."""
    facts = replay("megatron", "ours", tmp_path, change).facts
    assert (facts["found"], facts["values"]) == (found, values)

"""Several writers of one chunk, and slices that come back as zeros: replayed with Megatron-Core.

Flat ranges of an optimizer share a chunk of a Zarr array. The Zarr strategy of Megatron-Core 0.11.0 loses the
ranges of all ranks but one. Megatron-Core 0.16.1 and 0.19.2 write neither flat ranges nor Zarr.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from shardproof.engine.foreign import foreign_of
from shardproof.runs.maintenance import verify_any
from tests.interop.peer import assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("lost", "witnesses"),
    [
        (["fp32_param", "exp_avg_sq"], ["weight", "optimizer.state.exp_avg.weight"]),
        (["exp_avg"], []),
    ],
    ids=",".join,
)
def test_the_zarr_strategy_loses_ranges_without_an_error(
    lost: list[str], witnesses: list[str], tmp_path: Path
) -> None:
    """The save and Megatron's own load succeed. `verify` names ranges that another tensor contradicts.

    Zeros in first moments contradict nothing.
    """
    result = run_peer(
        "megatron11", "seed_zarr_strategy.py", tmp_path / "own", ",".join(lost), nproc=3, timeout=240
    )
    slots = ("fp32_param", "exp_avg", "exp_avg_sq")
    zeros = [{slot: 16 if rank and slot in lost else 0 for slot in slots} for rank in range(3)]
    assert result.facts["zeros"] == zeros
    with sp.open(tmp_path / "own") as checkpoint:
        for slot in slots:
            found = checkpoint[f"optimizer.state.{slot}.weight"].read().flatten()
            assert found[:16].all() and bool(found[16:].any()) == (slot not in lost)
    report = verify_any(foreign_of(tmp_path / "own"))
    assert "second moments of Adam, and not in other tensors" in " ".join(report.notes)
    found_by = dict(zip(lost, witnesses, strict=False))
    assert len(report.faults) == len(found_by)
    for slot, witness in found_by.items():
        place = "is 0 at 32 elements from [2, 0] to [5, 7]"
        expected = f"optimizer.state.{slot}.weight {place}, where {witness} is not"
        assert any(expected in fault.message for fault in report.faults), report.faults


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
def test_megatron_has_no_flat_ranges_and_shardproof_saves_them(environment: str, tmp_path: Path) -> None:
    """Three ranks write ranges that begin and end within rows; each loads the range of another."""
    saved = run_peer(environment, "seed_flat_ranges.py", tmp_path / "step", nproc=3, timeout=240)
    assert "flattened_range is not supported" in saved.facts["flattened_range"]
    assert saved.facts["zarr"] is False
    with sp.open(tmp_path / "step") as checkpoint:
        assert_same_tensors({"w": checkpoint["w"].read()}, saved.tensors)

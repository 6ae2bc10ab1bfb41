"""Several writers of one chunk, and slices that come back as zeros: replayed with Megatron-Core.

Flat ranges of an optimizer share a chunk of a Zarr array. The Zarr strategy of Megatron-Core 0.11.0 loses the
ranges of all ranks but one. Megatron-Core 0.16.1 and 0.19.2 write neither flat ranges nor Zarr.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from shardproof.interop import foreign_of
from shardproof.maintenance import verify_any
from tests.interop.peer import assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def test_the_zarr_strategy_loses_ranges_without_an_error(tmp_path: Path) -> None:
    """The save and Megatron's own load succeed. The format has nothing that could prove the loss."""
    facts = run_peer("megatron11", "seed_zarr_strategy.py", tmp_path / "own", nproc=3, timeout=240).facts
    assert facts["zeros"] == [0, 16, 16]
    with sp.open(tmp_path / "own") as checkpoint:
        found = checkpoint["optimizer.state.exp_avg.weight"].read().flatten()
    assert found.tolist() == [*range(1, 17), *[0] * 32]
    report = verify_any(foreign_of(tmp_path / "own"))
    assert report.ok and "writers of one chunk lost reads as zeros" in " ".join(report.notes)


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
def test_megatron_has_no_flat_ranges_and_shardproof_saves_them(environment: str, tmp_path: Path) -> None:
    """Three ranks write ranges that begin and end within rows; each loads the range of another."""
    saved = run_peer(environment, "seed_flat_ranges.py", tmp_path / "step", nproc=3, timeout=240)
    assert "flattened_range is not supported" in saved.facts["flattened_range"]
    assert saved.facts["zarr"] is False
    with sp.open(tmp_path / "step") as checkpoint:
        assert_same_tensors({"w": checkpoint["w"].read()}, saved.tensors)

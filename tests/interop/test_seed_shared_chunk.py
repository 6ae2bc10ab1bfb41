"""Several writers of one chunk, and slices that come back as zeros: replayed with zarr-python.

Flat ranges of an optimizer may share a chunk of a Zarr array. Megatron-Core 0.16.1 and 0.19.2 write neither
flat ranges nor Zarr. So zarr-python shows the loss, and Megatron-Core the refusal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from tests.interop.peer import assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]


def test_zarr_loses_slices_without_an_error(tmp_path: Path) -> None:
    facts = run_peer("zarr", "seed_shared_chunk.py", tmp_path / "array.zarr", timeout=300).facts
    assert facts["lost"] > 0


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
def test_megatron_has_no_flat_ranges_and_shardproof_saves_them(environment: str, tmp_path: Path) -> None:
    """Three ranks write ranges that begin and end within rows; each loads the range of another."""
    saved = run_peer(environment, "seed_flat_ranges.py", tmp_path / "step", nproc=3, timeout=240)
    assert "flattened_range is not supported" in saved.facts["flattened_range"]
    assert saved.facts["zarr"] is False
    with sp.open(tmp_path / "step") as checkpoint:
        assert_same_tensors({"w": checkpoint["w"].read()}, saved.tensors)

"""Boxes of foreign checkpoints: neighbours that share a read, and parts of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import shardproof as sp
from shardproof.errors import CorruptChunkError


def _state() -> dict[str, torch.Tensor]:
    """Small tensors of odd bytes, so that neighbours begin anywhere, and larger ones of several layouts."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for number in range(40):
        size = (number + 1,)
        state[f"bytes.{number}"] = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
        state[f"turned.{number}"] = torch.randn(3, number + 2, generator=generator).t()
        state[f"short.{number}"] = torch.randn(5, 4, generator=generator)
    state["long"] = torch.randn(1024, 700, generator=generator)
    state["long.turned"] = torch.randn(700, 600, generator=generator).t()
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boxes") / "dcp"
    save(_state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_whole_tensors_rows_and_columns_have_their_bits(saved: Path, dtype: torch.dtype | None) -> None:
    state = _state()
    target = {key: torch.zeros_like(value, dtype=dtype or value.dtype) for key, value in state.items()}
    sp.load(saved, target, cast=dtype is not None)
    for key, value in state.items():
        assert torch.equal(target[key], value.to(target[key].dtype)), key
    with sp.open(saved) as checkpoint:
        for key in ("long", "long.turned", "short.7", "turned.9"):
            value = state[key]
            rows, columns = value.shape[0] // 3, value.shape[1] // 2
            assert torch.equal(checkpoint[key][rows : 2 * rows + 1], value[rows : 2 * rows + 1]), key
            assert torch.equal(checkpoint[key][:, columns:], value[:, columns:]), key


def test_a_changed_byte_among_neighbours_is_found(saved: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "dcp"
    damaged.mkdir()
    for file in saved.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".distcp":
            needle = _state()["short.11"].numpy().tobytes()
            data[data.index(needle) + 17] ^= 1
        (damaged / file.name).write_bytes(data)
    target = {key: torch.zeros_like(value) for key, value in _state().items()}
    with pytest.raises(CorruptChunkError, match="80 bytes"):
        sp.load(damaged, target)

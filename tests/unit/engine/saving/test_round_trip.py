"""A save and a load in one process keep every bit, for every dtype and every kind of view."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import shardproof as sp
from shardproof.dtypes import DTYPES
from shardproof.engine.format import parse_header, start_in_page
from shardproof.engine.loading import load_from
from shardproof.engine.saving import Saver
from shardproof.errors import StructureError
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _random(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random bits, so NaN payloads and denormals are among them; booleans are 0 or 1."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2).view(dtype) if dtype == torch.bool else raw.view(dtype)


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_keeps_its_bits(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    source = {
        "vector": _random(dtype, 24),
        "matrix": _random(dtype, 24).view(4, 6),
        "scalar": _random(dtype, 1)[0],
    }
    sp.save(tmp_path / "c", source)
    target = {key: _random(dtype, value.numel()).view(value.shape) for key, value in source.items()}
    sp.load(tmp_path / "c", target)
    assert {key: _bits(value) for key, value in target.items()} == {
        key: _bits(value) for key, value in source.items()
    }
    with sp.open(tmp_path / "c") as checkpoint:
        assert checkpoint.dtype("matrix") == name
        assert _bits(checkpoint["matrix"].read()) == _bits(source["matrix"])


def test_every_dtype_at_once_is_aligned_for_any_safetensors_reader(tmp_path: Path) -> None:
    state = {
        f"{name}{count}": _random(getattr(torch, name), count)
        for name in DTYPES
        if hasattr(torch, name)
        for count in (1, 3, 5)
    }
    sp.save(tmp_path / "c", state)
    (shard,) = (tmp_path / "c" / "shards").iterdir()
    with safe_open(shard, "pt") as file:
        keys = set(file.keys())
        for key, value in state.items():
            assert _bits(file.get_tensor(f"{key}[0:{value.numel()}]")) == _bits(value)
    assert {"@digests"} <= keys


@pytest.mark.parametrize("small", [0, 1, 700, 5000])
def test_large_chunks_start_at_a_page_offset_far_from_that_of_tensors(small: int, tmp_path: Path) -> None:
    state = {"a": torch.randn(64, 1024), "b": torch.randn(64, 1024), "c": torch.randn(small)}
    sp.save(tmp_path, state)
    (shard,) = (tmp_path / "shards").iterdir()
    header = parse_header(shard.read_bytes(), shard.stat().st_size, "f")
    starts = {name[0]: start for name, _, _, start, _ in header.entries}
    assert header.data_start % 64 == 0
    assert starts["c" if small else "a"] == header.data_start
    assert starts["a"] % 4096 == starts["b"] % 4096
    assert 1856 <= starts["a"] % 4096 < 1856 + 64
    with safe_open(shard, "pt") as file:
        assert all(torch.equal(file.get_tensor(key), state[key[0]]) for key in file.keys() if key[0] != "@")  # noqa: SIM118


def test_the_dtype_with_most_bytes_decides_the_page_offset_of_large_chunks(tmp_path: Path) -> None:
    state = {
        "bias": torch.zeros(100, dtype=torch.bfloat16),
        "weight": torch.zeros(64, 1024, dtype=torch.bfloat16),
        "moment": torch.zeros(64, 1024),
        "scale": torch.zeros(77),
    }
    sp.save(tmp_path, state)
    (shard,) = (tmp_path / "shards").iterdir()
    header = parse_header(shard.read_bytes(), shard.stat().st_size, "f")
    names = [name.split("[")[0] for name, *_ in header.entries]
    assert names[:4] == ["scale", "moment", "bias", "weight"]
    assert 1856 <= header.entries[1][3] % 4096 < 1856 + 64


@given(st.lists(st.integers(0, 1 << 18), max_size=8))
def test_start_in_page_is_the_best_of_all_offsets(counts: list[int]) -> None:
    starts = np.cumsum(counts) - counts

    def gain(in_page: int) -> int:
        """Bytes of large chunks, weighted by nearness to byte 1856: from 0 to 21, in steps of 64 bytes."""
        total = 0
        for start, count in zip(starts.tolist(), counts, strict=True):
            away = abs((in_page + start // 64 * 64 - 1856 + 2048) % 4096 - 2048) // 64
            total += max(21 - away, 0) * count if count >= 65_536 else 0
        return total

    found = start_in_page(np.array(counts, np.int64))
    assert found % 64 == 0 and gain(found) == max(map(gain, range(0, 4096, 64)))


VIEWS: dict[str, Any] = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "strided": lambda: torch.randn(6, 8)[::2, 1::3],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "offset": lambda: torch.randn(20)[7:],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3.5),
    "nothing": lambda: torch.empty(0, 3),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "needs grad": lambda: torch.randn(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_every_kind_of_view_is_saved(kind: str, tmp_path: Path) -> None:
    source = VIEWS[kind]()
    sp.save(tmp_path / "c", {"x": source})
    target = {"x": torch.full(source.shape, 7, dtype=source.dtype)}
    sp.load(tmp_path / "c", target)
    assert torch.equal(target["x"], source.detach())


@pytest.mark.parametrize("kind", sorted(VIEWS.keys() - {"expanded", "needs grad"}))
def test_every_kind_of_view_is_filled_in_place(kind: str, tmp_path: Path) -> None:
    values = torch.randn(VIEWS[kind]().shape).to(VIEWS[kind]().dtype)
    sp.save(tmp_path / "c", {"x": values})
    target = VIEWS[kind]()
    state = {"x": target}
    sp.load(tmp_path / "c", state)
    assert state["x"] is target
    assert torch.equal(target.detach(), values)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 1 << 20])
def test_chunks_of_any_size_give_the_same_values(chunk_bytes: int, tmp_path: Path) -> None:
    state = {
        "a": torch.randn(17, 13),
        "t": torch.randn(13, 17).t(),
        "s": torch.tensor(1.0),
        "z": torch.zeros(0),
    }
    storage = LocalStorage(tmp_path / "c")
    Saver(LocalRendezvous(), chunk_bytes=chunk_bytes).save(storage, state)
    target = {key: torch.full(value.shape, 7.0) for key, value in state.items()}
    load_from(storage, target, LocalRendezvous())
    assert all(torch.equal(target[key], state[key]) for key in state)
    assert verify(storage).ok


def test_a_chunk_larger_than_all_buffers_round_trips(tmp_path: Path) -> None:
    state = {"big": torch.randn(5 << 20), "small": torch.randn(3)}
    storage = LocalStorage(tmp_path / "c")
    Saver(LocalRendezvous(), chunk_bytes=1 << 30).save(storage, state)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    load_from(storage, target, LocalRendezvous())
    assert all(torch.equal(target[key], state[key]) for key in state)


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {}, step=3)
    sp.load(tmp_path / "c", {})
    assert verify(LocalStorage(tmp_path / "c")).ok


def test_metadata_is_plain_data(tmp_path: Path) -> None:
    given = {"tokens": 10**12, "loss": math.inf, "dtype": torch.bfloat16, "tags": ("a", "b")}
    sp.save(tmp_path / "c", {"x": torch.zeros(1)}, metadata=given)
    with sp.open(tmp_path / "c") as checkpoint:
        assert checkpoint.metadata == given


def test_metadata_that_is_not_plain_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(sp.PlainDataError, match="metadata"):
        sp.save(tmp_path / "c", {"x": torch.zeros(1)}, metadata={"f": open})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", [-1, True, 1.5, "3"])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="not an int from 0"):
        sp.save(tmp_path / "c", {}, step=step)
    with pytest.raises(StructureError, match="not an int from 0"):
        sp.Checkpointer(tmp_path).save(step, {}).result()
    assert not any(tmp_path.iterdir())

"""Headers of foreign safetensors files: read with torch's dtypes, and refused if they are false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardproof.errors import FormatError, StorageError
from shardproof.formats.safetensors.safetensors_header import read_safetensors_header
from shardproof.storage import LocalStorage

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def test_every_dtype_of_the_library_is_read_with_its_bytes(tmp_path: Path) -> None:
    state = {
        str(dtype): torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
        for dtype in DTYPES
        if dtype != torch.bool
    }
    state["torch.bool"] = torch.tensor([[True, False, True], [False, True, True]])
    state["empty"] = torch.zeros(0, 4)
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_safetensors_header(LocalStorage(tmp_path), "a.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == state.keys()
    for key, expected in state.items():
        tensor, extent = header.tensors[key], header.extent(key)
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(expected.dtype), tuple(expected.shape))
        memory = bytearray(extent.nbytes)
        extent.read_into(memoryview(memory))
        assert memory == bytes(expected.reshape(-1).view(torch.uint8).numpy() if expected.numel() else b"")


def written(folder: Path, header: Any, data: bytes, length: int | None = None) -> LocalStorage:
    """A file with this header, given as text or as a value for JSON."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    (folder / "a.safetensors").write_bytes(claimed.to_bytes(8, "little") + text + data)
    return LocalStorage(folder)


def entry(begin: int, end: int, dtype: str = "U8", shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), None, "begins at byte 2"),
        ({"a": entry(0, 4), "b": entry(5, 9)}, bytes(9), None, "begins at byte 5"),
        ({"a": entry(0, 4)}, bytes(3), None, "cut short"),
        ({"a": entry(0, 4)}, bytes(5), None, "another file"),
        ({"a": entry(0, 4, "F32")}, bytes(4), None, "cannot have 4 bytes"),
        ({"a": entry(0, 4, "F6_E2M3")}, bytes(4), None, "cannot have 4 bytes"),
        ({"a": entry(0, 4, shape=(-4,))}, bytes(4), None, "a.safetensors"),
        ("{}", b"", 2**62, "claims 4611686018427387904 bytes"),
        ("[]", b"", None, "not a JSON object"),
        ('{"a": 1, "a": 2}', b"", None, "a.safetensors"),
        ("{" + '"a":{' * 100_000, b"", None, "a.safetensors"),
    ],
)
def test_false_headers_are_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    storage = written(tmp_path, header, data, length)
    with pytest.raises(FormatError, match=message):
        read_safetensors_header(storage, "a.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a\.safetensors is missing"):
        read_safetensors_header(LocalStorage(tmp_path), "a.safetensors")

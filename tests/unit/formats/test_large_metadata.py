"""Large metadata is refused before it is read, and a Zarr chunk is not far larger than its array."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardproof as sp
from shardproof.engine.foreign.reader import Foreign
from shardproof.errors import FormatError, PlainDataError
from shardproof.formats.zarr.zarr import ZarrReader
from shardproof.formats.zarr.zarr_codecs import Codec, Codecs
from shardproof.storage import LocalStorage

SPARSE = 3 << 30
"""Bytes of the file, which is a hole. A read of it would need as much memory."""


@pytest.mark.parametrize("name", [".metadata", "manifest.json", ".snapshot_metadata"])
def test_a_sparse_file_of_metadata_is_refused_before_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, SPARSE)
    read = LocalStorage.read

    def counted(storage: LocalStorage, name: str, start: int = 0, stop: int | None = None) -> bytes:
        end = os.path.getsize(storage.path / name) if stop is None and storage.size(name) else stop or 0
        assert end - start < 1 << 20, "the whole file would be read"
        return read(storage, name, start, stop)

    monkeypatch.setattr(LocalStorage, "read", counted)
    with pytest.raises(FormatError, match=r"3221225472 bytes|not that of a manifest"):
        sp.open(tmp_path)


def zarr_array(folder: Path, chunk: int, compressor: Any, data: bytes, shape: int = 4) -> Path:
    document = {
        "zarr_format": 2, "shape": [shape], "chunks": [chunk], "dtype": "|u1", "compressor": compressor,
        "fill_value": 0, "filters": None, "order": "C",
    }  # fmt: skip
    (folder / "a").mkdir(parents=True)
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / "a" / ".zarray").write_text(json.dumps(document))
    (folder / "a" / "0").write_bytes(data)
    return folder


def test_a_chunk_that_is_far_larger_than_the_array_is_refused(tmp_path: Path) -> None:
    small = zarr_array(tmp_path / "small", 1000, {"id": "zlib"}, zlib.compress(bytes(1000)))
    with sp.open(small) as checkpoint:
        assert checkpoint["a"].read().tolist() == [0, 0, 0, 0]
    large = zarr_array(tmp_path / "large", 1 << 30, {"id": "zlib"}, b"")
    shutil.copytree(small / "a", large / "b")
    with sp.open(large) as checkpoint:
        assert checkpoint["b"].read().tolist() == [0, 0, 0, 0]
        with pytest.raises(PlainDataError, match="a is .*a chunk of .* but the array of .* has 4"):
            checkpoint["a"]


def test_an_array_without_elements_may_have_large_chunks(tmp_path: Path) -> None:
    with sp.open(zarr_array(tmp_path, 1 << 30, None, b"", shape=0)) as checkpoint:
        assert checkpoint["a"].read().shape == (0,)


def test_metadata_of_a_storage_that_bounds_a_read_takes_one_request(tmp_path: Path) -> None:
    class Remote(LocalStorage):
        """In place of a bucket: a size takes a request."""

        def read_at_most(self, name: str, most: int) -> bytes:
            assert most == 1 << 30
            return self.read(name)

        def size(self, name: str) -> int | None:
            raise AssertionError("a request for the size")

    (tmp_path / "a.json").write_text("{}")
    reader = ZarrReader(Foreign(LocalStorage(zarr_array(tmp_path / "z", 4, None, bytes(4)))))
    reader.storage = Remote(tmp_path)
    assert reader.read_small("a.json") == b"{}"


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma", "zlib"])
def test_streams_of_several_members_decode(name: str) -> None:
    compress: Callable[[bytes], bytes] = {"gzip": gzip, "bz2": bz2, "lzma": lzma, "zlib": zlib}[name].compress
    members = [np.random.default_rng(at).bytes(300 * at) for at in range(60)]
    stream = b"".join(map(compress, members))
    whole = b"".join(members)
    codecs = Codecs((Codec.of(name, {}),), len(whole))
    assert codecs.decode(stream, "a", 0) == whole
    with pytest.raises(sp.errors.ShardproofError, match="end early|cannot be decoded"):
        codecs.decode(stream[:-1], "a", 0)
    with pytest.raises(sp.errors.ShardproofError, match="bytes, expected"):
        Codecs((Codec.of(name, {}),), len(whole) - 1).decode(stream, "a", 0)


def test_many_members_are_not_copied_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def decompress(self, data: Any, most: int) -> bytes:
            given.append(len(data))
            return bytes(self._inner.decompress(data, most))

    make = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda *args: Counting(make(*args)))
    stream = gzip.compress(b"a") * 20_000
    assert Codecs((Codec.of("gzip", {}),), 20_000).decode(stream, "a", 0) == b"a" * 20_000
    assert sum(given) < 1 << 30, "bytes that decompressors got, and copied after their member"

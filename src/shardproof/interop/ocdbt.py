"""Zarr arrays in an OCDBT database, the key-value store of TensorStore that Orbax uses.

A database is the file ``manifest.ocdbt`` and a tree of data files, which only TensorStore reads. Its entries
are the files of Zarr arrays. This module parses their metadata, like the metadata of arrays in folders, and
TensorStore reads the chunks. TensorStore reads zeros for a chunk without an entry. This module raises an
error for it if the writer stores every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError, ShardproofError, StorageError
from shardproof.interop.extents import DecodedExtent
from shardproof.interop.json_files import parse_json
from shardproof.interop.reader import StoredBox, StoredView
from shardproof.interop.zarr import ZarrArrays
from shardproof.interop.zarr_chunks import ZarrChunks, chunks_in_shard, clipped, leaf
from shardproof.interop.zarr_codecs import import_extra
from shardproof.interop.zarr_metadata import ArrayMetadata
from shardproof.storage import LocalStorage, Storage

__all__ = ["MANIFEST", "OcdbtArrays"]

MANIFEST = "manifest.ocdbt"
_CACHED_BYTES = 64 << 20
"""Bytes of the tree that TensorStore caches. Without a cache, it reads the tree again for each entry."""


class OcdbtArrays(ZarrArrays):
    """The arrays in an OCDBT database; see `ZarrArrays`.

    Args:
        storage: the folder of the database, which has to be a local folder.

    Raises:
        FormatError: tensorstore is not installed, or the database or the metadata of an array is damaged.
        StorageError: a file is missing or unreadable.
    """

    def __init__(self, storage: Storage) -> None:
        self._tensorstore = import_extra("tensorstore", "orbax", f"{storage.location}/{MANIFEST}")
        if not isinstance(storage, LocalStorage):
            raise FormatError(f"{storage.location}: OCDBT is read from local folders only", file=MANIFEST)
        self._path = f"{storage.location}/{MANIFEST}"
        self._spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{storage.path}/"}}
        self._context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHED_BYTES}})
        self._store = self.call(
            "the database", lambda: self._tensorstore.KvStore.open(self._spec, context=self._context).result()
        )
        self._arrays: dict[str, Any] = {}
        super().__init__(storage)

    def listed(self) -> frozenset[str]:
        """The keys of all entries."""
        keys = self.call("the list of entries", lambda: self._store.list().result())
        return frozenset(key.decode("utf-8", "surrogateescape") for key in keys)

    def read(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """The bytes of the metadata in an entry, and its object."""
        data = bytes(self.call(name, lambda: self._store.read(name).result()).value)
        return data, parse_json(data, f"{self._path}/{name}")

    def chunks_of(self, names: frozenset[str]) -> ZarrChunks:
        """Describes the chunks among some entries."""
        return _OcdbtChunks(self, names)

    @property
    def files(self) -> dict[str, int | None]:
        """The file ``manifest.ocdbt``. The tree names the other files, which only TensorStore reads."""
        return {MANIFEST: None}

    def array(self, folder: str) -> Any:
        """An array of TensorStore, opened once."""
        if folder not in self._arrays:
            driver = "zarr3" if self.metadata[folder][0].endswith("zarr.json") else "zarr"
            spec = {"driver": driver, "kvstore": {**self._spec, "path": f"{folder}/"}}
            self._arrays[folder] = self.call(
                folder, lambda: self._tensorstore.open(spec, open=True, context=self._context).result()
            )
        return self._arrays[folder]

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Calls TensorStore.

        Args:
            what: what the call reads, for the message.
            function: the call.

        Raises:
            FormatError: TensorStore finds damage.
            StorageError: a file is missing.
        """
        try:
            return function()
        except ShardproofError:
            raise
        except Exception as error:  # TensorStore raises ValueError and others; the message has an error code
            text = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
            is_missing = text.startswith("NOT_FOUND")
            kind = StorageError if is_missing else FormatError
            raise kind(
                f"{self._path}: TensorStore cannot read {what}: {text}. A file was changed, cut or removed: "
                "restore the folder from a copy",
                file=self._path,
                **({"missing": True} if is_missing else {}),
            ) from error


@dataclass(frozen=True, slots=True)
class _OcdbtExtent(DecodedExtent):
    """A box of an array that TensorStore reads."""

    storage: Storage
    file: str
    start: int
    """Number of the box. Only TensorStore knows the position of the bytes."""
    nbytes: int
    read: Callable[[], Any] = field(compare=False)
    """Returns the box as a NumPy array."""

    def decode(self) -> memoryview:
        """The elements in row-major order; see `DecodedExtent.decode`."""
        return np.ascontiguousarray(self.read()).reshape(-1).view(np.uint8).data


class _OcdbtChunks(ZarrChunks):
    """Describes the chunks of the arrays in a database; see `ZarrChunks`."""

    def __init__(self, arrays: OcdbtArrays, names: frozenset[str]) -> None:
        super().__init__(arrays.storage, names)
        self._arrays = arrays
        self._count = 0

    def lost_box(self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str) -> StoredBox:
        """The box of a chunk that was stored and has no entry. Reading it raises an error."""
        self._count += 1
        sizes = clipped(offsets, array.layout.sizes, array.shape)
        return StoredBox(
            offsets, sizes, MANIFEST, self._count, 0, partial(self._entry_lost, name, key, offsets)
        )

    def chunk_boxes(
        self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str, metadata: str
    ) -> Iterator[StoredBox]:
        """The boxes of a chunk that is stored, or that reads as the fill value."""
        if name not in self._names:
            sizes = clipped(offsets, array.layout.sizes, array.shape)
            yield StoredBox.of(offsets, sizes, self.filled_view(array, sizes, MANIFEST))
            return
        folder = metadata.rpartition("/")[0]
        for begin, _ in chunks_in_shard(array.layout, offsets):
            sizes = clipped(begin, leaf(array.layout).sizes, array.shape)
            if all(size > 0 for size in sizes):
                self._count += 1
                nbytes = math.prod(sizes) * DTYPES[array.dtype].itemsize
                read = partial(self._read, folder, key, begin, sizes)
                extent = _OcdbtExtent(self._storage, MANIFEST, self._count, nbytes, read)
                yield StoredBox.of(begin, sizes, StoredView.dense(sizes, extent))

    def _read(self, folder: str, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        what = f"the part of {key} that begins at {tuple(offsets)}"
        return self._arrays.call(what, lambda: self._arrays.array(folder)[box].read().result())

    def _entry_lost(self, name: str, key: str, offsets: tuple[int, ...]) -> StoredView:
        path = f"{self._storage.location}/{MANIFEST}"
        raise StorageError(
            f"{path} has no entry {name}: it holds the part of {key} that begins at {offsets}. Restore the "
            "folder from a copy",
            file=path,
            key=key,
            missing=True,
        )

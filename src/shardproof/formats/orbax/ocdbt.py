"""Zarr arrays in an OCDBT database, the key-value store of TensorStore that Orbax uses.

A database is the file ``manifest.ocdbt`` and data files with nodes of a tree and with values. Its entries are
the files of Zarr arrays. This module parses the tree (`read_ocdbt_tree`). Metadata and chunks are then read
like those in folders, from ranges of data files. TensorStore reads the fill value for a chunk without an
entry. This module raises an error for it if the writer stores every chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from shardproof._utils.humanize import printable
from shardproof.engine.foreign import ReadBudget, StoredBox, StoredView
from shardproof.engine.storage import Storage, check_name, too_large
from shardproof.errors import FormatError, StorageError
from shardproof.formats.json_files import parse_json
from shardproof.formats.orbax.ocdbt_tree import OcdbtUnsupported, OcdbtValue, read_ocdbt_tree
from shardproof.formats.stream_transforms import MemoryFile
from shardproof.formats.zarr.zarr import ZarrArrays
from shardproof.formats.zarr.zarr_chunks import ZarrChunks, chunks_in_shard, clipped, leaf
from shardproof.formats.zarr.zarr_metadata import MOST_METADATA_BYTES, ArrayMetadata

MANIFEST = "manifest.ocdbt"
_MOST_MANIFEST = 64 << 20
"""Bytes of ``manifest.ocdbt``, at most."""
_FREE_ENTRIES = 1 << 20
"""Entries that a database of any size may have. A million entries without values compress to a few kilobytes,
and need about 400 MB here. A larger database needs as many bytes as other metadata."""


class OcdbtArrays(ZarrArrays):
    """The arrays in an OCDBT database; see `ZarrArrays`.

    Args:
        storage: the folder of the database.

    Raises:
        FormatError: the database or the metadata of an array is damaged, or a package is not installed.
        StorageError: a file is missing or unreadable.
    """

    def __init__(self, storage: Storage) -> None:
        self._path = f"{storage.location}/{MANIFEST}"

        def read(file: str, start: int, stop: int) -> bytes:
            return storage.read(check_name(file, storage.location), start, stop)

        try:
            self._values = read_ocdbt_tree(
                lambda: storage.read_at_most(MANIFEST, _MOST_MANIFEST), read, ReadBudget(_FREE_ENTRIES)
            )
        except OcdbtUnsupported as error:
            raise FormatError(
                f"{self._path}: shardproof does not read this kind of OCDBT database: {error}. Copy its keys "
                "with TensorStore into a database with the default configuration, and read that one",
                file=self._path,
            ) from error
        except ValueError as error:
            raise FormatError(
                f"{self._path}: the database is damaged, or was made to use up memory: {error}. Restore the "
                "folder from a copy",
                file=self._path,
            ) from error
        super().__init__(storage)

    def listed(self) -> frozenset[str]:
        """The keys of all entries."""
        return frozenset(self._values)

    def read(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """The bytes of the metadata in an entry, and its object."""
        value, path = self._values[name], printable(f"{self._path}/{name}")
        if value.nbytes > MOST_METADATA_BYTES:
            raise too_large(path, value.nbytes, MOST_METADATA_BYTES)
        data = value.inline
        if value.file:
            data = self.storage.read(self._name(value), value.start, value.start + value.nbytes)
        return data, parse_json(data, path)

    def chunks_of(self, names: frozenset[str]) -> ZarrChunks:
        """Describes the chunks among some entries."""
        return _OcdbtChunks(self.storage, self._values)

    @property
    def files(self) -> dict[str, int | None]:
        """The manifest and the data files that hold values."""
        return {MANIFEST: None, **{self._name(value): None for value in self._values.values() if value.file}}

    def _name(self, value: OcdbtValue) -> str:
        return check_name(value.file, self.storage.location)


class _OcdbtChunks(ZarrChunks):
    """Describes the chunks of the arrays in a database; see `ZarrChunks`."""

    def __init__(self, storage: Storage, values: dict[str, OcdbtValue]) -> None:
        super().__init__(storage, values)
        self._values = values

    def lost_box(self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str) -> StoredBox:
        """The box of a chunk that was stored and has no entry. Reading it raises an error."""
        sizes = clipped(offsets, array.layout.sizes, array.shape)
        return StoredBox(offsets, sizes, MANIFEST, 0, 0, partial(self._entry_lost, name, key, offsets))

    def chunk_boxes(
        self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str, metadata: str
    ) -> Iterator[StoredBox]:
        """The boxes of a chunk that is stored, or that reads as the fill value."""
        layout = array.layout
        if name not in self._values:
            sizes = clipped(offsets, layout.sizes, array.shape)
            yield StoredBox.of(offsets, sizes, self.filled_view(array, sizes, MANIFEST))
            return
        value, file, chunks = self._values[name], MANIFEST, self
        if value.file:
            file = check_name(value.file, self._storage.location)
        else:
            memory = MemoryFile(self._storage.location, MANIFEST, bytearray(value.inline))
            chunks = _OcdbtChunks(cast(Storage, memory), self._values)
        for begin, places in chunks_in_shard(layout, offsets):
            sizes = clipped(begin, leaf(layout).sizes, array.shape)
            if all(size > 0 for size in sizes):
                stop = value.start + value.nbytes
                view = partial(chunks.find, array, key, sizes, file, places, MANIFEST, value.start, stop)
                yield StoredBox(begin, sizes, file, value.start, value.nbytes, view)

    def _entry_lost(self, name: str, key: str, offsets: tuple[int, ...]) -> StoredView:
        path = f"{self._storage.location}/{MANIFEST}"
        raise StorageError(
            f"{path} has no entry {name}: it holds the part of {key} that begins at {offsets}. Restore the "
            "folder from a copy",
            file=path,
            key=key,
            missing=True,
        )

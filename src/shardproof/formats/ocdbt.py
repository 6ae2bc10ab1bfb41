"""Zarr arrays in an OCDBT database, the key-value store of TensorStore that Orbax uses.

A database is the file ``manifest.ocdbt`` and data files with nodes of a B+tree and with values. Its entries
are the files of Zarr arrays. `read_ocdbt_tree` parses the tree in bounded memory. Metadata and chunks are
then read like those in folders, from ranges of data files. TensorStore reads the fill value for a chunk
without an entry. This module raises an error for it if the writer stores every chunk.

``manifest.ocdbt`` names the root node of each version. A node is a range of a data file, checked by a CRC-32C
and often compressed. A leaf has keys, and the value of each key or the range that holds it. An interior node
has nodes. Nothing stops a small file from naming one node many times, or from a node that decodes to
gigabytes. So nodes, keys and their text are charged to a `ReadBudget`.

Reference: the format "OCDBT" of the documentation of TensorStore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from shardproof._utils.humanize import printable
from shardproof.engine.foreign import ReadBudget, StoredBox, StoredView
from shardproof.engine.storage import Storage, check_name, too_large
from shardproof.errors import FormatError, StorageError
from shardproof.formats.json_values import parse_json
from shardproof.formats.stream_transforms import MemoryFile
from shardproof.formats.zarr.zarr import ZarrArrays
from shardproof.formats.zarr.zarr_chunks import ZarrChunks, chunks_in_shard, clipped, leaf
from shardproof.formats.zarr.zarr_codecs import import_extra
from shardproof.formats.zarr.zarr_metadata import MOST_METADATA_BYTES, ArrayMetadata

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_LEAST_BYTES = 16
"""Bytes of magic, length and checksum."""
_MOST_NODE_BYTES = 64 << 20
"""Bytes of a node after decompression, at most. Writers split nodes above 8 MiB."""
_RATIO = 16
"""Bytes of a decoded node for each unit of the budget. The metadata of arrays in a node repeats itself."""
_REPEATED_NODE = 1 << 8
"""Values that a node counts as if the tree names it again. Writers name each node once."""
_MOST_ARITY = 1 << 20
_MOST_KEY_BYTES = 1 << 16
_NOWHERE = (1 << 64) - 1
"""Offset and length of the root of an empty database."""


class OcdbtUnsupported(ValueError):
    """The database is of a kind that this reader does not read."""


class OcdbtValue(NamedTuple):
    """Where the value of a key is."""

    file: str
    """Name of the data file below the database; empty if the node holds the value."""
    start: int
    """First byte in the file."""
    nbytes: int
    inline: bytes
    """The value, if the node holds it."""


class _NodeRange(NamedTuple):
    """A range of a data file."""

    file: _DataFile
    start: int
    nbytes: int


class _DataFile(NamedTuple):
    base: bytes
    path: bytes

    @property
    def name(self) -> str:
        return (self.base + self.path).decode("utf-8", "surrogateescape")


@dataclass(slots=True)
class _Cursor:
    """Reads numbers and bytes one after the other. Raises ValueError at the end."""

    data: bytes
    at: int = 0

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError(f"it ends within {count} bytes from byte {self.at} on")
        self.at += count
        return found

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """A varint: seven bits in each byte, the lowest first."""
        data, at, value, shift = self.data, self.at, 0, 0
        while at < len(data) and shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.at = at
                return value
            shift += 7
        raise ValueError(f"it has no number at byte {self.at}")

    def numbers(self, count: int) -> list[int]:
        if count > len(self.data) - self.at:
            raise ValueError(f"it ends within {count} numbers from byte {self.at} on")
        return [self.number() for _ in range(count)]


def read_ocdbt_tree(
    read_manifest: Callable[[], bytes], read: Callable[[str, int, int], bytes], budget: ReadBudget
) -> dict[str, OcdbtValue]:
    """The keys of the last version of a database, and where their values are.

    Args:
        read_manifest: returns the bytes of ``manifest.ocdbt``.
        read: returns bytes `start` to `stop` of a data file.
        budget: counts what the tree makes.

    Raises:
        OcdbtUnsupported: the database is of an unknown version, or its manifests are numbered.
        ValueError: the database is damaged, or asks for more than the budget.
        FormatError: a package is missing.
    """
    return _Tree(read, budget).entries(read_manifest())


class _Tree:
    def __init__(self, read: Callable[[str, int, int], bytes], budget: ReadBudget) -> None:
        self._read, self._budget = read, budget
        self._found: dict[str, OcdbtValue] = {}
        self._granted: set[tuple[str, int]] = set()

    def entries(self, manifest: bytes) -> dict[str, OcdbtValue]:
        root, height = self._root(manifest)
        if root is not None:
            self._add(root, height, b"")
        return self._found

    def _root(self, manifest: bytes) -> tuple[_NodeRange | None, int]:
        """The root node of the last version, and its height."""
        self._budget.grant(len(manifest))
        cursor = self._decoded(manifest, _MANIFEST_MAGIC)
        cursor.take(16)  # the identifier of the database
        kind = cursor.byte()
        if kind:
            raise OcdbtUnsupported("its versions are in numbered manifests")
        cursor.numbers(2)  # the bytes of inline values and of nodes, at most
        cursor.byte()
        if cursor.number():  # the compression of new nodes
            cursor.take(4)
        files = self._files(cursor, b"")
        count = cursor.number()
        if not count:
            raise ValueError("it has no version")
        cursor.numbers(count)
        heights = cursor.take(count)
        (*_, last) = self._references(cursor, files, count)
        return (None if last.start == last.nbytes == _NOWHERE else last), heights[-1]

    def _decoded(self, data: bytes, magic: int) -> _Cursor:
        """The content of a manifest or node, after its checks."""
        if len(data) < _LEAST_BYTES or int.from_bytes(data[:4], "big") != magic:
            raise ValueError("it does not begin as TensorStore writes it")
        if int.from_bytes(data[4:12], "little") != len(data):
            raise ValueError(f"it has {len(data)} bytes, its header says another number: it was cut")
        crc32c: Any = import_extra("google_crc32c", "orbax", "an OCDBT database")
        expected, found = int.from_bytes(data[-4:], "little"), crc32c.value(data[:-4])
        if found != expected:
            raise ValueError(f"it does not match its CRC-32C: expected {expected:08x}, found {found:08x}")
        cursor = _Cursor(data[:-4], 12)
        version, compression = cursor.numbers(2)
        if version or compression > 1:
            raise OcdbtUnsupported(f"its format version is {version} and its compression {compression}")
        content = cursor.data[cursor.at :]
        if compression:
            zstandard: Any = import_extra("zstandard", "orbax", "an OCDBT database")
            try:
                with zstandard.ZstdDecompressor().stream_reader(content) as stream:
                    content = stream.read(_MOST_NODE_BYTES + 1)
            except zstandard.ZstdError as error:
                raise ValueError(f"it cannot be decompressed ({error})") from error
        if len(content) > _MOST_NODE_BYTES:
            raise ValueError(f"a node has more than {_MOST_NODE_BYTES} bytes after decompression")
        self._budget.charge(len(content) // _RATIO)
        return _Cursor(content)

    def _files(self, cursor: _Cursor, base: bytes) -> list[_DataFile]:
        """The table of data files at the beginning of a node."""
        count = cursor.number()
        if not count:
            return []
        before, own, bases = [0, *cursor.numbers(count - 1)], cursor.numbers(count), cursor.numbers(count)
        found, path = [], b""
        for shared, added, inner in zip(before, own, bases, strict=True):
            if shared > len(path) or len(base) + shared + added > _MOST_KEY_BYTES or inner > shared + added:
                raise ValueError(f"the path of a data file shares {shared} bytes and adds {added}")
            path = path[:shared] + cursor.take(added)
            self._budget.charge(len(base) + len(path))
            found.append(_DataFile(base + path[:inner], path[inner:]))
        return found

    def _references(self, cursor: _Cursor, files: list[_DataFile], count: int) -> list[_NodeRange]:
        """References to nodes, without their statistics."""
        ids, starts, sizes = cursor.numbers(count), cursor.numbers(count), cursor.numbers(count)
        return [_NodeRange(_at(files, number), *at) for number, *at in zip(ids, starts, sizes, strict=True)]

    def _add(self, node: _NodeRange, height: int, prefix: bytes) -> None:
        """Adds the entries below a node."""
        if node.nbytes > _MOST_NODE_BYTES:
            raise ValueError(f"a node has {node.nbytes} bytes")
        data = self._read(node.file.name, node.start, node.start + node.nbytes)
        if (place := (node.file.name, node.start)) in self._granted:
            self._budget.charge_values(_REPEATED_NODE)
        else:
            self._granted.add(place)
            self._budget.grant(len(data))
        cursor = self._decoded(data, _NODE_MAGIC)
        if (found := cursor.byte()) != height:
            raise ValueError(f"a node has the height {found}, expected {height}")
        files = self._files(cursor, node.file.base)
        count = cursor.number()
        if not 0 < count <= _MOST_ARITY:
            raise ValueError(f"a node has {count} entries")
        self._budget.charge_values(count)
        before, own = [0, *cursor.numbers(count - 1)], cursor.numbers(count)
        shared = cursor.numbers(count) if height else []
        keys = self._keys(cursor, before, own, prefix)
        if not height:
            self._add_values(cursor, files, keys)
            return
        for key, common, below in zip(keys, shared, self._references(cursor, files, count), strict=True):
            if common > len(key) - len(prefix):
                raise ValueError("an entry shares more of its key than it has")
            self._add(below, height - 1, key[: len(prefix) + common])

    def _keys(self, cursor: _Cursor, before: list[int], own: list[int], prefix: bytes) -> list[bytes]:
        """The whole keys of a node.

        Args:
            cursor: at the texts of the keys.
            before: bytes that each key shares with the one before it.
            own: bytes that each key adds.
            prefix: begins all keys.
        """
        keys, key = [], b""
        for shared, added in zip(before, own, strict=True):
            if shared > len(key) or len(prefix) + shared + added > _MOST_KEY_BYTES:
                raise ValueError(f"a key shares {shared} bytes and adds {added}")
            key = key[:shared] + cursor.take(added)
            self._budget.charge_text(len(prefix) + len(key))
            keys.append(prefix + key)
        return keys

    def _add_values(self, cursor: _Cursor, files: list[_DataFile], keys: list[bytes]) -> None:
        sizes, kinds = cursor.numbers(len(keys)), cursor.take(len(keys))
        outside = kinds.count(1)
        if outside + kinds.count(0) != len(kinds):
            raise ValueError("a value is of an unknown kind")
        ids, starts = cursor.numbers(outside), cursor.numbers(outside)
        places = zip(ids, starts, strict=True)
        for key, size, kind in zip(keys, sizes, kinds, strict=True):
            if kind:
                number, start = next(places)
                value = OcdbtValue(_at(files, number).name, start, size, b"")
            else:
                value = OcdbtValue("", 0, size, cursor.take(size))
            self._found[key.decode("utf-8", "surrogateescape")] = value


def _at(files: list[_DataFile], number: int) -> _DataFile:
    if number >= len(files):
        raise ValueError(f"it has no data file {number}")
    return files[number]


MANIFEST = "manifest.ocdbt"
_MOST_MANIFEST = 64 << 20
"""Bytes of ``manifest.ocdbt``, at most."""
_FREE_ENTRIES = 1 << 20
"""Entries that a database of any size may have. A million entries without values compress to a few kilobytes,
and need about 400 MB here. A larger database needs as many bytes as other metadata."""


class OcdbtArrays(ZarrArrays):
    """The arrays in an OCDBT database; see `ZarrArrays`.

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

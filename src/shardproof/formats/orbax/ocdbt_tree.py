"""Parses the B+tree of an OCDBT database, the key-value store of TensorStore, in bounded memory.

``manifest.ocdbt`` names the root node of each version. A node is a range of a data file, checked by a CRC-32C
and often compressed. A leaf has keys, and the value of each key or the range that holds it. An interior node
has nodes. Nothing stops a small file from naming one node many times, or from a node that decodes to
gigabytes. So nodes, keys and their text are charged to a `ReadBudget`.

Reference: the format "OCDBT" of the documentation of TensorStore.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardproof.engine.foreign import ReadBudget
from shardproof.formats.zarr.zarr_codecs import import_extra

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
        """The table of data files at the beginning of a node.

        Args:
            cursor: at the table.
            base: folder of the file that holds the node.
        """
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
        """Adds the entries below a node.

        Args:
            node: the node.
            height: the height that it has to have.
            prefix: begins all keys below the node, which has the rest of them.
        """
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

"""The structure of a rank's state: keys, dtypes, shapes and boxes, without values.

Each rank sends its structure to the coordinator, or only its digest if the coordinator has the structure in
its cache. `pack` shortens integer columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shardproof.engine.state import Collected


class TensorTable(msgspec.Struct, frozen=True, array_like=True):
    """The tensors that one rank declares, as columns sorted by key."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[str, ...]
    """The key of the tensor that shares this tensor's memory; empty if there is none."""


_LEVEL = 3
"""Compression level. It reduces similar keys to a 20th of their size at 500 MB/s."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Keys, dtypes, shapes and boxes of one rank's state, and the keys of its objects.

    Boxes are in the order of the rank's pieces. Their columns are as in `BoxTable`: box ``i`` has the number
    of dimensions of its tensor, ``box_tensor[i]``.
    """

    table: bytes
    """An encoded and compressed `TensorTable`. The coordinator decodes equal bytes once. If the
    compressors of two ranks differ, equal tables have different bytes, and the coordinator decodes both."""
    objects: tuple[str, ...]
    box_tensor: NDArray[np.int64]
    box_offsets: NDArray[np.int64]
    box_sizes: NDArray[np.int64]

    @staticmethod
    def of(collected: Collected) -> Structure:
        """The structure of a collected state."""
        entries = collected.tensors
        table = TensorTable(
            tuple([entry.key for entry in entries]),
            tuple([entry.dtype for entry in entries]),
            tuple([entry.shape for entry in entries]),
            tuple([entry.alias_of or "" for entry in entries]),
        )
        box_tensor = [row for row, entry in enumerate(entries) for _ in entry.pieces]
        pieces = [piece for entry in entries for piece in entry.pieces]
        offsets = [offset for piece in pieces for offset in piece.offsets]
        sizes = [size for piece in pieces for size in piece.sizes]
        return Structure.build(table, [item.key for item in collected.objects], box_tensor, offsets, sizes)

    @staticmethod
    def build(
        table: TensorTable,
        objects: Sequence[str],
        box_tensor: Sequence[int],
        box_offsets: Sequence[int],
        box_sizes: Sequence[int],
    ) -> Structure:
        """A structure from plain columns.

        >>> table = TensorTable(("w",), ("float32",), ((4, 2),), ("",))
        >>> Structure.build(table, [], [0], [0, 0], [4, 2]).digest().hex()[:8] != ""
        True
        """
        return Structure(
            zlib.compress(msgspec.msgpack.encode(table), _LEVEL),
            tuple(objects),
            np.asarray(box_tensor, np.int64),
            np.asarray(box_offsets, np.int64),
            np.asarray(box_sizes, np.int64),
        )

    def encode(self) -> bytes:
        """The structure as bytes, for the rendezvous."""
        columns = map(pack, (self.box_tensor, self.box_offsets, self.box_sizes))
        return msgspec.msgpack.encode((self.table, self.objects, *columns))

    @staticmethod
    def decode(data: bytes) -> Structure:
        """The structure that `encode` wrote."""
        table, objects, *columns = msgspec.msgpack.decode(data, type=_Wire)
        return Structure(table, objects, *map(unpack, columns))

    def digest(self) -> bytes:
        """16 bytes that differ if any key, dtype, shape, alias, box or object key does."""
        return xxhash.xxh3_128_digest(self.encode())

    def tensors(self) -> TensorTable:
        """The decoded table of tensors."""
        return msgspec.msgpack.decode(zlib.decompress(self.table), type=TensorTable)


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A packed int64 column: either evenly spaced values, or distances from the smallest value."""

    base: int
    """The first value if `width` is 0, otherwise the smallest."""
    step: int
    """Distance between neighbours if `width` is 0, otherwise 0."""
    count: int
    width: int
    """Bytes per distance in `data`; 0 if the values are evenly spaced."""
    data: bytes


_Wire = tuple[bytes, tuple[str, ...], Packed, Packed, Packed]
"""The encoded form. The table is nested as bytes, so that the coordinator decodes equal tables once."""


def pack(column: NDArray[np.int64]) -> Packed:
    """Packs a column. Evenly spaced values need no data; others need 1, 2, 4 or 8 bytes each.

    >>> pack(np.arange(5, 500)), pack(np.array([7, 300, 8])).data.hex()
    (Packed(base=5, step=1, count=495, width=0, data=b''), '000025010100')
    """
    count = len(column)
    if count == 0:
        return Packed(0, 0, 0, 0, b"")
    steps = np.diff(column[:2])
    step = int(steps[0]) if len(steps) else 0
    if bool((column[1:] - column[:-1] == step).all()):
        return Packed(int(column[0]), step, count, 0, b"")
    low, high = int(column.min()), int(column.max())
    width = next(width for width in (1, 2, 4, 8) if high - low < 1 << 8 * width)
    above = column - low  # a distance of 64 bits wraps around here, and back in `unpack`
    return Packed(low, 0, count, width, above.astype(f"<u{width}").tobytes())


def unpack(packed: Packed) -> NDArray[np.int64]:
    """The column that `pack` packed.

    >>> unpack(pack(np.array([7, 300, 8]))).tolist()
    [7, 300, 8]
    """
    if packed.width == 0:
        return np.arange(packed.count) * packed.step + packed.base
    column = np.frombuffer(packed.data, f"<u{packed.width}").astype(np.int64)
    column += packed.base
    return column

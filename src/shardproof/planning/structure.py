"""What a rank holds, without values: keys, dtypes, shapes and boxes, and their digest."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.planning.columns import Packed, pack, unpack

if TYPE_CHECKING:
    from shardproof.state import Collected

__all__ = ["Structure", "TensorTable"]


class TensorTable(msgspec.Struct, frozen=True, array_like=True):
    """The tensors that one rank declares, sorted by key. Row i of every column speaks of one tensor."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[str, ...]
    """The key that holds the same memory, or "" where there is none."""


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """A structure as posted. The table is bytes in bytes, so that equal ones are decoded once."""

    table: bytes
    objects: tuple[str, ...]
    box_tensor: Packed
    box_offsets: Packed
    box_sizes: Packed


_LEVEL = 3
"""Of compression. Keys have much in common: a 20th is left of them, at 500 MB/s."""


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Keys, dtypes, shapes and boxes of one rank's state, and the keys of its objects.

    Boxes are in the order of the rank's pieces; the box of row i belongs to tensor ``box_tensor[i]`` and
    takes as many entries of the flat columns as that tensor has dimensions.
    """

    table: bytes
    """An encoded and compressed `TensorTable`. Equal tables are equal bytes wherever the compressor is the
    same; where it is not, they are decoded more often, and that is all."""
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
        """This structure as bytes for the rendezvous."""
        return msgspec.msgpack.encode(
            _Wire(
                self.table,
                self.objects,
                pack(self.box_tensor),
                pack(self.box_offsets),
                pack(self.box_sizes),
            )
        )

    @staticmethod
    def decode(data: bytes) -> Structure:
        """The structure that `encode` wrote."""
        wire = msgspec.msgpack.decode(data, type=_Wire)
        return Structure(
            wire.table,
            wire.objects,
            unpack(wire.box_tensor),
            unpack(wire.box_offsets),
            unpack(wire.box_sizes),
        )

    def digest(self) -> bytes:
        """16 bytes that change with any key, dtype, shape, alias, box or object key."""
        return xxhash.xxh3_128_digest(self.encode())

    def tensors(self) -> TensorTable:
        """The decoded table of tensors."""
        return msgspec.msgpack.decode(zlib.decompress(self.table), type=TensorTable)

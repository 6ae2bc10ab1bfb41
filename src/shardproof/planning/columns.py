"""Columns of integers as few bytes: what structures and plans are made of when they travel."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Packed", "pack", "unpack"]


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A column of int64: its first value and a step, or its smallest value and how far each is above it."""

    base: int
    step: int
    """From each value to the next, where that is always the same; 0 otherwise."""
    count: int
    width: int
    """Bytes of a value in `data`; 0 where first value and step say all."""
    data: bytes


def pack(column: NDArray[np.int64]) -> Packed:
    """A column in as many bytes a value as the largest needs, and in none where the values are evenly spaced.

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
    above = column - low  # wraps around where the distance needs 64 bits, and back in `unpack`
    return Packed(low, 0, count, width, above.astype(f"<u{width}").tobytes())


def unpack(packed: Packed) -> NDArray[np.int64]:
    """The column that `pack` was given.

    >>> unpack(pack(np.array([7, 300, 8]))).tolist()
    [7, 300, 8]
    """
    if packed.width == 0:
        return np.arange(packed.count) * packed.step + packed.base
    column = np.frombuffer(packed.data, f"<u{packed.width}").astype(np.int64)
    column += packed.base
    return column

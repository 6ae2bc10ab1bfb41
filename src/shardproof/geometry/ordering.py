"""The order of many integers, several times faster than an indirect sort where they leave room for it."""

from __future__ import annotations

import numpy as np

from shardproof.geometry.boxes import INT64_MAX, Int64s

__all__ = ["stable_order"]


def stable_order(keys: Int64s) -> Int64s:
    """The order that sorts `keys`, equal ones in their order: ``np.argsort(keys, kind="stable")``.

    numpy sorts plain integers with vector instructions and pairs of them without, so where a key and a row
    number fit into 63 bits together, they are sorted as one integer.

    Args:
        keys: (n,) int64.

    >>> stable_order(np.array([7, -1, 7, 0])).tolist()
    [1, 3, 0, 2]
    """
    n = len(keys)
    if n == 0 or bool((keys[1:] >= keys[:-1]).all()):
        return np.arange(n)
    low, high = int(keys.min()), int(keys.max())
    bits = (n - 1).bit_length()
    if high - low > INT64_MAX >> bits:
        return np.argsort(keys, kind="stable")
    packed = keys - low
    packed <<= bits
    packed |= np.arange(n)
    packed.sort()
    packed &= (1 << bits) - 1
    return packed

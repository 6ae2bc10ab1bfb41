"""Bounds what reading the metadata of a checkpoint may make, by the bytes that it was read from.

A pickle refers to an object again with two bytes. So a small pickle can ask for a large copy many times, or
for a list that holds the one before it twice, and so on. Honest metadata repeats little. Everything that
grows faster than the bytes that were read is charged here: copied bytes, values, and the text of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

_PER_BYTE = 16
"""Units for each byte of metadata. Honest checkpoints use at most 7: a dict from small integers to True
has the smallest values."""
_FREE_VALUES = 1 << 18
"""Values that metadata of any size may have."""
_FREE_TEXT = 1 << 8
"""Characters that the whole key of each of these values may have."""
_TEXT_PER_BYTE = 64
"""Characters of whole keys for each byte of metadata. The text above a large dict is in each key below it."""
_VALUE = 16
"""Units of a value: about the memory that describing it takes, counted in pointers."""
_FREE = _FREE_VALUES * _VALUE
"""Units that one value may have, whatever its size."""
_ITEM = 4
"""Units of an item of a list or tuple that is copied or hashed."""
_ATOMS = frozenset((bool, float, type(None)))
_SMALL = 1 << 62
_CHECKED = 1 << 16
"""Units after which a count compares itself with the budget."""
_TEXTS = (str, bytes, bytearray)
_SEQUENCES = (list, tuple, set, frozenset)
_ENDLESS = 1 << 62
_KINDS = (*_TEXTS, *_SEQUENCES, dict, np.ndarray)
"""Classes of values that `check_repeats` measures. Others count as one item."""


class ReadBudget:
    """Counts what is made of metadata. A unit is a byte that is copied, or a character of a key of a dict.

    The text of whole keys, which name a value by all the keys above it, has a bound of its own.

    Args:
        free_values: values that metadata of any size may have.

    Example:
        >>> budget = ReadBudget()
        >>> budget.grant(1000)
        >>> budget.charge(5_000_000)
        Traceback (most recent call last):
        ValueError: it repeats itself too often: 1000 bytes of metadata ask for more than 4210304 units ...
    """

    def __init__(self, free_values: int = _FREE_VALUES) -> None:
        self._free, self._free_text = _VALUE * free_values, _FREE_TEXT * free_values
        self._granted = 0
        self._used = 0
        self._text = 0

    def grant(self, nbytes: int) -> None:
        """Adds the bytes of metadata that were read."""
        self._granted += nbytes

    def charge(self, units: int, read: int = 0) -> None:
        """Counts units.

        `units` are bytes, or characters of keys of a dict. `read` is the bytes of metadata that were read
        beside the granted ones.

        Raises:
            ValueError: the metadata asks for far more than its bytes hold.
        """
        self._used += units
        most = self._free + _PER_BYTE * (self._granted + read)
        if self._used > most:
            raise ValueError(
                f"it repeats itself too often: {self._granted + read} bytes of metadata ask for more than "
                f"{most} units of copied bytes, values and text of keys"
            )

    def charge_text(self, characters: int) -> None:
        """Counts the characters of a whole key, which names a value by all the keys above it.

        Raises:
            ValueError: the whole keys have far more text than the metadata.
        """
        self._text += characters
        most = self._free_text + _TEXT_PER_BYTE * self._granted
        if self._text > most:
            raise ValueError(
                f"it repeats itself too often: {self._granted} bytes of metadata ask for more than {most} "
                "characters of whole keys"
            )

    def charge_values(self, count: int) -> None:
        """Counts values that are made or visited; see `charge`."""
        self.charge(_VALUE * count)

    def charge_arguments(self, values: Sequence[Any], read: int) -> None:
        """Counts what a call may copy or hash: its arguments, and all in the lists and tuples among them."""
        pending: list[Any] = [values]
        units = 0
        while pending:
            value = pending.pop()
            if isinstance(value, _SEQUENCES):
                units += _ITEM * len(value)
                pending.extend(
                    item
                    for item in value
                    if not (type(item) is int and -_SMALL < item < _SMALL) and type(item) not in _ATOMS
                )
            elif isinstance(value, _TEXTS):
                units += len(value)
            elif isinstance(value, dict):
                units += _VALUE * len(value)
                pending.extend(key for key in value if isinstance(key, (tuple, frozenset)))
            elif isinstance(value, np.ndarray):
                units += value.nbytes
            elif isinstance(value, int):
                units += value.bit_length() // 8
            if units > _CHECKED:  # a list that holds the one before it twice does not end otherwise
                self.charge(units, read)
                units = 0
        self.charge(units, read)


def key_units(key: Any) -> int:
    """Characters of the text of a key of a dict, at most.

    Args:
        key: hashable, with few tuples in it (see `shardproof.formats.pickle_data.check_keys`).

    Example:
        >>> key_units("weight"), key_units(1000), key_units(("a", (1, "bc")))
        (6, 4, 28)
    """
    if isinstance(key, str):
        return len(key)
    if isinstance(key, int):
        return 1 + key.bit_length() // 3
    if isinstance(key, (bytes, bytearray)):
        return 4 * len(key) + 3
    if isinstance(key, (tuple, frozenset)):
        return 4 + sum(4 + key_units(item) for item in key)
    return 32


def check_repeats(value: Any) -> None:
    """Refuses a value that is far larger when each reference to an object counts than when each object does.

    Args:
        value: plain data of a pickle. It may hold itself.

    Raises:
        ValueError: the value repeats its objects too often.

    Example:
        >>> nested = [0]
        >>> for _ in range(60):
        ...     nested = [nested, nested]
        >>> check_repeats(nested)
        Traceback (most recent call last):
        ValueError: the value repeats its objects too often: 121 items and bytes become more than ...
    """
    sizes: dict[int, int] = {}
    """By id, the size with all references; 1 while the object is being measured, so that a cycle ends."""
    known = total = 0
    pending: list[Any] = [value]
    while pending:
        item = pending[-1]
        inside: Iterable[Any] = item if isinstance(item, _SEQUENCES) else ()
        if isinstance(item, dict):
            inside = [*item.keys(), *item.values()]
        if id(item) not in sizes:
            sizes[id(item)] = 1
            known += _length(item)
            pending.extend(child for child in inside if id(child) not in sizes and isinstance(child, _KINDS))
            continue
        pending.pop()
        if sizes[id(item)] == 1:
            total = min(_length(item) + sum(sizes.get(id(child), 1) for child in inside), _ENDLESS)
            sizes[id(item)] = total
    most = _FREE + _PER_BYTE * known
    if total > most:
        raise ValueError(
            f"the value repeats its objects too often: {known} items and bytes become more than {most}"
        )


def _length(item: Any) -> int:
    return item.nbytes if isinstance(item, np.ndarray) else len(item) if isinstance(item, Sized) else 1

"""A mapping whose values are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class LazyMapping(Mapping[str, Any]):
    """Reads a value at each access. Its keys are fixed.

    Args:
        keys: the keys, in the order of iteration.
        read: returns the value of a key.

    >>> squares = LazyMapping(["2", "3"], lambda key: int(key) ** 2)
    >>> list(squares), squares["3"], "4" in squares
    (['2', '3'], 9, False)
    """

    def __init__(self, keys: Iterable[str], read: Callable[[str], Any]) -> None:
        self._keys = dict.fromkeys(keys)
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._read(key)

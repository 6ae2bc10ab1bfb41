"""Mappings: one whose values are read when they are asked for, and a search in JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class LazyMapping(Mapping[str, Any]):
    """Reads a value at each access. Its keys are fixed.

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


def objects_with(data: Any, member: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects that have a member of this name.

    >>> list(objects_with([{"a": 1}, {"b": {"a": {"a": 2}}}], "a"))
    [{'a': {'a': 2}}, {'a': 1}]
    """
    pending = [data]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if member in item:
                yield item
            else:
                pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)

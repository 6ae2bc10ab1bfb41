"""Searches JSON values for objects that have a member."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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

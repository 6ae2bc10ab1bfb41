"""`io.BytesIO` objects in the values of a state dict, which are stored as their bytes and positions."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from shardproof.engine.state import StreamBytes


def with_bytes(value: Any) -> Any:
    """The value with the content of each stream in its dicts, lists and tuples instead of the stream.

    A value without streams is returned itself.

    >>> with_bytes((1, io.BytesIO(b"ab")))
    (1, StreamBytes(b'ab', 0))
    """
    return _mapped(value, lambda item: StreamBytes.of(item) if type(item) is io.BytesIO else item)


def with_streams(value: Any) -> Any:
    """Inverse of `with_bytes`.

    >>> with_streams([StreamBytes(b"ab", 1)])[0].read()
    b'b'
    """
    return _mapped(value, lambda item: item.stream() if type(item) is StreamBytes else item)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        pairs = [(key, item, _mapped(item, change)) for key, item in value.items()]
        if all(new is item for _, item, new in pairs):
            return value
        return kind((key, new) for key, _, new in pairs)
    if kind is list or kind is tuple:
        items = [_mapped(item, change) for item in value]
        return value if all(new is item for new, item in zip(items, value, strict=True)) else kind(items)
    return change(value)

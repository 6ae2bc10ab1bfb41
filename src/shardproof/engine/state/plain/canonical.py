"""A form of encoded plain data that does not depend on the insertion order of dicts."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_PAIRS = ("$dict", "$counter")
_TAGS = tuple(f'"{tag}"'.encode() for tag in (*_PAIRS, "$defaultdict"))


def canonical_json(data: Any) -> bytes:
    """Encoded plain data as JSON, with every dict in the order of its keys. An OrderedDict keeps its order.

    >>> canonical_json({"b": 1, "a": {"$dict": [[2, "y"], [1, "x"]]}})
    b'{"a":{"$dict":[[1,"x"],[2,"y"]]},"b":1}'
    """
    text = msgspec.json.encode(data, order="deterministic")
    return (
        msgspec.json.encode(_sorted(data), order="deterministic")
        if any(map(text.__contains__, _TAGS))
        else text
    )


def _sorted(data: Any) -> Any:
    if isinstance(data, list):
        return [_sorted(item) for item in data]
    if not isinstance(data, dict):
        return data
    data = {key: _sorted(item) for key, item in data.items()}
    tag = next(iter(data), "")
    if tag in _PAIRS:
        return {tag: sorted(data[tag], key=_key)}
    if tag == "$defaultdict":
        factory, pairs = data[tag]
        return {tag: [factory, sorted(pairs, key=_key)]}
    return data


def _key(pair: list[Any]) -> str:
    return json.dumps(pair[0], sort_keys=True)

"""Tensors that hold the bytes of plain values, which users see as the values and not as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardproof._utils.json_objects import objects_with


def inner_tensors(objects: Mapping[str, Any], keys: Iterable[str]) -> set[str]:
    """Of the keys of tensors, those that hold an array, bytes, a text or a long list of a plain value.

    A tensor inside a plain value is not one of them: it has a key of its own. A value that
    is a tensor as a whole, such as the state of a generator, has only the key of the value.

    Args:
        objects: encoded plain values by key.
        keys: keys of tensors. Only values whose key is above one of them are read.

    >>> objects = {"a": {"$tensor": "a.@data", "kind": "array"}, "b": {"w": {"$tensor": "b.w"}}}
    >>> inner_tensors(objects, ["a.@data", "b.w", "c"])
    {'a.@data'}
    """
    inner: dict[str, set[str]] = {}
    found = set()
    for key in keys:
        above = key
        while "." in above:
            above = above.rpartition(".")[0]
            if above not in objects:
                continue
            if above not in inner:
                parts = objects_with(objects[above], "$tensor")
                inner[above] = {
                    part["$tensor"]
                    for part in parts
                    if part.get("kind", "tensor") != "tensor" or part["$tensor"] == f"{above}.@data"
                }
            if key in inner[above]:
                found.add(key)
                break
    return found

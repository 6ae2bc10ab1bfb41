"""Maps between the keys of two projects: which written tensor comes from which boxes of stored ones.

A map is named by a family and a direction (`FAMILIES`), declared in a TOML file, or a Python function. It
sees keys, dtypes, shapes and plain values, but no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.formats.conversion.key_maps.engine import (
    KeyMap,
    KeyMapFunction,
    MappedKeys,
    MappedTensor,
    Move,
    apply_rules,
    check_mapped,
)
from shardproof.formats.conversion.key_maps.key_matching import Stored
from shardproof.formats.conversion.key_maps.layouts import CONFIG, hyperparameters
from shardproof.formats.conversion.key_maps.map_names import FAMILIES, MapName, named_rules

__all__ = [
    "CONFIG",
    "FAMILIES",
    "KeyMap",
    "KeyMapFunction",
    "MappedKeys",
    "MappedTensor",
    "Move",
    "apply_key_map",
    "key_map_label",
]


def apply_key_map(key_map: KeyMap, stored: Mapping[str, Stored], objects: Mapping[str, Any]) -> MappedKeys:
    """The tensors that a map gives.

    Args:
        key_map: a name, the path of a TOML file, or a function.
        stored: dtype and shape of each stored tensor, by key.
        objects: plain values by key, and Hugging Face's ``config.json``, if any, under that name.

    Raises:
        StructureError: the map does not fit the stored tensors, or a function returns invalid tensors.
        ValueError: there is no such map or option.
    """
    if callable(key_map):
        mapped = MappedKeys(dict(key_map(stored, objects)))
    else:
        rules, name = named_rules(MapName.parse(key_map))
        direction = name.options.get("direction", rules.directions[0])
        if direction not in rules.directions:
            raise ValueError(
                f"key map {name.base}: the direction is {' or '.join(rules.directions)}, not {direction!r}"
            )
        known = hyperparameters(name.numbers(), name.options.get("config"), objects)
        mapped = apply_rules(rules, direction, stored, known, name.rule_options(rules.placeholders))
    check_mapped(mapped.tensors, stored)
    return mapped


def key_map_label(key_map: KeyMap | None) -> str | None:
    """The name of a map, for messages and digests."""
    if key_map is None or isinstance(key_map, str):
        return key_map
    kind = key_map if hasattr(key_map, "__qualname__") else type(key_map)
    return f"{kind.__module__}.{kind.__qualname__}"

"""Maps that users declare in a TOML file."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from shardproof.conversion.key_maps.families import FAMILIES
from shardproof.conversion.key_maps.key_rules import KeyRules, Rule

__all__ = ["read_rules"]

_TOP = {"extends", "sides", "direction", "ignored", "options", "rules"}
_IN_RULE = {"layout", "shapes", "also"}
_SIDE = re.compile(r"[A-Za-z0-9_]+")


def read_rules(path: str) -> tuple[KeyRules, dict[str, str]]:
    """Reads a file.

    Args:
        path: of the file.

    Returns:
        The rules, and the options that the file sets, ``direction`` among them.

    Raises:
        ValueError: the file cannot be read or declares no map; the message names the file and the place.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"key map {path} cannot be read: {error}") from error
    try:
        return _rules(table)
    except ValueError as error:
        raise ValueError(f"key map {path}: {error}") from error


def _rules(table: dict[str, Any]) -> tuple[KeyRules, dict[str, str]]:
    _check_names("the file", table, _TOP)
    family = table.get("extends")
    if family is not None and family not in FAMILIES:
        raise ValueError(f"extends is one of {', '.join(FAMILIES)}, not {family!r}")
    base = KeyRules("megatron", "hf", ()) if family is None else FAMILIES[family]
    sides = _texts("sides", table.get("sides", [base.first, base.second]))
    if len(sides) != 2 or sides[0] == sides[1] or not all(map(_SIDE.fullmatch, sides)):
        raise ValueError('sides are two different words, such as ["megatron", "hf"]')
    if set(sides) & _IN_RULE:
        raise ValueError(f"{sides} cannot name sides: rules have fields of that name")
    rules = table.get("rules", [])
    if not isinstance(rules, list) or not (rules or family):
        raise ValueError("it has no [[rules]]")
    declared = [_rule(f"rule {row}", rule, *sides) for row, rule in enumerate(rules, 1)]
    found = base.with_first(declared, _texts("ignored", table.get("ignored", [])))
    options = table.get("options", {})
    if not isinstance(options, dict) or not all(isinstance(item, int | str) for item in options.values()):
        raise ValueError("[options] has a value that is neither a number nor a string")
    texts = {name: str(value) for name, value in options.items()}
    if "direction" in table:
        texts["direction"] = str(table["direction"])
    return (
        KeyRules(sides[0], sides[1], found.rules, found.ignored, found.first_prefix),
        texts,
    )


def _rule(where: str, table: Any, first: str, second: str) -> Rule:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is not a table: begin it with [[rules]]")
    _check_names(where, table, {first, second, *_IN_RULE})
    joined, parts = table.get(first), table.get(second)
    if not isinstance(joined, str) or not joined or parts in (None, [], ""):
        raise ValueError(f"{where} needs {first} = KEY and {second} = KEY, or a list of keys")
    layout = table.get("layout", "same")
    if not isinstance(layout, str):
        raise ValueError(f"{where}: layout must be a string")
    try:
        return Rule(
            joined,
            _texts(second, parts),
            layout,
            _texts("shapes", table.get("shapes", [])),
            also=_texts("also", table.get("also", [])),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _texts(name: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} is a string or a list of strings, not {value!r}")
    return tuple(found)


def _check_names(where: str, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")

"""The text that names a map, and the rules that it names: those of a family, or those of a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl

from shardproof.formats.conversion.key_maps.families import FAMILIES
from shardproof.formats.conversion.key_maps.hyperparameters import Hyperparameters
from shardproof.formats.conversion.key_maps.key_matching import RuleOptions
from shardproof.formats.conversion.key_maps.key_rules import KeyRules, Rule

_NUMBERS = tuple(item.name for item in fields(Hyperparameters))
_TEXTS = ("config", "direction", "norms", "prefix", "stack")
_TOP = {"extends", "sides", "direction", "ignored", "options", "rules"}
_IN_RULE = {"layout", "shapes", "also"}
_SIDE = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class MapName:
    """The name of a map, as a user gives it: ``megatron-to-hf:llama?heads=32&groups=8``.

    Raises:
        ValueError: an option is unknown, or its value is wrong.
    """

    base: str
    """Before the question mark."""
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> MapName:
        """Parses the text.

        >>> MapName.parse("megatron-to-hf:llama?heads=8&groups=4").numbers()
        {'heads': 8, 'groups': 4}
        """
        base, _, query = text.partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError as error:
            raise ValueError(f"key map {text!r}: write options as ?heads=8&groups=4") from error
        return MapName(base, dict(pairs))

    def numbers(self) -> dict[str, int]:
        """Numbers of the model."""
        for name in self.options:
            if name not in (*_NUMBERS, *_TEXTS):
                known = ", ".join(sorted((*_NUMBERS, *_TEXTS)))
                raise ValueError(f"key map {self.base}: there is no option {name!r}; there are {known}")
        found = {}
        for name in _NUMBERS:
            if (value := self.options.get(name)) is not None:
                if not (value.isascii() and value.isdigit() and 0 < int(value[:19]) < 1 << 62):
                    raise ValueError(f"key map {self.base}: {name} is a positive number, not {value!r}")
                found[name] = int(value)
        return found

    def rule_options(self, placeholders: frozenset[str]) -> RuleOptions:
        """How the rules are applied.

        Args:
            placeholders: of all rules.
        """
        norms = self.options.get("norms", "fused")
        if norms not in ("fused", "unfused"):
            raise ValueError(f"key map {self.base}: norms is fused or unfused, not {norms!r}")
        stack = self.options.get("stack")
        named = frozenset(() if stack in (None, "none") else str(stack).split(","))
        if not named <= placeholders:
            raise ValueError(
                f"key map {self.base}: stack names placeholders: {', '.join(sorted(placeholders))}; or none. "
                f"It is {stack!r}"
            )
        stacked = placeholders if stack is None else named
        prefixes = [item.removesuffix(".") for item in self.options.get("prefix", "").split(",") if item]
        return RuleOptions(sorted(prefixes, key=len, reverse=True), stacked, norms == "unfused")


def named_rules(name: MapName) -> tuple[KeyRules, MapName]:
    """The rules of a map, and its name with all options."""
    if name.base.endswith(".toml"):
        rules, options = _read_rules(name.base)
        return rules, MapName(name.base, {**options, **name.options})
    direction, _, family = name.base.partition(":")
    rules_of = FAMILIES.get(family)
    if rules_of is None or direction not in rules_of.directions:
        raise ValueError(
            f"there is no key map {name.base!r}. There are megatron-to-hf:FAMILY and hf-to-megatron:FAMILY "
            f"with FAMILY one of {', '.join(FAMILIES)}, or give the path of a .toml file"
        )
    if "direction" in name.options:
        raise ValueError(f"key map {name.base}: direction is an option of .toml files")
    return rules_of, MapName(name.base, {**name.options, "direction": direction})


def _read_rules(path: str) -> tuple[KeyRules, dict[str, str]]:
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
    ignored = _texts("ignored", table.get("ignored", []))
    options = table.get("options", {})
    if not isinstance(options, dict) or not all(isinstance(item, int | str) for item in options.values()):
        raise ValueError("[options] has a value that is neither a number nor a string")
    texts = {name: str(value) for name, value in options.items()}
    if "direction" in table:
        texts["direction"] = str(table["direction"])
    found = KeyRules(
        *sides, (*declared, *base.rules), (*ignored, *base.ignored), base.first_prefix, base.first_optimizer
    )
    return found, texts


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

"""Rules between the keys of two projects, as data, and which rule takes each stored key.

A pattern is a key with placeholders for numbers: ``decoder.layers.{layer}.mlp.linear_fc2.weight``. Text in
brackets is optional in stored keys, and present in written ones: ``[transformer.]wte.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import TypeAlias

from shardproof.errors import StructureError
from shardproof.formats.conversion.key_maps.layouts import LAYOUTS, Hyperparameters

Stored: TypeAlias = tuple[str, tuple[int, ...]]
"""Torch's name of the dtype, and the shape, of a stored tensor."""
Numbers: TypeAlias = tuple[int, ...]
"""Values of the placeholders of a rule, in their order."""

_Shape = tuple[int, ...]
_MOST_STACKED = 1_000_000
"""Layers times experts in one tensor, at most. It bounds the work for a wrong shape."""
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_TOKEN = re.compile(r"(\.?\{[a-z][a-z0-9_]*\}|\[[^\]]*\])")
_NUMBER = r"0|[1-9][0-9]{0,8}"


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """How rules are applied."""

    prefixes: Sequence[str] = ()
    """Prefixes below which the rules apply too. The written keys have the same prefixes."""
    stacked: frozenset[str] = frozenset()
    """Placeholders for which the first project's tensors are written with a leading dimension."""
    unfused_norms: bool = False
    """True to write `Rule.unfused` names."""


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor, or one of those that are stacked in it."""

    key: str
    offsets: _Shape
    """Where it lies in the leading dimensions of the stored tensor."""
    dtype: str
    shape: _Shape
    """Without leading dimensions."""


@dataclass(slots=True)
class MatchedRule:
    """The stored tensors that one rule takes, below one prefix."""

    rule: Rule
    prefix: str
    placeholders: tuple[str, ...]
    sources: dict[Numbers, dict[int, Source]] = field(default_factory=dict)
    """By the values of the placeholders; then by part, 0 for a joined tensor."""

    def example(self) -> Source:
        """Any source, for messages."""
        return next(iter(next(iter(self.sources.values())).values()))


class SizeNames:
    """Sizes by name, each with the first key that has it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str]] = {}

    def expect(self, name: str, size: int, by: str) -> None:
        """Records a size. Raises StructureError if it differs from the recorded one."""
        number = int(name) if name.isdecimal() else None
        expected, first = (number, "the rule") if number is not None else self._known.get(name, (size, by))
        if size != expected:
            raise StructureError(
                f"key map: {by} has {name} = {size}, expected {expected} as {first} has. Is it the right map "
                "for this model?",
                key=by,
            )
        if number is None:
            self._known.setdefault(name, (size, by))

    def check(self, names: str, shape: _Shape, by: str, stored: _Shape) -> None:
        """Compares a shape with the names of its sizes."""
        expected = names.split()
        if len(expected) != len(shape):
            raise StructureError(
                f"key map: {by} of shape {list(stored)} has {len(shape)} dimensions, expected "
                f"{len(expected)}: ({', '.join(expected)})",
                key=by,
            )
        for name, size in zip(expected, shape, strict=True):
            self.expect(name, size, by)


def match_keys(
    rules: KeyRules, joined_is_stored: bool, stored: Mapping[str, Stored], options: RuleOptions
) -> tuple[list[MatchedRule], list[str]]:
    """The rules that take keys, and the keys that they ignore."""
    prefix = rules.first_prefix if joined_is_stored else ""
    patterns = [
        (row, rule, part, KeyPattern(text, stackable=joined_is_stored, prefix=prefix))
        for row, rule in enumerate(rules.rules)
        for part, text in (
            ((0, name) for name in rule.joined_names) if joined_is_stored else enumerate(rule.parts)
        )
    ]
    ignored_patterns = [KeyPattern(text, prefix=rules.first_prefix) for text in rules.ignored]
    found: dict[tuple[str, int], MatchedRule] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    for key, (dtype, shape) in stored.items():
        prefix = next((f"{at}." for at in options.prefixes if key.startswith(f"{at}.")), "")
        name = key.removeprefix(prefix)
        if any(pattern.match(name) is not None for pattern in ignored_patterns):
            ignored.append(key)
            continue
        for row, rule, part, pattern in patterns:
            if (numbers := pattern.match(name)) is not None:
                at = prefix, row
                if at not in found:
                    found[at] = MatchedRule(rule, prefix, KeyPattern(rule.joined).placeholders)
                _add(found[at], part, key, dtype, shape, numbers)
                break
        else:
            is_optimizer = joined_is_stored and rules.first_optimizer and re.match(rules.first_optimizer, key)
            (ignored if is_optimizer else unknown).append(key)
    if unknown:
        raise StructureError(
            f"key map: no rule takes {len(unknown)} of {len(stored)} keys. Leave them out (--exclude KEY, or "
            "a pattern as below), name a prefix (?prefix=optimizer.state.exp_avg), or use another map:\n"
            f"{_summary(unknown)}",
            keys=unknown,
        )
    return [found[at] for at in sorted(found)], ignored


def _add(
    item: MatchedRule, part: int, key: str, dtype: str, shape: _Shape, numbers: Mapping[str, int | None]
) -> None:
    """Adds a stored tensor, or each of those that are stacked in it."""
    names = item.placeholders
    leading = [name for name in names if numbers[name] is None]
    if len(shape) < len(leading):
        raise StructureError(
            f"key map: {key} of shape {list(shape)} has {len(shape)} dimensions, expected one for each "
            f"{' and '.join(leading)} and those of the tensor",
            key=key,
        )
    count = prod(shape[: len(leading)])
    if not 0 < count <= _MOST_STACKED:
        raise StructureError(
            f"key map: {key} of shape {list(shape)} has {count} tensors stacked, expected 1 to "
            f"{_MOST_STACKED}",
            key=key,
        )
    for offsets in product(*map(range, shape[: len(leading)])):
        values = dict(zip(leading, offsets, strict=True))
        at = tuple(values[name] if (number := numbers[name]) is None else number for name in names)
        source = Source(key, offsets, dtype, shape[len(leading) :])
        if (other := item.sources.setdefault(at, {}).setdefault(part, source)) is not source:
            raise StructureError(f"key map: {other.key} and {key} are the same tensor", key=key)


def _summary(keys: Iterable[str]) -> str:
    """All keys, with one line for keys that differ only in numbers."""
    lines: dict[str, list[str]] = {}
    for key in keys:
        lines.setdefault(re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", key), []).append(key)
    return "\n".join(
        f"  {same[0]}" if len(same) == 1 else f"  {pattern} ({len(same)} keys)"
        for pattern, same in lines.items()
    )


def check_numbers(
    found: Sequence[MatchedRule], known: Hyperparameters, sizes: Mapping[str, SizeNames]
) -> None:
    """Checks that layers and experts are numbered from 0 without gaps, the same for all rules.

    Args:
        found: the rules that take keys.
        known: numbers of the model.
        sizes: by prefix; the numbers of layers and experts are recorded there.
    """
    if known.layers is not None:
        for prefix in sizes:
            sizes[prefix].expect("layer", known.layers, "the configuration")
    for item in found:
        names, key = item.placeholders, item.example().key
        extents = []
        for row, name in enumerate(names):
            values = {numbers[row] for numbers in item.sources}
            missing = (number for number in range(max(values)) if number not in values)
            if some := list(islice(missing, 10)):
                raise StructureError(
                    f"key map: of the tensors such as {key}, those of {name} {', '.join(map(str, some))} are "
                    "missing",
                    key=key,
                )
            extents.append(len(values))
        if len(item.sources) < prod(extents):
            gap = next(at for at in product(*map(range, extents)) if at not in item.sources)
            where = ", ".join(f"{name} {value}" for name, value in zip(names, gap, strict=True))
            raise StructureError(
                f"key map: of the tensors such as {key}, that of {where} is missing", key=key
            )
        for name, extent in zip(names, extents, strict=True):
            sizes[item.prefix].expect(name, extent, key)


class KeyPattern:
    """A key with placeholders.

    Args:
        text: the pattern.
        stackable: True if a placeholder, with the dot before it, may be left out of a key. The tensor then
            has a leading dimension instead.
        prefix: regular expression of text that stored keys may begin with.

    Raises:
        ValueError: a placeholder appears twice.

    >>> pattern = KeyPattern("layers.{layer}.experts.{expert}.weight", stackable=True)
    >>> pattern.match("layers.3.experts.weight")
    {'layer': 3, 'expert': None}
    >>> pattern.key({"layer": 3, "expert": None})
    'layers.3.experts.weight'
    """

    def __init__(self, text: str, *, stackable: bool = False, prefix: str = "") -> None:
        self.text = text
        self.placeholders: tuple[str, ...] = tuple(_PLACEHOLDER.findall(text))
        """Names, in the order of the leading dimensions."""
        if len(set(self.placeholders)) < len(self.placeholders):
            raise ValueError(f"{text!r} has the same placeholder twice")
        self._tokens = _TOKEN.split(text)
        parts = [prefix]
        for token in self._tokens:
            if token.startswith("["):
                parts.append(f"(?:{re.escape(token[1:-1])})?")
            elif token.endswith("}"):
                name = token.strip(".{}")
                number = f"{re.escape(token[: token.index('{')])}(?P<{name}>{_NUMBER})"
                parts.append(f"(?:{number})?" if stackable and token.startswith(".") else number)
            else:
                parts.append(re.escape(token))
        self._expression = re.compile("".join(parts))

    def match(self, key: str) -> dict[str, int | None] | None:
        """The numbers in a key, None for those left out; None if the key does not match."""
        found = self._expression.fullmatch(key)
        if found is None:
            return None
        groups = found.groupdict()
        return {name: None if groups[name] is None else int(groups[name]) for name in self.placeholders}

    def key(self, numbers: Mapping[str, int | None]) -> str:
        """The key with some numbers; None leaves a placeholder out, with its dot."""
        written = []
        for token in self._tokens:
            if token.startswith("["):
                written.append(token[1:-1])
            elif token.endswith("}"):
                number = numbers[token.strip(".{}")]
                written.append("" if number is None else f"{token[: token.index('{')]}{number}")
            else:
                written.append(token)
        return "".join(written)


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of the first project, and the tensors of the second that it is joined from.

    Raises:
        ValueError: the parts of the rule do not fit together.
    """

    joined: str
    """Pattern of the key in the first project. Placeholders may be left out of keys: those tensors are
    stacked, with a leading dimension for each."""
    parts: tuple[str, ...]
    """Patterns of the keys in the second project, with the same placeholders in the same order."""
    layout: str = "same"
    """One of `LAYOUTS`."""
    shapes: tuple[str, ...] = ()
    """For each part, the names of its sizes: "hidden ffn". Equal names have to be equal sizes."""
    unfused: str | None = None
    """Another name of `joined`, for norms that are not part of a linear layer."""
    also: tuple[str, ...] = ()
    """More names of `joined` in stored checkpoints."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"{self.joined}: layout is one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if len(self.parts) != LAYOUTS[self.layout].parts:
            raise ValueError(
                f"{self.joined}: layout {self.layout} has {LAYOUTS[self.layout].parts} parts, not "
                f"{len(self.parts)}"
            )
        if self.shapes and len(self.shapes) != len(self.parts):
            raise ValueError(f"{self.joined}: {len(self.shapes)} shapes for {len(self.parts)} parts")
        for text in (*self.parts, *self.joined_names):
            if KeyPattern(text).placeholders != KeyPattern(self.joined).placeholders:
                raise ValueError(f"{text!r} and {self.joined!r} have different placeholders")

    @property
    def joined_names(self) -> tuple[str, ...]:
        """All patterns of the joined tensor."""
        return (self.joined, *(() if self.unfused is None else (self.unfused,)), *self.also)


@dataclass(frozen=True, slots=True)
class KeyRules:
    """All rules between two projects. The first rule that a key matches takes it."""

    first: str
    """Name of the project with the joined tensors, such as "megatron"."""
    second: str
    """Name of the project with the parts, such as "hf"."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Patterns of keys, of either project, that are ignored: buffers, for example."""
    first_prefix: str = ""
    """Regular expression of text that keys of the first project may begin with."""
    first_optimizer: str = ""
    """Regular expression of the beginning of keys of the first project's optimizers; empty for none. They are
    ignored if no rule takes them."""

    @property
    def directions(self) -> tuple[str, str]:
        """Names of both directions."""
        return f"{self.first}-to-{self.second}", f"{self.second}-to-{self.first}"

    @property
    def placeholders(self) -> frozenset[str]:
        """Names of the placeholders of all rules, and the two that most models have."""
        names = (name for rule in self.rules for name in KeyPattern(rule.joined).placeholders)
        return frozenset({"layer", "expert", *names})

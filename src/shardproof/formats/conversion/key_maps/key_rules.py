"""Rules between the keys of two projects, as data, and the patterns that keys match.

A pattern is a key with placeholders for numbers: ``decoder.layers.{layer}.mlp.linear_fc2.weight``. Text in
brackets is optional in stored keys, and present in written ones: ``[transformer.]wte.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.formats.conversion.key_maps.layouts import LAYOUTS

_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_TOKEN = re.compile(r"(\.?\{[a-z][a-z0-9_]*\}|\[[^\]]*\])")
_NUMBER = r"0|[1-9][0-9]{0,8}"


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

"""The text that names a map: a family and a direction, or a file, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import parse_qsl

from shardproof.conversion.key_maps.hyperparameters import Hyperparameters
from shardproof.conversion.key_maps.key_matching import RuleOptions

__all__ = ["MapName"]

_NUMBERS = tuple(item.name for item in fields(Hyperparameters))
_TEXTS = ("config", "direction", "norms", "prefix", "stack")


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

    def with_defaults(self, options: Mapping[str, str]) -> MapName:
        """The same map, where options that are not given have these values."""
        return MapName(self.base, {**options, **self.options})

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

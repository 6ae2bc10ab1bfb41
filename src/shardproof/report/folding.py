"""Repeated layers, folded: a thousand keys that differ in numbers only, as one row.

``layers.0.wq``, ``layers.1.wq``, ... become ``layers.{0..31}.wq`` where dtype and shape are the same. A row
stands for exactly the keys that its pattern spells: index sets are joined only where the rest is equal, so
two numbered levels (``layers.{0..3}.experts.{0..7}``) fold to one row only if every combination is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Folded", "fold", "index_ranges"]

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Folded(Generic[Label]):
    """A row that stands for `count` keys of equal label."""

    pattern: str
    count: int
    label: Label
    first: str
    """The first of the keys, in the order they were given."""


def fold(items: Iterable[tuple[str, Label]]) -> list[Folded[Label]]:
    """Folds keys by the numbers in them, where everything else, and the label, is equal.

    Rows are in the order of the first key of each.

    >>> rows = fold([("a.0.w", "f32"), ("a.1.w", "f32"), ("a.2.w", "f32"), ("a.3.w", "f64"), ("b", "f32")])
    >>> [(row.pattern, row.count) for row in rows]
    [('a.{0..2}.w', 3), ('a.3.w', 1), ('b', 1)]
    """
    items = list(items)
    order = {key: place for place, (key, _) in enumerate(items)}
    rows: dict[tuple[tuple[str | None, ...], Label], list[_Row]] = {}
    for key, label in items:
        words = key.split(".")
        numbers = tuple(frozenset((int(word),)) for word in words if _is_index(word))
        template = tuple(None if _is_index(word) else word for word in words)
        rows.setdefault((template, label), []).append(_Row(numbers, 1, key))
    folded = []
    for (template, label), group in rows.items():
        # The last level first: experts of a layer are joined before the layers are.
        for level in reversed(range(template.count(None))):
            group = _join(group, level, order)
        folded += [Folded(_pattern(template, row.numbers), row.count, label, row.first) for row in group]
    return sorted(folded, key=lambda row: order[row.first])


def index_ranges(numbers: Iterable[int]) -> str:
    """A set of numbers as ranges.

    >>> index_ranges({0, 1, 2, 3, 7, 9, 10})
    '0..3,7,9,10'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(
        f"{first}..{last}" if last - first > 1 else ",".join(map(str, range(first, last + 1)))
        for first, last in spans
    )


@dataclass(frozen=True, slots=True)
class _Row:
    numbers: tuple[frozenset[int], ...]
    count: int
    first: str


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9 and (word == "0" or word[0] != "0")


def _join(rows: list[_Row], level: int, order: dict[str, int]) -> list[_Row]:
    """Rows that are equal but for one level become one."""
    groups: dict[tuple[frozenset[int], ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.numbers[:level] + row.numbers[level + 1 :], []).append(row)
    joined = []
    for others, group in groups.items():
        numbers = frozenset[int]().union(*(row.numbers[level] for row in group))
        first = min((row.first for row in group), key=order.__getitem__)
        count = sum(row.count for row in group)
        joined.append(_Row((*others[:level], numbers, *others[level:]), count, first))
    return joined


def _pattern(template: tuple[str | None, ...], numbers: tuple[frozenset[int], ...]) -> str:
    levels = iter(numbers)
    words = []
    for word in template:
        if word is None:
            level = next(levels)
            word = f"{{{index_ranges(level)}}}" if len(level) > 1 else str(next(iter(level)))
        words.append(word)
    return ".".join(words)

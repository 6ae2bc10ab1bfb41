"""Applies rules to the tensors of a checkpoint: finds which rule takes each key, and gives the moves.

    match keys -> check numbers of layers and experts -> arrange each rule's tensors -> check sizes

It works on keys, dtypes and shapes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from shardproof.conversion.key_maps.hyperparameters import Hyperparameters
from shardproof.conversion.key_maps.key_rules import KeyPattern, KeyRules, Rule
from shardproof.conversion.key_maps.layouts import LAYOUTS, Arrangement, LayoutMismatch, Piece
from shardproof.conversion.mapping import MappedTensor, Move
from shardproof.errors import StructureError

__all__ = ["MappedKeys", "RuleOptions", "Stored", "apply_rules"]

Stored: TypeAlias = tuple[str, tuple[int, ...]]
"""Torch's name of the dtype, and the shape, of a stored tensor."""

_Shape = tuple[int, ...]
_Numbers = tuple[int, ...]
"""Values of the placeholders of a rule, in their order."""


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """How rules are applied."""

    prefixes: Sequence[str] = ()
    """Below these keys the rules apply, too. The written keys have them as well."""
    stacked: frozenset[str] = frozenset()
    """Placeholders for which the first project's tensors are written with a leading dimension."""
    unfused_norms: bool = False
    """True to write `Rule.unfused` names."""


@dataclass(frozen=True, slots=True)
class MappedKeys:
    """What is written."""

    tensors: Mapping[str, MappedTensor]
    ignored: Sequence[str] = ()
    """Stored keys that mean nothing."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, or one of those that are stacked in it."""

    key: str
    offsets: _Shape
    """Where it lies in the leading dimensions of the stored tensor."""
    dtype: str
    shape: _Shape
    """Without leading dimensions."""


@dataclass(slots=True)
class _Found:
    """The stored tensors that one rule takes, below one prefix."""

    rule: Rule
    prefix: str
    sources: dict[_Numbers, dict[int, _Source]] = field(default_factory=dict)
    """By the values of the placeholders; then by part, 0 for a joined tensor."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        return KeyPattern(self.rule.joined).placeholders

    def example(self) -> _Source:
        """Any source, for messages."""
        return next(iter(next(iter(self.sources.values())).values()))


class _Sizes:
    """Sizes by name, each with the key that says it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str]] = {}

    def expect(self, name: str, size: int, by: str) -> None:
        """Notes a size. Raises if it contradicts one noted before."""
        number = int(name) if name.isdigit() else None
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


def apply_rules(
    rules: KeyRules,
    direction: str,
    stored: Mapping[str, Stored],
    known: Hyperparameters,
    options: RuleOptions,
) -> MappedKeys:
    """Maps stored tensors to those of the other project.

    Args:
        rules: between the projects.
        direction: one of `KeyRules.directions`.
        stored: dtype and shape of each stored tensor, by key.
        known: numbers of the model.
        options: how.

    Raises:
        StructureError: no rule takes a key, a rule lacks a tensor, or shapes contradict.
    """
    joined_is_stored = direction == rules.directions[0]
    found, ignored = _matched(rules, joined_is_stored, stored, options)
    tensors: dict[str, MappedTensor] = {}
    sizes: dict[str, _Sizes] = {}
    for item in found:
        sizes.setdefault(item.prefix, _Sizes())
    _check_numbers(found, known, sizes)
    for item in found:
        written = (
            _split(item, known, sizes[item.prefix])
            if joined_is_stored
            else _joined(item, known, sizes[item.prefix], options)
        )
        for key, tensor in written:
            if key in tensors:
                raise StructureError(f"key map: two stored tensors would be {key!r}", key=key)
            tensors[key] = tensor
    return MappedKeys(tensors, ignored)


def _matched(
    rules: KeyRules, joined_is_stored: bool, stored: Mapping[str, Stored], options: RuleOptions
) -> tuple[list[_Found], list[str]]:
    """The rule that takes each key."""
    patterns = list(_patterns(rules, joined_is_stored))
    meaningless = [KeyPattern(text, prefix=rules.first_prefix) for text in rules.ignored]
    found: dict[tuple[str, int], _Found] = {}
    ignored, unknown = [], []
    for key, (dtype, shape) in stored.items():
        prefix = next((f"{at}." for at in options.prefixes if key.startswith(f"{at}.")), "")
        name = key.removeprefix(prefix)
        if any(pattern.match(name) is not None for pattern in meaningless):
            ignored.append(key)
            continue
        for row, rule, part, pattern in patterns:
            if (numbers := pattern.match(name)) is not None:
                item = found.setdefault((prefix, row), _Found(rule, prefix))
                _add(item, part, key, dtype, shape, numbers)
                break
        else:
            unknown.append(key)
    if unknown:
        raise StructureError(
            f"key map: no rule takes {len(unknown)} of {len(stored)} keys. Leave them out (--exclude KEY, or "
            "a pattern as below), name a prefix (?prefix=optimizer.state.exp_avg), or use another map:\n"
            f"{_summary(unknown)}",
            keys=unknown,
        )
    return [found[at] for at in sorted(found)], ignored


def _patterns(rules: KeyRules, joined_is_stored: bool) -> Iterator[tuple[int, Rule, int, KeyPattern]]:
    for row, rule in enumerate(rules.rules):
        if joined_is_stored:
            for text in rule.joined_names:
                yield row, rule, 0, KeyPattern(text, stackable=True, prefix=rules.first_prefix)
        else:
            for part, text in enumerate(rule.parts):
                yield row, rule, part, KeyPattern(text)


def _add(
    item: _Found, part: int, key: str, dtype: str, shape: _Shape, numbers: Mapping[str, int | None]
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
    for offsets in product(*map(range, shape[: len(leading)])):
        values = dict(zip(leading, offsets, strict=True))
        at = tuple(values[name] if (number := numbers[name]) is None else number for name in names)
        source = _Source(key, offsets, dtype, shape[len(leading) :])
        if (other := item.sources.setdefault(at, {}).setdefault(part, source)) is not source:
            raise StructureError(f"key map: {other.key} and {key} are the same tensor", key=key)


def _summary(keys: Iterable[str]) -> str:
    """All keys, one line for those that differ in numbers alone."""
    lines: dict[str, list[str]] = {}
    for key in keys:
        lines.setdefault(re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", key), []).append(key)
    return "\n".join(
        f"  {same[0]}" if len(same) == 1 else f"  {pattern} ({len(same)} keys)"
        for pattern, same in lines.items()
    )


def _check_numbers(found: Sequence[_Found], known: Hyperparameters, sizes: Mapping[str, _Sizes]) -> None:
    """Checks that layers and experts are numbered from 0 without gaps, the same for all rules."""
    if known.layers is not None:
        for prefix in sizes:
            sizes[prefix].expect("layer", known.layers, "the configuration")
    for item in found:
        names, key = item.placeholders, item.example().key
        extents = []
        for row, name in enumerate(names):
            values = {numbers[row] for numbers in item.sources}
            if missing := set(range(max(values) + 1)) - values:
                raise StructureError(
                    f"key map: of the tensors such as {key}, those of {name} {_listed(missing)} are missing",
                    key=key,
                )
            extents.append(len(values))
        complete = set(product(*map(range, extents)))
        if missing_numbers := complete - item.sources.keys():
            where = ", ".join(
                f"{name} {value}" for name, value in zip(names, min(missing_numbers), strict=True)
            )
            raise StructureError(
                f"key map: of the tensors such as {key}, that of {where} is missing", key=key
            )
        for name, extent in zip(names, extents, strict=True):
            sizes[item.prefix].expect(name, extent, key)


def _listed(numbers: Iterable[int]) -> str:
    some = sorted(numbers)
    return ", ".join(map(str, some[:10])) + (", ..." if len(some) > 10 else "")


def _split(item: _Found, known: Hyperparameters, sizes: _Sizes) -> Iterator[tuple[str, MappedTensor]]:
    """The parts of joined tensors."""
    patterns = [KeyPattern(text) for text in item.rule.parts]
    for numbers, sources in sorted(item.sources.items()):
        source = sources[0]
        arranged = _checked(item.rule, known, sizes, {0: source}, joined=source)
        named = dict(zip(item.placeholders, numbers, strict=True))
        leading = (1,) * len(source.offsets)
        for part, (pattern, shape) in enumerate(zip(patterns, arranged.parts, strict=True)):
            moves = [
                Move(
                    piece.part_offsets,
                    piece.part_sizes,
                    source.key,
                    (*source.offsets, *piece.offsets),
                    (*leading, *piece.sizes),
                    (*range(len(leading)), len(leading) + 1, len(leading)) if piece.transposed else (),
                )
                for piece in arranged.pieces
                if piece.part == part
            ]
            yield item.prefix + pattern.key(named), MappedTensor(source.dtype, shape, moves)


def _joined(
    item: _Found, known: Hyperparameters, sizes: _Sizes, options: RuleOptions
) -> Iterator[tuple[str, MappedTensor]]:
    """Joined tensors, with leading dimensions where they are stacked."""
    rule, names = item.rule, item.placeholders
    text = rule.unfused if options.unfused_norms and rule.unfused is not None else rule.joined
    pattern = KeyPattern(text, stackable=True)
    stacked = [name in options.stacked for name in names]
    written: dict[str, list[tuple[_Numbers, Mapping[int, _Source], Arrangement]]] = {}
    for numbers, sources in sorted(item.sources.items()):
        if missing := [part for part in range(len(rule.parts)) if part not in sources]:
            named = dict(zip(names, numbers, strict=True))
            keys = [item.prefix + KeyPattern(rule.parts[part]).key(named) for part in missing]
            raise StructureError(
                f"key map: {_listed_keys(keys)} missing: {next(iter(sources.values())).key} is part of "
                f"{item.prefix}{pattern.key(named)} with it",
                keys=keys,
            )
        arranged = _checked(rule, known, sizes, sources, joined=None)
        key = pattern.key(
            {
                name: None if is_stacked else number
                for name, is_stacked, number in zip(names, stacked, numbers, strict=True)
            }
        )
        at = tuple(number for number, is_stacked in zip(numbers, stacked, strict=True) if is_stacked)
        written.setdefault(item.prefix + key, []).append((at, sources, arranged))
    for key, layers in written.items():
        yield key, _stack(key, layers)


def _stack(key: str, layers: Sequence[tuple[_Numbers, Mapping[int, _Source], Arrangement]]) -> MappedTensor:
    """A joined tensor, of all layers and experts that are stacked in it."""
    _, first_sources, first = layers[0]
    dtype, shape = first_sources[0].dtype, first.joined
    moves: list[Move] = []
    for at, sources, arranged in layers:
        for source in sources.values():
            if source.dtype != dtype:
                raise StructureError(
                    f"key map: {source.key} is {source.dtype}, expected {dtype} as {first_sources[0].key}: "
                    f"both are part of {key}",
                    key=source.key,
                )
        if arranged.joined != shape:
            raise StructureError(
                f"key map: {sources[0].key} gives shape {list(arranged.joined)}, expected {list(shape)} as "
                f"{first_sources[0].key} does: both are part of {key}",
                key=sources[0].key,
            )
        ones = (1,) * len(at)
        moves += (_join_move(piece, sources[piece.part], at, ones) for piece in arranged.pieces)
        moves += (Move((*at, *start), (*ones, *extent), None) for start, extent in arranged.padding)
    extents = tuple(max(numbers) + 1 for numbers in zip(*(at for at, _, _ in layers), strict=True))
    return MappedTensor(dtype, (*extents, *shape), moves)


def _join_move(piece: Piece, source: _Source, at: _Numbers, ones: _Shape) -> Move:
    return Move(
        (*at, *piece.offsets),
        (*ones, *piece.sizes),
        source.key,
        piece.part_offsets,
        piece.part_sizes,
        (1, 0) if piece.transposed else (),
    )


def _checked(
    rule: Rule,
    known: Hyperparameters,
    sizes: _Sizes,
    sources: Mapping[int, _Source],
    *,
    joined: _Source | None,
) -> Arrangement:
    """The arrangement of stored tensors, if their shapes fit."""
    layout = LAYOUTS[rule.layout]
    try:
        arranged = (
            layout.join([sources[part].shape for part in range(len(rule.parts))], known)
            if joined is None
            else layout.split(joined.shape, known)
        )
    except LayoutMismatch as error:
        keys = ", ".join(source.key for source in sources.values())
        shapes = ", ".join(str(list(source.shape)) for source in sources.values())
        each = " each" if joined is not None and joined.offsets else ""
        raise StructureError(
            f"key map: {keys} of shape {shapes}{each} cannot be mapped as {rule.layout}: {error}",
            key=next(iter(sources.values())).key,
        ) from error
    for part, names in enumerate(rule.shapes):
        source = sources[0] if joined is not None else sources[part]
        sizes.check(names, arranged.parts[part], source.key, source.shape)
    for name, size in arranged.sizes.items():
        sizes.expect(name, size, next(iter(sources.values())).key)
    return arranged


def _listed_keys(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'}"

"""Applies rules to the tensors of a checkpoint, and checks the moves of any map.

    match keys -> check numbers of layers and experts -> arrange each rule's tensors -> check sizes
        -> check moves

It needs only keys, dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import Boxes, tiling_faults
from shardproof.errors import StructureError, TilingError
from shardproof.formats.conversion.key_maps.key_matching import (
    KeyPattern,
    KeyRules,
    MatchedRule,
    Numbers,
    Rule,
    RuleOptions,
    SizeNames,
    Source,
    Stored,
    check_numbers,
    match_keys,
)
from shardproof.formats.conversion.key_maps.layouts import (
    LAYOUTS,
    Arrangement,
    Hyperparameters,
    LayoutMismatch,
)


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a written tensor that comes from a box of a stored one.

    The elements correspond in row-major order. So the two boxes have equally many elements, but may have
    different numbers of dimensions (one layer of a stack, one of many experts). With `axes`, the dimensions
    of the stored box are permuted first.
    """

    offsets: tuple[int, ...]
    """First index of the box in the written tensor."""
    sizes: tuple[int, ...]
    key: str | None
    """Key of the stored tensor; None for zeros (padding)."""
    source_offsets: tuple[int, ...] = ()
    """First index of the box in the stored tensor."""
    source_sizes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    """Order of the stored dimensions, as `torch.permute` takes it; empty to leave it."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A written tensor, and where its elements come from."""

    dtype: str
    """Torch's name of the dtype that is written."""
    shape: tuple[int, ...]
    moves: Sequence[Move]
    """Boxes that tile the shape."""


KeyMapFunction: TypeAlias = Callable[
    [Mapping[str, tuple[str, tuple[int, ...]]], Mapping[str, Any]], Mapping[str, MappedTensor]
]
"""From the dtype and shape of each stored tensor, and the plain values, to the written tensors."""
KeyMap: TypeAlias = str | KeyMapFunction
"""Map between the keys of two projects: its name, the path of a TOML file that declares it, or a function."""


@dataclass(frozen=True, slots=True)
class MappedKeys:
    """The tensors to write."""

    tensors: Mapping[str, MappedTensor]
    ignored: Sequence[str] = ()
    """Stored keys that the rules ignore, such as buffers."""


def apply_rules(
    rules: KeyRules,
    direction: str,
    stored: Mapping[str, Stored],
    known: Hyperparameters,
    options: RuleOptions,
) -> MappedKeys:
    """Maps stored tensors to those of the other project."""
    joined_is_stored = direction == rules.directions[0]
    found, ignored = match_keys(rules, joined_is_stored, stored, options)
    tensors: dict[str, MappedTensor] = {}
    sizes: dict[str, SizeNames] = {}
    for item in found:
        sizes.setdefault(item.prefix, SizeNames())
    check_numbers(found, known, sizes)
    for item in found:
        written = (
            _split(item, known, sizes[item.prefix])
            if joined_is_stored
            else _joined(item, known, sizes[item.prefix], options)
        )
        for key, tensor in written:
            if key in tensors:
                raise StructureError(f"key map: two stored tensors are mapped to {key!r}", key=key)
            tensors[key] = tensor
    return MappedKeys(tensors, ignored)


def _split(item: MatchedRule, known: Hyperparameters, sizes: SizeNames) -> Iterator[tuple[str, MappedTensor]]:
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
    item: MatchedRule, known: Hyperparameters, sizes: SizeNames, options: RuleOptions
) -> Iterator[tuple[str, MappedTensor]]:
    """Joined tensors, with leading dimensions where they are stacked."""
    rule, names = item.rule, item.placeholders
    text = rule.unfused if options.unfused_norms and rule.unfused is not None else rule.joined
    pattern = KeyPattern(text, stackable=True)
    stacked = [name in options.stacked for name in names]
    written: dict[str, list[tuple[Numbers, Mapping[int, Source], Arrangement]]] = {}
    for numbers, sources in sorted(item.sources.items()):
        if missing := [part for part in range(len(rule.parts)) if part not in sources]:
            named = dict(zip(names, numbers, strict=True))
            keys = [item.prefix + KeyPattern(rule.parts[part]).key(named) for part in missing]
            raise StructureError(
                f"key map: {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} missing: "
                f"{next(iter(sources.values())).key} is another part of {item.prefix}{pattern.key(named)}",
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


def _stack(key: str, layers: Sequence[tuple[Numbers, Mapping[int, Source], Arrangement]]) -> MappedTensor:
    """A joined tensor, with all layers and experts that are stacked in it."""
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
        moves += (
            Move(
                (*at, *piece.offsets),
                (*ones, *piece.sizes),
                sources[piece.part].key,
                piece.part_offsets,
                piece.part_sizes,
                (1, 0) if piece.transposed else (),
            )
            for piece in arranged.pieces
        )
        moves += (Move((*at, *start), (*ones, *extent), None) for start, extent in arranged.padding)
    extents = tuple(max(numbers) + 1 for numbers in zip(*(at for at, _, _ in layers), strict=True))
    return MappedTensor(dtype, (*extents, *shape), moves)


def _checked(
    rule: Rule,
    known: Hyperparameters,
    sizes: SizeNames,
    sources: Mapping[int, Source],
    *,
    joined: Source | None,
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


def check_mapped(tensors: Mapping[str, MappedTensor], stored: Mapping[str, Stored]) -> None:
    """Checks what a map gives.

    Raises:
        StructureError: a value is not a `MappedTensor`, or a move does not fit its tensors.
        TilingError: moves overlap, or do not fill a tensor.
    """
    by_dimensions: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not key or not isinstance(tensor, MappedTensor):
            raise StructureError(f"key map: {key!r} is mapped to {type(tensor).__name__}, not MappedTensor")
        if tensor.dtype not in DTYPES or any(type(size) is not int or size < 0 for size in tensor.shape):
            raise StructureError(
                f"key map: {key!r} has dtype {tensor.dtype!r} and shape {tensor.shape!r}", key=key
            )
        for move in tensor.moves:
            _check_move(key, tensor, move, stored)
        by_dimensions.setdefault(len(tensor.shape), []).append(key)
    for ndim, keys in by_dimensions.items():
        _check_tiling(ndim, keys, tensors)


def _check_move(key: str, tensor: MappedTensor, move: Move, stored: Mapping[str, Stored]) -> None:
    fits = len(move.offsets) == len(move.sizes) == len(tensor.shape) and min(move.sizes, default=0) >= 0
    if fits and move.key is not None:
        shape = stored.get(move.key, ("", None))[1]
        if shape is None:
            raise StructureError(f"key map: {key!r} comes from {move.key!r}, which is not stored", key=key)
        axes = move.axes or tuple(range(len(shape)))
        fits = (
            len(move.source_offsets) == len(move.source_sizes) == len(shape)
            and all(
                min(at, size) >= 0 and at + size <= extent
                for at, size, extent in zip(move.source_offsets, move.source_sizes, shape, strict=True)
            )
            and sorted(axes) == list(range(len(shape)))
            and prod(move.source_sizes) == prod(move.sizes)
        )
    if not fits:
        raise StructureError(
            f"key map: {key!r} of shape {list(tensor.shape)} has a wrong move: {move}", key=key
        )


def _check_tiling(ndim: int, keys: list[str], tensors: Mapping[str, MappedTensor]) -> None:
    moves = [move for key in keys for move in tensors[key].moves]
    counts = [len(tensors[key].moves) for key in keys]
    columns = (len(moves), ndim)
    boxes = Boxes(
        np.array([move.offsets for move in moves], np.int64).reshape(columns),
        np.array([move.sizes for move in moves], np.int64).reshape(columns),
    )
    shapes = np.array([tensors[key].shape for key in keys], np.int64).reshape(len(keys), ndim)
    for fault in tiling_faults(shapes, np.repeat(np.arange(len(keys)), counts), boxes):
        key = keys[fault.tensor]
        raise TilingError(
            f"key map: the moves of {key!r} have a fault, {fault.kind}, at {list(fault.offsets)}, sizes "
            f"{list(fault.sizes)}: each element of {list(tensors[key].shape)} needs exactly one move",
            key=key,
            kind=fault.kind,
        )

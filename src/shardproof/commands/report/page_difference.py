"""The facts of the page of two checkpoints: what `diff --measure` finds, by layer, with histograms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from shardproof.commands.report.description import Stored
from shardproof.commands.report.difference import Difference, ValueDifference, most_changed_first
from shardproof.commands.report.divided_reads import boxes_of, read_boxes
from shardproof.commands.report.measures import MOST_NUMBERS, Measure, MeasuredDifference, Norm, numbers
from shardproof.commands.report.page_facts import LONGEST_TEXT, MOST_VALUES, cut, heading
from shardproof.commands.report.stored_bits import Bits
from shardproof.commands.report.summary import tensor_bytes
from shardproof.engine.foreign import Foreign
from shardproof.workers import Job

_JOB = Job("the histograms", "run the command again")
HISTOGRAMS = 6
"""Tensors of a page that have histograms."""
_KEYS = ("only_a", "only_b")
_TEXTS = ("changed", "objects", "uncompared")
"""The lists of a difference: of keys, and of keys with texts."""


def difference_facts(
    sides: Sequence[tuple[Foreign, Stored]],
    difference: Difference,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The facts of two checkpoints, as plain JSON values. Reads the tensors that changed most once more.

    Args:
        sides: both checkpoints, with their descriptions.
        difference: the result of `diff` with `measure`.
        on_progress: called with the bytes read so far and in all.

    Raises:
        CorruptChunkError, StorageError, TilingError: a tensor cannot be read.
    """
    values = most_changed_first(difference.values)
    found = difference.to_json()
    lists: dict[str, Any] = {name: found[name][:MOST_VALUES] for name in _KEYS}
    for name in _TEXTS:
        rows = found[name][:MOST_VALUES]
        lists[name] = [
            {part: text if part == "key" else cut(text) for part, text in row.items()} for row in rows
        ]
    by_key = {value["key"]: value for value in found["values"]}
    return heading("difference", difference.a) | {
        "sides": [_side(stored) for _, stored in sides],
        "difference": found
        | lists
        | {f"{name}_in_all": len(found[name]) for name in (*_KEYS, *_TEXTS)}
        | {"values": [by_key[value.key] for value in values]},
        "layers": _layers(values),
        "histograms": _histograms(sides, values[:HISTOGRAMS], on_progress),
    }


def _side(stored: Stored) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "location": stored.location,
        "format": stored.format,
        "step": manifest.step,
        "time": manifest.time or None,
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors),
        "bytes": sum(map(tensor_bytes, manifest.tensors)),
        "notes": [cut(note, 4 * LONGEST_TEXT) for note in stored.notes],
    }


def layer_of(key: str) -> str:
    """The part of the tree that counts as the layer of a key: up to its first number, or its first two words.

    >>> layer_of("model.layers.3.attention.wq"), layer_of("model.embed.weight"), layer_of("w")
    ('model.layers.3', 'model.embed', 'w')
    """
    numbered = re.match(r"(?:[^.]*\.)*?[0-9]+(?=\.|$)", key)
    return numbered[0] if numbered else ".".join(key.split(".")[:2])


def _layers(values: Sequence[ValueDifference]) -> list[dict[str, Any]]:
    """Each layer with tensors that differ, by its relative difference."""
    groups: dict[str, list[MeasuredDifference]] = {}
    for value in values:
        if value.measured is not None:
            groups.setdefault(layer_of(value.key), []).append(value.measured)
    rows = []
    for layer, group in groups.items():
        whole = MeasuredDifference(
            largest=max(one.largest for one in group),
            difference=_joined([one.difference for one in group]),
            first=_joined([one.first for one in group]),
            one_finite=sum(one.one_finite for one in group),
            nan=(sum(one.nan[0] for one in group), sum(one.nan[1] for one in group)),
            inf=(sum(one.inf[0] for one in group), sum(one.inf[1] for one in group)),
        )
        rows.append((whole.relative, {"layer": layer, "tensors": len(group), **whole.to_json()}))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _joined(norms: Sequence[Norm]) -> Norm:
    """The norm of the numbers of several norms."""
    whole = Norm()
    for norm in norms:
        whole.join(norm)
    return whole


def _histograms(
    sides: Sequence[tuple[Foreign, Stored]],
    values: Sequence[ValueDifference],
    on_progress: Callable[[int, int], None] | None,
) -> list[dict[str, Any]]:
    """Magnitudes of both tensors of each key, and of the difference of their numbers, read box by box."""
    one = sides[0][1].manifest
    records = {record.key: record for record in one.tensors}
    chosen = [records[one.aliases.get(value.key, value.key)] for value in values]
    boxes = [
        boxes_of(record, (value.key, value.key), MOST_NUMBERS)
        for value, record in zip(values, chosen, strict=True)
    ]
    every = [box for group in boxes for box in group]
    parts = read_boxes(_JOB, sides, every, _measure_boxes, on_progress=on_progress)
    found = []
    for value, group in zip(values, boxes, strict=True):
        whole = {"a": Measure(), "b": Measure(), "change": Measure()}
        for part in islice(parts, len(group)):
            for name, measure in part.items():
                whole[name].join(measure)
        found.append({"key": value.key, **{name: one.to_json() for name, one in whole.items()}})
    return found


def _measure_boxes(sides: Sequence[Bits], dtype: str) -> dict[str, Measure]:
    """Measures of a box of both tensors, and of the difference of their numbers."""
    a, b = (numbers(bits, dtype) for bits in sides)
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        change = b[both] - a[both]
    return {"a": Measure.of(a), "b": Measure.of(b), "change": Measure.of(change)}

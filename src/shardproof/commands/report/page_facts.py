"""The facts of a page, as plain JSON values.

- A run: what `ls`, `doctor` and a restore say about it.
- A checkpoint: what `inspect` shows, for each tensor.
- Two checkpoints: what `diff --measure` finds, by layer, with histograms.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.commands.report.description import Stored
from shardproof.commands.report.detail import spelled
from shardproof.commands.report.difference import Difference, ValueDifference, most_changed_first
from shardproof.commands.report.measures import Measure, MeasuredDifference, Norm, numbers
from shardproof.commands.report.stored_bits import open_bits
from shardproof.commands.report.summary import summarise, tensor_bytes
from shardproof.commands.report.tensor_statistics import boxes_to_measure
from shardproof.engine.foreign import NATIVE, Foreign
from shardproof.engine.storage import Storage
from shardproof.errors import NotCommittedError, StorageError
from shardproof.runs.checkpointer import (
    Examination,
    StepInfo,
    Verdict,
    best_interval,
    interval_advice,
    leftovers,
    plan_restore,
    read_node_mark,
    save_seconds,
    scan_run,
)
from shardproof.version import __version__

_MOST_STEPS = 2000
"""Steps on a page. Older ones are left out, and counted."""
MOST_TENSORS = 50_000
"""Tensors on a page. The smallest of more are left out, and counted."""
MOST_BOXES = 60_000
"""Boxes on a page. Tensors of one layout share theirs, and the largest tensors come first."""
_MOST_VALUES = 2000
"""Plain values, faults and other rows on a page."""
_LONGEST_TEXT = 300
"""Characters of a plain value."""
_HISTOGRAMS = 6
"""Tensors of a page that have histograms."""
_KEYS = ("only_a", "only_b")
_TEXTS = ("changed", "objects", "uncompared")
"""The lists of a difference: of keys, and of keys with texts."""
_HOURS = (1, 3, 6, 12, 24, 72, 168, 720)
"""Times between two failures for which the page suggests an interval."""
_MEANINGS = {verdict.value: verdict.meaning for verdict in Verdict}


def _heading(page: str, location: str) -> dict[str, Any]:
    """The facts that every page begins with."""
    return {"page": page, "location": location, "made": time.time(), "program": f"shardproof {__version__}"}


def run_facts(
    tiers: Sequence[Storage],
    examination: Examination,
    *,
    mtbf: float | None = None,
    blocked: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The facts of a run, as plain JSON values.

    Args:
        tiers: the run's folder in each tier, nearest first.
        examination: of the first tier.
        mtbf: seconds between two failures of the job, on average; None: not known.
        blocked: seconds that training waited for the save of each step, from traces.

    Raises:
        StorageError: a tier cannot be read.
    """
    run = tiers[0]
    modified = cache(run.modified)
    written: dict[str, float] = {}
    for leftover in leftovers(run, modified):
        if leftover.modified is not None:
            written[leftover.folder] = max(leftover.modified, written.get(leftover.folder, 0.0))
    second = {info.name: info.status for info in scan_run(tiers[1])} if len(tiers) > 1 else None
    infos = examination.infos[-_MOST_STEPS:]
    return _heading("run", run.location) | {
        "steps": [
            info.to_json()
            | {
                "meaning": _MEANINGS[info.status],
                "seconds": save_seconds(info, modified),
                "blocked": None if info.step is None or info.suspect else (blocked or {}).get(info.step),
                "written": written.get(info.name),
                "second_tier": None if second is None else second.get(info.name, "absent"),
            }
            for info in infos
        ],
        "steps_left_out": len(examination.infos) - len(infos),
        "restore": _restore(tiers),
        "interval": _interval(examination.infos, modified, mtbf),
        "examination": examination.to_json(),
    }


def _restore(tiers: Sequence[Storage]) -> dict[str, Any]:
    """The step that a restore takes, or why none, and the newer steps that it passes over."""
    facts: dict[str, Any] = {"takes": None, "passed_over": [], "fault": None}
    mark = read_node_mark(tiers[0])
    if mark is not None:
        return facts | {"fault": f"{mark.sentence}. A restore with node_local=True reads them"}
    try:
        chosen = plan_restore(tiers)
    except (NotCommittedError, StorageError) as error:
        return facts | {"fault": error.message}
    facts["takes"] = None if chosen.folder is None else chosen.folder.name
    facts["passed_over"] = [
        {"folder": item.folder.name, "reason": item.reason, "damaged": item.damaged, "tier": item.tier}
        for item in chosen.passed
    ]
    return facts


def _interval(
    infos: Sequence[StepInfo], modified: Callable[[str], float | None], mtbf: float | None
) -> dict[str, Any] | None:
    """The advice of `ls --mtbf`, and suggestions for other times between failures."""
    advice = interval_advice(infos, modified, mtbf or _HOURS[0] * 3600.0)
    if advice is None:
        return None
    facts = asdict(advice) | {"differs_much": advice.differs_much}
    if mtbf is None:
        facts |= {"mtbf": None, "suggested": None, "differs_much": None}
    others = [
        {"mtbf": 3600.0 * hours, "suggested": best_interval(advice.cost, 3600.0 * hours)} for hours in _HOURS
    ]
    return facts | {"suggestions": others}


def checkpoint_facts(stored: Stored, verified: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts of a checkpoint, as plain JSON values.

    Args:
        stored: its description.
        verified: the report of `verify` as JSON, if it was verified for the page.
    """
    manifest = stored.manifest
    summary = summarise(
        stored.location,
        manifest,
        stored.table,
        format=stored.format,
        notes=stored.notes,
        unreadable=stored.unreadable,
    ).to_json()
    values = [key for key in summary["objects"] if stored.format == NATIVE]
    report = None
    if verified is not None:
        faults = verified["faults"]
        more = {"faults": faults[:_MOST_VALUES], "faults_in_all": len(faults), "time": time.time()}
        report = {**verified, **more}
    shares: dict[str, list[int]] = {}
    for record in manifest.tensors:
        share = shares.setdefault(record.dtype, [0, 0])
        share[0] += 1
        share[1] += tensor_bytes(record)
    tensors, layouts = _tensors(stored, verified)
    about = {name: summary[name] for name in summary.keys() - {"rows", "parts", "objects", "metadata"}}
    return _heading("checkpoint", stored.location) | {
        "summary": about | {"values": len(summary["objects"])},
        "metadata": {key: _text(value, 4 * _LONGEST_TEXT) for key, value in summary["metadata"].items()},
        "dtypes": [{"dtype": dtype, "tensors": one, "bytes": all_} for dtype, (one, all_) in shares.items()],
        "tensors": tensors,
        "tensors_left_out": len(manifest.tensors) - len(tensors),
        "layouts": layouts,
        "values": {key: _text(manifest.objects[key]) for key in values[:_MOST_VALUES]},
        "verified": report,
    }


def _text(value: Any, most: int = _LONGEST_TEXT) -> str:
    """A stored plain value for people, which may be nested deeper than Python can spell."""
    try:
        return _cut(spelled(value), most)
    except RecursionError:
        return "nested too deep to show"


def _cut(text: str, most: int = _LONGEST_TEXT) -> str:
    """The text, or its start and its length.

    >>> _cut("abcdef", 3)
    'abc... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


class _Layouts:
    """The layouts of tensors: offsets and sizes of the boxes one after the other, and the file of each."""

    def __init__(self) -> None:
        self.rows: list[dict[str, list[int]]] = []
        """The files are numbered as the writers of the summary."""
        self._numbers: dict[tuple[bytes, ...], int] = {}
        self._boxes = 0

    def number(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64], files: NDArray[np.int64]
    ) -> int | None:
        """The number of a layout; None if the page has no room for it."""
        layout = (offsets.tobytes(), sizes.tobytes(), files.tobytes())
        if layout not in self._numbers and self._boxes + len(files) <= MOST_BOXES:
            self._boxes += len(files)
            self._numbers[layout] = len(self.rows)
            columns = {"offsets": offsets, "sizes": sizes, "files": files}
            self.rows.append({name: column.tolist() for name, column in columns.items()})
        return self._numbers.get(layout)


def _tensors(
    stored: Stored, verified: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], list[dict[str, list[int]]]]:
    """The rows of the tensors, and the layouts that they name by number."""
    table, records = stored.table, stored.manifest.tensors
    first = np.searchsorted(table.tensor, np.arange(len(records) + 1))
    bounds = table.box_start[first]
    ties: dict[str, list[str]] = {}
    for alias, target in stored.manifest.aliases.items():
        ties.setdefault(target, []).append(alias)
    state = "stored" if stored.has_digests else "none"
    damaged = [fault["details"].get("key") for fault in verified["faults"]] if verified else []
    if (
        verified and None not in damaged and state == "stored"
    ):  # each fault names its tensor, so others are whole
        state = "verified"
    rows, layouts = {}, _Layouts()
    order = sorted(range(len(records)), key=lambda row: (-tensor_bytes(records[row]), row))
    for row in order[:MOST_TENSORS]:
        record, box = records[row], slice(bounds[row], bounds[row + 1])
        files = table.file[first[row] : first[row + 1]]
        rows[row] = {
            "key": record.key,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "bytes": tensor_bytes(record),
            "chunks": len(files),
            "files": len(np.unique(files)),
            "digest": "damaged" if record.key in damaged else state,
            "layout": layouts.number(table.box_offsets[box], table.box_sizes[box], files),
        }
        if record.key in ties:
            rows[row]["tied"] = ties[record.key]
    return [rows[row] for row in sorted(rows)], layouts.rows


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
    lists: dict[str, Any] = {name: found[name][:_MOST_VALUES] for name in _KEYS}
    for name in _TEXTS:
        rows = found[name][:_MOST_VALUES]
        lists[name] = [
            {part: text if part == "key" else _cut(text) for part, text in row.items()} for row in rows
        ]
    by_key = {value["key"]: value for value in found["values"]}
    return _heading("difference", difference.a) | {
        "sides": [_side(stored) for _, stored in sides],
        "difference": found
        | lists
        | {f"{name}_in_all": len(found[name]) for name in (*_KEYS, *_TEXTS)}
        | {"values": [by_key[value.key] for value in values]},
        "layers": _layers(values),
        "histograms": _histograms(sides, values[:_HISTOGRAMS], on_progress),
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
        "notes": [_cut(note, 4 * _LONGEST_TEXT) for note in stored.notes],
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
    whole.add(np.array([norm.value for norm in norms if math.isfinite(norm.value)]))
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
    done, total = 0, 2 * sum(map(tensor_bytes, chosen))
    found = []
    with ExitStack() as opened:
        bits = [opened.enter_context(closing(open_bits(place, stored))) for place, stored in sides]
        for value, record in zip(values, chosen, strict=True):
            measures = {"a": Measure(), "b": Measure(), "change": Measure()}
            for offsets, sizes in boxes_to_measure(record.shape):
                pair = [side.box(value.key, offsets, sizes) for side in bits]
                a, b = (numbers(box, record.dtype) for box in pair)
                measures["a"].add(a)
                measures["b"].add(b)
                both = np.isfinite(a) & np.isfinite(b)
                with np.errstate(over="ignore"):
                    measures["change"].add(b[both] - a[both])
                done += sum(box.nbytes for box in pair)
                if on_progress is not None:
                    on_progress(done, total)
            found.append({"key": value.key, **{name: one.to_json() for name, one in measures.items()}})
    return found

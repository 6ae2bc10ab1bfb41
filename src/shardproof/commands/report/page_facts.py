"""The facts of the page of a run and of a checkpoint.

A run: what `ls`, `doctor` and a restore say about it. A checkpoint: what `inspect` shows, for each tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.commands.report.description import Stored
from shardproof.commands.report.detail import spelled
from shardproof.commands.report.summary import summarise, tensor_bytes
from shardproof.engine.foreign import NATIVE
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
MOST_VALUES = 2000
"""Plain values, faults and other rows on a page."""
LONGEST_TEXT = 300
"""Characters of a plain value."""
_HOURS = (1, 3, 6, 12, 24, 72, 168, 720)
"""Times between two failures for which the page suggests an interval."""
_MEANINGS = {verdict.value: verdict.meaning for verdict in Verdict}


def heading(page: str, location: str) -> dict[str, Any]:
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
    return heading("run", run.location) | {
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
    """The facts of a checkpoint, as plain JSON values; `verified` is the report of `verify` as JSON."""
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
        more = {"faults": faults[:MOST_VALUES], "faults_in_all": len(faults), "time": time.time()}
        report = {**verified, **more}
    shares: dict[str, list[int]] = {}
    for record in manifest.tensors:
        share = shares.setdefault(record.dtype, [0, 0])
        share[0] += 1
        share[1] += tensor_bytes(record)
    tensors, layouts = _tensors(stored, verified)
    about = {name: summary[name] for name in summary.keys() - {"rows", "parts", "objects", "metadata"}}
    return heading("checkpoint", stored.location) | {
        "summary": about | {"values": len(summary["objects"])},
        "metadata": {key: _text(value, 4 * LONGEST_TEXT) for key, value in summary["metadata"].items()},
        "dtypes": [{"dtype": dtype, "tensors": one, "bytes": all_} for dtype, (one, all_) in shares.items()],
        "tensors": tensors,
        "tensors_left_out": len(manifest.tensors) - len(tensors),
        "layouts": layouts,
        "values": {key: _text(manifest.objects[key]) for key in values[:MOST_VALUES]},
        "verified": report,
    }


def _text(value: Any, most: int = LONGEST_TEXT) -> str:
    """A stored plain value for people, which may be nested deeper than Python can spell."""
    try:
        return cut(spelled(value), most)
    except RecursionError:
        return "nested too deep to show"


def cut(text: str, most: int = LONGEST_TEXT) -> str:
    """The text, or its start and its length.

    >>> cut("abcdef", 3)
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

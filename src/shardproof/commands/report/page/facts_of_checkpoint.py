"""The facts of the page of a checkpoint: what `inspect` shows, for each tensor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.commands.report.description import Stored
from shardproof.commands.report.detail import spelled
from shardproof.commands.report.page.facts_of_run import heading
from shardproof.commands.report.summary import summarise, tensor_bytes
from shardproof.engine.foreign import NATIVE

MOST_TENSORS = 50_000
"""Tensors on a page. The smallest of more are left out, and counted."""
MOST_BOXES = 60_000
"""Boxes on a page. Tensors of one layout share theirs, and the largest tensors come first."""
MOST_VALUES = 2000
"""Plain values, faults and other rows on a page."""
LONGEST_TEXT = 300
"""Characters of a plain value."""


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

"""The traces of many ranks as one.

Note: One clock for all ranks
-----------------------------
Times in a trace file come from its process's monotonic clock, which is exact but starts anywhere. Each file
tells the wall clock's time of one moment of it (`wall_seconds`), taken when tracing began. Merging shifts
every file by the difference between those moments, so spans of time within a rank stay as measured, and ranks
lie beside each other as well as the wall clocks of their machines agree: within microseconds on one machine,
and as well as NTP or PTP keeps them on several. `Merged.spread` says how far apart at most the ranks left the
same meeting, by these clocks. All leave a meeting within moments, so clocks are hardly further off.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.errors import FormatError

__all__ = ["Merged", "merge_traces"]

MEETINGS = ("agree", "plan", "commit", "match", "apply")
"""Phases that all ranks end together."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What became one trace."""

    path: str
    files: int
    ranks: int
    phases: int
    unfinished: int
    """Phases that had not ended when their process did."""
    spread: float
    """Seconds between the first and the last rank to leave the same meeting, at most (see the note)."""
    skipped: tuple[str, ...]
    """Files that are no trace of ours."""


def merge_traces(files: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Merged:
    """Puts trace files of many ranks and operations into one, on one time line.

    Args:
        files: as `trace` writes them.
        out: name of the new file.

    Raises:
        FormatError: none of the files is a trace.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from shardproof import events
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):  # in a real job, each in a process of its own
    ...         with events.trace(folder), events.phase("save runs/a", "write", rank=rank, world_size=2):
    ...             pass
    ...     events.merge_traces(Path(folder).iterdir(), f"{folder}/all.json").ranks
    2
    """
    names = sorted(os.fspath(file) for file in files)
    skipped, readable, origin = [], [], float("inf")
    for name in names:
        document = _read(name)
        if document is None:
            skipped.append(name)
        else:
            readable.append(name)
            origin = min(origin, document["otherData"]["wall_seconds"])
    if not readable:
        raise FormatError(f"none of {len(names)} files is a trace of shardproof", files=names[:10])
    counts = _Counts()
    with open(out, "w") as merged:
        about = {"wall_seconds": origin, "files": len(readable)}
        merged.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
        separator = "\n"
        for row in _rows(readable, origin):
            merged.write(separator + json.dumps(row))
            separator = ",\n"
            counts.take(row)
        merged.write("\n]}\n")
    return Merged(
        os.fspath(out),
        len(readable),
        len(counts.ranks),
        counts.phases,
        counts.unfinished,
        counts.spread(),
        tuple(skipped),
    )


def _read(name: str) -> dict[str, Any] | None:
    """A trace file's document, or None if it is none."""
    try:
        document = json.loads(Path(name).read_bytes())
        ours = "process" in document["otherData"] and isinstance(document["traceEvents"], list)
    except (ValueError, KeyError, TypeError):
        return None
    return document if ours else None


def _rows(names: Iterable[str], origin: float) -> Iterator[dict[str, Any]]:
    """All events, at times since `origin`, with one number for each lane of a rank whatever file it is in."""
    lanes: dict[tuple[int, str], int] = {}
    for name in names:
        document = _read(name)
        if document is None:  # it changed since we looked
            continue
        shift = (document["otherData"]["wall_seconds"] - origin) * 1e6
        numbers: dict[int, int] = {}
        for row in document["traceEvents"]:
            if row["ph"] == "M":
                if row["name"] == "thread_name":
                    key = (row["pid"], row["args"]["name"])
                    numbers[row["tid"]] = lanes.setdefault(key, len(lanes) + 1)
            else:
                row["ts"] += shift
            row["tid"] = numbers.get(row["tid"], row["tid"])
            yield row


class _Counts:
    """What is said of a merged trace, gathered while it is written."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.phases = 0
        self.unfinished = 0
        self._ends: dict[tuple[Any, ...], list[float]] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()

    def take(self, row: dict[str, Any]) -> None:
        """Takes an event of the merged trace."""
        self.ranks.add(row["pid"])
        if row["ph"] != "X":
            return
        self.phases += 1
        args = row["args"]
        if args.get("unfinished"):
            self.unfinished += 1
        elif row["name"] in MEETINGS:
            meeting = (args["operation"], args["step"], row["name"])
            self._times[row["pid"], *meeting] += 1  # the same again, as a checkpoint that is written over
            if "error" not in args:
                ends = self._ends.setdefault((*meeting, self._times[row["pid"], *meeting]), [])
                ends.append(row["ts"] + row["dur"])

    def spread(self) -> float:
        """Seconds, at most, between the ends of one meeting."""
        return max(((max(ends) - min(ends)) / 1e6 for ends in self._ends.values()), default=0.0)

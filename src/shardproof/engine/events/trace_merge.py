"""Merges the traces of many ranks into one.

Note: One clock for all ranks
-----------------------------
Times in a trace file come from the monotonic clock of its process, which is exact but starts anywhere. Each
file has the wall clock's time of one moment (`wall_seconds`), read when tracing began. The merge shifts
every file by the difference between those moments. So durations within a rank stay exact. Ranks are aligned
as well as the wall clocks of their machines agree: within microseconds on one machine, and as well as NTP
or PTP keeps them on several. `Merged.spread` is the largest time, by these clocks, between two ranks that
left the same meeting. All ranks leave a meeting within moments, so it bounds the error of the clocks.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof._utils.arguments import unexpanded_home
from shardproof.engine.events.phase_table import PHASES
from shardproof.engine.events.trace_files import encoded, row_about
from shardproof.errors import FormatError

_MEETINGS = {phase.name for phase in PHASES if phase.compares_clocks}
"""Phases that all ranks end together."""
_SAME = 5e-4
"""Microseconds: half of the unit in which traces store times."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge."""

    path: str
    files: int
    ranks: int
    phases: int
    unfinished: int
    """Phases that were open when their process ended."""
    spread: float
    """Most seconds between the first and the last rank to leave one meeting (see the note)."""
    skipped: tuple[str, ...]
    """Files that are not traces of shardproof."""


def merge_traces(files: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Merged:
    """Merges trace files of many ranks and operations into one, on one time line.

    Args:
        files: the files that `trace` wrote.
        out: the name of the new file.

    Returns:
        The numbers of merged files and phases, and the skipped files.

    Raises:
        FormatError: none of the files is a trace of shardproof.

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
    skipped, origin = [], float("inf")
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    for name in names:
        document = _read(name)
        if document is None:
            skipped.append(name)
        else:
            by_rank[document["otherData"]["rank"]].append(name)
            origin = min(origin, document["otherData"]["wall_seconds"])
    if not by_rank:
        raise FormatError(f"none of {len(names)} files is a trace of shardproof", files=names[:10])
    counts, files_merged = _Counts(), len(names) - len(skipped)
    if (fault := unexpanded_home(os.fspath(out))) is not None:
        raise ValueError(f"{out} cannot be the path of a trace: {fault}")
    with open(out, "wb") as merged:
        about = json.dumps({"wall_seconds": origin, "files": files_merged})
        merged.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": ['.encode())
        separator = b"\n"
        for row in _rows([by_rank[rank] for rank in sorted(by_rank)], origin):
            merged.write(separator + encoded(row))
            separator = b",\n"
            counts.take(row)
        merged.write(b"\n]}\n")
    return Merged(
        os.fspath(out),
        files_merged,
        len(counts.ranks),
        counts.phases,
        counts.unfinished,
        counts.spread(),
        tuple(skipped),
    )


def blocked_seconds(files: Iterable[str | os.PathLike[str]]) -> dict[int, float]:
    """Seconds that training waited in the call of a save, by step: the most of all ranks and saves of it.

    Args:
        files: the files that `trace` wrote. Other files are skipped.
    """
    found: dict[int, float] = {}
    for document in filter(None, map(_read, sorted(os.fspath(file) for file in files))):
        for row in document["traceEvents"]:
            if (row.get("ph"), row.get("cat"), row.get("name")) == ("X", "save", "blocked"):
                step = row["args"].get("step")
                if isinstance(step, int):
                    found[step] = max(found.get(step, 0.0), row["dur"] / 1e6)
    return found


def _read(name: str) -> dict[str, Any] | None:
    """The document of a trace file, or None for any other file."""
    try:
        document = json.loads(Path(name).read_bytes())
        about, rows = document["otherData"], document["traceEvents"]
        known = {"process": int, "rank": int, "wall_seconds": float}
        ours = isinstance(rows, list) and all(isinstance(about[key], kind) for key, kind in known.items())
    except (ValueError, KeyError, TypeError):
        return None
    return document if ours else None


def _rows(by_rank: Sequence[Sequence[str]], origin: float) -> Iterator[dict[str, Any]]:
    """All rows, rank by rank, with times since `origin`."""
    lanes = 0
    for names in by_rank:
        rows: list[dict[str, Any]] = []
        about: dict[str, dict[str, Any]] = {}
        phases: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for name in names:
            document = _read(name)
            if document is None:  # the file has changed since the first read
                continue
            shift = round((document["otherData"]["wall_seconds"] - origin) * 1e6, 3)
            threads: dict[int, str] = {}
            for row in document["traceEvents"]:
                if row["ph"] != "M":
                    row["ts"] = round(row["ts"] + shift, 3)
                    rows.append(row)
                    if row["ph"] == "X":
                        phases[threads[row["tid"]]].append(row)
                elif row["name"] == "thread_name":
                    threads[row["tid"]] = row["args"]["name"]
                else:
                    about[row["name"]] = row
        yield from about.values()
        for thread, of_thread in phases.items():
            before, lanes = lanes, _put_in_lanes(of_thread, lanes)
            for lane in range(before + 1, lanes + 1):
                yield row_about("thread_name", rows[0]["pid"], lane, {"name": thread})
        yield from rows


def _put_in_lanes(phases: list[dict[str, Any]], before: int) -> int:
    """Gives each phase a lane, so that phases of one lane are apart or nested.

    Phases of one thread need one lane. Several threads of one name may work at once, as in the saves of two
    checkpointers: they need more lanes. See the note "What Perfetto does not show" in `trace_files`.

    Args:
        phases: the phases of all threads of one name in one rank.
        before: the number of lanes in use.

    Returns:
        The number of lanes in use afterwards.

    >>> phases = [{"ts": 0.0, "dur": 9.0}, {"ts": 5.0, "dur": 8.0}, {"ts": 6.0, "dur": 3.0}]
    >>> _put_in_lanes(phases, 10), [phase["tid"] for phase in phases]
    (12, [11, 12, 11])
    """
    ends: list[list[float]] = []
    for phase in sorted(phases, key=lambda phase: (phase["ts"], -phase["dur"])):
        end = phase["ts"] + phase["dur"]
        for lane in ends:
            while lane and lane[-1] <= phase["ts"] + _SAME:
                lane.pop()
        fits = (at for at, lane in enumerate(ends) if not lane or end <= lane[-1] + _SAME)
        at = next(fits, len(ends))
        if at == len(ends):
            ends.append([])
        ends[at].append(end)
        phase["tid"] = before + at + 1
    return before + len(ends)


class _Counts:
    """The numbers of a merged trace, counted while it is written."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.phases = 0
        self.unfinished = 0
        self._ends: dict[tuple[Any, ...], list[float]] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()

    def take(self, row: dict[str, Any]) -> None:
        """Counts a row of the merged trace."""
        self.ranks.add(row["pid"])
        if row["ph"] != "X":
            return
        self.phases += 1
        args = row["args"]
        if args.get("unfinished"):
            self.unfinished += 1
        elif row["name"] in _MEETINGS:
            meeting = (args["operation"], args["step"], row["name"])
            self._times[row["pid"], *meeting] += 1  # an operation may repeat: an overwritten checkpoint
            if "error" not in args:
                ends = self._ends.setdefault((*meeting, self._times[row["pid"], *meeting]), [])
                ends.append(row["ts"] + row["dur"])

    def spread(self) -> float:
        """Most seconds between the ends of one meeting."""
        return max(((max(ends) - min(ends)) / 1e6 for ends in self._ends.values()), default=0.0)

"""Trace files for Perfetto: one for each operation on each rank, valid after every event, and their merge.

The format is Chromium's Trace Event Format (JSON). A rank is a process and a thread is a lane. A phase is a
complete event ("X"), with a counter ("C") of two curves for its bytes.

Note: What Perfetto does not show
---------------------------------
Perfetto drops a phase that overlaps another of its lane without being nested in it. It counts such phases
in its table `stats` as `slice_drop_overlapping_complete_event`. So threads that work at the same time have
different lanes, even with one name. Times are whole nanoseconds, which is Perfetto's unit, so that equal
ends stay equal.

Perfetto drops the facts of a phase from the first one that is NaN or infinite, which JSON does not have, or
that holds half a surrogate pair. So the file has such numbers as text, and such halves as "?". Perfetto may
show the escape of a letter literally, so text is UTF-8. It names a curve by its counter and its key: `save
write`, `GB`.

Note: A trace that survives its process
---------------------------------------
One write changes the file. It begins where the finished events end. It holds the newly finished events,
every open phase with its duration so far and the mark ``unfinished``, the end of the document, and spaces
up to the previous length of the file. So nothing of an earlier tail remains. Whenever the process is killed,
the file is valid JSON and names the open phases.

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
import math
import os
import re
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof._utils.arguments import unexpanded_home
from shardproof.engine.events.phases import PHASES, Event, Subscription, hub
from shardproof.errors import FormatError

_OPEN_FILES = 64
_END = "\n]}\n"

_MEETINGS = {phase.name for phase in PHASES if phase.compares_clocks}
"""Phases that all ranks end together."""

_SAME = 5e-4
"""Microseconds: half of the unit in which traces store times."""


def trace(path: str | os.PathLike[str]) -> Subscription:
    """Writes a trace of every operation of this rank.

    Open a file at https://ui.perfetto.dev. To see all ranks, merge their files first: `merge_traces`, or
    ``shardproof trace FOLDER -o all.json``. The files grow during the operations, so they also show the
    running operations of a job that died.

    Args:
        path: a folder, for one file per operation and rank; it is created if it is missing. Or a name that
            ends in ``.json``, for one file of all operations of this process; an existing file is
            overwritten. With several ranks, the name has the rank before the ``.json``.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> from shardproof import events
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with events.trace(folder), events.phase("save runs/a", "write", rank=3, world_size=4):
    ...         pass
    ...     (file,) = Path(folder).iterdir()
    ...     [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    ['write']
    """
    if (fault := unexpanded_home(os.fspath(path))) is not None:
        raise ValueError(f"{path} cannot be the path of a trace: {fault}")
    tracer = Tracer(Path(path))
    return hub.subscribe(tracer, tracer.close)


class Tracer:
    """A listener that writes trace files.

    Args:
        path: as for `trace`.
        wall: the wall clock's seconds since 1970 at the moment `clock`. Times in a file are microseconds
            since that moment. See the note "One clock for all ranks".
        clock: seconds of `time.perf_counter`.
    """

    def __init__(self, path: Path, wall: float | None = None, clock: float | None = None) -> None:
        self._path = path
        self._wall = time.time() if wall is None else wall
        self._clock = time.perf_counter() if clock is None else clock
        self._files: OrderedDict[Any, _TraceFile] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Writes an event."""
        if event.kind == "waiting":  # the file of the other rank has it
            return
        with self._lock:
            self._file(event).take(event, (event.clock - self._clock) * 1e6)

    def close(self) -> None:
        """Cuts the spaces off the ends of the files."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _file(self, event: Event) -> _TraceFile:
        single = self._path.suffix == ".json"
        key = (event.rank,) if single else (event.operation, event.step, event.rank)
        file = self._files.get(key)
        if file is not None and (single or not file.begins_again(event)):
            self._files.move_to_end(key)
            return file
        if file is not None:
            self._files.pop(key).close()
        if single:
            path = self._path
            if event.world_size > 1:
                path = path.with_name(f"{path.stem}.rank{event.rank:05}.json")
        else:
            path = self._path / _name_of(event)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[key] = _TraceFile(path, event, self._wall)
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file


class _TraceFile:
    """One trace file: where its finished events end, and the open phases."""

    def __init__(self, path: Path, event: Event, wall: float) -> None:
        self._path = path
        self._rank = event.rank
        self._first_phase = event.phase
        self._open: dict[int, tuple[dict[str, Any], int]] = {}
        """The row and the thread of each open phase."""
        self._lanes: list[str] = []
        """The name of the threads of each lane. Lanes count from 1."""
        self._counted: dict[int, tuple[float, int]] = {}
        about = {
            "rank": event.rank,
            "world_size": event.world_size,
            "wall_seconds": wall,
            "process": os.getpid(),
        }
        head = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
        name, place = {"name": f"rank {event.rank}"}, {"sort_index": event.rank}
        head += json.dumps(_row_about("process_name", event.rank, 0, name))
        head += ",\n" + json.dumps(_row_about("process_sort_index", event.rank, 0, place))
        self._path.write_text(head + _END)
        self._end = len(head.encode())
        self._length = self._end + len(_END)

    def begins_again(self, event: Event) -> bool:
        """True if this event begins a new operation of the same name."""
        return event.kind == "begin" and event.phase == self._first_phase and not self._open

    def take(self, event: Event, at: float) -> None:
        """Writes an event of the time `at`, in microseconds."""
        new = []
        row, _ = self._open.pop(event.id, (None, 0))
        if row is None:
            lanes = len(self._lanes)
            row = self._row(event, at)
            if len(self._lanes) > lanes:
                new.append(_row_about("thread_name", self._rank, row["tid"], {"name": event.thread}))
        new += self._counters(event, at)
        for one in (row, *(open_row for open_row, _ in self._open.values())):
            one["dur"] = round(at - one["ts"], 3)
        row["args"] = {"operation": event.operation, "step": event.step, "bytes": event.done, **event.facts}
        if event.error is not None:
            row["args"]["error"] = event.error
        if event.kind in ("end", "failed"):
            new.append(row)
        else:
            row["args"]["unfinished"] = True
            self._open[event.id] = (row, event.thread_id)
        self._write(new)

    def close(self) -> None:
        """Cuts the spaces off the end of the file."""
        os.truncate(self._path, self._write([]))

    def _row(self, event: Event, at: float) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": event.phase,
            "cat": event.action,
            "pid": self._rank,
            "tid": self._lane(event),
            "ts": round(at - event.seconds * 1e6, 3),
        }

    def _lane(self, event: Event) -> int:
        """The lane in which the event's thread works; or a free lane of its name; or a new one."""
        at_work = {row["tid"]: thread for row, thread in self._open.values()}
        named = [lane for lane, name in enumerate(self._lanes, 1) if name == event.thread]
        own = [lane for lane in named if at_work.get(lane) == event.thread_id]
        free = [lane for lane in named if lane not in at_work]
        if not own and not free:
            self._lanes.append(event.thread)
            return len(self._lanes)
        return (own or free)[0]

    def _counters(self, event: Event, at: float) -> list[dict[str, Any]]:
        """Counter rows: bytes done, and the speed since the last event."""
        before, done = self._counted.pop(event.id, (at - event.seconds * 1e6, 0))
        if event.kind == "begin" or not event.done:
            return []
        if event.kind == "progress":
            self._counted[event.id] = (at, event.done)
        speed = (event.done - done) / max(at - before, 1e-3) / 1e3
        # At the end of a phase its curves fall to zero.
        curves = [{"GB": event.done / 1e9, "GB/s": max(speed, 0.0)}]
        curves += [] if event.kind == "progress" else [{"GB": 0.0, "GB/s": 0.0}]
        return [
            {
                "ph": "C",
                "name": f"{event.action} {event.phase}",
                "pid": self._rank,
                "tid": 0,
                "ts": round(at, 3),
                "args": values,
            }
            for values in curves
        ]

    def _write(self, new: list[dict[str, Any]]) -> int:
        """Writes finished events and the tail in one write (see the note). Returns the end of the tail."""
        finished = b"".join(b",\n" + _encoded(row) for row in new)
        tail = b"".join(b",\n" + _encoded(row) for row, _ in self._open.values()) + _END.encode()
        ends = self._end + len(finished) + len(tail)
        data = finished + tail + b" " * (self._length - ends)
        with open(self._path, "r+b", buffering=0) as file:
            file.seek(self._end)
            written = file.write(data)
        if written != len(data):
            raise OSError(f"{self._path}: {written} of {len(data)} bytes written")
        self._end += len(finished)
        self._length = max(self._length, ends)
        return ends


def _encoded(row: dict[str, Any]) -> bytes:
    """A row as JSON in UTF-8 that Perfetto shows in full. See the note "What Perfetto does not show".

    >>> _encoded({"args": {"loss": float("nan"), "step": 7, "speeds": [1.5, float("inf")]}})
    b'{"args": {"loss": "nan", "step": 7, "speeds": [1.5, "inf"]}}'
    """
    try:
        text = json.dumps(row, default=str, allow_nan=False, ensure_ascii=False)
    except ValueError:
        text = json.dumps(_as_text(row), default=str, allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace")


def _as_text(value: Any) -> Any:
    """The same value, with NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _row_about(name: str, rank: int, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    """A metadata row of a process or of one of its lanes."""
    return {"ph": "M", "name": name, "pid": rank, "tid": lane, "args": args}


def _name_of(event: Event) -> str:
    """A file name from action, place, time and rank.

    >>> _name_of(Event("begin", "save runs/a b/step-7", "collect", 3, 4, 7, 1e9, 0.0, "", 0.0, 0, 0))
    'save-step-7-20010909T014640.000-rank00003.json'
    """
    place = event.operation.partition(" ")[2].rstrip("/").rpartition("/")[2]
    words = [re.sub(r"[^\w.-]+", "_", word)[:80] for word in (event.action, place) if word]
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(event.time)) + f".{int(event.time % 1 * 1e3):03}"
    return f"{'-'.join(words)}-{when}-rank{event.rank:05}.json"


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
            merged.write(separator + _encoded(row))
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
                yield _row_about("thread_name", rows[0]["pid"], lane, {"name": thread})
        yield from rows


def _put_in_lanes(phases: list[dict[str, Any]], before: int) -> int:
    """Gives each phase a lane, so that phases of one lane are apart or nested.

    Returns the number of lanes in use afterwards. Phases of one thread need one lane. Several threads of one
    name may work at once, as in the saves of two checkpointers: they need more lanes. See the note "What
    Perfetto does not show" in `trace_files`.

    `phases` are those of all threads of one name in one rank, `before` is the number of lanes in use.

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

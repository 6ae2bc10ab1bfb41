"""Shows progress as lines and bars with GB, GB/s, time left, and the slowest rank, or as log records."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TextIO

from shardproof._utils.humanize import gigabytes, gigabytes_per_second, printable, span
from shardproof.engine.events.phases import Event, Subscription, hub

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


def show(file: TextIO | None = None, *, every: float = 5.0) -> Subscription:
    """Shows the phases of rank 0 on `file`.

    On a terminal, each long phase has a bar, and each phase prints a line at its end. Elsewhere there are
    only lines, one every few seconds for a running phase. Other ranks than 0 show nothing, so every rank may
    call it. While rank 0 waits for other ranks, it shows the slowest of them.

    Args:
        file: the text file to write to; None for standard error.
        every: minimum seconds between two lines for running phases, except on a terminal.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    >>> from shardproof import events
    >>> with events.show(sys.stdout), events.phase("save runs/a", "write") as phase:
    ...     phase.progress(2_000_000, 2_000_000)  # doctest: +ELLIPSIS
    save runs/a: write 2.00 MB in ... ms, ...B/s
    """
    file = file or sys.stderr
    if not file.isatty():
        return hub.subscribe(Lines(lambda text: print(text, file=file, flush=True), every))
    from rich.console import Console

    bars = Bars(Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=True))
    return hub.subscribe(bars, bars.close)


def finished(event: Event) -> str:
    """The line for a phase that has ended.

    >>> facts = {"slowest_rank": 3, "slowest_seconds": 1.25}
    >>> finished(Event("end", "save a", "commit", 0, 4, 7, 0.0, 0.0, "", 1.5, 0, 0, facts))
    'save a: commit in 1.50 s, slowest rank 3: 1.25 s'
    >>> finished(Event("failed", "save a", "write", 0, 4, 7, 0.0, 0.0, "", 1.5, 0, 0, {}, "OSError: full"))
    'save a: write FAILED after 1.50 s: OSError: full'
    """
    if event.kind == "failed":
        return printable(
            f"{event.operation}: {event.phase} FAILED after {span(event.seconds)}: {event.error}"
        )
    text = f"{event.operation}: {event.phase}"
    if event.done:
        text += f" {gigabytes(event.done)}"
    text += f" in {span(event.seconds)}"
    if event.done:
        text += f", {gigabytes_per_second(event.done, event.seconds)}"
    if "slowest_rank" in event.facts:
        text += f", slowest rank {event.facts['slowest_rank']}"
        if "slowest_seconds" in event.facts:
            text += f": {span(event.facts['slowest_seconds'])}"
    return printable(text)


def progress_text(event: Event) -> str:
    """The progress of a phase: amount, speed, and time left at that speed.

    >>> progress_text(Event("progress", "save a", "write", 0, 4, 7, 0.0, 0.0, "", 2.0, 3 * 10**9, 6 * 10**9))
    '3.00 GB of 6.00 GB, 1.50 GB/s, ETA 2.00 s'
    """
    text = gigabytes(event.done)
    if event.total:
        text += f" of {gigabytes(event.total)}"
    text += f", {gigabytes_per_second(event.done, event.seconds)}"
    if event.done and event.total > event.done:
        text += f", ETA {span((event.total - event.done) * event.seconds / event.done)}"
    return text


class _SlowestRank:
    """The slowest of the ranks that rank 0 waits for, and the time left at its speed so far."""

    def __init__(self) -> None:
        self._operation = ""
        self._first: dict[int, tuple[float, int]] = {}

    def text(self, event: Event) -> str:
        """The text for a `waiting` event."""
        ranks: dict[int, tuple[int, int]] = event.facts["ranks"]
        if self._operation != event.operation:
            self._operation, self._first = event.operation, {}
        for rank, (done, _) in ranks.items():
            self._first.setdefault(rank, (event.clock, done))
        slowest = min(ranks, key=lambda rank: ranks[rank][0] / max(ranks[rank][1], 1))
        done, total = ranks[slowest]
        text = f"waits for {len(ranks):,} of {event.world_size:,} ranks, slowest rank {slowest}: "
        text += gigabytes(done) + (f" of {gigabytes(total)}" if total else "")
        clock, before = self._first[slowest]
        if done > before and total > done:
            text += f", ETA {span((total - done) * (event.clock - clock) / (done - before))}"
        return text


class Lines:
    """A listener that writes a line when a phase of rank 0 ends, and lines for a running phase.

    Args:
        write: gets each line.
        every: minimum seconds between two lines for running phases, and before the first of a phase.
    """

    def __init__(self, write: Callable[[str], object], every: float = 5.0) -> None:
        self._write = write
        self._every = every
        self._written = float("-inf")
        self._slowest = _SlowestRank()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Shows an event."""
        if event.rank != 0 or event.kind == "begin":
            return
        with self._lock:
            head = f"{event.operation}: {event.phase} "
            if event.kind in ("end", "failed"):
                text = finished(event)
            elif event.clock - self._written < self._every:
                return
            elif event.kind == "waiting":
                text = printable(head + self._slowest.text(event))
            elif event.seconds >= self._every:
                text = printable(head + progress_text(event))
            else:
                return
            self._written = event.clock
            self._write(text)


class Bars:
    """A listener that draws a bar for each running phase of rank 0, and writes a line at its end.

    It starts no thread before a phase has lasted for a moment and reports progress.

    Args:
        console: a console of rich on the terminal.
        lines: write a line at the end of each phase.
        at_once: draw a bar as soon as a phase begins.
    """

    def __init__(self, console: Console, *, lines: bool = True, at_once: bool = False) -> None:
        self._console = console
        self._lines = lines
        self._at_once = at_once
        self._progress: Any = None
        self._rows: dict[Hashable, TaskID] = {}
        self._slowest = _SlowestRank()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Shows an event."""
        if event.rank != 0:
            return
        with self._lock:
            if event.kind == "progress" or (event.kind == "begin" and self._at_once):
                self._draw(event.id, event, progress_text(event))
            elif event.kind == "waiting":
                self._draw(event.operation, event, self._slowest.text(event))
            elif event.kind in ("end", "failed"):
                if event.id in self._rows:  # shows the last numbers for a moment
                    self._draw(event.id, event, progress_text(event))
                    self._progress.refresh()
                self._drop(event.id)
                self._drop(event.operation)
                if self._lines:
                    self._console.print(finished(event))

    def close(self) -> None:
        """Removes all bars."""
        with self._lock:
            for row in list(self._rows):
                self._drop(row)

    def _draw(self, row: Hashable, event: Event, text: str) -> None:
        if self._progress is None:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        if row not in self._rows:
            title = printable(f"{event.operation}: {event.phase}")
            self._rows[row] = self._progress.add_task(title, total=None, text="")
        self._progress.update(
            self._rows[row], completed=event.done, total=event.total or None, text=printable(text)
        )

    def _drop(self, row: Hashable) -> None:
        if row not in self._rows:
            return
        self._progress.remove_task(self._rows.pop(row))
        if not self._rows:
            self._progress.stop()
            self._progress = None


def log_to(logger: logging.Logger, level: int = logging.INFO) -> Subscription:
    """Logs one record for each phase that ends on this rank. A phase that failed is logged as an error.

    The message is for people. The record's attribute `shardproof` has the same facts as a dict (see
    `facts_of`), which a formatter such as `JsonFormatter` may print.

    Args:
        logger: gets the records.
        level: the level of phases that did not fail.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    >>> import sys
    >>> from shardproof import events
    >>> logger = logging.Logger("saves")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> with events.log_to(logger), events.phase("save runs/a", "write", rank=3, world_size=4, step=7):
    ...     pass  # doctest: +ELLIPSIS
    rank 3: save runs/a: write in ... ms
    """

    def log(event: Event) -> None:
        if event.kind in ("end", "failed"):
            logger.log(
                logging.ERROR if event.kind == "failed" else level,
                "rank %d: %s",
                event.rank,
                finished(event),
                extra={"shardproof": facts_of(event)},
            )

    return hub.subscribe(log)


def facts_of(event: Event) -> dict[str, Any]:
    """The fields and the facts of an event, as plain values.

    >>> event = Event("end", "save a", "write", 0, 4, 7, 1e9, 0.0, "main", 2.0, 10**9, 10**9, {"files": 1})
    >>> facts = facts_of(event)
    >>> facts["phase"], facts["bytes"], facts["bytes_per_second"], facts["files"]
    ('write', 1000000000, 500000000.0, 1)
    """
    facts: dict[str, Any] = {
        **event.facts,
        "kind": event.kind,
        "operation": event.operation,
        "phase": event.phase,
        "rank": event.rank,
        "world_size": event.world_size,
        "step": event.step,
        "time": event.time,
        "thread": event.thread,
        "seconds": event.seconds,
        "bytes": event.done,
        "bytes_per_second": event.done / max(event.seconds, 1e-9),
    }
    if event.error is not None:
        facts["error"] = event.error
    return facts


class JsonFormatter(logging.Formatter):
    """Formats any record as one line of JSON: time, level, logger, message, and the facts of an event.

    >>> record = logging.makeLogRecord({"name": "saves", "levelname": "INFO", "msg": "done", "created": 5.0})
    >>> JsonFormatter().format(record)
    '{"time": 5.0, "level": "INFO", "logger": "saves", "message": "done"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "shardproof", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

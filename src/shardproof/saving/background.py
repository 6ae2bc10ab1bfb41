"""Background threads of saves. The process waits for them at exit.

Note "The end of the interpreter": these threads are daemons, so a thread that hangs in a dead file system
cannot keep the process alive. An `atexit` function waits for their work. It runs after the program's last
line and before the interpreter shuts down. At that time executors accept no work, and from CPython 3.12 on
no thread can be started. So these threads are started at the first save and need only a queue. The links of
a rendezvous start before the caller continues (`StoreRendezvous.new_rendezvous`). At exit, `map_requests`
and `ObjectSink` need no other threads and work in the calling thread. A child made by fork has none of these
threads, and does not wait.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from shardproof._utils import forks

__all__ = ["Progress", "Workers", "wait_while_moving"]

T = TypeVar("T")

_log = logging.getLogger("shardproof")
_POLL_SECONDS = 0.2
"""Seconds between two checks for progress."""


class Workers:
    """`count` threads that run tasks from one queue, in the order in which they were submitted.

    >>> workers = Workers("shardproof-doctest", 1)
    >>> workers.submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self, name: str, count: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for number in range(count):
            title = name if count == 1 else f"{name}-{number}"
            threading.Thread(target=_run, args=(self._tasks,), name=title, daemon=True).start()
        weakref.finalize(self, _stop, self._tasks, count)

    def submit(self, work: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Runs `work` when a thread is free. Its result or error becomes that of the future."""
        result: Future[T] = Future() if future is None else future
        self._tasks.put(lambda: _fulfil(result, work))
        return result


def _run(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise its references would stay until the next task


def _stop(tasks: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
    except BaseException as error:  # of a callback; `Future` lets SystemExit through
        log_callback_error(error)


def log_callback_error(error: BaseException) -> None:
    """Logs an error that must not end the thread, because later tasks need the thread."""
    _log.error("a callback of a future raised %r, which has no effect here", error, exc_info=error)


class Progress:
    """A counter of a save's progress. Any thread may advance it; waiting threads check that it moves."""

    def __init__(self) -> None:
        self.is_bounded = False
        """True if the current step has a deadline of its own, as a meeting has."""
        self.count = 0
        """Number of steps so far."""

    def advance(self) -> None:
        """Counts one step."""
        self.count += 1

    @contextmanager
    def bounded(self, is_bounded: bool = True) -> Iterator[None]:
        """Sets `is_bounded` within a context."""
        before, self.is_bounded = self.is_bounded, is_bounded
        try:
            yield
        finally:
            self.is_bounded = before


def wait_while_moving(
    future: Future[Any], progress: Progress, patience: float, tick: Callable[[], None] | None = None
) -> bool:
    """Waits for a future while its work makes progress, and calls `tick` after each progress.

    Returns:
        True if the future is done; False after `patience` seconds without progress.
    """
    seen, since = progress.count, time.monotonic()
    while not _is_done(future, _POLL_SECONDS):
        if progress.is_bounded or progress.count != seen:
            seen, since = progress.count, time.monotonic()
            if tick is not None:
                tick()
        elif time.monotonic() - since > patience:
            return False
    return True


def _is_done(future: Future[Any], seconds: float) -> bool:
    try:
        future.exception(seconds)
    except TimeoutError:
        return future.done()
    return True


class _Unfinished:
    """The unfinished saves of this process, for the end of the interpreter."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._saves: dict[Future[Any], tuple[int, Progress, float, str]] = {}
        self._registered = False

    def add(self, future: Future[Any], progress: Progress, patience: float, what: str) -> None:
        """Adds a save. Called after its threads started, since `atexit` calls the last function first."""
        with self._lock:
            self._saves[future] = os.getpid(), progress, patience, what
            if not self._registered:
                self._registered = True
                atexit.register(self.wait)
        future.add_done_callback(self._remove)

    def _remove(self, future: Future[Any]) -> None:
        with self._lock:
            self._saves.pop(future, None)

    def wait(self) -> None:
        """Waits for each save that makes progress."""
        with self._lock:
            saves = list(self._saves.items())
        for future, (process, progress, patience, what) in saves:
            if process == os.getpid() and not wait_while_moving(future, progress, patience):
                _log.error(
                    "%s: given up at exit, after %.0f s without progress. Run `shardproof ls` to see whether "
                    "it is committed",
                    what,
                    patience,
                )


unfinished = _Unfinished()

"""Threads that go on while the caller trains, and that a process does not leave behind.

Note "The end of the interpreter": threads of this module are daemons, so that one which hangs in a dead file
system cannot keep the process for ever. What they have under way is waited for by a function that `atexit`
calls, which comes after the last line of the program and before the interpreter is taken apart. By then no
thread can be started and executors take no work, so these threads exist from the first save on and need
nothing but a queue. A child made by fork has none of them, and waits for nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from shardproof._utils import forks

__all__ = ["Progress", "Workers", "wait_while_moving"]

T = TypeVar("T")

_log = logging.getLogger("shardproof")
_LOOK = 0.2
"""Seconds between two looks at whether something moves."""


class Workers:
    """A few threads that run what they are given, in the order in which it came.

    Args:
        name: of the threads.
        count: how many.

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
        """Run `work` when a thread is free; an error of any kind is the future's.

        Args:
            work: to run.
            future: for its result; None: a new one.
        """
        result: Future[T] = Future() if future is None else future
        self._tasks.put(lambda: _fulfil(result, work))
        return result


def _run(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # what it held must not live until the next one comes


def _stop(tasks: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class Progress:
    """How far a save has come. Any thread may say so; whoever waits looks whether it moves."""

    def __init__(self) -> None:
        self.is_bounded = False
        """Whether what goes on ends by itself: a meeting of ranks, which has deadlines of its own."""
        self._count = 0

    def moved(self) -> None:
        """Something was done."""
        self._count += 1

    @property
    def count(self) -> int:
        """Changes whenever something was done."""
        return self._count


def wait_while_moving(
    future: Future[Any], progress: Progress, patience: float, tick: Callable[[], None] | None = None
) -> bool:
    """Wait for a future, as long as its work moves.

    Args:
        future: of the work.
        progress: of the work.
        patience: seconds without progress after which it is given up.
        tick: called whenever it moved.

    Returns:
        Whether the future is done.
    """
    seen, since = progress.count, time.monotonic()
    while not _is_done(future, _LOOK):
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
    """The saves of this process that are under way, for the end of the interpreter."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._saves: dict[Future[Any], tuple[int, Progress, float, str]] = {}
        self._registered = False

    def add(self, future: Future[Any], progress: Progress, patience: float, what: str) -> None:
        """Wait for this one, too. Called once its threads run: `atexit` calls the last function first."""
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
        """Wait for all that moves."""
        with self._lock:
            saves = list(self._saves.items())
        for future, (process, progress, patience, what) in saves:
            if process == os.getpid() and not wait_while_moving(future, progress, patience):
                _log.error(
                    "%s: given up at exit, after %.0f s without progress. `shardproof ls` says whether it is "
                    "committed",
                    what,
                    patience,
                )


unfinished = _Unfinished()

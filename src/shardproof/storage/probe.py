"""Chooses the faster way to write to a file system: past the page cache (direct) or through it (buffered).

Note: a probe of real writes
    The probe writes no bytes of its own and leaves no file behind. Each process measures a file system once.
    If the user has not chosen, windows of the saved files alternate between the two ways (direct, buffered,
    buffered, direct). Each window is timed until the disk has written its bytes. After the last window, all
    writes use the faster way. So the probe measures what matters: large writes, by all ranks of the node at
    once, during training. A probe with its own file would measure the probes of other ranks, or wait for
    them. The first 64 MiB of every file are written direct and not timed, so small saves do not decide.

Note: one window at a time
    Several threads write one file. A write that would begin the next window waits for the writes of the
    current one, so the two ways never overlap in one file. A window's clock runs only during writes: it does
    not count the time spent to produce the bytes. The last write of a buffered window waits for the disk
    before the clock stops.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardproof._utils import forks

__all__ = ["PROBES", "VARIABLE", "Probe", "Trial", "users_choice"]

_log = logging.getLogger("shardproof")

VARIABLE = "SHARDPROOF_DIRECT"
"""The environment variable by which the user chooses: 1 for direct, 0 for buffered."""

WINDOW = 64 << 20
"""Bytes of a window: written in one way and timed together. Also the bytes before the first window."""

_WINDOWS = 2
"""Windows measured each way."""

_MIN_GAIN = 1.25
"""Buffered writes must be this many times faster, because they keep a processor busy."""


def users_choice() -> bool | None:
    """The choice in the environment variable SHARDPROOF_DIRECT: direct (1), buffered (0), or None.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {value!r}: set it to 1 to write past the page cache "
            "(O_DIRECT), to 0 to write through it, or unset it to use the faster way"
        )
    return None if value == "" else value == "1"


class Probe:
    """The measurements of the file system on a device (`st_dev`). Threads and files share it."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = forks.lock()
        self._windows: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
        self.answer: bool | None = None
        """True if direct writes are faster; None before the decision."""

    def next_window(self) -> bool:
        """True if the next window goes direct."""
        with self._lock:
            if self.answer is not None:
                return self.answer
            direct, buffered = len(self._windows[True]), len(self._windows[False])
            return direct == 0 or buffered >= _WINDOWS

    def add(self, direct: bool, count: int, seconds: float) -> None:
        """Add a window of `count` bytes written in `seconds`. The last window decides."""
        with self._lock:
            self._windows[direct].append((count, seconds))
            if self.answer is not None or any(len(found) < _WINDOWS for found in self._windows.values()):
                return
            direct_speed, buffered_speed = (_speed(self._windows[way]) for way in (True, False))
            self.answer = buffered_speed < _MIN_GAIN * direct_speed
        _log.info(
            "device %d:%d takes %.2f GB/s past the page cache, %.2f GB/s through it; further writes go %s",
            os.major(self._device),
            os.minor(self._device),
            direct_speed / 1e9,
            buffered_speed / 1e9,
            "past it" if self.answer else "through it",
        )

    def refuse(self) -> None:
        """Decide for buffered writes: the file system refuses direct ones."""
        with self._lock:
            self.answer = False


PROBES: dict[int, Probe] = {}
"""The probes of this process, by device. All storages use them, so a file system is measured once."""


class Trial:
    """One file's part in a probe; see "one window at a time".

    Args:
        probe: probe of the file's file system.
        wait: waits until the disk has taken all buffered writes; may raise OSError.
        clock: seconds.
    """

    def __init__(
        self, probe: Probe, wait: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._probe = probe
        self._wait = wait
        self._clock = clock
        self._turn = threading.Condition()
        self._timed = False
        self._direct = True
        self._begun = 0
        self._running = 0
        self._since = 0.0
        self._busy = 0.0

    @contextmanager
    def write(self, count: int) -> Iterator[bool]:
        """Context of a write of `count` bytes that could go either way; yields whether it goes direct.

        Raises:
            OSError: at the end of a window, the disk refused buffered bytes.
        """
        answer = self._probe.answer
        if answer is not None:
            yield answer
            return
        direct = self._begin(count)
        try:
            yield direct
        finally:
            self._end()

    def _begin(self, count: int) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._begun < WINDOW)
            if self._running == 0:
                self._since = self._clock()
            self._running += 1
            self._begun += count
            return self._direct

    def _end(self) -> None:
        with self._turn:
            self._running -= 1
            if self._running:
                return
            full = self._begun >= WINDOW
            try:
                if full and not self._direct:
                    self._wait()
            finally:
                self._busy += self._clock() - self._since
                if full:
                    self._next()

    def _next(self) -> None:
        """End the window, or the bytes before the first window, and begin the next one."""
        if self._timed:
            self._probe.add(self._direct, self._begun, self._busy)
        self._timed = True
        self._direct = self._probe.next_window()
        self._begun, self._busy = 0, 0.0
        self._turn.notify_all()


def _speed(windows: list[tuple[int, float]]) -> float:
    """Bytes a second over all windows."""
    return sum(count for count, _ in windows) / max(sum(seconds for _, seconds in windows), 1e-9)

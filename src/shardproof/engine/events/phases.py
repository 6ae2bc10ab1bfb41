"""Phases, the events that they publish, and the hub that hands events to listeners.

Note: Guarantees for listeners
------------------------------
The thread that reports calls the listeners, one after another. For one phase, listeners get begin, progress
and end in this order and never two at a time, because the phase's lock covers each of them.
`Phase.progress` only tries the lock. So a thread that copies or writes never waits for a listener that
handles another thread's report; the next report carries its numbers. The end of a phase waits for a running
report. A listener that subscribes in the middle of a phase gets the rest of it, without a begin.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from shardproof._utils import forks

PERIOD = 0.1
"""Minimum seconds between two progress events of one phase."""

Kind: TypeAlias = Literal["begin", "progress", "end", "failed", "waiting"]
_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a phase of an operation, on one rank."""

    kind: Kind
    """``begin``, ``progress``, ``end``, ``failed`` (an exception ended it), or ``waiting``: rank 0 waits, and
    `facts["ranks"]` has the bytes done and bytes in all of each rank that it waits for."""
    operation: str
    """A verb and a place: ``save runs/gpt/step-00001000``."""
    phase: str
    """The name of the phase: one of `PHASES`, or one of the caller's program."""
    rank: int
    world_size: int
    step: int | None
    time: float
    """Seconds since 1970, by this machine's clock."""
    clock: float
    """Seconds of this process's `time.perf_counter`, for durations."""
    thread: str
    """Name of the thread in which the phase began."""
    seconds: float
    """Seconds since the phase began."""
    done: int
    """Bytes done, from the last report."""
    total: int
    """Bytes in all; 0 if unknown."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts from `Phase.note`, complete in the last event of a phase."""
    error: str | None = None
    """Class and text of the exception in a ``failed`` event: ``StorageError: no space left``."""
    id: int = 0
    """The number of the phase: equal for all its events, and unique in this process."""
    thread_id: int = 0
    """`threading.get_ident` of that thread. Several threads may have one name."""

    @property
    def action(self) -> str:
        """The operation's first word: ``save``, ``load``, ``restore``, ...

        >>> Event("begin", "save runs/a", "write", 0, 1, 7, 0.0, 0.0, "MainThread", 0.0, 0, 0).action
        'save'
        """
        return self.operation.partition(" ")[0]


Listener: TypeAlias = Callable[[Event], object]


class Subscription:
    """A subscription. Call it, close it, or leave it as a context to end it; any number of times."""

    def __init__(self, hub: Hub, listener: Listener, last: Callable[[], object]) -> None:
        self._hub = hub
        self._last = last
        self.listener = listener

    def __call__(self) -> None:
        """End the subscription."""
        self.close()

    def close(self) -> None:
        """End the subscription."""
        self._hub.remove(self)
        self._last()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Phase:
    """A part of an operation on this rank. It lasts from entering this context to leaving it. See `phase`."""

    def __init__(
        self, hub: Hub, operation: str, name: str, rank: int, world_size: int, step: int | None
    ) -> None:
        self._hub = hub
        self.operation = operation
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.step = step
        self.id = next(hub.ids)
        self._lock = threading.Lock()
        self._progress = (0, 0)
        self._facts: dict[str, Any] = {}
        self._failure: str | None = None
        self._over = True

    def __enter__(self) -> Self:
        self._thread, self._thread_id = threading.current_thread().name, threading.get_ident()
        self._begun = self._hub.clock()
        self._due = self._begun + PERIOD
        with self._lock:
            self._over = False
            self._publish("begin", self._begun)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over = True
            text = self._failure if error is None else _text(error)
            self._publish("end" if text is None else "failed", self._hub.clock(), text)

    def progress(self, done: int, total: int) -> None:
        """Reports the progress of this phase. Cheap; any thread may call it at any rate.

        Args:
            done: bytes done.
            total: bytes in all; 0 if unknown.
        """
        self._progress = (done, total)
        if not self._hub.listeners or self._hub.clock() < self._due:
            return
        if self._lock.acquire(blocking=False):
            try:
                now = self._hub.clock()
                if not self._over and now >= self._due:
                    self._due = now + PERIOD
                    self._publish("progress", now)
            finally:
                self._lock.release()

    def note(self, **facts: Any) -> None:
        """Adds plain facts to the last event of the phase."""
        self._facts.update(facts)

    def fail(self, error: BaseException) -> None:
        """Marks the phase as failed by an error that does not pass through the context."""
        self._failure = _text(error)  # the frames of the error may have this phase

    def _publish(self, kind: Kind, now: float, error: str | None = None) -> None:
        if not self._hub.listeners:
            return
        done, total = self._progress
        event = Event(
            kind=kind,
            operation=self.operation,
            phase=self.name,
            rank=self.rank,
            world_size=self.world_size,
            step=self.step,
            time=self._hub.wall(),
            clock=now,
            thread=self._thread,
            seconds=now - self._begun,
            done=done,
            total=total,
            facts=dict(self._facts),
            error=error,
            id=self.id,
            thread_id=self._thread_id,
        )
        self._hub.publish(event)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Hub:
    """Hands events to listeners. A process uses one, `hub`; tests make their own, with their own clock.

    Args:
        clock: gives seconds, for durations.
        wall: gives seconds since 1970.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self.wall = wall
        self.ids = itertools.count(1)
        self.listeners: tuple[Subscription, ...] = ()
        """Replaced and never changed, so threads read it without the lock."""
        self._lock = forks.lock()

    def phase(
        self, operation: str, name: str, *, rank: int = 0, world_size: int = 1, step: int | None = None
    ) -> Phase:
        """A phase that has not begun. See `shardproof.events.phase`."""
        return Phase(self, operation, name, rank, world_size, step)

    def subscribe(self, listener: Listener, last: Callable[[], object] = lambda: None) -> Subscription:
        """Calls `listener` with every event, and `last` at the end. See `shardproof.events.subscribe`."""
        subscription = Subscription(self, listener, last)
        with self._lock:
            self.listeners = (*self.listeners, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Ends a subscription."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not subscription)

    def publish_waiting(
        self,
        operation: str,
        phase: str,
        world_size: int,
        ranks: Callable[[], Mapping[int, tuple[int, int]]],
    ) -> None:
        """Publishes the progress of other ranks. See `shardproof.events.publish_waiting`."""
        if not self.listeners or not (found := dict(ranks())):
            return
        done, total = (sum(one[side] for one in found.values()) for side in (0, 1))
        event = Event(
            kind="waiting",
            operation=operation,
            phase=phase,
            rank=0,
            world_size=world_size,
            step=None,
            time=self.wall(),
            clock=self.clock(),
            thread=threading.current_thread().name,
            seconds=0.0,
            done=done,
            total=total,
            facts={"ranks": found},
        )
        self.publish(event)

    def publish(self, event: Event) -> None:
        """Hands an event to every listener. Logs the error of a listener that raises, and removes it."""
        for subscription in self.listeners:
            try:
                subscription.listener(event)
            except Exception:
                self.remove(subscription)
                _log.warning(
                    "%r failed on event %s of phase %s (%s) and gets no more events",
                    subscription.listener,
                    event.kind,
                    event.phase,
                    event.operation,
                    exc_info=True,
                )


hub = Hub()
"""The hub of this process."""

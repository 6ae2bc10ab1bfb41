"""The table of phases, the events that phases publish, and the hub that hands events to listeners.

Events, errors and the documentation share the table.

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
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from shardproof._utils import forks


@dataclass(frozen=True, slots=True)
class KnownPhase:
    """One phase of one operation.

    Example:
        >>> [phase.name for phase in PHASES if phase.operation == "load" and phase.in_events]
        ['match', 'read', 'apply']
    """

    operation: str
    """First word of the operation, such as ``save``; ``any`` for a phase of every operation."""
    name: str
    kind: Literal["local", "meeting", "background"]
    """Work of one rank in the caller's thread; a meeting of the ranks; or work of the background thread."""
    text: str
    """The work of a rank in the phase, in one line of Markdown."""
    in_events: bool = True
    """True if events name the phase."""
    in_errors: bool = True
    """True if errors and ``waiting`` events name the phase."""
    reported_in: str = ""
    """The phase of events in which the ranks report the outcome; empty for the phase itself."""
    compares_clocks: bool = False
    """True if all ranks end the phase almost together, so that `merge_traces` compares their clocks by it."""


_event = partial(KnownPhase, in_errors=False)
_error = partial(KnownPhase, in_events=False)

_PLAN = "reports its structure; rank 0 proves the tilings and makes the plan. Only after a change"
_BASE = "receives the digests of the base of an incremental save. Only if they are not cached"
_COMMIT = "reports its digests; rank 0 checks them and publishes the manifest: the commit"
_UPLOADED = "reports its copies; rank 0 checks them and publishes the manifest on the second tier"
_JOINED = "finds which ranks see one folder, and how to reach the others. Only with `node_local`"
_PARTED = "waits until rank 0 needs no other node any more, after a save or restore. Only with `node_local`"
_PUBLISHED = "uploads its files to an object store; rank 0 then publishes the checkpoint"
_COPIES = (
    "makes copies that were lost with a node, and meets the others. Only after a restore with `replicas=1`"
)
_APPLY = "replaces plain values and calls `load_state_dict`. Only if a rank has any"
_AGAIN = "votes on the rerun, with a suspect on the same device as before"

PHASES: tuple[KnownPhase, ...] = (
    _error("any", "connect", "local", "connects to the store that the environment names"),
    _error("any", "begin", "local", "works before the first meeting of the operation"),
    _error("any", "turn", "local", "waits until another of its threads has left its meeting"),
    _event("save", "blocked", "local", "spans the call of `Checkpointer.save`"),
    _error(
        "save",
        "busy",
        "meeting",
        'agrees whether to skip the save (`when_busy="skip"`)',
        reported_in="blocked",
    ),
    KnownPhase(
        "save",
        "collect",
        "local",
        "describes its state; your `state_dict` methods run here",
        reported_in="agree",
    ),
    _event(
        "save",
        "agree",
        "meeting",
        "reports its structure digest; rank 0 decides whether the ranks reuse their cached plan",
        compares_clocks=True,
    ),
    KnownPhase("save", "plan", "meeting", _PLAN, compares_clocks=True),
    _error("save", "base", "meeting", _BASE, reported_in="plan"),
    _event(
        "save",
        "replicas",
        "background",
        "hashes its replicas while training waits. Only with `check_replicas`",
    ),
    _event("save", "stage", "local", "copies memory that other code than an optimizer's step may write"),
    _event(
        "save",
        "fence",
        "local",
        "delays the step of an optimizer, a load or `fence` until the memory is copied",
    ),
    KnownPhase("save", "write", "background", "hashes and writes its file", reported_in="commit"),
    KnownPhase("save", "commit", "meeting", _COMMIT, compares_clocks=True),
    _event("save", "retain", "background", "removes old steps. Only on rank 0"),
    _error("save", "background", "background", "fails outside of the meetings: retention, or an interrupt"),
    _error(
        "restore",
        "choose",
        "meeting",
        "reports the newest step that it sees; rank 0 chooses the newest readable one",
    ),
    _error(
        "restore",
        "compare",
        "meeting",
        "compares which keys the chosen step lacks. Only after a load of a damaged step",
    ),
    _error(
        "load",
        "metadata",
        "meeting",
        "receives manifest and index from rank 0. Only from an object store",
        reported_in="match",
    ),
    KnownPhase(
        "load",
        "match",
        "local",
        "compares its tree with the checkpoint; changes nothing",
        compares_clocks=True,
    ),
    _error(
        "load",
        "share",
        "meeting",
        "agrees which rank reads each box that several ranks need. Only with `read_once`",
        reported_in="match",
    ),
    KnownPhase("load", "read", "local", "reads, verifies and fills tensors; the target changes from here on"),
    KnownPhase("load", "apply", "local", _APPLY, compares_clocks=True),
    _event("verify", "read", "local", "reads and verifies every chunk"),
    _event("diff", "read", "local", "reads the tensors that may differ"),
    _error("convert", "plan", "meeting", "plans the conversion; rank 0 takes the work folder"),
    KnownPhase("convert", "write", "local", "writes its units; rank 0 then writes the metadata"),
    KnownPhase("convert", "verify", "local", "reads its share again"),
    KnownPhase("convert", "publish", "local", _PUBLISHED),
    _event("copy", "read", "local", "copies the files of a step (`convert --standalone`)"),
    _error("settle", "settle", "meeting", "agrees on the verdict of a suspect, which rank 0 writes"),
    _error("pin", "pin", "meeting", "agrees on the pin of a step, which rank 0 writes or removes"),
    _error("schedule", "choose", "meeting", "agrees on the call of `save_if_due` at which all ranks save"),
    _error("nodes", "join", "meeting", _JOINED),
    _error("nodes", "part", "meeting", _PARTED),
    KnownPhase("nodes", "copy", "background", _COPIES),
    _error("upload", "prepare", "meeting", "agrees on the name of the rendezvous of the uploads, once"),
    _error("upload", "plan", "meeting", "receives its part of the newest step that waits for its upload"),
    KnownPhase(
        "upload",
        "copy",
        "background",
        "verifies its files and copies them to the second tier",
        reported_in="commit",
    ),
    KnownPhase("upload", "commit", "meeting", _UPLOADED, compares_clocks=True),
    _error("save", "latest", "meeting", "waits until rank 0 has replaced the file `latest` (DeepSpeed)"),
    _error("load", "format", "meeting", "waits until rank 0 has found the format (DeepSpeed, Megatron-Core)"),
    _error("load", "open", "meeting", "opens the files that DeepSpeed wrote"),
    _error("load", "finish", "meeting", "sets the options and the counters that DeepSpeed wrote"),
    _error("load", "common", "meeting", "reads the common state (Megatron-Core)"),
    _error("load", "choose", "meeting", "chooses the newest checkpoint: that of rank 0 (adapters)"),
    _error("load", "prepare", "meeting", "materializes a model of Hugging Face, before the load"),
    _error("match", "keys", "meeting", "compares its keys with those of the other ranks (Megatron-Core)"),
    _error("compare", "digest", "meeting", "compares the digests of its boxes and replicas (Megatron-Core)"),
    _error("compare", "boxes", "meeting", "compares boxes and replicas that are not proved (Megatron-Core)"),
    _error("compare", "common", "meeting", "compares the common state (Megatron-Core)"),
    _error("export", "prepare", "meeting", "plans an export to Hugging Face; rank 0 takes the work folder"),
    _error("export", "publish", "meeting", "waits until rank 0 has moved the exported model to its place"),
    _error("validate", "initial run", "meeting", "votes on the first run of a step"),
    _error("validate", "rerunning in place", "meeting", "votes on the second run, in the same process"),
    _error("validate", "will rerun from checkpoint", "meeting", "resumes the step of a suspect checkpoint"),
    _error("validate", "rerunning from checkpoint", "meeting", "votes on the rerun on another device"),
    _error("validate", "rerunning again from checkpoint", "meeting", _AGAIN),
)
"""Every phase that this package names, in the order in which a rank goes through it."""


PERIOD = 0.1
"""Minimum seconds between two progress events of one phase."""

_Kind: TypeAlias = Literal["begin", "progress", "end", "failed", "waiting"]
_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a phase of an operation, on one rank."""

    kind: _Kind
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

    def _publish(self, kind: _Kind, now: float, error: str | None = None) -> None:
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

"""The part of a `Checkpointer` that decides which calls of `save_if_due` save."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from shardproof._utils.arguments import check_boolean, check_number
from shardproof._utils.humanize import span
from shardproof.engine import events
from shardproof.engine.rendezvous import Rendezvous
from shardproof.engine.saving import PendingSave
from shardproof.runs.checkpointer.agreed_calls import AgreedCalls, Request, Requests
from shardproof.runs.checkpointer.preemption import (
    Preempted,
    Preemption,
    SignalNotices,
    lead_seconds,
    limit_of,
)
from shardproof.runs.checkpointer.schedules import ENOUGH_SAVES, Schedule, advice_of
from shardproof.runs.checkpointer.step_folders import checked_step

_SAVES = 10
"""Number of recent saves that `lead_seconds` uses."""

_log = logging.getLogger("shardproof")


class DueSaves:
    """Decides which calls save, and carries out preemption.

    Raises:
        ValueError: an argument has an invalid value, or this is not the main thread and there are signals.
    """

    def __init__(
        self,
        every: Schedule | None,
        preemption: Preemption | None,
        mtbf_hours: float | None,
        rendezvous: Rendezvous,
        location: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if every is not None and not isinstance(every, Schedule):
            raise ValueError(f"every is a schedule such as Every(steps=500), or None, not {every!r}")
        if preemption is not None and not isinstance(preemption, Preemption):
            raise ValueError(f"preemption is a Preemption, or None, not {preemption!r}")
        check_number("mtbf_hours", mtbf_hours, "of hours")
        if mtbf_hours is not None and not 0 < mtbf_hours < math.inf:
            raise ValueError(f"mtbf_hours is a positive number of hours, or None, not {mtbf_hours!r}")
        self._every = every
        self._location = location
        self._rank = rendezvous.rank
        self._step: int | None = None
        """The step of the last call."""
        self._preempted = ""
        """The reason to end, once the ranks have agreed to end."""
        self._costs = _Costs(location, 3600 * mtbf_hours, clock) if mtbf_hours and not self._rank else None
        self._exit_code = 0 if preemption is None else preemption.exit_code
        self._notices = _Notices(every, preemption, self._rank, clock, wall)
        self._calls: AgreedCalls | None = None
        if preemption is not None or (every is not None and every.seconds is not None):
            name = f"schedule {location}"
            self._calls = AgreedCalls(rendezvous.new_rendezvous(name), name, self._notices)
            self._notices.install(self._calls.wake)
            self._calls.start()
            weakref.finalize(self, self._calls.close)

    def is_due(self, step: int, *, force: bool = False) -> bool:
        """True if this call has to save; see `Checkpointer.save_if_due` for the errors.

        Every rank gets the same answer for the same call. The step of a call that raises is not recorded.
        """
        check_boolean("force", force)
        if self._every is None and self._calls is None and not force:
            raise ValueError(
                f"{self._location}: save_if_due never saves without a schedule: pass every= or preemption= "
                "to the Checkpointer, for example every=Every(steps=500), or call save"
            )
        step = checked_step(step)
        before, self._step = self._step, step
        if before is None or before >= step:  # the first call, or the run went back to an earlier step
            before = max(step - 1, 0)
        is_due = self._every is not None and self._every.is_due_at(step, before)
        if self._calls is not None and not self._preempted:
            self._notices.called()
            request = self._calls.answer()
            if request is not None:
                self._notices.carried_out(request)
                is_due = is_due or request.scheduled
                self._preempted = request.preempted
        return is_due or self.is_preempted

    @property
    def is_preempted(self) -> bool:
        """True if the program has to end after a save. Stays true until a save succeeds."""
        return bool(self._preempted)

    def began(self, pending: PendingSave) -> PendingSave:
        """Records that a save began. If the program has to end, waits for it and raises `Preempted`."""
        self._notices.began()
        if self._costs is not None:
            self._costs.began(pending)
        if not self._preempted:
            return pending
        committed = pending.result()
        assert committed.step is not None
        preempted = Preempted(committed.step, self._preempted, self._exit_code)
        if self._rank == 0:
            _log.warning("%s: %s, with exit code %s", self._location, preempted, preempted.code)
        raise preempted

    def committed(self, seconds: float) -> None:
        """Note the seconds of a save, from the call to the commit. Called in the thread of saves."""
        self._notices.saves.append(seconds)


class _Notices(Requests):
    """The requests of this rank: from signals, and on rank 0 also from the clock and the time limit."""

    def __init__(
        self,
        every: Schedule | None,
        preemption: Preemption | None,
        rank: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.saves: deque[float] = deque(maxlen=_SAVES)
        self._longest_pause = 0.0
        self._preemption = preemption
        self._rank = rank
        self._clock = clock
        self._wall = wall
        self._period = every.seconds if every is not None and rank == 0 else None
        self._limit = math.inf
        if preemption is not None and rank == 0:
            self._limit = limit_of(preemption, os.environ, wall())
        self._last_save = clock()
        self._last_call: float | None = None
        self._is_granted = False
        self._signals: SignalNotices | None = None

    @property
    def has_clock(self) -> bool:
        """True if a request may depend only on the time."""
        return self._period is not None or self._limit < math.inf

    def install(self, noticed: Callable[[], None]) -> None:
        """Install the signal handlers."""
        if self._preemption is not None and self._preemption.signals:
            self._signals = SignalNotices(self._preemption.signals, noticed)

    def called(self) -> None:
        """Note a call of `save_if_due`."""
        now = self._clock()
        if self._last_call is not None:
            self._longest_pause = max(self._longest_pause, now - self._last_call)
        self._last_call = now

    def began(self) -> None:
        """Records the start of a save."""
        self._last_save = self._clock()

    def requested(self) -> Request:
        """The current request of this rank. The monitor calls it."""
        scheduled = (
            self._period is not None
            and not self._is_granted
            and self._clock() - self._last_save >= self._period
        )
        return Request(scheduled, self._preempted())

    def granted(self, request: Request) -> None:
        """Note that all ranks will save at a later call. Until then, the schedule requests nothing."""
        if request.scheduled:
            self._is_granted = True

    def carried_out(self, request: Request) -> None:
        """Note that this rank is at the call at which all ranks save."""
        if request.scheduled:
            self._last_save, self._is_granted = self._clock(), False

    def _preempted(self) -> str:
        if self._signals is not None and self._signals.first is not None:
            return f"{self._signals.first.name} on rank {self._rank}"
        if self._preemption is not None and self._limit < math.inf:
            left = self._limit - self._wall()
            if left <= lead_seconds(self._preemption, list(self.saves), self._longest_pause):
                return f"the time limit of the job, {left:.0f} s away when the save was requested"
        return ""


class _Costs:
    """The time for which saves block training on this rank, and a suggestion in the log."""

    def __init__(self, location: str, mtbf: float, clock: Callable[[], float]) -> None:
        self._location = location
        self._mtbf = mtbf
        self._clock = clock
        self._times: list[float] = []
        self._blocked: list[float] = []
        self._has_logged = False
        self._fences: list[float] = []
        """Seconds that steps of optimizers waited since the last save began."""
        subscription = events.subscribe(partial(_note_fence, self._fences, f"save {location}/"))
        weakref.finalize(self, subscription.close)

    def began(self, pending: PendingSave) -> None:
        """Note a save that began. Log the suggestion once, if it differs much from the interval."""
        if self._blocked:
            self._blocked[-1] += sum(self._fences)
        self._fences.clear()
        # The first save makes the plan, and takes longer than the others. The last one is not over.
        advice = advice_of(self._times, self._blocked[1:], self._mtbf)
        if (
            not self._has_logged
            and advice is not None
            and advice.saves > ENOUGH_SAVES
            and advice.differs_much
        ):
            self._has_logged = True
            _log.info(
                "%s: a save begins every %s and blocks training for %s on rank 0 (medians of %d saves). With "
                "a failure every %s (mtbf_hours), the formula of Daly suggests a save every %s",
                self._location,
                span(advice.interval),
                span(advice.cost),
                advice.saves,
                span(advice.mtbf),
                span(advice.suggested),
            )
        if not pending.skipped:
            self._times.append(self._clock())
            self._blocked.append(pending.blocked)


def _note_fence(fences: list[float], prefix: str, event: events.Event) -> None:
    if event.kind == "end" and event.phase == "fence" and event.operation.startswith(prefix):
        fences.append(event.seconds)

"""The ranks choose the call of `save_if_due` at which all of them save, while training continues.

Note: Why all ranks save at the same call
-----------------------------------------
Each rank numbers its calls of `save_if_due` from 1. All ranks make the same calls, but any rank may be any
number of calls ahead of another. The ranks must choose one number that no rank has passed.

1. Between two choices, a thread of each rank, the monitor, waits for a notification of the rendezvous.
   Nothing is sent. A rank that wants a save (the clock of rank 0, a signal) notifies all monitors.
2. Each monitor *promises*: it reads n, the number of calls that its rank has answered, and from then on the
   rank answers no call. Both are one step under the lock of the gate. The monitor posts n to a meeting.
3. Rank 0 answers with N = max(n) + 1, or with 0 if no rank wants a save.
4. Each monitor notes N, and the rank answers calls again. Call N is answered with "save".

*Same call.* At its promise, a rank has answered n < N calls. It answers no call before it notes N. So each
rank notes N before it answers call N, and answers it with "save". All ranks note the same N.

*No choice is lost.* A rank may promise for a second choice before it has answered call N of the first. Its
n is then smaller than N, and may give N again, or more. The gate stores every number until that call. If both
choices have the same number, no rank has answered that call before its second promise: otherwise N would
be larger. So all ranks join both choices into one save.

*No deadlock.* A call waits only for a promise, a promise ends with its meeting, and a meeting waits only for
monitors. A monitor waits for no call: not for training, not for a save. So the waits have no cycle. If a
rank does not post to the meeting, the others give it up after the deadline of the rendezvous, and the calls
raise `RankSilent`.

*Cost.* Without a choice, a call takes a lock and compares two numbers. With a choice, a rank waits
only if its next call begins during the meeting. A meeting takes about one round trip among the ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Protocol

import msgspec

from shardproof._utils import forks
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous

_LOOK = 0.5
"""Seconds between two checks of the clock on rank 0."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The request of one rank, or the combined request that all ranks carry out at one call."""

    scheduled: bool = False
    """True if the schedule asks for a save."""
    preempted: str = ""
    """The reason why the program has to end; empty if it continues."""

    def __or__(self, other: Request) -> Request:
        return Request(self.scheduled or other.scheduled, self.preempted or other.preempted)

    def __bool__(self) -> bool:
        return self.scheduled or bool(self.preempted)


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The answer of rank 0: a call, the request for it, and the topic of the next notification."""

    call: int
    """Number of the call; 0 if no rank requests a save."""
    request: Request
    next_topic: str


class _RequestPost(msgspec.Struct, frozen=True, array_like=True):
    answered: int
    request: Request


class Gate:
    """The calls of one rank: the number of answered calls, and the later calls that save.

    It has no threads and no clock. `AgreedCalls` holds a lock around each method.

    >>> gate = Gate()
    >>> gate.answer(), gate.promise(), gate.is_open
    (None, 1, False)
    >>> gate.note(2, Request(scheduled=True))
    >>> gate.answer()
    Request(scheduled=True, preempted='')
    """

    __slots__ = ("_chosen", "answered", "is_open")

    def __init__(self) -> None:
        self.answered = 0
        """Number of calls that are answered."""
        self.is_open = True
        """False from a promise until its choice is noted: no call may be answered."""
        self._chosen: dict[int, Request] = {}

    def answer(self) -> Request | None:
        """Answer the next call. The gate is open."""
        assert self.is_open
        self.answered += 1
        return self._chosen.pop(self.answered, None) if self._chosen else None

    def promise(self) -> int:
        """Close the gate, and return the number of answered calls."""
        self.is_open = False
        return self.answered

    def note(self, call: int, request: Request) -> None:
        """Note the chosen call, and open the gate. Call 0 means that the ranks chose none."""
        if call:
            assert call > self.answered
            self._chosen[call] = self._chosen.get(call, Request()) | request
        self.is_open = True


def choose(answered: Sequence[int]) -> int:
    """The first call that no rank has answered."""
    return max(answered) + 1


class Requests(Protocol):
    """The source of the requests of one rank. The monitor calls the methods in its thread."""

    @property
    def has_clock(self) -> bool:
        """True if `requested` depends on the time, so that the monitor calls it regularly."""

    def requested(self) -> Request:
        """The current request of this rank."""

    def granted(self, request: Request) -> None:
        """Note the request that all ranks will carry out."""


class AgreedCalls:
    """The monitor of one rank, and the gate that it shares with the calls of `save_if_due`.

    Nothing else uses `rendezvous`, one of all ranks, and `operation` is the same on all of them.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str, requests: Requests) -> None:
        self._rendezvous = rendezvous
        self._meetings = MeetingSequence(rendezvous, operation)
        self._requests = requests
        self._gate = Gate()
        self._changed = threading.Condition(forks.lock())
        self._failed: BaseException | None = None
        self._wake: SimpleQueue[str] = SimpleQueue()

    def start(self) -> None:
        """Start the monitor."""
        threading.Thread(target=self._run, name="shardproof-schedule", daemon=True).start()

    def answer(self) -> Request | None:
        """The answer to the next call of this rank; None if the call does not save.

        Raises:
            ShardproofError: the ranks could not choose a call.
        """
        with self._changed:
            while not self._gate.is_open and self._failed is None:
                # The monitor opens the gate or fails, within the deadlines of its meeting.
                self._changed.wait(1.0)
            if self._failed is not None:
                # A new error for each call: a traceback grows each time that its error is raised.
                raise copy(self._failed) from self._failed
            return self._gate.answer()

    def wake(self) -> None:
        """Wakes the monitor, because this rank may request something. A signal handler may call it."""
        self._wake.put("wake")

    def close(self) -> None:
        """End the monitor. Sends nothing to the other ranks."""
        self._wake.put("close")

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
        finally:
            self._rendezvous.close()

    def _watch(self) -> None:
        choice = self._meet(0, Request())  # names the first topic
        while not choice.request.preempted:
            if not self._until_notified(choice.next_topic):
                return
            with self._changed:
                answered = self._gate.promise()
            choice = self._meet(answered, self._requests.requested())
            self._requests.granted(choice.request)
            with self._changed:
                self._gate.note(choice.call, choice.request)
                self._changed.notify_all()

    def _until_notified(self, topic: str) -> bool:
        """Wait for the notification, and send it if this rank requests something. False after `close`."""
        notification = self._rendezvous.notification(topic)
        notification.add_done_callback(lambda _: self._wake.put("notified"))
        has_asked = False
        while True:
            if not has_asked and self._requests.requested():
                has_asked = True
                self._rendezvous.notify(topic)
            try:
                news = self._wake.get(timeout=_LOOK if self._requests.has_clock and not has_asked else None)
            except Empty:
                continue
            if news == "close":
                return False
            if news == "notified":
                notification.result()
                return True

    def _meet(self, answered: int, request: Request) -> Choice:
        def decide(posts: list[_RequestPost]) -> Choice:
            asked = Request()
            for post in posts:
                asked |= post.request
            call = choose([post.answered for post in posts]) if asked else 0
            return Choice(call, asked, token_hex(8))

        post = _RequestPost(answered, request)
        return self._meetings.exchange("choose", lambda: post, decide, _RequestPost, Choice)

"""The operations of a meeting on the store: join, post, wait, propose a verdict, delete old keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shardproof.engine.rendezvous import store_requests as requests
from shardproof.engine.rendezvous.heartbeat import Heartbeat, Watch
from shardproof.engine.rendezvous.membership import Membership
from shardproof.engine.rendezvous.store_requests import Link, is_over, new_client, wait_in_steps
from shardproof.engine.rendezvous.wire import (
    MeetingKeys,
    Record,
    WrongBytes,
    checked_body,
    cut,
    part_keys,
    part_sizes,
)

Answer = TypeVar("Answer")


class CoordinatorSilent(Exception):
    """This rank cannot join, because the coordinator showed no sign of life for the deadline."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch


@dataclass(frozen=True, slots=True)
class _Joining:
    """The wait for the announcement of a generation, or for the welcome into one."""

    generation: str
    key: str
    waiting: Future[None]


@dataclass(slots=True)
class _PendingVerdict:
    """A verdict that this rank sends once it has joined."""

    number: int
    verdict: bytes
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The state of a meeting in the store: posts by rank, signs of life by rank, and the verdict or None."""

    posts: Mapping[int, bytes]
    signs: Mapping[int, bytes]
    verdict: bytes | None


class Channel:
    """Two connections to the store: one for requests answered at once, one for the long wait of a meeting.

    The connection of the wait also reads the value that it waited for. Waking another thread for the read
    would take as long as a round trip to the server.

    Every call takes at most `patience` seconds and then raises `LinkLost`. Between requests, the first
    connection joins a generation, once the heartbeat has started, and posts the rank's signs of life.
    """

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int, heartbeat: Heartbeat, patience: float
    ) -> None:
        self.patience = patience
        self.heartbeat = heartbeat
        self.rank = rank
        self._membership = Membership(name, rank, world_size)
        self._has_started = False
        """True after `start_heartbeat` or `begin`."""
        client = partial(new_client, store)
        self._requests = Link(client, "shardproof-store", (self._idle, lambda: heartbeat.period))
        try:
            self._waits = Link(client, "shardproof-wait")
        except BaseException:  # the process cannot start another thread
            self._requests.close()
            raise
        self._heard: dict[int, float] = {}
        self._written_keys: list[tuple[int, list[str]]] = []
        self._first: int | None = None
        self._pending_verdicts: list[_PendingVerdict] = []
        self._entry: _Joining | None = None
        self._notification: tuple[str, Future[None]] | None = None
        """The key of the notification that this rank waits for, and the wait."""

    @property
    def is_member(self) -> bool:
        """True if this rank has joined a generation."""
        return self._membership.is_member

    def start_heartbeat(self) -> None:
        """Begin to join and to post signs of life. Does not need the other ranks."""
        self._has_started = True
        if self.rank == 0:
            self._call(self._membership.announce)
        else:
            self._call(self._membership.approach)

    def join(self, number: int) -> MeetingKeys:
        """The keys of a meeting. Joins a generation first, if this rank is in none.

        Each generation counts meetings from the one for which this rank joined it.

        Raises:
            CoordinatorSilent: the coordinator did not welcome this rank.
        """
        self.begin(number)
        if not self.is_member:
            if self.rank == 0:
                self._call(self._membership.announce)
            else:
                self._until_welcome()
                self.heard(0)
        if self._entry is not None:
            self._end_wait(self._entry)
            self._entry = None
        if self._membership.start:
            self._first, self._pending_verdicts = number - self._membership.start, []
            self._membership.start = 0
        for one in self._pending_verdicts:
            self.propose_later(self._keys(one.number), one.verdict)
        self._pending_verdicts = []
        return self._keys(number)

    def begin(self, number: int) -> None:
        """Begin to join, with this meeting as the first. Does nothing on later calls. Does not wait."""
        if self._first is None:
            self._first = number
        if self.rank > 0 and not self._has_started:
            self._requests.submit(self._membership.approach)  # opens the connection over which a rank joins
        self._has_started = True

    def propose_failure(self, number: int, verdict: bytes) -> None:
        """Propose that a meeting fails, for a reason of this rank alone. Does not wait.

        Keeps the verdict until the rank has joined.
        """
        if self._first is None:
            return  # this rank left that generation
        if self.is_member:
            self.propose_later(self._keys(number), verdict)
        else:
            self._pending_verdicts.append(_PendingVerdict(number, verdict))

    def leave(self, number: int, carried: bytes | None) -> None:
        """Leave the generation. At its next meeting, this rank joins again under another name.

        The rank proposes the verdict `carried` again in the next generation.
        """

        def request(store: Any) -> None:  # runs on the link's thread, which gets no interrupts
            self._membership.leave(store)
            self._first = None if carried is None else number
            self._pending_verdicts = [] if carried is None else [_PendingVerdict(number, carried)]

        self._call(request)

    def needs_new_generation(self, keys: MeetingKeys) -> bool:
        """True if a rank waits for a new generation. Call it before giving up a meeting."""
        if self.rank == 0:
            return self._call(lambda store: self._membership.dismiss(store, keys.number))
        return self._call(self._membership.is_superseded)

    def _call(self, request: Callable[[Any], Answer]) -> Answer:
        """Run a request. If the server is stopped, the request takes effect when the server resumes."""
        return self._requests.call(request, self.patience)

    def _keys(self, number: int) -> MeetingKeys:
        assert self._first is not None
        return MeetingKeys(self._membership.root, number - self._first)

    def _until_welcome(self) -> None:
        """Wait for the coordinator in the announced generation. The announcement may change meanwhile."""
        membership, step = self._membership, self.heartbeat.period / 4
        watch = Watch([0], time.monotonic(), 2 * self.heartbeat.period)
        if self._entry is None:
            self._entry = self._wait_to_enter("", membership.keys.opened)
        try:
            while not (is_over(self._entry.waiting, step) and self._call(membership.find_welcome)):
                if membership.is_member:  # the idle task found the welcome
                    break
                self.heartbeat.tick()
                self._call(membership.approach)
                if membership.generation != self._entry.generation:
                    self._end_wait(self._entry)
                    self._entry = self._wait_to_enter(membership.generation, membership.welcome_key)
                    watch = Watch([0], time.monotonic(), 2 * self.heartbeat.period)
                elif self._entry.waiting.done():
                    time.sleep(step)  # another rank gave up before there was an announcement
                sign = self._call(self._look_for_coordinator)
                watch.step(time.monotonic())
                if watch.observe(0, sign):
                    self.heard(0)
                if watch.silent(self.patience):
                    raise CoordinatorSilent(watch)
        except Exception:
            # An interrupt passes: the next call continues this wait, because the coordinator may have
            # welcomed this rank.
            self._end_wait(self._entry)
            self._entry = None
            self._requests.submit(membership.leave)  # this rank set the welcome key itself
            raise

    def _wait_to_enter(self, generation: str, key: str) -> _Joining:
        return _Joining(generation, key, self._waits.submit(partial(requests.wait, key=key)))

    def _end_wait(self, entry: _Joining) -> None:
        """End the wait for a welcome, and delete the welcome."""
        self.release(entry.waiting, entry.key)
        if entry.key != self._membership.keys.opened:
            self._waits.submit(partial(requests.delete, keys=[entry.key]))

    def _idle(self, store: Any) -> None:
        """The task of the first connection between requests: join, and post signs of life."""
        if not self._has_started:
            return
        membership = self._membership
        if self.rank == 0 and membership.is_member and not membership.is_complete:
            membership.welcome(store)
        elif self.rank != 0 and not membership.is_member:
            membership.approach(store)
            membership.find_welcome(store)
        self._send_pending_verdicts(store)
        if membership.is_member and (news := self.heartbeat.news()) is not None:
            store.set(MeetingKeys(membership.root, 0).beat(self.rank), news)

    def _send_pending_verdicts(self, store: Any) -> None:
        """Propose the pending verdicts once this rank has joined. Its next meeting may be far away."""
        if not self.is_member or self._membership.start:
            return
        for one in [one for one in self._pending_verdicts if not one.is_sent]:
            keys = self._keys(one.number)
            store.compare_set(keys.verdict, "", one.verdict)
            requests.set_all(store, {keys.wake: b"1", keys.ready: b"1"})
            one.is_sent = True

    def _look_for_coordinator(self, store: Any) -> bytes | None:
        """The coordinator's newest sign of life in the generation that this rank wants to join."""
        if not self._membership.generation:
            return None
        return requests.peek(store, MeetingKeys(self._membership.root, 0).beat(0))

    def post(self, keys: MeetingKeys, record: bytes, body: bytes, others: int) -> None:
        """Post to the coordinator, and wake it if this is the last of `others` posts."""
        key = keys.post(self.rank)
        self._remember(keys, [*self._write_parts(key, body), key])
        items = {key: record} | self._trace(keys)

        def request(store: Any) -> None:
            requests.set_all(store, items)
            if store.add(keys.count, 1) == others:
                store.set(keys.ready, b"1")

        self._call(request)

    def until_ready(self, keys: MeetingKeys, ranks: Iterable[int]) -> Future[dict[int, bytes]]:
        """The posts of all other ranks, once they are there. A call of `release` may end it with fewer."""
        posts = {rank: keys.post(rank) for rank in ranks}

        def request(store: Any) -> dict[int, bytes]:
            self._membership.welcome_all(store)
            requests.wait(store, keys.ready)
            if len(posts) <= requests.FEW:
                return requests.present(store, posts)
            # All have posted, so the keys need no check before the read.
            return requests.values(store, posts) if store.add(keys.count, 0) >= len(posts) else {}

        return self._waits.submit(request)

    def until_verdict(self, keys: MeetingKeys) -> Future[bytes | None]:
        """The verdict, once there is one; or None, if a rank calls `release` earlier."""

        def request(store: Any) -> bytes | None:
            requests.wait(store, keys.wake)
            return requests.peek(store, keys.verdict)

        return self._waits.submit(request)

    def until_read(self, keys: MeetingKeys) -> Future[None]:
        """A future that is done once all ranks have acknowledged the verdict."""
        return self._waits.submit(lambda store: requests.wait(store, keys.all_read))

    def acknowledge(self, keys: MeetingKeys, readers: int) -> None:
        """Report that this rank has read its answer: its last request of a meeting. Does not wait."""

        def request(store: Any) -> None:
            if store.add(keys.read, 1) == readers:
                store.set(keys.all_read, b"1")

        self._requests.submit(request)

    def release(self, waiting: Future[Any], key: str) -> None:
        """End a wait that this rank no longer needs, and the waits of all ranks for this key."""
        if waiting.done():
            return
        keys = [key]
        if self.rank == 0 and not self._membership.is_complete:
            keys.append(self._membership.keys.all_joined(self._membership.generation))
        self._requests.submit(lambda store: requests.set_all(store, dict.fromkeys(keys, b"1")))

    def look(
        self, keys: MeetingKeys, posts_of: Iterable[int], signs_of: Iterable[int], known: int | None = None
    ) -> View:
        """The current posts and signs of life of these ranks, and the verdict.

        Reads posts only if more than `known` ranks have posted. A request for thousands of missing keys takes
        a second, and ranks that write their shards do not post for a long time.
        """
        posts, signs = list(posts_of), list(signs_of)

        def request(store: Any) -> View:
            if self.rank == 0 and signs:
                self._membership.welcome(store)
            news = posts and (known is None or store.add(keys.count, 0) > known)
            return View(
                requests.present(store, {rank: keys.post(rank) for rank in posts}) if news else {},
                requests.present(store, {rank: keys.beat(rank) for rank in signs}),
                requests.peek(store, keys.verdict),
            )

        return self._call(request)

    def read(self, key: str) -> bytes:
        """The value of a key that a rank has written.

        Raises:
            WrongBytes: the key does not exist.
        """
        value = self._call(lambda store: requests.peek(store, key))
        if value is None:
            raise WrongBytes(key, "a value that was written before", None)
        return value

    def body(self, key: str, record: Record) -> bytes:
        """The bytes of the record at `key`, joined from its parts.

        Raises:
            WrongBytes: the bytes do not have the size or the digest of the record.
        """
        if not record.parts:
            return record.body
        parts = []
        for part_key, size in zip(part_keys(key, record.parts), part_sizes(record), strict=True):
            part = self.read(part_key)
            if len(part) != size:
                raise WrongBytes(part_key, f"{size} bytes", part)
            parts.append(part)
            self.heartbeat.tick()
        return checked_body(key, record, b"".join(parts))

    def write_answers(self, keys: MeetingKeys, answers: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Write one answer per rank, before the verdict: rank, record and body of each."""
        batch: dict[str, bytes] = {}
        for rank, record, body in answers:
            key = keys.answer(rank)
            self._remember(keys, [*self._write_parts(key, body), key])
            batch[key] = record
            if len(batch) == requests.BATCH:
                self._set(batch)
                batch = {}
        self._set(batch)

    def propose(self, keys: MeetingKeys, record: bytes, body: bytes = b"") -> bytes:
        """Propose this verdict. Returns the verdict that stands: this one, or an earlier one."""
        parts = self._write_parts(keys.verdict, body)
        return wait_in_steps(self.propose_later(keys, record, parts), self.patience)

    def propose_later(self, keys: MeetingKeys, record: bytes, parts: Sequence[str] = ()) -> Future[bytes]:
        """Proposes a verdict. Does not wait.

        If the server is stopped, the request takes effect when the server resumes.
        """
        self._remember(keys, [*parts, *keys.shared])
        items = {keys.wake: b"1"} | self._trace(keys)

        def request(store: Any) -> bytes:
            standing = store.compare_set(keys.verdict, "", record)
            requests.set_all(store, items)
            return bytes(standing)

        return self._requests.submit(request)

    def notify(self, topic: str, number: int, world_size: int) -> None:
        """Set the key of each rank. Does not wait. If several ranks notify, the first sets the keys.

        Args:
            topic: the prefix of the keys.
            number: the number of the next meeting. `sweep` deletes the count of calls after it, because
                a rank that has posted to that meeting does not notify of this topic again.
            world_size: the number of ranks.
        """
        self._written_keys.append((number - 1, [f"{topic}/calls"]))

        def request(store: Any) -> None:
            if store.add(f"{topic}/calls", 1) == 1:
                requests.set_all(store, {f"{topic}/{rank}": b"1" for rank in range(world_size)})

        self._requests.submit(request)

    def notification(self, topic: str) -> Future[None]:
        """A future that is done once a rank has notified of the topic, or this channel is closed.

        Each rank waits for its own key, so that it can end its wait without the other ranks.
        """
        key = f"{topic}/{self.rank}"

        def request(store: Any) -> None:
            requests.wait(store, key)
            requests.delete(store, [key])

        self._notification = key, self._waits.submit(request)
        return self._notification[1]

    def note_other(self, base: str) -> None:
        """Record a rendezvous that this rank made from this one, for the rank that replaces it."""
        self._membership.note_other(base)
        self._requests.submit(self._membership.write_trace)

    def submit(self, request: Callable[[Any], Answer]) -> Future[Answer]:
        """Run a request after the earlier ones. Does not wait."""
        return self._requests.submit(request)

    def remember_verdicts(self, numbers: Iterable[int]) -> None:
        """Record the keys of the meetings that this rank gave up, for `sweep`."""
        self._written_keys += [(number, self._keys(number).shared) for number in numbers]

    def sweep(self, number: int) -> None:
        """Delete the keys that this rank wrote before meeting `number`, once all have posted to it."""
        old = [key for before, keys in self._written_keys if before < number for key in keys]
        self._written_keys = [(before, keys) for before, keys in self._written_keys if before >= number]
        for start in range(0, len(old), requests.BATCH):
            self._requests.submit(partial(requests.delete, keys=old[start : start + requests.BATCH]))
        if self._membership.has_old_keys:
            self._requests.submit(self._membership.clean)

    def heard(self, rank: int) -> None:
        """Record a sign of life of a rank."""
        self._heard[rank] = time.monotonic()

    def last_heard(self, rank: int) -> float | None:
        """Seconds since the last sign of life of a rank; None if it posted none."""
        return time.monotonic() - self._heard[rank] if rank in self._heard else None

    def close(self) -> None:
        """End both connections."""
        if self._notification is not None:
            self.release(self._notification[1], self._notification[0])
        self._membership.close()
        self._requests.close()
        self._waits.close()

    def _write_parts(self, key: str, body: bytes) -> list[str]:
        written = []
        for part_key, part in cut(key, body):
            self._set({part_key: part})
            written.append(part_key)
        return written

    def _set(self, items: Mapping[str, bytes]) -> None:
        self._call(lambda store: requests.set_all(store, items))
        self.heartbeat.tick()

    def _remember(self, keys: MeetingKeys, written: list[str]) -> None:
        """Record the keys that this rank wrote for a meeting, for `sweep`."""
        assert self._first is not None
        self._written_keys.append((keys.number + self._first, written))

    def _trace(self, keys: MeetingKeys) -> dict[str, bytes]:
        """The trace that goes with a post or verdict, for the rank that replaces this one."""
        assert self._first is not None
        oldest = min((number for number, _ in self._written_keys), default=0) - self._first
        return self._membership.trace(min(max(oldest, 0), keys.number), keys.number)

"""A rank's way to the store, in the terms of a meeting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from shardproof.rendezvous.keys import MeetingKeys
from shardproof.rendezvous.link import Link, patiently
from shardproof.rendezvous.pulse import Pulse
from shardproof.rendezvous.records import Record, cut, part_keys

__all__ = ["Channel", "View"]

Answer = TypeVar("Answer")

_LONG_WAIT = timedelta(
    hours=1
)  # the client writes warnings when a wait times out: ours end because a key is set
_BATCH = 256
_FEW = 3
"""As many keys are looked at one by one, a trip to the server each: all together take three at least."""
_NOTHING = "(nothing)"
"""Neither a record nor a sign of life."""


@dataclass(frozen=True, slots=True)
class View:
    """What the store shows of a meeting: posts that came in, signs of life, the verdict once there is one."""

    posts: Mapping[int, bytes]
    signs: Mapping[int, bytes]
    verdict: bytes | None


class Channel:
    """Two connections to the store: for requests answered at once, and for the one long wait of a meeting.

    What a meeting waits for is read over the connection of the wait: to wake another thread for it costs as
    much as a trip to the server.

    Every call is bounded by `patience` seconds and raises `LinkLost`. Between requests the first connection
    posts this rank's signs of life.
    """

    def __init__(self, store: Any, name: str, rank: int, pulse: Pulse, patience: float) -> None:
        self.patience = patience
        self.pulse = pulse
        self.rank = rank
        self._name = name
        self._root = ""
        self._joining: Future[int] | None = None
        self._beat = _Beat(pulse)
        self._requests = Link(store.clone, "shardproof-store", (self._beat, lambda: pulse.period))
        self._waits = Link(store.clone, "shardproof-wait")
        self._heard: dict[int, float] = {}
        self._litter: list[tuple[int, list[str]]] = []

    def join(self, number: int) -> MeetingKeys:
        """The keys of a meeting.

        A rank that joins the same store again under the same name gets another root: a process group that is
        destroyed and made again may find the keys of its former life in a store that lived on. It joins once:
        a store that did not answer in time still counts the rank when it wakes, and is not asked again.
        """
        if not self._root:
            joined = f"{self._name}/joined/{self.rank}"
            if self._joining is None or (self._joining.done() and self._joining.exception() is not None):
                self._joining = self._requests.submit(lambda store: int(store.add(joined, 1)))
            self._root = f"{self._name}/{patiently(self._joining, self.patience)}"
            self._beat.key = MeetingKeys(self._root, 0).beat(self.rank)
        return MeetingKeys(self._root, number)

    @property
    def root(self) -> str:
        """With which the keys of its meetings begin; empty until this rank has joined."""
        return self._root

    def post(self, keys: MeetingKeys, record: bytes, body: bytes, others: int) -> None:
        """Post to the leader, and wake it if all `others` that it waits for are there."""
        key = keys.post(self.rank)
        self._litter.append((keys.number, [*self._write_parts(key, body), key]))

        def request(store: Any) -> None:
            store.set(key, record)
            if store.add(keys.count, 1) == others:
                store.set(keys.ready, b"1")

        self._requests.call(request, self.patience)

    def until_ready(self, keys: MeetingKeys, ranks: Iterable[int]) -> Future[dict[int, bytes]]:
        """What all other ranks posted, once they have; or perhaps less, when `release` is called.

        Args:
            keys: of the meeting.
            ranks: all but this one.
        """
        posts = {rank: keys.post(rank) for rank in ranks}

        def request(store: Any) -> dict[int, bytes]:
            _wait(store, keys.ready)
            if len(posts) <= _FEW:
                return _present(store, posts)
            # What all have posted is not asked for before it is read.
            return _values(store, posts) if store.add(keys.count, 0) >= len(posts) else {}

        return self._waits.submit(request)

    def until_verdict(self, keys: MeetingKeys) -> Future[bytes | None]:
        """The verdict, once there is one; or None, when some rank calls `release` before."""

        def request(store: Any) -> bytes | None:
            _wait(store, keys.wake)
            return _peek(store, keys.verdict)

        return self._waits.submit(request)

    def until_read(self, keys: MeetingKeys) -> Future[None]:
        """Done when all ranks have read the verdict that asked for it."""
        return self._waits.submit(lambda store: _wait(store, keys.all_read))

    def acknowledge(self, keys: MeetingKeys, readers: int) -> None:
        """Say that this rank has read its answer; does not wait. The last thing said about a meeting."""

        def request(store: Any) -> None:
            if store.add(keys.read, 1) == readers:
                store.set(keys.all_read, b"1")

        self._requests.submit(request)

    def release(self, waiting: Future[Any], key: str) -> None:
        """End a wait that nobody needs any more, and with it that of all ranks that wait for this key."""
        if not waiting.done():
            self._requests.submit(lambda store: store.set(key, b"1"))

    def look(
        self, keys: MeetingKeys, posts_of: Iterable[int], signs_of: Iterable[int], known: int | None = None
    ) -> View:
        """What is there now, of those ranks.

        Posts are looked for unless no more than `known` were counted: to ask for thousands of keys that are
        not there takes a second, and ranks that write have no news for long.
        """
        posts, signs = list(posts_of), list(signs_of)

        def request(store: Any) -> View:
            news = posts and (known is None or store.add(keys.count, 0) > known)
            return View(
                _present(store, {rank: keys.post(rank) for rank in posts}) if news else {},
                _present(store, {rank: keys.beat(rank) for rank in signs}),
                _peek(store, keys.verdict),
            )

        return self._requests.call(request, self.patience)

    def read(self, key: str) -> bytes:
        """A value that is known to be there."""
        return bytes(self._requests.call(lambda store: store.get(key), self.patience))

    def body(self, key: str, record: Record) -> bytes:
        """The bytes of the record at `key`, put together from its parts."""
        if not record.parts:
            return record.body
        parts = []
        for part in part_keys(key, record.parts):
            parts.append(self.read(part))
            self.pulse.tick()
        body = b"".join(parts)
        assert len(body) == record.size, f"{key}: {len(body)} bytes where {record.size} were written"
        return body

    def write_answers(self, keys: MeetingKeys, answers: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Write what ranks are answered, ahead of the verdict: rank, record and body of each."""
        batch: dict[str, bytes] = {}
        for rank, record, body in answers:
            key = keys.answer(rank)
            self._litter.append((keys.number, [*self._write_parts(key, body), key]))
            batch[key] = record
            if len(batch) == _BATCH:
                self._requests.call(partial(_set_all, batch), self.patience)
                self.pulse.tick()
                batch = {}
        self._requests.call(partial(_set_all, batch), self.patience)
        self.pulse.tick()

    def propose(self, keys: MeetingKeys, record: bytes, body: bytes = b"") -> bytes:
        """End the meeting with this verdict, unless it has one; returns the verdict that stands."""
        parts = self._write_parts(keys.verdict, body)
        return patiently(self.propose_later(keys, record, parts), self.patience)

    def propose_later(self, keys: MeetingKeys, record: bytes, parts: Sequence[str] = ()) -> Future[bytes]:
        """The same without waiting for it, so that a store that hangs can take the verdict when it wakes."""
        self._litter.append((keys.number, [*parts, *keys.shared]))

        def request(store: Any) -> bytes:
            standing = store.compare_set(keys.verdict, "", record)
            store.set(keys.wake, b"1")
            return bytes(standing)

        return self._requests.submit(request)

    def later(self, request: Callable[[Any], Answer]) -> Future[Answer]:
        """Run a request after those before it. Does not wait."""
        return self._requests.submit(request)

    def gave_up(self, numbers: Iterable[int]) -> None:
        """Note the verdicts that this rank wrote to meetings which it gave up, for `sweep`."""
        self._litter += [(number, MeetingKeys(self._root, number).shared) for number in numbers]

    def sweep(self, number: int) -> None:
        """Delete what this rank wrote before meeting `number`, in which all have posted. Does not wait."""
        old = [key for before, keys in self._litter if before < number for key in keys]
        self._litter = [(before, keys) for before, keys in self._litter if before >= number]
        for start in range(0, len(old), _BATCH):
            batch = old[start : start + _BATCH]
            self._requests.submit(partial(_delete, batch))

    def heard(self, rank: int) -> None:
        """A rank showed a sign of life just now."""
        self._heard[rank] = time.monotonic()

    def last_heard(self, rank: int) -> float | None:
        """Seconds since a rank was heard; None if it never was."""
        return time.monotonic() - self._heard[rank] if rank in self._heard else None

    def close(self) -> None:
        """End both connections."""
        self._requests.close()
        self._waits.close()

    def _write_parts(self, key: str, body: bytes) -> list[str]:
        written = []
        for part_key, part in cut(key, body):
            self._requests.call(partial(_set, part_key, part), self.patience)
            self.pulse.tick()
            written.append(part_key)
        return written


class _Beat:
    """Posts this rank's signs of life, when there is news and it is known where."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.key = ""

    def __call__(self, store: Any) -> None:
        if self.key and (news := self._pulse.news()) is not None:
            store.set(self.key, news)


def _set(key: str, value: bytes, store: Any) -> None:
    store.set(key, value)


def _set_all(values: Mapping[str, bytes], store: Any) -> None:
    for key, value in values.items():
        store.set(key, value)


def _delete(keys: Sequence[str], store: Any) -> None:
    for key in keys:
        store.delete_key(key)


def _wait(store: Any, key: str) -> None:
    while True:
        began = time.monotonic()
        try:
            store.wait([key], _LONG_WAIT)
            return
        except RuntimeError:
            # A timeout and a lost connection look alike in older stores; only the first takes its time.
            if time.monotonic() - began < 0.9 * _LONG_WAIT.total_seconds():
                raise


def _present(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of those keys that exist, found by halving: few requests if few are missing."""
    if len(keys) <= _FEW:
        peeked = {rank: _peek(store, key) for rank, key in keys.items()}
        return {rank: value for rank, value in peeked.items() if value is not None}
    found: list[int] = []
    groups = [list(keys)] if keys else []
    while groups:
        group = groups.pop()
        if store.check([keys[rank] for rank in group]):
            found += group
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return _values(store, {rank: keys[rank] for rank in found})


def _values(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of keys that exist."""
    ranks = list(keys)
    values: dict[int, bytes] = {}
    for start in range(0, len(ranks), _BATCH):
        batch = ranks[start : start + _BATCH]
        values.update(zip(batch, map(bytes, store.multi_get([keys[rank] for rank in batch])), strict=True))
    return values


def _peek(store: Any, key: str) -> bytes | None:
    """The value of a key if it exists. One trip to the server, where to check for it and to get it are three.

    To compare with a value that no key has changes none, and every store answers what is there instead, or
    for a key that does not exist the very value that was asked for. It may end a wait for the key though (of
    the server of `TCPStore` on libuv), so nobody may wait for a key that is looked at like this.
    """
    found = bytes(store.compare_set(key, _NOTHING, _NOTHING))
    return None if found == _NOTHING.encode() else found

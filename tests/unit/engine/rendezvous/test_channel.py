"""Requests of one rank to the store, and how many it makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from shardproof.engine.rendezvous.channel import Channel
from shardproof.engine.rendezvous.heartbeat import Heartbeat
from shardproof.engine.rendezvous.store_requests import LinkLost
from shardproof.engine.rendezvous.wire import INLINE, MeetingKeys, pack, unpack
from tests.thread_limit import limit_threads

WORLD = 600
LIMIT = 30.0


class RecordingStore:
    """A store that records the requested keys."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requested: list[str] = []

    def clone(self) -> RecordingStore:
        return self

    def check(self, keys: list[str]) -> bool:
        self.requested += keys
        return bool(self.store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected == desired:
            self.requested.append(key)
        return bytes(self.store.compare_set(key, expected, desired))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(HashStore())


def channel_of(store: Any, rank: int, world_size: int, patience: float = 10.0) -> Channel:
    heartbeat = Heartbeat()
    heartbeat.period = 0.01  # a rank is welcome after that
    return Channel(store, "job", rank, world_size, heartbeat, patience)


Open = Callable[..., list[Channel]]


@pytest.fixture
def channels(store: RecordingStore) -> Iterator[Open]:
    """Opens the channels of the first `count` ranks, and joins them."""
    opened: list[Channel] = []

    def open_channels(count: int, world_size: int = WORLD) -> list[Channel]:
        opened.extend(channel_of(store, rank, world_size) for rank in range(count))
        for channel in opened:
            channel.join(0)
        return opened

    yield open_channels
    for channel in opened:
        channel.close()


def test_a_channel_without_a_second_thread_ends_the_first(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    limit_threads(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="new thread"):
        channel_of(store, 0, 2)
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in left)


def test_the_coordinator_looks_for_posts_only_if_their_count_grew(
    store: RecordingStore, channels: Open
) -> None:
    coordinator, *others = channels(3)
    keys = coordinator.join(0)
    others[0].post(keys, pack("save", "write", "bytes", b"one"), b"one", others=WORLD - 1)
    waited_for = range(1, WORLD)
    assert set(coordinator.look(keys, waited_for, [], known=0).posts) == {1}
    store.requested.clear()
    assert coordinator.look(keys, waited_for, [], known=1).posts == {}
    assert store.requested == [keys.verdict]
    others[1].post(keys, pack("save", "write", "error", b"two"), b"two", others=WORLD - 1)
    assert set(coordinator.look(keys, range(2, WORLD), [], known=1).posts) == {2}


@pytest.mark.parametrize("count", [2, 5])
def test_posts_are_read_after_all_have_arrived(count: int, store: RecordingStore, channels: Open) -> None:
    """The key of each post is requested if there are few ranks, and no key if there are many."""
    coordinator, ranks = channels(count + 1, count + 1)[0], range(1, count + 1)
    keys = coordinator.join(0)
    store.requested.clear()
    waiting = coordinator.until_ready(keys, ranks)
    for rank in ranks:
        assert not waiting.done()
        store.set(keys.post(rank), pack("save", "write", "bytes", str(rank).encode()))
        if store.add(keys.count, 1) == count:
            store.set(keys.ready, b"1")
    assert {rank: unpack("k", value).body for rank, value in waiting.result(10).items()} == {
        rank: str(rank).encode() for rank in ranks
    }
    assert store.requested == ([keys.post(rank) for rank in ranks] if count == 2 else [])


@pytest.mark.parametrize("count", [2, 5])
def test_a_released_wait_returns_without_the_missing_posts(count: int, channels: Open) -> None:
    coordinator, other = channels(2, count + 1)
    keys = coordinator.join(0)
    other.post(keys, pack("save", "write", "bytes", b"one"), b"one", others=count)
    waiting = coordinator.until_ready(keys, range(1, count + 1))
    coordinator.release(waiting, keys.ready)
    assert set(waiting.result(10)) <= {1}
    verdict = coordinator.until_verdict(keys)  # over the same connection, which is free again
    other.release(verdict, keys.wake)
    assert verdict.result(10) is None


def test_a_rank_that_waits_for_the_verdict_gets_it(channels: Open) -> None:
    coordinator, other = channels(2)
    keys = other.join(0)
    waiting = other.until_verdict(keys)
    verdict = pack("save", "write", "all", b"yes")
    assert coordinator.propose(coordinator.join(0), verdict) == verdict
    assert waiting.result(10) == verdict


def test_every_rank_finds_its_answer(channels: Open) -> None:
    coordinator, other = channels(2)
    keys = coordinator.join(0)
    bodies = {rank: str(rank).encode() for rank in range(1, WORLD)} | {300: bytes(2 * INLINE)}
    coordinator.write_answers(
        keys, ((rank, pack("save", "plan", "all", body), body) for rank, body in bodies.items())
    )
    for rank, body in bodies.items():
        record = unpack("k", other.read(keys.answer(rank)))
        assert other.body(keys.answer(rank), record) == body


def test_answers_are_swept(store: RecordingStore, channels: Open) -> None:
    (coordinator,) = channels(1)
    keys = coordinator.join(0)
    answers = [keys.answer(rank) for rank in range(1, WORLD)]
    coordinator.write_answers(
        keys, ((rank, pack("save", "plan", "all", b""), b"") for rank in range(1, WORLD))
    )
    assert all(store.check([key]) for key in answers)
    coordinator.sweep(1)
    coordinator.look(keys, [], [])  # requests are served in order: what was swept is gone
    assert not any(store.check([key]) for key in answers)


class Asleep(RecordingStore):
    """A store that answers nothing before it is woken."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.awake = threading.Event()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert self.awake.wait(30)
        return super().compare_set(key, expected, desired)


def welcome_the_second_hello(coordinator: Channel) -> None:
    """The first one is of an incarnation that gave up: its rank joins again under another name."""
    keys, ends = coordinator.join(0), time.monotonic() + LIMIT
    joined = f"{keys.root}/joined"
    while coordinator.submit(lambda store: store.add(joined, 0)).result(LIMIT) < 2:
        assert time.monotonic() < ends
    coordinator.look(keys, [], [1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_join_that_was_answered_late_is_counted_once(rank: int) -> None:
    store = Asleep(HashStore())
    late = channel_of(store, rank, 2, patience=0.2)
    other = channel_of(store.store, 1 - rank, 2)
    if rank == 1:
        other.heartbeat.period = LIMIT  # so that it looks for hellos only when the test calls `look`
        other.start_heartbeat()
    try:
        with pytest.raises(LinkLost, match="no answer"):
            late.join(0)
        if rank == 1:
            threading.Thread(target=welcome_the_second_hello, args=(other,), daemon=True).start()
        store.awake.set()
        late.patience = 10.0
        assert late.join(1) == MeetingKeys(other.join(0).root, 1)
        assert late.join(2) == other.join(2)
    finally:
        late.close()
        other.close()


class Refusing(RecordingStore):
    """A store that refuses the first request to compare."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if not self.requested:
            self.requested.append(key)
            raise RuntimeError("refused")
        return super().compare_set(key, expected, desired)


def test_a_join_that_was_refused_is_tried_again() -> None:
    store = Refusing(HashStore())
    channel = channel_of(store, 0, 1)
    try:
        with pytest.raises(LinkLost, match="refused"):
            channel.join(0)
        root = channel.join(1).root
        assert store.check(["job/announced"]) and root.startswith("job/")
    finally:
        channel.close()

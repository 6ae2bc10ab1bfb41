"""What one rank asks of the store, and how often."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from shardproof.rendezvous.channel import Channel
from shardproof.rendezvous.link import LinkLost
from shardproof.rendezvous.pulse import Pulse
from shardproof.rendezvous.records import INLINE, pack, unpack

WORLD = 600


class Asked:
    """A store that keeps count of the keys that are asked for."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked: list[str] = []

    def clone(self) -> Asked:
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        return bool(self.store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected == desired:
            self.asked.append(key)
        return bytes(self.store.compare_set(key, expected, desired))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def store() -> Asked:
    return Asked(HashStore())


@pytest.fixture
def channels(store: Asked) -> Iterator[list[Channel]]:
    made = [Channel(store, "job", rank, Pulse(), 10.0) for rank in range(3)]
    yield made
    for channel in made:
        channel.close()


def test_posts_are_looked_for_only_when_more_were_counted(store: Asked, channels: list[Channel]) -> None:
    leader, *others = channels
    keys = leader.join(0)
    others[0].join(0)
    others[0].post(keys, pack("save", "write", "bytes", b"one"), b"one", others=WORLD - 1)
    waited_for = range(1, WORLD)
    assert set(leader.look(keys, waited_for, [], known=0).posts) == {1}
    store.asked.clear()
    assert leader.look(keys, waited_for, [], known=1).posts == {}
    assert store.asked == [keys.verdict]
    others[1].join(0)
    others[1].post(keys, pack("save", "write", "error", b"two"), b"two", others=WORLD - 1)
    assert set(leader.look(keys, range(2, WORLD), [], known=1).posts) == {2}


@pytest.mark.parametrize("count", [2, 5])
def test_posts_are_read_once_all_are_there(count: int, store: Asked, channels: list[Channel]) -> None:
    """Of a few, each is asked for; of more, none is before it is read."""
    leader, other, _ = channels
    keys, ranks = leader.join(0), range(1, count + 1)
    other.join(0)
    waiting = leader.until_ready(keys, ranks)
    for rank in ranks:
        assert not waiting.done()
        store.set(keys.post(rank), pack("save", "write", "bytes", str(rank).encode()))
        if store.add(keys.count, 1) == count:
            store.set(keys.ready, b"1")
    assert {rank: unpack(value).body for rank, value in waiting.result(10).items()} == {
        rank: str(rank).encode() for rank in ranks
    }
    assert store.asked == ([keys.post(rank) for rank in ranks] if count == 2 else [])


@pytest.mark.parametrize("count", [2, 5])
def test_a_wait_that_is_not_needed_waits_for_no_post(count: int, channels: list[Channel]) -> None:
    leader, other, _ = channels
    keys = leader.join(0)
    other.join(0)
    other.post(keys, pack("save", "write", "bytes", b"one"), b"one", others=count)
    waiting = leader.until_ready(keys, range(1, count + 1))
    leader.release(waiting, keys.ready)
    assert set(waiting.result(10)) <= {1}
    verdict = leader.until_verdict(keys)  # over the same connection, which is free again
    other.release(verdict, keys.wake)
    assert verdict.result(10) is None


def test_who_waits_for_the_verdict_is_given_it(channels: list[Channel]) -> None:
    leader, other, _ = channels
    keys = other.join(0)
    waiting = other.until_verdict(keys)
    verdict = pack("save", "write", "all", b"yes")
    assert leader.propose(leader.join(0), verdict) == verdict
    assert waiting.result(10) == verdict


def test_every_rank_finds_its_answer(channels: list[Channel]) -> None:
    leader, other, _ = channels
    keys = leader.join(0)
    bodies = {rank: str(rank).encode() for rank in range(1, WORLD)} | {300: bytes(2 * INLINE)}
    leader.write_answers(
        keys, ((rank, pack("save", "plan", "all", body), body) for rank, body in bodies.items())
    )
    for rank, body in bodies.items():
        record = unpack(other.read(keys.answer(rank)))
        assert other.body(keys.answer(rank), record) == body


def test_answers_are_swept(store: Asked, channels: list[Channel]) -> None:
    leader = channels[0]
    keys = leader.join(0)
    before = store.num_keys()
    leader.write_answers(keys, ((rank, pack("save", "plan", "all", b""), b"") for rank in range(1, WORLD)))
    assert store.num_keys() >= before + WORLD - 1
    leader.sweep(1)
    leader.look(keys, [], [])  # requests are served in order: what was swept is gone
    assert store.num_keys() <= before


class Asleep(Asked):
    """A store that answers nothing before it is woken."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.awake = threading.Event()

    def add(self, key: str, amount: int) -> int:
        assert self.awake.wait(30)
        return int(self.store.add(key, amount))


def test_a_rank_whose_join_was_answered_late_has_joined_once() -> None:
    store = Asleep(HashStore())
    late = Channel(store, "job", 1, Pulse(), 0.2)
    other = Channel(store.store, "job", 0, Pulse(), 10.0)
    try:
        with pytest.raises(LinkLost, match="no answer"):
            late.join(0)
        store.awake.set()
        late.patience = 10.0
        assert late.join(1) == other.join(1)
    finally:
        late.close()
        other.close()


class Refusing(Asked):
    """A store that refuses the first request to count."""

    def add(self, key: str, amount: int) -> int:
        if not self.asked:
            self.asked.append(key)
            raise RuntimeError("refused")
        return int(self.store.add(key, amount))


def test_a_join_that_was_refused_is_tried_again() -> None:
    store = Refusing(HashStore())
    channel = Channel(store, "job", 0, Pulse(), 10.0)
    try:
        with pytest.raises(LinkLost, match="refused"):
            channel.join(0)
        assert channel.join(1).root == "job/1"
    finally:
        channel.close()

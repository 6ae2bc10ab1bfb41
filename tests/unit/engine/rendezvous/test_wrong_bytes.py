"""Foreign bytes under the keys of a meeting soon end in an error of this package on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from shardproof.engine.rendezvous import StoreRendezvous, wire
from shardproof.engine.rendezvous.heartbeat import amounts, describe
from shardproof.engine.rendezvous.wire import RankKeys, Sign, Token, WrongBytes
from shardproof.errors import RankFailure, RankSilent, ShardproofError

DEADLINE = 5.0
HUGE = 10**15

Corrupt = Callable[[str, bytes], bytes]

record = wire.pack("save", "plan", "bytes", b"post")
head = msgspec.json.decode(record.partition(b"\n")[0])


def with_head(**fields: Any) -> bytes:
    return msgspec.json.encode(head | fields) + b"\npost"


WRONG = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\n",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"1" * 5000,
    record[: len(record) // 2],
    record[:-1],
    record + b"more",
    with_head(size=HUGE),
    with_head(size=HUGE, parts=-(-HUGE // wire.PART)),
    with_head(size=-1),
    with_head(parts="3"),
    with_head(readers=-1),
    with_head(digest=7),
    with_head(kind="other"),
    with_head(operation=None),
]


@given(st.binary(max_size=200) | st.sampled_from(WRONG))
@example(record)
def test_every_value_is_decoded_or_refused(value: bytes) -> None:
    refusals: list[str] = []
    for kind in (Token, RankKeys, list[RankKeys], Sign, int):
        try:
            wire.checked("key", value, kind)
        except WrongBytes as wrong:
            refusals.append(str(wrong))
    try:
        assert wire.unpack("key", value).operation == "save"
    except WrongBytes as wrong:
        refusals.append(str(wrong))
    try:
        assert isinstance(wire.unpack_error("key", value), ShardproofError)
    except WrongBytes as wrong:
        refusals.append(str(wrong))
    assert all("'key'" in text and len(text) < 1000 for text in refusals)
    assert len(describe(value)) < 400
    assert len(amounts(value)) == 2


@given(st.integers(0, len(record) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_record_does_not_change_its_body(at: int, by: int) -> None:
    changed = bytearray(record)
    changed[at] ^= by
    try:
        assert wire.unpack("key", bytes(changed)).body == b"post"
    except WrongBytes:
        pass


class Corrupted:
    """A store that replaces the values that are written under some keys."""

    def __init__(self, store: Any, suffix: str, value: bytes | Corrupt) -> None:
        self.store = store
        self.suffix = suffix
        self.value = value
        self.hits = 0

    def clone(self) -> Corrupted:
        return self

    def _of(self, key: str, value: bytes) -> bytes:
        if not key.endswith(self.suffix):
            return value
        self.hits += 1
        return self.value(key, value) if callable(self.value) else self.value

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, self._of(key, value))

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.store.multi_set(keys, [self._of(key, value) for key, value in zip(keys, values, strict=True)])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if expected != desired:
            desired = self._of(key, desired)
        return bytes(self.store.compare_set(key, expected, desired))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def meet_at(store: Any) -> list[Any]:
    """Holds two rendezvous of two ranks, and returns the last answer or the first error of each rank."""
    results: list[Any] = [None] * 2
    large = bytes(wire.INLINE + 1)

    def run(rank: int) -> None:
        rendezvous = StoreRendezvous(store, rank, 2, deadline=DEADLINE)
        rendezvous._heartbeat.period = 0.02
        try:
            rendezvous.meet("save", "plan", large, lambda posts: [large, large + b"1"])
            results[rank] = rendezvous.meet("save", "commit", b"%d" % rank, lambda posts: b"".join(posts))
        except BaseException as error:
            results[rank] = error
        finally:
            rendezvous.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # far longer than the deadline, on a busy machine too
    return results


RECORDS = ["/0/post/1", "/0/post/1/0", "/1/post/1", "/1/verdict"]


@settings(max_examples=40)
@given(st.sampled_from(RECORDS), st.sampled_from(WRONG) | st.binary(max_size=60))
@example("/1/verdict", b"{}")
@example("/1/verdict", with_head(size=HUGE))
@example("/0/post/1", with_head(size=HUGE, parts=-(-HUGE // wire.PART)))
def test_wrong_bytes_for_a_record_are_one_error_on_all_ranks(suffix: str, value: bytes) -> None:
    store = Corrupted(HashStore(), suffix, value)
    results = meet_at(store)
    assert store.hits
    assert [type(end) for end in results] == [RankFailure] * 2, results
    assert results[0].to_wire() == results[1].to_wire()
    assert suffix in str(results[0])


@pytest.mark.parametrize("suffix", ["/0/answer/1", "/0/answer/1/0"])
@pytest.mark.parametrize("value", [b"", b"{}", with_head(size=HUGE)])
def test_wrong_bytes_for_an_answer_fail_the_rank_that_reads_it(
    suffix: str, value: bytes, monkeypatch: Any
) -> None:
    """The error on that rank names the key. Rank 0 misses that rank at the next meeting."""
    monkeypatch.setitem(globals(), "DEADLINE", 0.4)
    results = meet_at(Corrupted(HashStore(), suffix, value))
    assert [type(end) for end in results] == [RankSilent, RankFailure]
    assert suffix in str(results[1])


@pytest.mark.parametrize("suffix", ["/announced", "/hello/1"])
@pytest.mark.parametrize("value", [b"", b"{}", b'"0123"', b"\xff", b"7" * 10_000])
def test_wrong_bytes_in_a_join_are_an_error_of_this_package(
    suffix: str, value: bytes, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "DEADLINE", 0.4)
    results = meet_at(Corrupted(HashStore(), suffix, value))
    assert all(isinstance(end, ShardproofError) for end in results), results
    assert any(suffix in str(end) for end in results)


@pytest.mark.parametrize(
    "suffix", ["/beat/0", "/beat/1", "/trace/0", "/trace/1", "/wake", "/ready", "/opened"]
)
def test_wrong_bytes_under_other_keys_change_no_answer(suffix: str) -> None:
    assert meet_at(Corrupted(HashStore(), suffix, b"\xff{}")) == [b"01"] * 2


@pytest.mark.parametrize("suffix", ["/count", "/joined"])
def test_a_counter_that_is_no_number_is_an_error_of_this_package(suffix: str) -> None:
    class Broken(Corrupted):
        def add(self, key: str, amount: int) -> int:
            if key.endswith(suffix):
                self.store.set(key, "many")
            return int(self.store.add(key, amount))

    results = meet_at(Broken(HashStore(), "none", b""))
    assert all(isinstance(end, ShardproofError) for end in results), results

"""Parts that need neither a store nor real time: records, the watch, heartbeats and error texts."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.rendezvous import meeting_errors, wire
from shardproof.engine.rendezvous.heartbeat import Heartbeat, Watch, describe
from shardproof.errors import ShardproofError


@given(st.text(max_size=20), st.text(max_size=20), st.binary(max_size=200))
def test_small_records_round_trip(operation: str, phase: str, body: bytes) -> None:
    record = wire.unpack("k", wire.pack(operation, phase, "bytes", body, readers=3))
    assert (record.operation, record.phase, record.body, record.parts) == (operation, phase, body, 0)
    assert (record.size, record.readers) == (len(body), 3)


@pytest.mark.parametrize("size", [wire.INLINE, wire.INLINE + 1, wire.PART, wire.PART + 1, 3 * wire.PART])
def test_large_records_are_cut_below_the_store_limit(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    value = wire.pack("save", "plan", "bytes", body)
    record = wire.unpack("k", value)
    parts = dict(wire.cut("k", body))
    assert len(value) < 7 << 20 and all(len(part) <= 7 << 20 for part in parts.values())
    assert list(parts) == list(wire.part_keys("k", record.parts))
    assert [len(part) for part in parts.values()] == (list(wire.part_sizes(record)) if parts else [])
    assert (b"".join(parts.values()) if record.parts else record.body) == body


def test_an_old_heartbeat_does_not_end_the_silence() -> None:
    watch = Watch([1], now=0.0, longest_step=1.0)
    watch.step(0.5)
    assert not watch.observe(1, b"old")
    assert watch.silence(1) == 0.5
    assert watch.observe(1, b"new")
    assert watch.silence(1) == 0.0
    assert not watch.observe(1, b"new")


def test_time_in_which_the_watcher_was_stopped_counts_as_silence_of_no_rank() -> None:
    watch = Watch([1, 2], now=0.0, longest_step=0.5)
    watch.step(100.0)
    assert watch.silent(for_seconds=1.0) == []
    watch.arrived(2)
    watch.step(100.5)
    assert watch.silent(for_seconds=1.0) == [1]


def test_a_heartbeat_has_news_only_after_progress() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.news() is None
    heartbeat.progress(1, 10)
    assert heartbeat.news() is not None
    assert heartbeat.news() is None
    heartbeat.tick()
    assert heartbeat.news() is not None
    heartbeat.decide(True)
    while time.thread_time() % 0.01 > 0.003:
        pass  # so that the little work from here on stays within one counted span
    heartbeat.news()
    time.sleep(0.05)
    assert heartbeat.news() is None  # asleep while it decides
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    assert heartbeat.news() is not None
    heartbeat.decide(False)
    heartbeat.leave()
    assert heartbeat.news() is None


def test_a_heartbeat_is_described_in_words() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("plan")
    assert describe(heartbeat.news()) == "in the meeting of phase plan"
    assert describe(None) == "no progress reported"


def test_errors_name_ranks_phase_and_cause_also_after_the_wire() -> None:
    failed = meeting_errors.failure(
        "save a", "write", 4, {3: "OSError: full", 1: "ValueError: x"}, silent=[2]
    )
    silent = meeting_errors.silence(
        "save a", "write", 4, 3.0, {2: 3.25, 1: None}, {2: "1.0 MiB of 2.0 MiB", 1: "none"}
    )
    apart = meeting_errors.disagreement(
        {0: ("save a", "write"), 1: ("load b", "plan"), 2: ("load b", "plan")}
    )
    for error, parts in [
        (failed, ["ranks 1, 3 of 4", "rank 3: OSError: full", "phase write", "rank 2"]),
        (
            silent,
            ["ranks 1-2 of 4", "rank 2: last heard 3.2 s ago, 1.0 MiB of 2.0 MiB", "rank 1: never heard"],
        ),
        (apart, ["rank 0: save a, phase write", "ranks 1-2: load b, phase plan"]),
    ]:
        again = ShardproofError.from_wire(json.loads(json.dumps(error.to_wire())))
        assert type(again) is type(error) and again.details == error.details
        for part in parts:
            assert part in str(again), (part, str(again))
    assert failed.causes == {1: "ValueError: x", 3: "OSError: full"}


def test_the_text_of_a_cause_is_made_if_str_fails_and_cut_if_it_is_long() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert meeting_errors.cause_text(Mute()) == "Mute: (its text cannot be made)"
    assert meeting_errors.cause_text(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(meeting_errors.cause_text(ValueError("x" * 10**6))) < 5000


def test_the_error_of_many_ranks_is_short() -> None:
    text = str(
        meeting_errors.silence(
            "save", "write", 4096, 3.0, dict.fromkeys(range(4096)), dict.fromkeys(range(4096), "x")
        )
    )
    assert "ranks 0-4095" in text and "and 4080 more" in text
    assert len(text) < 3000

"""Phases and their listeners."""

from __future__ import annotations

import logging
import threading
from itertools import pairwise
from typing import Any

import pytest

import shardproof as sp
from shardproof import events
from shardproof.engine.events.phases import PERIOD, Hub
from tests.unit.engine.events.hubs import Bench


def test_events_of_a_phase_have_their_order_and_fields() -> None:
    bench = Bench()
    with bench.hub.phase("save runs/a", "write", rank=2, world_size=4, step=7) as phase:
        bench.clock.now += 1.0
        phase.progress(50, 200)
        phase.note(files=1)
        bench.clock.now += 1.0
        phase.progress(200, 200)
        phase.note(digest="x")
        bench.clock.now += 0.01
    begin, first, second, end = bench.seen
    assert [event.kind for event in bench.seen] == ["begin", "progress", "progress", "end"]
    assert {(e.operation, e.phase, e.rank, e.world_size, e.step) for e in bench.seen} == {
        ("save runs/a", "write", 2, 4, 7)
    }
    assert {event.thread for event in bench.seen} == {threading.current_thread().name}
    assert len({event.id for event in bench.seen}) == 1
    assert (first.done, first.total, first.seconds, first.facts) == (50, 200, 1.0, {})
    assert (second.done, second.facts) == (200, {"files": 1})
    assert (end.done, end.total, end.facts) == (200, 200, {"files": 1, "digest": "x"})
    assert end.seconds == pytest.approx(2.01)
    assert begin.time == 1_000_000_100.0 and begin.clock == 100.0 and end.clock == pytest.approx(102.01)
    assert end.action == "save"


def test_progress_is_published_at_most_every_period_and_at_the_end() -> None:
    bench = Bench()
    with bench.hub.phase("save a", "write") as phase:
        for step in range(1, 1001):  # 1 ms each
            bench.clock.now = 100.0 + step / 1000
            phase.progress(step, 1000)
    done = [event.done for event in bench.seen if event.kind == "progress"]
    assert len(done) == pytest.approx(1.0 / PERIOD, abs=1)
    assert all(later - earlier >= 100 for earlier, later in pairwise(done))
    assert done[0] >= 100
    assert bench.seen[-1].done == 1000


def test_an_exception_is_raised_and_published() -> None:
    bench = Bench()
    with pytest.raises(KeyError, match="gone"), bench.hub.phase("load a", "read"):
        raise KeyError("gone")
    with pytest.raises(KeyboardInterrupt), bench.hub.phase("load a", "apply"):
        raise KeyboardInterrupt
    assert bench.kinds() == [("begin", "read"), ("failed", "read"), ("begin", "apply"), ("failed", "apply")]
    assert bench.seen[1].error == "KeyError: 'gone'"


def test_an_error_given_to_fail_is_published() -> None:
    bench = Bench()
    with bench.hub.phase("save a", "write") as phase:
        phase.fail(OSError("full"))
    assert [(event.kind, event.error) for event in bench.seen] == [
        ("begin", None),
        ("failed", "OSError: full"),
    ]


def test_a_listener_that_raises_is_logged_once_and_gets_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    calls: list[str] = []

    def failing(event: events.Event) -> None:
        calls.append(event.kind)
        raise ValueError("my fault")

    bench.hub.subscribe(failing)
    after: list[events.Event] = []
    bench.hub.subscribe(after.append)
    with caplog.at_level(logging.WARNING, "shardproof"), bench.hub.phase("save a", "write"):
        pass
    assert calls == ["begin"]
    assert [event.kind for event in after] == ["begin", "end"] == [event.kind for event in bench.seen]
    (record,) = caplog.records
    assert "failing" in record.getMessage() and "save a" in record.getMessage()
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


def test_a_subscription_ends_by_call_by_close_and_by_context() -> None:
    bench = Bench()
    for end in ("__call__", "close", "__exit__"):
        seen: list[events.Event] = []
        subscription = bench.hub.subscribe(seen.append)
        with bench.hub.phase("save a", "collect"):
            pass
        getattr(subscription, end)()
        getattr(subscription, end)()
        with bench.hub.phase("save a", "agree"):
            pass
        assert [event.phase for event in seen] == ["collect", "collect"]
    assert len(bench.hub.listeners) == 1


def test_the_same_listener_twice_ends_apart() -> None:
    bench = Bench()
    seen: list[events.Event] = []
    listener = seen.append
    first, second = bench.hub.subscribe(listener), bench.hub.subscribe(listener)
    first()
    first()
    with bench.hub.phase("save a", "collect"):
        pass
    assert [event.kind for event in seen] == ["begin", "end"]
    second()
    assert len(bench.hub.listeners) == 1


def test_a_listener_that_subscribes_during_a_phase_gets_the_rest() -> None:
    hub = Hub()
    seen: list[events.Event] = []
    with hub.phase("save a", "write") as phase:
        phase.progress(5, 5)
        hub.subscribe(seen.append)
    assert [(event.kind, event.done) for event in seen] == [("end", 5)]
    assert seen[0].seconds >= 0


def test_progress_does_not_wait_for_a_listener_that_is_busy() -> None:
    bench = Bench()
    busy, go_on = threading.Event(), threading.Event()

    def slow(event: events.Event) -> None:
        if event.kind == "progress":
            busy.set()
            assert go_on.wait(20)

    bench.hub.subscribe(slow)
    with bench.hub.phase("save a", "write") as phase:
        bench.clock.now += 1
        thread = threading.Thread(target=phase.progress, args=(1, 10))
        thread.start()
        assert busy.wait(20)
        bench.clock.now += 1
        phase.progress(2, 10)  # a wait would not end: only this thread releases the listener
        go_on.set()
        thread.join(20)
        assert not thread.is_alive()
    assert [(event.kind, event.done) for event in bench.seen] == [("begin", 0), ("progress", 1), ("end", 2)]


def test_no_progress_after_the_end() -> None:
    bench = Bench()
    with bench.hub.phase("save a", "write") as phase:
        pass
    bench.clock.now += 5
    phase.progress(1, 1)
    assert bench.kinds() == [("begin", "write"), ("end", "write")]


def test_many_threads_report_and_events_of_a_phase_never_overlap() -> None:
    inside, most = [0], [0]
    seen: list[events.Event] = []

    def listener(event: events.Event) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        seen.append(event)
        inside[0] -= 1

    ticks = iter(range(10**9))
    hub = Hub(lambda: float(next(ticks)))  # every reading is a period later
    hub.subscribe(listener)
    with hub.phase("save a", "write") as phase:
        threads = [
            threading.Thread(target=lambda: [phase.progress(n, 500) for n in range(500)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert most == [1]
    assert seen[0].kind == "begin" and seen[-1].kind == "end"
    assert {event.kind for event in seen[1:-1]} == {"progress"}
    clocks = [event.clock for event in seen]
    assert clocks == sorted(clocks)


def test_heard_asks_for_ranks_only_if_there_is_a_listener() -> None:
    hub = Hub()
    asked: list[int] = []

    def ranks() -> dict[int, tuple[int, int]]:
        asked.append(1)
        return {3: (1, 4), 5: (2, 4)}

    hub.publish_waiting("save a", "commit", 8, ranks)
    assert asked == []
    seen: list[Any] = []
    hub.subscribe(seen.append)
    hub.publish_waiting("save a", "commit", 8, ranks)
    hub.publish_waiting("save a", "commit", 8, dict)
    (event,) = seen
    assert (event.kind, event.rank, event.done, event.total) == ("waiting", 0, 3, 8)
    assert event.facts == {"ranks": {3: (1, 4), 5: (2, 4)}}


def test_the_package_offers_events() -> None:
    assert sp.events is events
    seen: list[events.Event] = []
    with sp.events.subscribe(seen.append), sp.events.phase("save a", "collect", rank=1, world_size=2, step=3):
        pass
    assert [(event.kind, event.rank, event.step) for event in seen] == [("begin", 1, 3), ("end", 1, 3)]

"""StoreRendezvous in one process: ranks are threads that share a HashStore."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardproof.errors import RankFailure, RankSilent, ReentrantCallError, StructureError
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous, connect
from shardproof.rendezvous.channel import Channel, View
from shardproof.rendezvous.keys import MeetingKeys
from shardproof.rendezvous.store_requests import peek


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def on_ranks(
    count: int, store: Any, work: Callable[[StoreRendezvous], Any], deadline: float = 30.0
) -> list[Any]:
    """What `work` returned or raised on each rank."""
    ends: list[Any] = [None] * count

    def run(rank: int) -> None:
        meetings = StoreRendezvous(store, rank, count, deadline=deadline)
        try:
            ends[rank] = work(meetings)
        except BaseException as error:
            ends[rank] = error
        finally:
            meetings.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return ends


class _Failing(Future[None]):
    """A wait whose connection is lost after it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.set_exception(RuntimeError("connection reset by peer"))
        self.looked_at = 0

    def result(self, timeout: float | None = None) -> None:
        self.looked_at += 1
        if self.looked_at == 1:
            raise FutureTimeoutError
        return super().result(timeout)


def test_posts_that_are_not_there_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that failed is done too: what it failed of is told, before anybody waits for a post."""
    monkeypatch.setattr(Channel, "until_ready", lambda self, keys, ranks: _Failing())
    begun = time.monotonic()
    meetings = StoreRendezvous(HashStore(), 0, 2, deadline=20.0)
    try:
        with pytest.raises(RankSilent, match="connection reset by peer"):
            meetings.meet("save", "write", b"", join)
    finally:
        meetings.close()
    assert time.monotonic() - begun < 15


def test_posts_that_a_wait_did_not_find_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    look = Channel.look

    def ended(self: Channel, keys: MeetingKeys, ranks: Any) -> Future[dict[int, bytes]]:
        future: Future[dict[int, bytes]] = Future()
        future.set_result({})
        return future

    def counted(self: Channel, keys: MeetingKeys, posts_of: Any, **options: Any) -> View:
        looks.extend(posts_of)
        return look(self, keys, posts_of, **options)

    monkeypatch.setattr(Channel, "until_ready", ended)
    monkeypatch.setattr(Channel, "look", counted)
    arrived = threading.Event()

    def work(meetings: StoreRendezvous) -> bytes:
        if meetings.rank == 1:
            assert arrived.wait(30)
        else:
            threading.Timer(0.3, arrived.set).start()
        return meetings.meet("save", "agree", b"%d" % meetings.rank, join)

    assert on_ranks(2, HashStore(), work, deadline=2.4) == [b"0,1"] * 2
    assert 1 <= len(looks) < 20  # 0.3 s apart


def test_a_coordinator_that_was_given_up_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The posts were there before; what the others said since is asked for when they are taken."""
    given_up = threading.Event()
    until_ready = Channel.until_ready

    def late(self: Channel, keys: MeetingKeys, ranks: Any) -> Future[dict[int, bytes]]:
        waiting = until_ready(self, keys, ranks)
        assert set(waiting.result(30)) == {1}
        assert given_up.wait(30)
        return waiting

    monkeypatch.setattr(Channel, "until_ready", late)
    decided: list[bytes] = []

    def work(meetings: StoreRendezvous) -> bytes:
        if meetings.rank == 0:
            meetings._heartbeat.period = 60.0  # it moves no more
            return meetings.meet("save", "write", b"0", lambda posts: decided.append(b"") or b"")
        try:
            return meetings.meet("save", "write", b"1", join)
        finally:
            given_up.set()

    ends = on_ranks(2, HashStore(), work, deadline=0.4)
    assert [type(end) for end in ends] == [RankSilent] * 2
    assert decided == []


MANY = 6
"""Ranks whose posts are not looked at one by one."""


@pytest.fixture(params=["hash", "prefix", "file", "tcp", "tcp without libuv"])
def any_store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    kind = request.param
    if kind.startswith("tcp"):
        return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=kind == "tcp")
    store = FileStore(str(tmp_path / "store"), MANY) if kind == "file" else HashStore()
    return PrefixStore("job 7", store) if kind == "prefix" else store


def test_to_look_at_a_key_makes_none(any_store: Any) -> None:
    assert peek(any_store, "key") is None
    assert not any_store.check(["key"])
    for value in (b"", b"\x00\xff a record"):
        any_store.set("key", value)
        assert peek(any_store, "key") == value
        assert any_store.get("key") == value


@pytest.mark.parametrize("ranks", [3, MANY])
def test_any_store_will_do(ranks: int, any_store: Any) -> None:
    seconds = []

    def work(meetings: StoreRendezvous) -> list[bytes]:
        own = b"%d" % meetings.rank
        answers = [meetings.meet("save", "agree", own, join)]  # opens the connections, which can take seconds
        began = time.monotonic()
        answers.append(meetings.meet("save", "plan", own, lambda posts: [post * 2 for post in posts]))
        answers.append(meetings.meet("save", "empty", b"", lambda posts: b""))
        seconds.append(time.monotonic() - began)
        return answers

    answers = on_ranks(ranks, any_store, work, deadline=60.0)
    everybody = b",".join(b"%d" % rank for rank in range(ranks))
    assert answers == [[everybody, b"%d%d" % (rank, rank), b""] for rank in range(ranks)]
    assert max(seconds) < 60.0 / 8  # nobody was woken by a step of waiting alone


def test_many_ranks_and_meetings_leave_few_keys() -> None:
    store = HashStore()

    def work(meetings: StoreRendezvous) -> int:
        for number in range(20):
            own = b"%d" % (meetings.rank + number)
            each = meetings.meet("save", f"phase {number}", own, list)
            assert each == own
            meetings.meet("save", f"answer {number}", own, join)
        return number

    assert on_ranks(16, store, work) == [19] * 16
    # The last meeting's keys; of each rank its hello, its trace and a sign of life; of the generation four.
    assert store.num_keys() <= 16 * 4 + 12


@pytest.mark.parametrize("ringers", [(0,), (2,), (1, 2), tuple(range(MANY))])
def test_a_bell_wakes_every_rank_whoever_rings(ringers: tuple[int, ...], any_store: Any) -> None:
    def work(meetings: StoreRendezvous) -> list[bytes]:
        answers = [meetings.meet("schedule", "choose", b"%d" % meetings.rank, join)]
        for bell in ("first", "second"):
            rung = meetings.until_rung(bell)
            if meetings.rank in ringers:
                meetings.ring(bell)
            rung.result(60)
            answers.append(meetings.meet("schedule", bell, b"%d" % meetings.rank, join))
        return answers

    everybody = b",".join(b"%d" % rank for rank in range(MANY))
    assert on_ranks(MANY, any_store, work) == [[everybody] * 3] * MANY


def test_bells_leave_no_keys() -> None:
    store = HashStore()

    def work(meetings: StoreRendezvous) -> int:
        for number in range(20):
            rung = meetings.until_rung(f"bell {number}")
            if meetings.rank % 3 == 0:
                meetings.ring(f"bell {number}")
            rung.result(60)
            meetings.meet("schedule", "choose", b"", join)
        return number

    assert on_ranks(6, store, work) == [19] * 6
    assert store.num_keys() <= 6 * 4 + 12


def test_a_rank_that_closes_while_it_waits_for_a_bell_rings_it_for_no_other() -> None:
    before = set(threading.enumerate())
    store = HashStore()
    ranks = [StoreRendezvous(store, rank, 2, deadline=5) for rank in range(2)]
    waits = [meetings.until_rung("bell") for meetings in ranks]
    ranks[0].close()
    waits[0].result(60)
    assert not waits[1].done()
    ranks[1].ring("bell")
    waits[1].result(60)
    ranks[1].close()
    assert set(threading.enumerate()) <= before


def test_a_bell_of_one_process() -> None:
    alone = LocalRendezvous()
    for bell in ("first", "second"):
        rung = alone.until_rung(bell)
        assert not rung.done()
        alone.ring(bell)
        alone.ring(bell)
        rung.result(60)


def test_ranks_stay_in_step_after_errors() -> None:
    def work(meetings: StoreRendezvous) -> list[str]:
        seen = []
        for number in range(9):
            own: Any = ValueError("no") if number % 3 == 0 and meetings.rank == 1 else b"yes"
            phase = "b" if number % 3 == 1 and meetings.rank == 2 else "a"
            try:
                seen.append(meetings.meet("save", phase, own, join).decode())
            except (RankFailure, StructureError) as error:
                seen.append(type(error).__name__)
        return seen

    assert on_ranks(3, HashStore(), work) == [["RankFailure", "StructureError", "yes,yes,yes"] * 3] * 3


def test_silence_over_threads() -> None:
    def work(meetings: StoreRendezvous) -> bytes | None:
        return None if meetings.rank == 1 else meetings.meet("save", "agree", b"", join)

    ends = on_ranks(3, HashStore(), work, deadline=1.0)
    assert isinstance(ends[0], RankSilent) and isinstance(ends[2], RankSilent)
    assert ends[0].to_wire() == ends[2].to_wire()
    assert ends[0].ranks == [1]


def test_a_rank_that_leaves_while_it_waits_for_the_verdict_takes_nobody_along() -> None:
    went_on = threading.Event()

    def decide(posts: list[bytes]) -> bytes:
        assert went_on.wait(30)
        return join(posts)

    def work(meetings: StoreRendezvous) -> bytes:
        channel = meetings._open()
        look = channel.look

        def leave(*args: Any, **kwargs: Any) -> Any:
            raise SystemExit(3)

        def go_on(keys: MeetingKeys, *args: Any, **kwargs: Any) -> Any:
            if store.check([keys.wake]):
                went_on.set()
            return look(keys, *args, **kwargs)

        if meetings.rank > 0:
            channel.look = leave if meetings.rank == 1 else go_on  # type: ignore[method-assign]
        return meetings.meet("save", "write", b"%d" % meetings.rank, decide)

    store = HashStore()
    ends = on_ranks(3, store, work, deadline=8.0)
    assert isinstance(ends[1], SystemExit)
    assert (ends[0], ends[2]) == (b"0,1,2", b"0,1,2")


def test_a_second_life_at_the_same_store_does_not_read_the_first() -> None:
    store = HashStore()
    for life in (b"1", b"2"):
        ends = on_ranks(2, store, lambda meetings: meetings.meet("save", "agree", life, join))  # noqa: B023
        assert ends == [life + b"," + life] * 2


def test_meetings_of_several_threads_are_held_one_at_a_time() -> None:
    def work(meetings: StoreRendezvous) -> list[bytes]:
        answers: list[bytes] = []

        def several() -> None:
            answers.extend(meetings.meet("save", "agree", b"x", join) for _ in range(10))

        threads = [threading.Thread(target=several) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return answers

    assert on_ranks(2, HashStore(), work) == [[b"x,x"] * 30] * 2


def test_misuse_is_refused() -> None:
    meetings = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    with pytest.raises(ReentrantCallError, match="from inside a meeting"):
        meetings.meet("save", "a", b"", lambda posts: meetings.meet("save", "b", b"", join))
    meetings.close()
    meetings.close()
    with pytest.raises(RuntimeError, match="closed"):
        meetings.meet("save", "a", b"", join)
    with pytest.raises(ValueError, match="not in a world"):
        StoreRendezvous(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="positive"):
        StoreRendezvous(HashStore(), 0, 2, deadline=0)


def test_a_forked_child_is_told_to_make_its_own() -> None:
    meetings = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    meetings.meet("save", "a", b"", join)
    child = os.fork()
    if child == 0:
        try:
            meetings.meet("save", "b", b"", join)
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) and meetings.closed else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert meetings.meet("save", "b", b"1", join) == b"1"
    meetings.close()


def test_nothing_is_left_running_once_it_is_dropped() -> None:
    before = set(threading.enumerate())
    meetings = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    meetings.meet("save", "a", b"", join)
    assert len(set(threading.enumerate()) - before) == 2
    gone = weakref.ref(meetings)
    del meetings
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before


def test_local_raises_what_was_posted() -> None:
    with pytest.raises(OSError, match="full"):
        LocalRendezvous().meet("save", "write", OSError("full"), join)
    assert LocalRendezvous().meet("save", "plan", b"x", lambda posts: [b"only"]) == b"only"


def test_connect_without_a_launcher_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = connect(deadline=7.0)
    assert isinstance(found, LocalRendezvous)
    assert found.deadline == 7.0


def test_connect_says_what_is_missing_or_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK is not"):
        connect()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RankSilent, match=r"127\.0\.0\.1:1"):
        connect(deadline=0.5)


def test_a_reservation_keeps_its_place_in_the_order() -> None:
    """A meeting that is called later, and would be first if it could, comes after the reserved ones."""

    def work(meetings: StoreRendezvous) -> tuple[bytes, bytes]:
        reservation, answers = meetings.reserve(), list[bytes]()
        post = str(meetings.rank).encode()

        def first() -> None:
            with reservation:
                answers.append(meetings.meet("save", "agree", b"a" + post, join))
                answers.append(meetings.meet("save", "plan", b"b" + post, join))

        later = threading.Timer(0.05, first)
        later.start()
        answers.append(meetings.meet("vote", "vote", b"c" + post, join))
        later.join(10)
        return b" ".join(answers[:2]), answers[2]

    assert on_ranks(3, HashStore(), work) == [(b"a0,a1,a2 b0,b1,b2", b"c0,c1,c2")] * 3


def test_a_reservation_that_is_given_up_lets_the_others_meet() -> None:
    alone = StoreRendezvous(HashStore(), 0, 1)
    reservation = alone.reserve()
    reservation.give_up()
    reservation.give_up()
    assert alone.meet("save", "plan", b"x", join) == b"x"
    with alone.reserve():
        assert alone.meet("save", "plan", b"y", join) == b"y"
    alone.close()
    with pytest.raises(RuntimeError, match="closed"):
        alone.reserve()


def test_who_gave_up_waiting_for_a_turn_keeps_no_place_in_the_order() -> None:
    """Not even while somebody still looks at the error."""
    alone, errors = StoreRendezvous(HashStore(), 0, 1, deadline=0.5), list[BaseException]()
    held = alone.reserve()
    try:
        alone.meet("vote", "vote", b"early", join)
    except RankSilent as error:
        errors.append(error)
    held.give_up()
    assert "cannot meet" in str(errors)
    assert alone.meet("vote", "vote", b"late", join) == b"late"
    with pytest.raises(RuntimeError, match="after it was left"), held:
        pass
    alone.close()

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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import shardproof as sp
from shardproof.engine.rendezvous.channel import Channel, View
from shardproof.engine.rendezvous.store_requests import peek
from shardproof.engine.rendezvous.wire import MeetingKeys
from shardproof.errors import RankFailure, RankSilent, ReentrantCallError, StorageError, StructureError
from shardproof.rendezvous import LocalRendezvous, MeetingSequence, StoreRendezvous, connect
from tests.thread_limit import limit_threads


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def on_ranks(
    count: int, store: Any, work: Callable[[StoreRendezvous], Any], deadline: float = 30.0
) -> list[Any]:
    """Runs `work` on each rank, and returns the result or the error of each."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        rendezvous = StoreRendezvous(store, rank, count, deadline=deadline)
        try:
            results[rank] = work(rendezvous)
        except BaseException as error:
            results[rank] = error
        finally:
            rendezvous.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


class _Failing(Future[None]):
    """A wait whose connection is lost after it was first polled."""

    def __init__(self) -> None:
        super().__init__()
        self.set_exception(RuntimeError("connection reset by peer"))
        self.polls = 0

    def result(self, timeout: float | None = None) -> None:
        self.polls += 1
        if self.polls == 1:
            raise FutureTimeoutError
        return super().result(timeout)


def test_the_cause_of_a_failed_wait_for_posts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed wait is done, but has no posts. The coordinator reports its error and reads no post."""
    monkeypatch.setattr(Channel, "until_ready", lambda self, keys, ranks: _Failing())
    begun = time.monotonic()
    rendezvous = StoreRendezvous(HashStore(), 0, 2, deadline=20.0)
    try:
        with pytest.raises(RankSilent, match="connection reset by peer"):
            rendezvous.meet("save", "write", b"", join)
    finally:
        rendezvous.close()
    assert time.monotonic() - begun < 15


def test_the_coordinator_polls_for_posts_that_a_wait_did_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def work(rendezvous: StoreRendezvous) -> bytes:
        if rendezvous.rank == 1:
            assert arrived.wait(30)
        else:
            threading.Timer(0.3, arrived.set).start()
        return rendezvous.meet("save", "agree", b"%d" % rendezvous.rank, join)

    assert on_ranks(2, HashStore(), work, deadline=2.4) == [b"0,1"] * 2
    assert 1 <= len(looks) < 20  # 0.3 s apart


def test_a_coordinator_that_was_given_up_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All posts have arrived. Before it decides, the coordinator looks whether a rank gave it up."""
    given_up = threading.Event()
    until_ready = Channel.until_ready

    def late(self: Channel, keys: MeetingKeys, ranks: Any) -> Future[dict[int, bytes]]:
        waiting = until_ready(self, keys, ranks)
        assert set(waiting.result(30)) == {1}
        assert given_up.wait(30)
        return waiting

    monkeypatch.setattr(Channel, "until_ready", late)
    decided: list[bytes] = []

    def work(rendezvous: StoreRendezvous) -> bytes:
        if rendezvous.rank == 0:
            rendezvous._heartbeat.period = 60.0  # it reports no progress
            return rendezvous.meet("save", "write", b"0", lambda posts: decided.append(b"") or b"")
        try:
            return rendezvous.meet("save", "write", b"1", join)
        finally:
            given_up.set()

    results = on_ranks(2, HashStore(), work, deadline=0.4)
    assert [type(end) for end in results] == [RankSilent] * 2
    assert decided == []


MANY = 6
"""So many ranks that the coordinator does not check their posts one by one."""


@pytest.fixture(params=["hash", "prefix", "file", "tcp", "tcp without libuv"])
def any_store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    kind = request.param
    if kind.startswith("tcp"):
        return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=kind == "tcp")
    store = FileStore(str(tmp_path / "store"), MANY) if kind == "file" else HashStore()
    return PrefixStore("job 7", store) if kind == "prefix" else store


def test_peek_creates_no_key(any_store: Any) -> None:
    assert peek(any_store, "key") is None
    assert not any_store.check(["key"])
    for value in (b"", b"\x00\xff a record"):
        any_store.set("key", value)
        assert peek(any_store, "key") == value
        assert any_store.get("key") == value


@pytest.mark.parametrize("ranks", [3, MANY])
def test_ranks_meet_over_any_store(ranks: int, any_store: Any) -> None:
    seconds = []

    def work(rendezvous: StoreRendezvous) -> list[bytes]:
        own = b"%d" % rendezvous.rank
        answers = [
            rendezvous.meet("save", "agree", own, join)
        ]  # opens the connections, which can take seconds
        began = time.monotonic()
        answers.append(rendezvous.meet("save", "plan", own, lambda posts: [post * 2 for post in posts]))
        answers.append(rendezvous.meet("save", "empty", b"", lambda posts: b""))
        seconds.append(time.monotonic() - began)
        return answers

    answers = on_ranks(ranks, any_store, work, deadline=60.0)
    all_posts = b",".join(b"%d" % rank for rank in range(ranks))
    assert answers == [[all_posts, b"%d%d" % (rank, rank), b""] for rank in range(ranks)]
    assert max(seconds) < 60.0 / 8  # no rank was woken by a polling step alone


def test_many_ranks_and_meetings_leave_few_keys() -> None:
    store = HashStore()

    def work(rendezvous: StoreRendezvous) -> int:
        for number in range(20):
            own = b"%d" % (rendezvous.rank + number)
            each = rendezvous.meet("save", f"phase {number}", own, list)
            assert each == own
            rendezvous.meet("save", f"answer {number}", own, join)
        return number

    assert on_ranks(16, store, work) == [19] * 16
    # Keys of the last meeting; a hello, a trace and a heartbeat of each rank; four keys of the generation.
    assert store.num_keys() <= 16 * 4 + 12


@pytest.mark.parametrize("senders", [(0,), (2,), (1, 2), tuple(range(MANY))])
def test_a_notification_from_any_rank_wakes_all_ranks(senders: tuple[int, ...], any_store: Any) -> None:
    def work(rendezvous: StoreRendezvous) -> list[bytes]:
        answers = [rendezvous.meet("schedule", "choose", b"%d" % rendezvous.rank, join)]
        for topic in ("first", "second"):
            notification = rendezvous.notification(topic)
            if rendezvous.rank in senders:
                rendezvous.notify(topic)
            notification.result(60)
            answers.append(rendezvous.meet("schedule", topic, b"%d" % rendezvous.rank, join))
        return answers

    all_posts = b",".join(b"%d" % rank for rank in range(MANY))
    assert on_ranks(MANY, any_store, work) == [[all_posts] * 3] * MANY


def test_notifications_leave_no_keys() -> None:
    store = HashStore()

    def work(rendezvous: StoreRendezvous) -> int:
        for number in range(20):
            notification = rendezvous.notification(f"topic {number}")
            if rendezvous.rank % 3 == 0:
                rendezvous.notify(f"topic {number}")
            notification.result(60)
            rendezvous.meet("schedule", "choose", b"", join)
        return number

    assert on_ranks(6, store, work) == [19] * 6
    assert store.num_keys() <= 6 * 4 + 12


def test_a_rank_that_closes_while_it_waits_for_a_notification_wakes_no_other_rank() -> None:
    before = set(threading.enumerate())
    store = HashStore()
    ranks = [StoreRendezvous(store, rank, 2, deadline=5) for rank in range(2)]
    waits = [rendezvous.notification("topic") for rendezvous in ranks]
    ranks[0].close()
    waits[0].result(60)
    assert not waits[1].done()
    ranks[1].notify("topic")
    waits[1].result(60)
    ranks[1].close()
    assert set(threading.enumerate()) <= before


def test_a_notification_wakes_a_single_process() -> None:
    alone = LocalRendezvous()
    for topic in ("first", "second"):
        notification = alone.notification(topic)
        assert not notification.done()
        alone.notify(topic)
        alone.notify(topic)
        notification.result(60)


def test_ranks_stay_in_step_after_errors() -> None:
    def work(rendezvous: StoreRendezvous) -> list[str]:
        seen = []
        for number in range(9):
            own: Any = ValueError("no") if number % 3 == 0 and rendezvous.rank == 1 else b"yes"
            phase = "b" if number % 3 == 1 and rendezvous.rank == 2 else "a"
            try:
                seen.append(rendezvous.meet("save", phase, own, join).decode())
            except (RankFailure, StructureError) as error:
                seen.append(type(error).__name__)
        return seen

    assert on_ranks(3, HashStore(), work) == [["RankFailure", "StructureError", "yes,yes,yes"] * 3] * 3


def test_a_silent_rank_is_named_on_all_other_ranks() -> None:
    def work(rendezvous: StoreRendezvous) -> bytes | None:
        return None if rendezvous.rank == 1 else rendezvous.meet("save", "agree", b"", join)

    results = on_ranks(3, HashStore(), work, deadline=1.0)
    assert isinstance(results[0], RankSilent) and isinstance(results[2], RankSilent)
    assert results[0].to_wire() == results[2].to_wire()
    assert results[0].ranks == [1]


def test_a_rank_that_leaves_while_it_waits_for_the_verdict_fails_no_other_rank() -> None:
    went_on = threading.Event()

    def decide(posts: list[bytes]) -> bytes:
        assert went_on.wait(30)
        return join(posts)

    def work(rendezvous: StoreRendezvous) -> bytes:
        channel = rendezvous._open()
        look = channel.look

        def leave(*args: Any, **kwargs: Any) -> Any:
            raise SystemExit(3)

        def go_on(keys: MeetingKeys, *args: Any, **kwargs: Any) -> Any:
            if store.check([keys.wake]):
                went_on.set()
            return look(keys, *args, **kwargs)

        if rendezvous.rank > 0:
            channel.look = leave if rendezvous.rank == 1 else go_on  # type: ignore[method-assign]
        return rendezvous.meet("save", "write", b"%d" % rendezvous.rank, decide)

    store = HashStore()
    results = on_ranks(3, store, work, deadline=8.0)
    assert isinstance(results[1], SystemExit)
    assert (results[0], results[2]) == (b"0,1,2", b"0,1,2")


def test_a_second_job_at_the_same_store_reads_no_posts_of_the_first() -> None:
    store = HashStore()
    for job in (b"1", b"2"):
        results = on_ranks(2, store, lambda rendezvous: rendezvous.meet("save", "agree", job, join))  # noqa: B023
        assert results == [job + b"," + job] * 2


def test_meetings_of_several_threads_are_held_one_at_a_time() -> None:
    def work(rendezvous: StoreRendezvous) -> list[bytes]:
        answers: list[bytes] = []

        def several() -> None:
            answers.extend(rendezvous.meet("save", "agree", b"x", join) for _ in range(10))

        threads = [threading.Thread(target=several) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return answers

    assert on_ranks(2, HashStore(), work) == [[b"x,x"] * 30] * 2


def test_misuse_is_refused() -> None:
    rendezvous = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    with pytest.raises(ReentrantCallError, match="from inside a meeting"):
        rendezvous.meet("save", "a", b"", lambda posts: rendezvous.meet("save", "b", b"", join))
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(RuntimeError, match="closed"):
        rendezvous.meet("save", "a", b"", join)
    with pytest.raises(ValueError, match="not in a world"):
        StoreRendezvous(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="positive"):
        StoreRendezvous(HashStore(), 0, 2, deadline=0)


def test_a_forked_child_cannot_use_the_rendezvous_of_its_parent() -> None:
    rendezvous = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    rendezvous.meet("save", "a", b"", join)
    child = os.fork()
    if child == 0:
        try:
            rendezvous.meet("save", "b", b"", join)
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) and rendezvous.closed else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert rendezvous.meet("save", "b", b"1", join) == b"1"
    rendezvous.close()


def test_a_dropped_rendezvous_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    rendezvous = StoreRendezvous(HashStore(), 0, 1, deadline=5)
    rendezvous.meet("save", "a", b"", join)
    assert len(set(threading.enumerate()) - before) == 2
    gone = weakref.ref(rendezvous)
    del rendezvous
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before


def test_a_local_rendezvous_raises_the_posted_error() -> None:
    with pytest.raises(OSError, match="full"):
        LocalRendezvous().meet("save", "write", OSError("full"), join)
    assert LocalRendezvous().meet("save", "plan", b"x", lambda posts: [b"only"]) == b"only"


def test_connect_without_a_launcher_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = connect(deadline=7.0)
    assert isinstance(found, LocalRendezvous)
    assert found.deadline == 7.0


def test_connect_names_a_missing_variable_or_an_unreachable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK is not"):
        connect()
    monkeypatch.setenv("RANK", "1")
    with monkeypatch.context() as without:
        without.delenv("MASTER_ADDR")
        with pytest.raises(ValueError, match="WORLD_SIZE is 2, but MASTER_ADDR is not set"):
            connect()  # two ranks that save alone would each commit
    with pytest.raises(RankSilent, match=r"127\.0\.0\.1:1"):
        connect(deadline=0.5)


def test_an_environment_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="the environment variable WORLD_SIZE is 'two', expected an integer"):
        connect()


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_call_on_one_rank_only_is_named_and_the_advice_helps(call: str, tmp_path: Path) -> None:
    def made(**options: Any) -> None:
        state = {"w": torch.ones(2)}
        if call == "save":
            sp.save(tmp_path / "step", state, **options)
        else:
            sp.load(tmp_path / "saved", state, **options)

    sp.save(tmp_path / "saved", {"w": torch.ones(2)}, rendezvous=LocalRendezvous())
    advice = (
        rf"may not have called {call}: all ranks call it, and `if rank == 0: {call}\(\.\.\.\)` waits.*"
        r"rendezvous=shardproof\.rendezvous\.LocalRendezvous\(\)"
    )
    with pytest.raises(RankSilent, match=advice):
        made(rendezvous=StoreRendezvous(HashStore(), 0, 2, deadline=0.5))
    made(rendezvous=LocalRendezvous())


def test_a_reservation_keeps_its_place_in_the_order() -> None:
    """A meeting that is called before the reserved ones waits for them."""

    def work(rendezvous: StoreRendezvous) -> tuple[bytes, bytes]:
        reservation, answers = rendezvous.reserve(), list[bytes]()
        post = str(rendezvous.rank).encode()

        def first() -> None:
            with reservation:
                answers.append(rendezvous.meet("save", "agree", b"a" + post, join))
                answers.append(rendezvous.meet("save", "plan", b"b" + post, join))

        later = threading.Timer(0.05, first)
        later.start()
        answers.append(rendezvous.meet("vote", "vote", b"c" + post, join))
        later.join(10)
        return b" ".join(answers[:2]), answers[2]

    assert on_ranks(3, HashStore(), work) == [(b"a0,a1,a2 b0,b1,b2", b"c0,c1,c2")] * 3


def test_a_reservation_that_is_released_lets_the_others_meet() -> None:
    alone = StoreRendezvous(HashStore(), 0, 1)
    reservation = alone.reserve()
    reservation.release()
    reservation.release()
    assert alone.meet("save", "plan", b"x", join) == b"x"
    with alone.reserve():
        assert alone.meet("save", "plan", b"y", join) == b"y"
    alone.close()
    with pytest.raises(RuntimeError, match="closed"):
        alone.reserve()


def test_a_meeting_that_gave_up_waiting_for_its_turn_keeps_no_place_in_the_order() -> None:
    """Also while the caller still holds the error."""
    alone, errors = StoreRendezvous(HashStore(), 0, 1, deadline=0.5), list[BaseException]()
    held = alone.reserve()
    try:
        alone.meet("vote", "vote", b"early", join)
    except RankSilent as error:
        errors.append(error)
    held.release()
    assert "cannot start a meeting" in str(errors)
    assert alone.meet("vote", "vote", b"late", join) == b"late"
    with pytest.raises(RuntimeError, match="after it was left"), held:
        pass
    alone.close()


def test_a_new_rendezvous_needs_no_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save commits over it after the last line of the program, when no thread can be started."""
    rendezvous = StoreRendezvous(HashStore(), 0, 1, deadline=30.0)
    background = rendezvous.new_rendezvous("background")
    with monkeypatch.context() as limited:
        limit_threads(limited)
        assert background.meet("save", "write", b"1", join) == b"1"
        other = rendezvous.new_rendezvous("other")  # its first meeting reports that it has no thread
        with pytest.raises(RuntimeError, match="new thread"):
            other.meet("save", "write", b"1", join)
    assert other.meet("save", "write", b"1", join) == b"1"
    for each in (other, background, rendezvous):
        each.close()


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, "cannot read a: StorageError"), (2, "rank 1: cannot read a: StorageError")]
)
def test_an_error_that_the_work_of_an_exchange_returns_keeps_its_class(ranks: int, expected: str) -> None:
    def work(rendezvous: StoreRendezvous) -> list[str]:
        last = rendezvous.rank == ranks - 1
        meetings = MeetingSequence(rendezvous, "load")
        seen = [str(meetings.exchange("match", lambda: {"rank": rendezvous.rank}, ranks_of, dict, list))]
        error = StorageError("cannot read a", file="a")
        with pytest.raises(StorageError) as returned:
            meetings.exchange("read", lambda: error if last else {}, ranks_of, dict, list)
        seen.append(f"{returned.value.message}: {type(returned.value).__name__}")
        with pytest.raises(RankFailure, match="cannot read a"):
            meetings.exchange("read", lambda: fail(error) if last else {}, ranks_of, dict, list)
        return seen

    def ranks_of(posts: list[dict[str, int]]) -> list[int]:
        return [post["rank"] for post in posts]

    def fail(error: StorageError) -> dict[str, int]:
        raise error

    assert on_ranks(ranks, HashStore(), work) == [[str([*range(ranks)]), expected]] * ranks


def test_an_error_that_all_ranks_return_alike_names_no_rank() -> None:
    def work(rendezvous: StoreRendezvous) -> tuple[str, dict[str, Any]]:
        meetings = MeetingSequence(rendezvous, "load")
        with pytest.raises(StorageError) as returned:
            meetings.exchange("read", lambda: StorageError("cannot read a", file="a"), len, int, int)
        return returned.value.message, returned.value.details

    assert on_ranks(2, HashStore(), work) == [("cannot read a", {"file": "a"})] * 2


def test_each_rank_gets_its_own_answer() -> None:
    def work(rendezvous: StoreRendezvous) -> list[int]:
        meetings = MeetingSequence(rendezvous, "load")
        own = [rendezvous.rank] * rendezvous.rank
        return meetings.exchange_each("share", lambda: own, lambda posts: posts[::-1], list[int], list[int])

    assert on_ranks(3, HashStore(), work) == [[2, 2], [1], []]

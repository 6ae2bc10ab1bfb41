"""Ranks that leave an operation, and how all ranks find one order again. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from shardproof.errors import RankFailure, RankSilent, ShardproofError
from shardproof.rendezvous import StoreRendezvous

SHORT, LONG = 1.5, 8.0
"""Deadlines: of ranks that give each other up, and of ranks that are told before."""
ALL = b"0,1,2"


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def on_ranks(count: int, work: Callable[[StoreRendezvous], Any], deadline: float = LONG) -> list[Any]:
    """What `work` returned or raised on each rank."""
    store, ends = HashStore(), list[Any]([None] * count)

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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ends


def meet(meetings: StoreRendezvous, operation: str, times: int = 1) -> bytes:
    """The answer of the last meeting of an operation."""
    with meetings.operation(operation):
        for number in range(times):
            answer = meetings.meet(operation, f"phase {number}", b"%d" % meetings.rank, join)
    return answer


def outcome(work: Callable[[], bytes]) -> Any:
    """The answer, or the error that all ranks get."""
    try:
        return work()
    except ShardproofError as error:
        return error


def leave(meetings: StoreRendezvous, operation: str, after: int) -> None:
    """Fail in an operation, after some of its meetings, where no meeting tells of it."""
    error = OSError("no space left")

    def fail() -> None:
        with meetings.operation(operation):
            for number in range(after):
                meetings.meet(operation, f"phase {number}", b"%d" % meetings.rank, join)
            raise error

    with pytest.raises(OSError, match="no space left"):
        fail()


def interrupt_while_joining(meetings: StoreRendezvous, operation: str) -> None:
    """Ctrl-C while this rank waits for its coordinator, which is not there yet."""
    tick = meetings._heartbeat.tick

    def interrupt() -> None:
        meetings._heartbeat.tick = tick  # type: ignore[method-assign]
        raise KeyboardInterrupt

    meetings._heartbeat.tick = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        meet(meetings, operation)


def leave_before_joining(meetings: StoreRendezvous, operation: str) -> None:
    """Fail before the first meeting."""
    leave(meetings, operation, after=0)


BEFORE_JOINING = [interrupt_while_joining, leave_before_joining]


@pytest.mark.parametrize("is_called", [True, False], ids=["of all ranks", "of one rank"])
@pytest.mark.parametrize("leaves", BEFORE_JOINING)
def test_a_rank_that_leaves_while_it_joins_meets_again(
    leaves: Callable[[StoreRendezvous, str], None], is_called: bool
) -> None:
    """The others come after it left: to that operation, which fails, or to the next one."""
    left = threading.Event()

    def work(meetings: StoreRendezvous) -> list[Any]:
        first: Any = None
        if meetings.rank == 1:
            leaves(meetings, "save 1")
            left.set()
        else:
            assert left.wait(LONG)
            if is_called:
                first = outcome(lambda: meet(meetings, "save 1"))
        return [first, meet(meetings, "save 2"), meet(meetings, "save 3", times=2)]

    ends = on_ranks(3, work)
    assert [end[1:] for end in ends] == [[ALL, ALL]] * 3
    for rank in (0, 2):
        assert (isinstance(ends[rank][0], RankFailure) and set(ends[rank][0].causes) == {1}) == is_called


@pytest.mark.parametrize("leaves", BEFORE_JOINING)
def test_a_rank_that_left_before_it_joined_and_never_meets_tells_the_others(
    leaves: Callable[[StoreRendezvous, str], None],
) -> None:
    left, over = threading.Event(), threading.Event()

    def work(meetings: StoreRendezvous) -> Any:
        if meetings.rank == 1:
            leaves(meetings, "save 1")
            left.set()
            assert over.wait(2 * LONG)
            return None
        assert left.wait(LONG)
        try:
            return outcome(lambda: meet(meetings, "save 1"))
        finally:
            over.set()

    told, _ = on_ranks(2, work)
    assert isinstance(told, RankFailure), told
    assert set(told.causes) == {1}


@pytest.mark.parametrize("left", ["save 1", "save 2"])
@pytest.mark.parametrize("restarted", [0, 1])
def test_a_rank_leaves_an_operation_where_all_ranks_are_told_to_join_again(restarted: int, left: str) -> None:
    """A rank starts again alone, a second waits for its former life, and a third comes after that."""
    given_up, steps = threading.Event(), range(1, 9)

    def come_last(meetings: StoreRendezvous) -> list[Any]:
        """The operation that it leaves is the first that it comes to."""
        assert given_up.wait(LONG)
        leave(meetings, left, after=0)
        rest = [step for step in steps if f"save {step}" > left]
        return [outcome(lambda: meet(meetings, f"save {step}")) for step in rest]  # noqa: B023

    def work(meetings: StoreRendezvous) -> list[Any]:
        answers: list[Any] = [meet(meetings, "save 0")]
        if meetings.rank == 2:
            return [*answers, *come_last(meetings)]
        again = None
        if meetings.rank == restarted:
            meetings.close()
            meetings = again = StoreRendezvous(meetings._store, restarted, 3, deadline=SHORT)
        for step in steps:
            answers.append(outcome(lambda: meet(meetings, f"save {step}")))  # noqa: B023
            if again is None:
                given_up.set()
        if again is not None:
            again.close()
        return answers

    ends = on_ranks(3, work, SHORT)
    assert [end[0] for end in ends] == [ALL] * 3
    assert isinstance(ends[1 - restarted][1], RankSilent)
    assert [end[-2:] for end in ends] == [[ALL, ALL]] * 3, ends


@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_two_ranks_leave_two_operations(first: int, second: int) -> None:
    """Each after so many of its meetings. No operation is lost but those two, and no rank is given up."""

    def work(meetings: StoreRendezvous) -> list[Any]:
        answers: list[Any] = []
        for operation, rank, after in [("save 1", 1, first), ("save 2", 2, second), ("save 3", None, 0)]:
            if meetings.rank == rank:
                leave(meetings, operation, after)
                answers.append(None)
            else:
                answers.append(outcome(lambda: meet(meetings, operation, times=3)))  # noqa: B023
        return answers

    ends = on_ranks(3, work)
    for operation, leaver in enumerate((1, 2)):
        told = [ends[rank][operation] for rank in range(3) if rank != leaver]
        assert all(isinstance(error, RankFailure) for error in told), told
        assert [error.causes for error in told] == [{leaver: "OSError: no space left"}] * 2
    assert [end[2] for end in ends] == [ALL] * 3


def test_two_ranks_leave_operations_that_no_other_rank_calls() -> None:
    """At the same time, at the same meeting: the others pass over both."""
    before = threading.Barrier(2)

    def work(meetings: StoreRendezvous) -> list[Any]:
        answers = [meet(meetings, "save 0")]
        if meetings.rank > 0:
            before.wait(LONG)
            leave(meetings, f"evaluate {meetings.rank}", after=0)
        return [
            *answers,
            outcome(lambda: meet(meetings, "save 1")),
            outcome(lambda: meet(meetings, "save 2")),
        ]

    assert on_ranks(3, work) == [[ALL, ALL, ALL]] * 3


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_operation_that_was_left_fails_with_the_cause_and_the_rank(leaver: int, after: int) -> None:
    def work(meetings: StoreRendezvous) -> list[Any]:
        first: Any = None
        if meetings.rank == leaver:
            leave(meetings, "save 1", after)
        else:
            first = outcome(lambda: meet(meetings, "save 1", times=3))
        return [first, meet(meetings, "save 1", times=3)]

    ends = on_ranks(3, work)
    told = [end[0] for rank, end in enumerate(ends) if rank != leaver]
    assert all(isinstance(error, RankFailure) for error in told), told
    assert [error.causes for error in told] == [{leaver: "OSError: no space left"}] * 2
    assert all(f"rank {leaver} of 3 failed" in str(error) and "save 1" in str(error) for error in told)
    assert [end[1] for end in ends] == [ALL] * 3

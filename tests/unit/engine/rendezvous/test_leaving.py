"""Ranks that leave an operation with an error, and how all ranks return to one order. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from shardproof.errors import RankFailure, RankSilent, ShardproofError
from shardproof.rendezvous import StoreRendezvous

SHORT, LONG = 1.5, 8.0
"""Deadlines of ranks that give each other up, and of ranks that get an error before it."""
ALL = b"0,1,2"


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def on_ranks(count: int, work: Callable[[StoreRendezvous], Any], deadline: float = LONG) -> list[Any]:
    """Runs `work` on each rank, and returns the result or the error of each."""
    store, results = HashStore(), list[Any]([None] * count)

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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def meet(rendezvous: StoreRendezvous, operation: str, times: int = 1) -> bytes:
    """The answer of the last meeting of an operation."""
    with rendezvous.operation(operation):
        for number in range(times):
            answer = rendezvous.meet(operation, f"phase {number}", b"%d" % rendezvous.rank, join)
    return answer


def outcome(work: Callable[[], bytes]) -> Any:
    """The answer, or the error that all ranks get."""
    try:
        return work()
    except ShardproofError as error:
        return error


def leave(rendezvous: StoreRendezvous, operation: str, after: int) -> None:
    """Fail in an operation, after some of its rendezvous and outside of any meeting."""
    error = OSError("no space left")

    def fail() -> None:
        with rendezvous.operation(operation):
            for number in range(after):
                rendezvous.meet(operation, f"phase {number}", b"%d" % rendezvous.rank, join)
            raise error

    with pytest.raises(OSError, match="no space left"):
        fail()


def interrupt_while_joining(rendezvous: StoreRendezvous, operation: str) -> None:
    """Ctrl-C while this rank waits for its coordinator, which is not there yet."""
    heartbeat = rendezvous._heartbeat
    tick = heartbeat.tick

    def interrupt() -> None:
        heartbeat.tick = tick  # type: ignore[method-assign]
        raise KeyboardInterrupt

    heartbeat.tick = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        meet(rendezvous, operation)


def leave_before_joining(rendezvous: StoreRendezvous, operation: str) -> None:
    """Fail before the first meeting."""
    leave(rendezvous, operation, after=0)


BEFORE_JOINING = [interrupt_while_joining, leave_before_joining]


@pytest.mark.parametrize("is_called", [True, False], ids=["of all ranks", "of one rank"])
@pytest.mark.parametrize("leaves", BEFORE_JOINING)
def test_a_rank_that_leaves_while_it_joins_meets_again(
    leaves: Callable[[StoreRendezvous, str], None], is_called: bool
) -> None:
    """The others come after it has left: to that operation, which fails, or to the next one."""
    left = threading.Event()

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        first: Any = None
        if rendezvous.rank == 1:
            leaves(rendezvous, "save 1")
            left.set()
        else:
            assert left.wait(LONG)
            if is_called:
                first = outcome(lambda: meet(rendezvous, "save 1"))
        return [first, meet(rendezvous, "save 2"), meet(rendezvous, "save 3", times=2)]

    results = on_ranks(3, work)
    assert [end[1:] for end in results] == [[ALL, ALL]] * 3
    for rank in (0, 2):
        assert (
            isinstance(results[rank][0], RankFailure) and set(results[rank][0].causes) == {1}
        ) == is_called


@pytest.mark.parametrize("leaves", BEFORE_JOINING)
def test_the_error_of_a_rank_that_left_before_it_joined_reaches_the_others(
    leaves: Callable[[StoreRendezvous, str], None],
) -> None:
    left, over = threading.Event(), threading.Event()

    def work(rendezvous: StoreRendezvous) -> Any:
        if rendezvous.rank == 1:
            leaves(rendezvous, "save 1")
            left.set()
            assert over.wait(2 * LONG)
            return None
        assert left.wait(LONG)
        try:
            return outcome(lambda: meet(rendezvous, "save 1"))
        finally:
            over.set()

    error, _ = on_ranks(2, work)
    assert isinstance(error, RankFailure), error
    assert set(error.causes) == {1}


@pytest.mark.parametrize("left", ["save 1", "save 2"])
@pytest.mark.parametrize("restarted", [0, 1])
def test_ranks_meet_after_one_left_the_operation_in_which_all_join_again(restarted: int, left: str) -> None:
    """One rank restarts, the second waits for its previous incarnation, and the third comes after that."""
    given_up, steps = threading.Event(), range(1, 9)

    def come_last(rendezvous: StoreRendezvous) -> list[Any]:
        """The third rank leaves the first operation that it comes to."""
        assert given_up.wait(LONG)
        leave(rendezvous, left, after=0)
        rest = [step for step in steps if f"save {step}" > left]
        return [outcome(lambda: meet(rendezvous, f"save {step}")) for step in rest]  # noqa: B023

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        answers: list[Any] = [meet(rendezvous, "save 0")]
        if rendezvous.rank == 2:
            return [*answers, *come_last(rendezvous)]
        again = None
        if rendezvous.rank == restarted:
            rendezvous.close()
            rendezvous = again = StoreRendezvous(rendezvous._store, restarted, 3, deadline=SHORT)
        for step in steps:
            answers.append(outcome(lambda: meet(rendezvous, f"save {step}")))  # noqa: B023
            if again is None:
                given_up.set()
        if again is not None:
            again.close()
        return answers

    results = on_ranks(3, work, SHORT)
    assert [end[0] for end in results] == [ALL] * 3
    assert isinstance(results[1 - restarted][1], RankSilent)
    assert [end[-2:] for end in results] == [[ALL, ALL]] * 3, results


@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_two_ranks_leave_two_operations(first: int, second: int) -> None:
    """Each leaves after some rendezvous. Only these two operations fail, and no rank is given up."""

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        answers: list[Any] = []
        for operation, rank, after in [("save 1", 1, first), ("save 2", 2, second), ("save 3", None, 0)]:
            if rendezvous.rank == rank:
                leave(rendezvous, operation, after)
                answers.append(None)
            else:
                answers.append(outcome(lambda: meet(rendezvous, operation, times=3)))  # noqa: B023
        return answers

    results = on_ranks(3, work)
    for operation, leaver in enumerate((1, 2)):
        errors = [results[rank][operation] for rank in range(3) if rank != leaver]
        assert all(isinstance(error, RankFailure) for error in errors), errors
        assert [error.causes for error in errors] == [{leaver: "OSError: no space left"}] * 2
    assert [end[2] for end in results] == [ALL] * 3


def test_two_ranks_leave_operations_that_no_other_rank_calls() -> None:
    """Both leave at the same meeting. Rank 0 passes over both operations."""
    before = threading.Barrier(2)

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        answers = [meet(rendezvous, "save 0")]
        if rendezvous.rank > 0:
            before.wait(LONG)
            leave(rendezvous, f"evaluate {rendezvous.rank}", after=0)
        return [
            *answers,
            outcome(lambda: meet(rendezvous, "save 1")),
            outcome(lambda: meet(rendezvous, "save 2")),
        ]

    assert on_ranks(3, work) == [[ALL, ALL, ALL]] * 3


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_operation_that_a_rank_left_fails_with_its_rank_and_cause(leaver: int, after: int) -> None:
    def work(rendezvous: StoreRendezvous) -> list[Any]:
        first: Any = None
        if rendezvous.rank == leaver:
            leave(rendezvous, "save 1", after)
        else:
            first = outcome(lambda: meet(rendezvous, "save 1", times=3))
        return [first, meet(rendezvous, "save 1", times=3)]

    results = on_ranks(3, work)
    errors = [end[0] for rank, end in enumerate(results) if rank != leaver]
    assert all(isinstance(error, RankFailure) for error in errors), errors
    assert [error.causes for error in errors] == [{leaver: "OSError: no space left"}] * 2
    assert all(f"rank {leaver} of 3 failed" in str(error) and "save 1" in str(error) for error in errors)
    assert [end[1] for end in results] == [ALL] * 3

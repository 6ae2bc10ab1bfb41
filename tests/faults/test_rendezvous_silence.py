"""Ranks that never arrive, stop, die or are merely slow: which rank is named, when, and what happens then."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from shardproof.errors import RankFailure, RankSilent, ShardproofError
from tests import harness
from tests.harness import Job, Outcome, reach, run_ranks

DEADLINE = 3.0
SLACK = 2.0


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def attempt(meetings: Any, operation: str = "save a", phase: str = "write", decide: Any = join) -> Any:
    """One meeting: its answer, or the error's type, details and text; and the seconds it took."""
    began = time.monotonic()
    try:
        answer: Any = meetings.meet(operation, phase, b"%d" % harness.rank(), decide)
    except ShardproofError as error:
        answer = (type(error).__name__, error.details, error.message)
    return answer, time.monotonic() - began


def two_meetings() -> list[Any]:
    """All ranks meet; past the point `work` they meet for `save a`, past `again` for `save b`."""
    meetings = harness.rendezvous(deadline=20.0)
    assert meetings.meet("save a", "agree", b"", join) is not None
    meetings.deadline = DEADLINE
    reach("work")
    first = attempt(meetings)
    reach("again")
    return [first, attempt(meetings, "save b")]


def named(outcomes: list[Outcome], silent: list[int]) -> dict[str, Any]:
    """The details of the RankSilent error that all these ranks got in their first meeting."""
    firsts = [outcome.value[0] for outcome in outcomes]
    answers = [answer for answer, _ in firsts]
    assert all(answer == answers[0] for answer in answers), answers
    kind, details, message = answers[0]
    assert kind == RankSilent.__name__
    assert details["ranks"] == silent
    assert details["phase"] == "write"
    for rank in silent:
        assert f"rank {rank}" in message
    return dict(details)


def in_time(outcomes: list[Outcome]) -> None:
    seconds = [outcome.value[0][1] for outcome in outcomes]
    assert DEADLINE <= max(seconds) <= DEADLINE + SLACK  # a rank that came later itself waited less


ALL = [b"0,1,2"] * 3


@pytest.mark.parametrize("silent", [1, 0])
def test_a_stopped_rank_is_named_and_meets_again_later(silent: int) -> None:
    others = [rank for rank in range(3) if rank != silent]

    def script(job: Job) -> None:
        job.until_held(silent, "work")
        job.stop(silent)
        for rank in others:
            job.until_held(rank, "again")
        job.go(silent)
        job.resume(silent)
        for rank in range(3):
            job.until_held(rank, "again")
        for rank in range(3):
            job.go(rank)

    outcomes = run_ranks(
        3,
        two_meetings,
        hold={r: ["again", "work"] if r == silent else "again" for r in range(3)},
        script=script,
    )
    details = named(outcomes, [silent])
    in_time([outcomes[rank] for rank in others])
    assert DEADLINE <= details["last_heard"][str(silent)] <= DEADLINE + SLACK
    assert [outcome.value[1][0] for outcome in outcomes] == ALL


@pytest.mark.parametrize("silent", [2, 0])
def test_a_killed_rank_is_named(silent: int) -> None:
    outcomes = run_ranks(3, two_meetings, kill={silent: "work"})
    others = [outcome for outcome in outcomes if outcome.rank != silent]
    assert outcomes[silent].exit_code == -9
    named(others, [silent])
    in_time(others)


def one_never_comes() -> Any:
    meetings = harness.rendezvous(deadline=DEADLINE)
    if harness.rank() == 1:
        return None
    return [attempt(meetings)]


def test_a_rank_that_never_arrives_is_named() -> None:
    outcomes = run_ranks(3, one_never_comes)
    details = named([outcomes[0], outcomes[2]], [1])
    assert details["last_heard"] == {"1": None}
    in_time([outcomes[0], outcomes[2]])


def one_skips() -> Any:
    meetings = harness.rendezvous(deadline=DEADLINE)
    skips = int(os.environ["SKIPS"])
    first = None if harness.rank() == skips else attempt(meetings)
    reach("again")
    return [first, attempt(meetings, "save b")]


@pytest.mark.parametrize("skips", [0, 1])
def test_a_rank_that_left_out_an_operation_joins_the_next(skips: int) -> None:
    def script(job: Job) -> None:
        for rank in range(3):
            job.until_held(rank, "again")
        for rank in range(3):
            job.go(rank)

    outcomes = run_ranks(
        3, one_skips, hold=dict.fromkeys(range(3), "again"), script=script, environment={"SKIPS": str(skips)}
    )
    named([outcome for outcome in outcomes if outcome.rank != skips], [skips])
    assert [outcome.value[1][0] for outcome in outcomes] == ALL


def one_is_slow(slow: int) -> Any:
    meetings = harness.rendezvous(deadline=20.0)
    meetings.meet("save a", "agree", b"", join)
    meetings.deadline = 2.5
    if harness.rank() == slow:
        for done in range(60):
            meetings.progress(done << 20, 60 << 20)
            time.sleep(0.1)
    return attempt(meetings)


@pytest.mark.parametrize("slow", [1, 0])
def test_the_others_wait_for_a_slow_rank_that_makes_progress(slow: int) -> None:
    outcomes = run_ranks(3, one_is_slow, slow)
    assert [outcome.value[0] for outcome in outcomes] == ALL
    assert all(outcome.value[1] > 4.0 for outcome in outcomes if outcome.rank != slow)


def one_stops_making_progress() -> Any:
    meetings = harness.rendezvous(deadline=20.0)
    meetings.meet("save a", "agree", b"", join)
    meetings.deadline = DEADLINE
    if harness.rank() == 1:
        for done in range(1, 16):
            meetings.progress(done << 20, 64 << 20)
            time.sleep(0.1)
        time.sleep(2 * DEADLINE)  # alive, and stuck
    return [attempt(meetings)]


def test_a_rank_that_stops_making_progress_is_named_with_its_progress() -> None:
    outcomes = run_ranks(3, one_stops_making_progress)
    details = named(outcomes, [1])
    assert details["progress"] == {"1": "15.0 MiB of 64.0 MiB"}
    assert outcomes[0].value[0][1] > DEADLINE + 1.0


def think(posts: list[bytes]) -> bytes:
    ends = time.monotonic() + 3 * DEADLINE
    while time.monotonic() < ends:
        sum(range(1000))
    return join(posts)


def hang(posts: list[bytes]) -> bytes:
    time.sleep(2 * DEADLINE)
    return join(posts)


def meet_with_decide(decide: Any) -> Any:
    return [attempt(harness.rendezvous(deadline=DEADLINE), decide=decide)]


def test_the_others_wait_for_a_coordinator_that_computes() -> None:
    outcomes = run_ranks(3, meet_with_decide, think)
    assert [outcome.value[0][0] for outcome in outcomes] == ALL


def test_all_ranks_name_a_coordinator_that_hangs() -> None:
    named(run_ranks(3, meet_with_decide, hang), [0])


def one_fails_one_is_gone() -> Any:
    meetings = harness.rendezvous(deadline=DEADLINE)
    if harness.rank() == 2:
        return None
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        meetings.meet("save a", "write", ValueError("bad") if harness.rank() == 1 else b"", join)
    return caught.value.causes, caught.value.details["silent"], time.monotonic() - began


def test_a_silent_rank_does_not_hide_the_failure_of_another() -> None:
    for outcome in run_ranks(3, one_fails_one_is_gone)[:2]:
        causes, silent, seconds = outcome.value
        assert (causes, silent) == ({1: "ValueError: bad"}, [2])
        assert seconds < DEADLINE + SLACK


def test_a_store_that_dies_is_named() -> None:
    def script(job: Job) -> None:
        for rank in range(3):
            job.until_held(rank, "work")
        job.store = None  # the last reference: the server ends
        for rank in range(3):
            job.go(rank)

    outcomes = run_ranks(3, two_meetings, hold=dict.fromkeys(range(3), "work"), script=script)
    for outcome in outcomes:
        (kind, details, message), seconds = outcome.value[0]
        assert (kind, details["ranks"]) == (RankSilent.__name__, [0])
        assert details["store"] in message
        assert seconds < DEADLINE + SLACK


def store_at_rank_0() -> list[Any]:
    from shardproof.rendezvous import connect

    meetings = connect(deadline=20.0)
    meetings.meet("save a", "agree", b"", join)
    meetings.deadline = DEADLINE
    reach("work")
    first = attempt(meetings)
    reach("again")
    return [first, attempt(meetings, "save b")]


def test_the_death_of_rank_0_is_named_where_it_serves_the_store() -> None:
    outcomes = run_ranks(3, store_at_rank_0, store="rank 0", kill={0: "work"})
    for outcome in outcomes[1:]:
        (kind, details, _), seconds = outcome.value[0]
        assert (kind, details["ranks"]) == (RankSilent.__name__, [0])
        assert seconds < DEADLINE + SLACK


def test_ranks_meet_again_after_rank_0_was_stopped_while_it_serves_the_store() -> None:
    def script(job: Job) -> None:
        job.until_held(0, "work")
        job.stop(0)
        for rank in (1, 2):
            job.until_held(rank, "again")
        job.resume(0)
        time.sleep(0.5)
        job.go(0)
        for rank in range(3):
            job.until_held(rank, "again")
        for rank in range(3):
            job.go(rank)

    hold = {0: ["work", "again"], 1: "again", 2: "again"}
    outcomes = run_ranks(3, store_at_rank_0, store="rank 0", hold=hold, script=script)
    for outcome in outcomes:
        (kind, details, _), seconds = outcome.value[0]
        assert (kind, details["ranks"]) == (RankSilent.__name__, [0])
        assert seconds < 2 * DEADLINE + SLACK
    assert [outcome.value[1][0] for outcome in outcomes] == ALL

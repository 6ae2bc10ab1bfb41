"""A rank or the decision fails at a meeting: the same error on every rank, and the next meeting works."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardproof.errors import KeyMismatchError, RankFailure, ShardproofError, StructureError
from tests import harness
from tests.harness import Outcome, run_ranks


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def last(posts: list[bytes]) -> bytes:
    return posts[-1]


def meet_and_go_on(
    post: bytes | BaseException, phase: str, decide: object = join
) -> tuple[str, dict, str, bytes]:  # type: ignore[type-arg]
    """The error of one meeting (type, details, text of the cause), and the answer of the meeting after it."""
    meetings = harness.rendezvous(deadline=20.0)
    with pytest.raises(ShardproofError) as caught:
        meetings.meet("save a", phase, post, decide)  # type: ignore[arg-type]
    error = caught.value
    answer = meetings.meet("save b", "agree", b"%d" % harness.rank(), join)
    cause = f"{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
    return type(error).__name__, error.details | {"message": error.message}, cause, answer


def same_error(outcomes: list[Outcome]) -> tuple[str, dict]:  # type: ignore[type-arg]
    """The error that all ranks got, which must be the same. All ranks must have met again."""
    values = [outcome.value for outcome in outcomes]
    assert all(value[:2] == values[0][:2] for value in values), values
    assert [value[3] for value in values] == [b",".join(b"%d" % r for r in range(len(values)))] * len(values)
    return values[0][0], values[0][1]


def rank_raises(failing: Sequence[int], phase: str) -> tuple[str, dict, str, bytes]:  # type: ignore[type-arg]
    fails = harness.rank() in failing
    return meet_and_go_on(OSError(28, f"full on {harness.rank()}") if fails else b"fine", phase)


@pytest.mark.parametrize(("failing", "phase"), [([1], "collect"), ([0], "plan"), ([0, 2], "write")])
def test_an_error_on_a_rank_reaches_all_ranks(failing: list[int], phase: str) -> None:
    outcomes = run_ranks(3, rank_raises, failing, phase)
    kind, details = same_error(outcomes)
    assert kind == "RankFailure"
    assert details["phase"] == phase
    assert details["causes"] == {str(rank): f"OSError: [Errno 28] full on {rank}" for rank in failing}
    for outcome in outcomes:
        own = f"OSError: [Errno 28] full on {outcome.rank}" if outcome.rank in failing else ""
        assert outcome.value[2] == own


def refuse(posts: list[bytes]) -> bytes:
    raise KeyMismatchError("the key w is missing", missing=["w"])


def stumble(posts: list[bytes]) -> bytes:
    raise IndexError("no such post")


def answer_too_few(posts: list[bytes]) -> list[bytes]:
    return [b"1"]


def test_an_error_of_ours_in_decide_reaches_all_ranks() -> None:
    kind, details = same_error(run_ranks(2, meet_and_go_on, b"", "plan", refuse))
    assert (kind, details["missing"], details["message"]) == (
        "KeyMismatchError",
        ["w"],
        "the key w is missing",
    )


@pytest.mark.parametrize(
    ("decide", "cause"),
    [(stumble, "IndexError: no such post"), (answer_too_few, "ValueError: 1 answers for 2 ranks")],
)
def test_any_other_error_in_decide_is_a_rank_failure(decide: object, cause: str) -> None:
    outcomes = run_ranks(2, meet_and_go_on, b"", "plan", decide)
    kind, details = same_error(outcomes)
    assert kind == RankFailure.__name__
    assert details["causes"] == {"0": cause}
    assert outcomes[0].value[2] == cause


def meet_in_different_phases() -> tuple[str, dict, str, bytes]:  # type: ignore[type-arg]
    return meet_and_go_on(b"", "write" if harness.rank() == 2 else "agree")


def test_ranks_in_different_phases_all_get_one_error() -> None:
    kind, details = same_error(run_ranks(3, meet_in_different_phases))
    assert kind == StructureError.__name__
    assert details["meetings"] == {
        "0": ["save a", "agree"],
        "1": ["save a", "agree"],
        "2": ["save a", "write"],
    }
    assert "ranks 0-1: save a, phase agree" in details["message"]


def meet_with_large_posts() -> list[int]:
    meetings = harness.rendezvous(deadline=10.0)
    size = (20 << 20) + harness.rank()
    own = bytes([harness.rank()]) * size
    one = meetings.meet("save a", "plan", own, last)
    each = meetings.meet("save a", "plan", own, list)
    assert one == bytes([harness.world_size() - 1]) * ((20 << 20) + harness.world_size() - 1)
    assert each == own
    return [len(one), len(each)]


def test_large_posts_and_answers_arrive_whole() -> None:
    values = [outcome.value for outcome in run_ranks(2, meet_with_large_posts)]
    assert values == [[(20 << 20) + 1, 20 << 20], [(20 << 20) + 1, (20 << 20) + 1]]

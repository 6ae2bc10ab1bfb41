"""Another program writes to the keys of a meeting, in the store that real ranks share."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardproof.errors import ShardproofError
from tests import harness
from tests.harness import Job, reach, run_ranks

DEADLINE = 3.0
HUGE = (
    b'{"operation":"save","phase":"two","kind":"all","parts":142857143,"size":1000000000000000,'
    b'"digest":"","readers":0,"renew":null,"whole":["",0]}\n'
)


def meet_twice() -> tuple[str, str]:
    """The error of the second meeting: its type and its text."""
    meetings = harness.rendezvous(deadline=20.0)
    meetings.meet("save", "one", b"", lambda posts: b"")
    meetings.deadline = DEADLINE
    reach("second meeting")
    with pytest.raises(ShardproofError) as caught:
        meetings.meet("save", "two", b"post", lambda posts: b"".join(posts))
    meetings.close()
    return type(caught.value).__name__, caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("verdict", b"{}", "RankFailure"),
        ("verdict", HUGE, "RankFailure"),
        ("verdict", b"\xff\xfe", "RankFailure"),
        ("count", b"many", "RankSilent"),
    ],
)
def test_wrong_bytes_are_the_same_error_on_all_ranks(key: str, value: bytes, error: str) -> None:
    def script(job: Job) -> None:
        for rank in range(3):
            job.until_held(rank, "second meeting")
        generation = msgspec.json.decode(job.store.get("shardproof/3/announced"), type=str)
        job.store.set(f"shardproof/3/{generation}/1/{key}", value)
        for rank in range(3):
            job.go(rank)

    hold = dict.fromkeys(range(3), "second meeting")
    ends: list[Any] = [outcome.value for outcome in run_ranks(3, meet_twice, hold=hold, script=script)]
    assert [kind for kind, _ in ends] == [error] * 3
    if error == "RankFailure":
        assert len({text for _, text in ends}) == 1
        assert f"/1/{key}" in ends[0][1]

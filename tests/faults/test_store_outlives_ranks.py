"""A store that outlives the ranks: processes end or die at any point, and others start at the same store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from shardproof.errors import ShardproofError
from tests import harness
from tests.harness import reach, run_ranks

LONG = 30.0


@pytest.fixture
def server() -> Any:
    """A store of the test's own, which outlives all ranks."""
    return TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def at(server: Any, world_size: int) -> dict[str, str]:
    return {"MASTER_PORT": str(server.port), "WORLD_SIZE": str(world_size)}


def new_rendezvous(deadline: float) -> Any:
    from shardproof.rendezvous import StoreRendezvous

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    return StoreRendezvous(store, harness.rank(), harness.world_size(), deadline=deadline)


def meet(deadline: float) -> list[Any]:
    """Two meetings; the points before, between and after are those at which a rank may be killed."""
    meetings = new_rendezvous(deadline)
    ends: list[Any] = []
    for point in ("begin", "middle"):
        reach(point)
        try:
            ends.append(
                meetings.meet(
                    f"save {point}", "agree", b"%d" % harness.rank(), lambda posts: b",".join(posts)
                )
            )
        except ShardproofError as error:
            ends.append((type(error).__name__, error.details["ranks"]))
    reach("end")
    meetings.close()
    return ends


def test_ranks_meet_after_a_job_in_which_the_coordinator_was_alone(server: Any) -> None:
    (first,) = run_ranks(1, meet, 0.5, environment=at(server, 2))
    assert first.value == [("RankSilent", [1])] * 2
    for _ in range(2):
        ends = [outcome.value for outcome in run_ranks(2, meet, LONG, environment=at(server, 2))]
        assert ends == [[b"0,1"] * 2] * 2


@pytest.mark.parametrize("dies", [{1: "begin"}, {0: "middle"}, {0: "end", 1: "middle"}])
def test_ranks_meet_after_a_job_in_which_some_were_killed(server: Any, dies: dict[int, str]) -> None:
    first = run_ranks(2, meet, 2.0, kill=dies, environment=at(server, 2))
    assert [outcome.exit_code for outcome in first] == [-9 if rank in dies else 0 for rank in range(2)]
    ends = [outcome.value for outcome in run_ranks(2, meet, LONG, environment=at(server, 2))]
    assert ends == [[b"0,1"] * 2] * 2


def save_and_restore(folder: str, step: int) -> list[int]:
    """Restores the newest step, if any, and saves one more step."""
    import torch

    import shardproof as sp

    checkpointer = sp.Checkpointer(folder, rendezvous=new_rendezvous(LONG))
    state = {"weight": torch.zeros(4)}
    found = checkpointer.restore(state)
    state["weight"] += 1
    checkpointer.save(step, state).result()
    return [found or 0, int(state["weight"][0])]


def test_a_job_goes_on_after_an_attempt_that_left_a_rank_alone(server: Any, tmp_path: Any) -> None:
    (first,) = run_ranks(1, meet, 0.5, environment=at(server, 2))
    assert first.value == [("RankSilent", [1])] * 2
    for step in (1, 2, 3):
        ends = run_ranks(2, save_and_restore, str(tmp_path), step, environment=at(server, 2))
        assert [outcome.value for outcome in ends] == [[step - 1, step]] * 2


def test_keys_of_killed_ranks_do_not_pile_up(server: Any) -> None:
    counts = []
    for _ in range(4):
        run_ranks(2, meet, LONG, kill={0: "end", 1: "end"}, environment=at(server, 2))
        counts.append(server.num_keys())
    assert max(counts) <= 18, counts  # heartbeat keys come and go; without cleaning, four jobs leave 29

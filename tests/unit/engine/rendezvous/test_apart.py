"""Two live ranks that wait in different meetings give up, and meet again. Ranks are threads."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import HashStore

from shardproof.engine.rendezvous.channel import Channel
from shardproof.engine.rendezvous.heartbeat import Heartbeat, Watch
from shardproof.engine.rendezvous.meeting import Meeting, MeetingGivenUp, attend
from shardproof.errors import RankSilent, ShardproofError

DEADLINE = 1.0


class Rank:
    """A rank whose meeting numbers the test sets."""

    def __init__(self, store: Any, rank: int) -> None:
        heartbeat = Heartbeat()
        heartbeat.period = DEADLINE / 8
        self.channel = Channel(store, "apart", rank, 2, heartbeat, DEADLINE)
        self.number = 0

    def meet(self, operation: str) -> bytes:
        """The answer of the next meeting that is about this operation."""
        while True:
            meeting = Meeting(self.number, 2, operation, "agree", DEADLINE, False, (operation, 0))
            try:
                return attend(self.channel, meeting, b"%d" % self.channel.rank, b",".join)
            except MeetingGivenUp:
                continue
            finally:
                self.number += 1


def together(ranks: list[Rank], operation: str) -> list[bytes | ShardproofError]:
    """Runs a meeting of both ranks, and returns the answer or the error of each."""
    results: dict[int, bytes | ShardproofError] = {}

    def run(rank: Rank) -> None:
        try:
            results[rank.channel.rank] = rank.meet(operation)
        except ShardproofError as error:
            results[rank.channel.rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1], "a rank still waits"
    return [results[0], results[1]]


def test_live_ranks_in_different_meetings_give_up_and_meet_again() -> None:
    store = HashStore()
    ranks = [Rank(store, 0), Rank(store, 1)]
    try:
        for ahead in (0, 1):
            assert together(ranks, f"save before {ahead}") == [b"0,1", b"0,1"]
            ranks[ahead].number += 1
            results = together(ranks, f"save {ahead}")
            assert [type(end) for end in results] == [RankSilent, RankSilent], results
            assert any("waits in another meeting" in str(end) for end in results), results
            again = [together(ranks, f"save {ahead} again {attempt}") for attempt in range(2)]
            assert [b"0,1", b"0,1"] in again, again
    finally:
        for rank in ranks:
            rank.channel.close()


def test_a_heartbeat_from_another_meeting_does_not_end_the_silence() -> None:
    watch = Watch([1], now=0.0, longest_step=1.0)
    watch.observe(1, b"first")
    watch.step(1.0)
    assert not watch.observe(1, b"second", is_elsewhere=True)
    assert watch.silent(for_seconds=1.0) == [1]
    assert watch.observe(1, b"third")
    assert watch.silent(for_seconds=1.0) == []

"""Ranks join one generation, whatever earlier ranks left in the store. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardproof.errors import RankSilent, ShardproofError
from shardproof.rendezvous import StoreRendezvous
from shardproof.rendezvous.keys import MeetingKeys
from shardproof.rendezvous.membership import Membership

SHORT, LONG = 0.1, 30.0
"""Deadlines: of ranks that others leave alone, and of ranks that must find each other."""


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def live(
    store: Any, ranks: Iterable[int], world_size: int, work: Callable[[StoreRendezvous], Any], deadline: float
) -> dict[int, Any]:
    """One life of some ranks at a store: what `work` returned or raised on each."""
    ends: dict[int, Any] = {}

    def run(rank: int) -> None:
        meetings = StoreRendezvous(store, rank, world_size, deadline=deadline)
        try:
            ends[rank] = work(meetings)
        except BaseException as error:
            ends[rank] = error
        finally:
            meetings.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def meet_twice(meetings: StoreRendezvous) -> list[bytes]:
    post = b"%d" % meetings.rank
    return [
        meetings.meet("save", "agree", post, join),
        meetings.meet("save", "commit", post, lambda posts: [one * 2 for one in posts]),
    ]


def alone(store: Any, ranks: Iterable[int], world_size: int) -> None:
    """A life in which some ranks are missing, so that the others give up."""
    ends = live(store, ranks, world_size, meet_twice, SHORT)
    assert {type(end) for end in ends.values()} == {RankSilent}, ends


def together(store: Any, world_size: int) -> None:
    """A life of all ranks, which meet."""
    ends = live(store, range(world_size), world_size, meet_twice, LONG)
    everybody = b",".join(b"%d" % rank for rank in range(world_size))
    assert ends == {rank: [everybody, b"%d%d" % (rank, rank)] for rank in range(world_size)}


@pytest.fixture(params=["hash", "prefix", "file", "tcp", "tcp without libuv"])
def any_store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    kind = request.param
    if kind.startswith("tcp"):
        return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=kind == "tcp")
    store = FileStore(str(tmp_path / "store"), 3) if kind == "file" else HashStore()
    return PrefixStore("job 7", store) if kind == "prefix" else store


def test_ranks_meet_after_a_life_in_which_only_one_came(any_store: Any) -> None:
    for rank in (0, 1):
        alone(any_store, [rank], 2)
        together(any_store, 2)
        together(any_store, 2)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_meet_after_a_life_in_which_one_of_three_was_missing(missing: int) -> None:
    store = HashStore()
    together(store, 3)
    alone(store, {0, 1, 2} - {missing}, 3)
    alone(store, [missing], 3)
    together(store, 3)


def test_a_world_of_another_size_at_the_same_store() -> None:
    store = HashStore()
    for world_size in (2, 3, 1, 4, 2):
        together(store, world_size)


def test_keys_of_dead_ranks_do_not_pile_up() -> None:
    def meet_much_and_die(meetings: StoreRendezvous) -> None:
        """Large posts and answers of the last meeting stay in the store."""
        meetings.meet("save", "plan", bytes(100_000), lambda posts: [bytes(100_000)] * 2)

    store, kept = HashStore(), []
    for _ in range(4):
        live(store, range(2), 2, meet_much_and_die, LONG)
        alone(store, [0], 2)
        alone(store, [1], 2)
        together(store, 2)
        kept.append(store.num_keys())
    assert kept[-1] <= kept[0] + 4 and kept[-1] <= 20, kept  # four lives leave more than thirty, uncleaned


def test_ranks_that_never_meet_leave_few_keys() -> None:
    store, kept = HashStore(), []
    for _ in range(12):
        alone(store, [0], 2)
        kept.append(store.num_keys())
    assert max(kept[9:]) == max(kept[10:])
    together(store, 2)
    assert store.num_keys() <= 16


def test_the_coordinator_that_comes_late_learns_what_was_given_up() -> None:
    """So it is in step with the rank that gave up, and goes on to the same meeting."""
    store, given_up = HashStore(), threading.Event()

    def work(meetings: StoreRendezvous) -> list[Any]:
        if meetings.rank == 0:
            assert given_up.wait(30)
            meetings.deadline = LONG  # it learns of the verdict once the other rank has joined
        ends: list[Any] = []
        for operation in ("save a", "save b"):
            try:
                ends.append(meetings.meet(operation, "agree", operation.encode(), join))
            except ShardproofError as error:
                ends.append(error.to_wire())
            given_up.set()
            meetings.deadline = LONG
        return ends

    ends = live(store, range(2), 2, work, 0.4)
    assert ends[0] == ends[1]
    assert ends[0][0]["details"]["ranks"] == [0]
    assert ends[0][1] == b"save b,save b"


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_rank_that_starts_again_alone_meets_the_others(restarted: int) -> None:
    """They wait for its former life, give up, and join again with it. Each rank saves step after step."""
    store, steps = HashStore(), 7

    def work(meetings: StoreRendezvous) -> list[Any]:
        answers: list[Any] = []
        for step in range(steps):
            if step == 1:
                assert answers == [b"0,1,2"]
                if meetings.rank == restarted:
                    meetings.close()
                    meetings = StoreRendezvous(store, restarted, 3, deadline=1.5)
            try:
                answers.append(meetings.meet(f"save {step}", "agree", b"%d" % meetings.rank, join))
            except ShardproofError as error:
                answers.append(type(error))
        meetings.close()
        return answers

    ends = live(store, range(3), 3, work, 1.5)
    assert {answers[0] for answers in ends.values()} == {b"0,1,2"}
    assert all(RankSilent in answers for answers in ends.values()), ends
    assert [answers[-2:] for answers in ends.values()] == [[b"0,1,2"] * 2] * 3, ends


def test_two_rendezvous_of_one_name_that_meet_first_in_one_order() -> None:
    def work(meetings: StoreRendezvous) -> list[bytes]:
        second = StoreRendezvous(store, meetings.rank, 2, deadline=LONG)
        answers = [
            each.meet("save", "agree", b"%d" % number, join)
            for number in range(3)
            for each in (meetings, second)
        ]
        second.close()
        return answers

    store = HashStore()
    expected = [b"%d,%d" % (number, number) for number in range(3) for _ in range(2)]
    assert live(store, range(2), 2, work, LONG) == {0: expected, 1: expected}


def test_a_rank_that_was_not_welcome_deletes_nothing_of_those_that_are() -> None:
    """The second rendezvous of a rank says hello to the coordinator of the first, until its own is there."""
    store = HashStore()
    coordinator, first, second = (Membership("job", rank, 2) for rank in (0, 1, 1))
    coordinator.announce(store)
    first.approach(store)
    coordinator.welcome(store)
    assert first.find_welcome(store)
    second.approach(store)
    coordinator.welcome(store)
    assert not second.find_welcome(store)
    others = Membership("job", 0, 2)
    others.announce(store)
    second.approach(store)
    others.welcome(store)
    assert second.find_welcome(store)
    post = MeetingKeys(first.root, 1).post(1)
    store.set(post, b"post")
    second.clean(store)
    assert store.check([post])


class Counting:
    """A store that keeps count of requests."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_a_coordinator_of_many_ranks_makes_few_requests_to_welcome_them() -> None:
    ranks = 16_384
    store = HashStore()
    coordinator = Membership("job", 0, ranks)
    coordinator.announce(store)
    for rank in range(1, ranks):
        store.set(coordinator.keys.hello(coordinator.generation, rank), b'"%016x"' % rank)
    store.add(coordinator.keys.joined(coordinator.generation), ranks - 1)
    counting = Counting(store)
    coordinator.welcome(counting)
    assert counting.requests <= 2 * ranks / 256 + 8
    assert coordinator.is_complete
    assert store.check([coordinator.keys.welcome(coordinator.generation, f"{ranks - 1:016x}")])
    counting.requests = 0
    coordinator.welcome(counting)
    assert counting.requests == 1

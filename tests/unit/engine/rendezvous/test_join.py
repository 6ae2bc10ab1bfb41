"""Ranks join one generation, whatever earlier ranks left in the store. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardproof.engine.rendezvous.membership import Membership
from shardproof.engine.rendezvous.wire import MeetingKeys
from shardproof.errors import RankSilent, ShardproofError
from shardproof.rendezvous import StoreRendezvous

SHORT, LONG = 0.1, 30.0
"""Deadlines of ranks whose peers are missing, and of ranks that must meet."""


def join(posts: list[bytes]) -> bytes:
    return b",".join(posts)


def run_job(
    store: Any, ranks: Iterable[int], world_size: int, work: Callable[[StoreRendezvous], Any], deadline: float
) -> dict[int, Any]:
    """Runs `work` on some ranks at a store, and returns the result or the error of each."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        rendezvous = StoreRendezvous(store, rank, world_size, deadline=deadline)
        try:
            results[rank] = work(rendezvous)
        except BaseException as error:
            results[rank] = error
        finally:
            rendezvous.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meet_twice(rendezvous: StoreRendezvous) -> list[bytes]:
    post = b"%d" % rendezvous.rank
    return [
        rendezvous.meet("save", "agree", post, join),
        rendezvous.meet("save", "commit", post, lambda posts: [one * 2 for one in posts]),
    ]


def alone(store: Any, ranks: Iterable[int], world_size: int) -> None:
    """Runs some ranks of a job. The others are missing, so these give up."""
    results = run_job(store, ranks, world_size, meet_twice, SHORT)
    assert {type(end) for end in results.values()} == {RankSilent}, results


def together(store: Any, world_size: int) -> None:
    """Runs all ranks of a job, which meet."""
    results = run_job(store, range(world_size), world_size, meet_twice, LONG)
    all_posts = b",".join(b"%d" % rank for rank in range(world_size))
    assert results == {rank: [all_posts, b"%d%d" % (rank, rank)] for rank in range(world_size)}


@pytest.fixture(params=["hash", "prefix", "file", "tcp", "tcp without libuv"])
def any_store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    kind = request.param
    if kind.startswith("tcp"):
        return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=kind == "tcp")
    store = FileStore(str(tmp_path / "store"), 3) if kind == "file" else HashStore()
    return PrefixStore("job 7", store) if kind == "prefix" else store


def test_ranks_meet_after_a_job_in_which_only_one_rank_came(any_store: Any) -> None:
    for rank in (0, 1):
        alone(any_store, [rank], 2)
        together(any_store, 2)
        together(any_store, 2)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_meet_after_a_job_in_which_one_of_three_ranks_was_missing(missing: int) -> None:
    store = HashStore()
    together(store, 3)
    alone(store, {0, 1, 2} - {missing}, 3)
    alone(store, [missing], 3)
    together(store, 3)


def test_jobs_of_other_world_sizes_meet_at_the_same_store() -> None:
    store = HashStore()
    for world_size in (2, 3, 1, 4, 2):
        together(store, world_size)


def test_keys_of_dead_ranks_do_not_pile_up() -> None:
    def meet_much_and_die(rendezvous: StoreRendezvous) -> None:
        """Large posts and answers of the last meeting stay in the store."""
        rendezvous.meet("save", "plan", bytes(100_000), lambda posts: [bytes(100_000)] * 2)

    store, key_counts = HashStore(), []
    for _ in range(4):
        run_job(store, range(2), 2, meet_much_and_die, LONG)
        alone(store, [0], 2)
        alone(store, [1], 2)
        together(store, 2)
        key_counts.append(store.num_keys())
    assert key_counts[-1] <= key_counts[0] + 4 and key_counts[-1] <= 20, (
        key_counts
    )  # without cleaning, four jobs leave more than thirty


def test_keys_of_the_other_rendezvous_of_dead_ranks_do_not_pile_up() -> None:
    """A save commits over a rendezvous of its own, with a name that no other process uses."""
    names, key_counts = iter("abcdef"), []

    def save_and_die(rendezvous: StoreRendezvous) -> None:
        post = b"%d" % rendezvous.rank
        name = rendezvous.meet("save", "agree", post, lambda posts: next(names).encode()).decode()
        other = rendezvous.new_rendezvous(name)
        for phase in ("write", "commit"):
            other.meet("save", phase, post, join)
        other.close()

    store = HashStore()
    for _ in range(5):
        assert run_job(store, range(2), 2, save_and_die, LONG) == {0: None, 1: None}
        together(store, 2)
        key_counts.append(store.num_keys())
    assert max(key_counts) <= key_counts[0] + 3, key_counts


def test_ranks_that_never_meet_leave_few_keys() -> None:
    store, key_counts = HashStore(), []
    for _ in range(12):
        alone(store, [0], 2)
        key_counts.append(store.num_keys())
    assert max(key_counts[9:]) == max(key_counts[10:])
    together(store, 2)
    assert store.num_keys() <= 16


def test_a_late_coordinator_learns_which_meeting_the_other_rank_gave_up() -> None:
    """So both ranks go on to the same meeting."""
    store, given_up = HashStore(), threading.Event()

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        if rendezvous.rank == 0:
            assert given_up.wait(30)
            rendezvous.deadline = LONG  # it learns of the verdict once the other rank has joined
        results: list[Any] = []
        for operation in ("save a", "save b"):
            try:
                results.append(rendezvous.meet(operation, "agree", operation.encode(), join))
            except ShardproofError as error:
                results.append(error.to_wire())
            given_up.set()
            rendezvous.deadline = LONG
        return results

    results = run_job(store, range(2), 2, work, 0.4)
    assert results[0] == results[1]
    assert results[0][0]["details"]["ranks"] == [0]
    assert results[0][1] == b"save b,save b"


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_rank_that_restarts_alone_meets_the_others(restarted: int) -> None:
    """The others wait for its previous incarnation, give up, and join again with the new one."""
    store, steps = HashStore(), 7

    def work(rendezvous: StoreRendezvous) -> list[Any]:
        answers: list[Any] = []
        for step in range(steps):
            if step == 1:
                assert answers == [b"0,1,2"]
                if rendezvous.rank == restarted:
                    rendezvous.close()
                    rendezvous = StoreRendezvous(store, restarted, 3, deadline=1.5)
            try:
                answers.append(rendezvous.meet(f"save {step}", "agree", b"%d" % rendezvous.rank, join))
            except ShardproofError as error:
                answers.append(type(error))
        rendezvous.close()
        return answers

    results = run_job(store, range(3), 3, work, 1.5)
    assert {answers[0] for answers in results.values()} == {b"0,1,2"}
    assert all(RankSilent in answers for answers in results.values()), results
    assert [answers[-2:] for answers in results.values()] == [[b"0,1,2"] * 2] * 3, results


def test_two_rendezvous_of_one_name_that_first_meet_in_the_same_order_do_not_mix() -> None:
    def work(rendezvous: StoreRendezvous) -> list[bytes]:
        second = StoreRendezvous(store, rendezvous.rank, 2, deadline=LONG)
        answers = [
            each.meet("save", "agree", b"%d" % number, join)
            for number in range(3)
            for each in (rendezvous, second)
        ]
        second.close()
        return answers

    store = HashStore()
    expected = [b"%d,%d" % (number, number) for number in range(3) for _ in range(2)]
    assert run_job(store, range(2), 2, work, LONG) == {0: expected, 1: expected}


def test_a_rank_deletes_no_key_of_an_earlier_membership_that_was_welcomed() -> None:
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
    """A store that counts requests."""

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

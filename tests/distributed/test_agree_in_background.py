"""Saves that return before the ranks have agreed: their values, and which saves wait for all ranks."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof as sp
from shardproof.errors import ShardproofError
from tests.harness import Job, rank, reach, rendezvous, run_ranks

LIMIT = 60.0


class Net(nn.Module):
    """Layers whose statistics change in forward, and tensors that may be there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(given)
        return out


class Training:
    """A training run with equal values on all ranks, and a `PerRank` object beside them."""

    def __init__(self, root: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.calls = torch.zeros((), dtype=torch.int64)
        self.more: dict[str, torch.Tensor] = {}
        self.rendezvous = rendezvous(deadline=20.0)
        self.checkpointer = sp.Checkpointer(root, rendezvous=self.rendezvous, **options)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        mine = sp.PerRank({"calls": self.calls, "count": int(self.calls)})
        return {"net": self.net, "optimizer": self.optimizer, "mine": mine, **self.more}

    def step(self) -> None:
        """Changes every tensor: statistics in forward, parameters and slots in the step, the others here."""
        self.optimizer.zero_grad()
        self.net(torch.randn(8, 64)).sum().backward()
        self.optimizer.step()
        self.calls += 1
        for tensor in self.more.values():
            tensor += 1

    def shorten_deadline(self) -> None:
        """Sets a deadline of 1 s, for a save that a rank never joins. Busy machines need more in others."""
        self.rendezvous.deadline = 1.0

    def copies(self) -> list[torch.Tensor]:
        """Every value as it is now."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        held = [*self.net.state_dict().values(), *slots, self.calls, *self.more.values()]
        return [tensor.detach().clone() for tensor in held]

    def restore_and_compare(self, step: int, want: list[torch.Tensor]) -> list[int]:
        """Restores a step, and returns the positions of the tensors that differ from `want`."""
        assert self.checkpointer.restore(self.state, step=step) == step
        return [at for at, pair in enumerate(zip(self.copies(), want, strict=True)) if not torch.equal(*pair)]


def _return_before_the_other_rank_saves(root: str) -> list[int]:
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    if rank() == 1:
        reach("the other has returned")
    want = training.copies()
    pending = training.checkpointer.save(2, training.state)
    reach("returned")
    training.step()
    pending.result(LIMIT)
    return training.restore_and_compare(2, want)


def _hold_rank_1_until_rank_0_has_returned(job: Job) -> None:
    job.until_held(1, "the other has returned")
    job.until_held(0, "returned")
    job.go(1)
    job.until_held(1, "returned")
    job.go(0)
    job.go(1)


def test_a_save_returns_before_the_other_ranks_save(tmp_path: Path) -> None:
    """Rank 1 saves only after rank 0 has returned from its save."""
    hold = {0: "returned", 1: ["the other has returned", "returned"]}
    outcomes = run_ranks(
        2,
        _return_before_the_other_rank_saves,
        str(tmp_path),
        hold=hold,
        script=_hold_rank_1_until_rank_0_has_returned,
    )
    assert [outcome.value for outcome in outcomes] == [[], []]


def _step_before_the_other_rank_saves(root: str) -> list[int]:
    """Rank 0 steps before rank 1 saves: the fence must wait until the ranks have agreed."""
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    want = training.copies()
    if rank() == 0:
        pending = training.checkpointer.save(2, training.state)
        stepping = threading.Thread(target=training.step)
        stepping.start()
        reach("in its step")
    else:
        reach("comes late")
        stepping = threading.Thread(target=training.step)
        pending = training.checkpointer.save(2, training.state)
        stepping.start()
    pending.result(LIMIT)
    stepping.join(LIMIT)
    return training.restore_and_compare(2, want)


def test_a_step_waits_until_the_ranks_have_agreed(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(0, "in its step")
        job.go(0)
        job.until_held(1, "comes late")
        job.go(1)

    hold = {0: "in its step", 1: "comes late"}
    outcomes = run_ranks(2, _step_before_the_other_rank_saves, str(tmp_path), hold=hold, script=script)
    assert [outcome.value for outcome in outcomes] == [[], []]


def _grow_on_one_rank(root: str, odd: int) -> list[list[int]]:
    """From save 2 on, all ranks have one more tensor. From save 4 on, rank `odd` has another."""
    training = Training(root)
    wrong = []
    for number in range(1, 6):
        if number == 2:
            training.more["shared"] = torch.full((3000,), 7.0)
        if number == 4 and rank() == odd:
            training.more["mine too"] = torch.full((5000,), 9.0)
        want = training.copies()
        pending = training.checkpointer.save(number, training.state)
        training.step()
        training.step()
        pending.result(LIMIT)
        wrong.append(training.restore_and_compare(number, want))
    return wrong


@pytest.mark.parametrize("odd", [0, 1])
def test_values_are_those_of_the_call_when_another_rank_needs_a_new_plan(odd: int, tmp_path: Path) -> None:
    """The unchanged rank continues with its cached plan, and gets the new plan in the background."""
    outcomes = run_ranks(2, _grow_on_one_rank, str(tmp_path), odd)
    assert [outcome.value for outcome in outcomes] == [[[]] * 5] * 2


def _fail_on_one_rank(root: str, odd: int) -> tuple[str, str, list[int]]:
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    if rank() == odd:
        training.more["strange"] = object()  # type: ignore[assignment]
    failure = ("", "")
    try:
        training.checkpointer.save(2, training.state).result(LIMIT)
    except ShardproofError as error:
        failure = (type(error).__name__, str(error))
    training.more.clear()
    training.step()
    training.checkpointer.save(3, training.state).result(LIMIT)
    return (*failure, training.checkpointer.steps())


@pytest.mark.parametrize("odd", [0, 1])
def test_all_ranks_report_the_failure_of_a_rank_that_they_did_not_wait_for(odd: int, tmp_path: Path) -> None:
    outcomes = run_ranks(2, _fail_on_one_rank, str(tmp_path), odd)
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * 2
    kind, text, steps = outcomes[0].value
    assert (kind, steps) == ("RankFailure", [1, 3])
    assert f"rank {odd}" in text
    assert "strange" in text


def _fail_and_save_again(root: str, odd: int) -> tuple[list[str], list[int]]:
    """Fails save 2 without a call of `result`. Returns how the saves after it end, and the steps."""
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    if rank() == odd:
        training.more["strange"] = object()  # type: ignore[assignment]
        with pytest.raises(ShardproofError):
            training.checkpointer.save(2, training.state)
        training.more.clear()
    else:
        pending = training.checkpointer.save(2, training.state)
        assert not wait([pending.future()], LIMIT).not_done
    ends = []
    for number in range(3, 7):
        training.step()
        try:
            training.checkpointer.save(number, training.state)
            ends.append("begun")
        except ShardproofError as error:
            ends.append(type(error).__name__)
    training.checkpointer.wait()
    return ends, training.checkpointer.steps()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_failure_is_raised_by_the_next_save_and_by_no_later_one(odd: int, tmp_path: Path) -> None:
    """The failed rank raises at once. At the next save all ranks raise, because the other rank reports it."""
    outcomes = run_ranks(2, _fail_and_save_again, str(tmp_path), odd)
    assert [outcome.value for outcome in outcomes] == [
        (["RankFailure", "begun", "begun", "begun"], [1, 4, 5, 6])
    ] * 2


ONE_SAVES = {0: "over", 1: "does not save"}


def _until_one_is_done(job: Job) -> None:
    """Holds rank 1, which does not save, until rank 0 is done."""
    job.until_held(1, "does not save")
    job.until_held(0, "over")
    job.go(0)
    job.go(1)


def _save_without_rank_1(root: str) -> tuple[str, bool]:
    """Rank 1 does not save. Rank 0 trains on, and `wait` raises the failure."""
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    if rank() == 1:
        reach("does not save")
        return "", True
    training.shorten_deadline()
    pending = training.checkpointer.save(2, training.state)
    training.step()
    assert not wait([pending.future()], LIMIT).not_done
    reach("over")
    with pytest.raises(ShardproofError) as caught:
        training.checkpointer.wait()
    return type(caught.value).__name__, bool(training.calls == 2)


def test_training_goes_on_when_a_rank_never_saves(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _save_without_rank_1, str(tmp_path), hold=ONE_SAVES, script=_until_one_is_done)
    assert outcomes[0].value == ("RankSilent", True)


def _meet_meanwhile(root: str) -> tuple[list[bytes], list[bool]]:
    """Runs the caller's meetings, and other saves, directly after saves that have not agreed yet."""
    training = Training(root)
    training.checkpointer.save(1, training.state).result(LIMIT)
    answers, skipped = [], []
    other = sp.Checkpointer(f"{root}/other", rendezvous=training.rendezvous)
    other.save(1, training.state).result(LIMIT)
    for number in range(2, 6):
        pending = training.checkpointer.save(number, training.state)
        answers.append(training.rendezvous.meet("vote", str(number), f"{number}{rank()}".encode(), _joined))
        skipped.append(training.checkpointer.save(number + 10, training.state, when_busy="skip").skipped)
        beside = other.save(number, training.state)
        pending.result(LIMIT)
        beside.result(LIMIT)
        training.checkpointer.wait(LIMIT)
    assert other.steps() == [1, 2, 3, 4, 5]
    return answers, skipped


def _joined(posts: list[bytes]) -> bytes:
    return b" ".join(posts)


def test_meetings_of_the_caller_keep_their_order_beside_background_saves(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _meet_meanwhile, str(tmp_path))
    (answers, skipped), (_, also) = (outcome.value for outcome in outcomes)
    assert answers == outcomes[1].value[0] == [b"20 21", b"30 31", b"40 41", b"50 51"]
    assert skipped == also


def _returns_without_rank_1(root: str, why: str) -> bool:
    """True if rank 0 returns from its second save, which rank 1 never joins."""
    options: dict[str, Any] = {
        "stage": {"snapshot": "stage"},
        "incremental": {"incremental": True},
        "replicas": {"check_replicas": "all"},
    }.get(why, {})
    training = Training(root, **options)
    if why == "loose":
        training.more["loose"] = torch.ones((1 << 20) + 1, dtype=torch.uint8)
    if why != "first":
        training.checkpointer.save(1, training.state).result(LIMIT)
    if why == "structure":
        training.more["new"] = torch.ones(3)
    if rank() == 1:
        reach("does not save")
        return False
    training.shorten_deadline()
    try:
        training.checkpointer.save(2, training.state)
    except ShardproofError:
        return False
    finally:
        reach("over")
    return True


@pytest.mark.parametrize(
    "why", ["nothing", "first", "structure", "stage", "loose", "incremental", "replicas"]
)
def test_which_saves_wait_for_all_ranks(why: str, tmp_path: Path) -> None:
    """Rank 1 never saves: a save that waits for it fails, and the others return."""

    outcomes = run_ranks(
        2, _returns_without_rank_1, str(tmp_path), why, hold=ONE_SAVES, script=_until_one_is_done
    )
    assert outcomes[0].value is (why == "nothing")

"""Votes of the rerun machine's ranks: their cost, and votes after a rank failed or left."""

from __future__ import annotations

import itertools
import math
import os
import signal
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import shardproof as sp
from shardproof import rerun
from shardproof.training.rerun import votes
from tests.harness import Job, process_group, rank, reach, rendezvous, run_ranks

DEADLINE = 4.0
"""Of tests in which a rank leaves. Other tests have a longer deadline, for busy machines."""


class CountingRendezvous:
    """A rendezvous that counts its meetings."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sizes: list[int] = []
        """Bytes that this rank posted and received, for each meeting."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def meet(self, operation: str, phase: str, post: Any, decide: Any) -> bytes:
        answer: bytes = self._inner.meet(operation, phase, post, decide)
        self.sizes.append(len(post) + len(answer))
        return answer


def step(machine: rerun.RerunMachine, value: float = 1.0) -> rerun.Decision:
    while machine.should_run(None):
        machine.validate(value, math.isnan)
    return machine.decide()


def count_meetings(mode: Any, grouped: bool) -> list[int]:
    counted = CountingRendezvous(rendezvous(deadline=30.0))
    with process_group():
        import torch.distributed as dist

        group = dist.new_group() if grouped else None
        machine = rerun.RerunMachine(mode, rendezvous=counted, group=group)  # type: ignore[arg-type]
        for _ in range(5):
            assert step(machine) == rerun.Decision()
        bad = step(machine, math.nan if rank() == 1 else 1.0)
    assert bad.exit == (mode == "validate")
    return counted.sizes


@pytest.mark.parametrize(
    ("mode", "grouped", "quiet", "loud"),
    [
        ("validate", False, 5, 2),
        ("validate", True, 0, 2),
        ("disabled", False, 0, 0),
        ("disabled", True, 0, 0),
    ],
)
def test_a_quiet_step_costs_one_empty_exchange_and_a_disabled_machine_none(
    mode: str, grouped: bool, quiet: int, loud: int
) -> None:
    for outcome in run_ranks(2, count_meetings, mode, grouped):
        sizes = outcome.value
        assert sizes[:quiet] == [0] * quiet
        assert len(sizes[quiet:]) == loud and all(0 < size < 2000 for size in sizes[quiet:])


def raise_on(raising: int, where: str, grouped: bool) -> str:
    with process_group():
        import torch.distributed as dist

        group = dist.new_group() if grouped else None
        machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0), group=group)
        try:
            with machine:
                for number in range(4):
                    while machine.should_run(None):
                        if where == "in the step" and number == 2 and rank() == raising:
                            raise ZeroDivisionError("the loader broke")
                    machine.decide()
                    if where == "between steps" and number == 1 and rank() == raising:
                        raise ZeroDivisionError("the loader broke")
        except sp.RankFailure as failure:
            return f"{failure.causes}"
        except ZeroDivisionError as own:
            return f"own: {own}"
    return "no failure"


@pytest.mark.parametrize("raising", [0, 2])
@pytest.mark.parametrize("where", ["in the step", "between steps"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_rank_that_raises_fails_the_next_vote_of_all_ranks(raising: int, where: str, grouped: bool) -> None:
    outcomes = run_ranks(3, raise_on, raising, where, grouped, timeout=25)  # the deadline is longer
    for outcome in outcomes:
        cause = f"{{{raising}: 'ZeroDivisionError: the loader broke'}}"
        assert outcome.value == ("own: the loader broke" if outcome.rank == raising else cause)


def end_early() -> list[str]:
    with process_group():
        machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0))
        data = rerun.ReplayableIterator(range(2 if rank() == 1 else 3))
        try:
            with machine:
                while True:
                    while machine.should_run(data):
                        next(data)
                    machine.decide()
        except sp.RankFailure as failure:
            return [failure.causes[1]]
        except StopIteration as own:
            return own.__notes__


def test_a_rank_whose_data_ends_earlier_names_the_remedy_on_all_ranks() -> None:
    for outcome in run_ranks(2, end_early, timeout=60):
        (text,) = outcome.value
        assert "the data of this rank ended within a step" in text
        assert "drop_last=True" in text


def even_ends() -> int:
    """The remedy: the sampler drops the last samples, or an endless iterator and a number of steps."""
    with process_group():
        samples = range(7)
        sampler = DistributedSampler(samples, drop_last=True)
        loaders = [DataLoader(samples, sampler=sampler, batch_size=1), itertools.cycle(range(2 + rank()))]
        for loader in loaders:
            machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0))
            data = rerun.ReplayableIterator(loader)
            with machine:
                for _ in range(3):
                    while machine.should_run(data):
                        next(data)
                    machine.decide()
        return machine.step


def test_ranks_with_as_many_microbatches_end_together() -> None:
    assert [outcome.value for outcome in run_ranks(2, even_ends, timeout=60)] == [3, 3]


def save_while_another_raises(folder: str) -> str:
    meeting_place = rendezvous(deadline=30.0)
    machine = rerun.RerunMachine(rendezvous=meeting_place)
    checkpointer = sp.Checkpointer(folder, rendezvous=meeting_place)
    try:
        with machine:
            step(machine)
            if rank() == 1:
                raise ZeroDivisionError("the optimizer broke")
            checkpointer.save(1, {"rerun": machine}).result()
    except (sp.RankFailure, ZeroDivisionError) as failure:
        return str(failure)
    return "no failure"


def test_a_rank_that_raises_fails_the_save_that_the_others_are_in(tmp_path: Any) -> None:
    for outcome in run_ranks(2, save_while_another_raises, str(tmp_path), timeout=25):
        assert "the optimizer broke" in outcome.value


def leave(how: str, grouped: bool) -> Any:
    with process_group():
        import torch.distributed as dist

        group = dist.new_group() if grouped else None
        meeting_place = rendezvous(deadline=30.0)
        machine = rerun.RerunMachine(rendezvous=meeting_place, group=group)
        with machine:
            step(machine)
            meeting_place.deadline = DEADLINE
            if rank() == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                return "left"
            step(machine)
    return "no failure"


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_rank_that_leaves_is_named_after_the_deadline(how: str, grouped: bool) -> None:
    outcomes = run_ranks(3, leave, how, grouped, timeout=40)
    for outcome in (outcomes[0], outcomes[2]):
        error = outcome.error
        assert isinstance(error, sp.RankSilent | sp.RankFailure), outcome.trace
        assert 1 in (error.ranks if isinstance(error, sp.RankSilent) else error.details["silent"])


def out_of_step(grouped: bool) -> None:
    with process_group():
        import torch.distributed as dist

        group = dist.new_group() if grouped else None
        machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0), group=group)
        if rank() == 1:
            machine.state_tree()["job"].load_state_dict(
                {**machine.state_tree()["job"].state_dict(), "step": 5}
            )
            machine.state_loaded()
        step(machine)


@pytest.mark.parametrize("grouped", [False, True])
def test_ranks_in_different_steps_get_an_error(grouped: bool) -> None:
    for outcome in run_ranks(2, out_of_step, grouped):
        assert isinstance(outcome.error, sp.StructureError), outcome.trace
        assert "validate step 0" in str(outcome.error) and "validate step 5" in str(outcome.error)


def reject_on_one(folder: str) -> tuple[int, bool]:
    machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0), log=f"{folder}/log.jsonl")
    step(machine)
    if rank() == 1:
        machine.reject("replicas of model.weight differ", ranks=[2])
    decision = step(machine)
    return decision.code, decision.checkpoint


def test_a_rejection_by_one_rank_ends_the_job_on_all_ranks(tmp_path: Any) -> None:
    assert [one.value for one in run_ranks(3, reject_on_one, str(tmp_path))] == [(17, False)] * 3
    (record,) = rerun.read_rejected(tmp_path / "log.jsonl")
    assert (record.step, record.rank, record.message) == (1, 2, "replicas of model.weight differ")


def raise_while_one_is_away(raising: int) -> str:
    votes.ERROR_POST_SECONDS = 1.0
    machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0))
    try:
        with machine:
            step(machine)
            if rank() == 1:
                reach("away")  # as in a collective that waits for the rank that raises
            if rank() == raising:
                raise ZeroDivisionError("the loader broke")
            step(machine)
    except (sp.RankFailure, ZeroDivisionError) as failure:
        return str(failure)
    return "no failure"


@pytest.mark.parametrize(("raising", "ends_first"), [(0, (0, 2)), (2, (2,))])
def test_a_rank_that_raises_does_not_wait_for_one_that_waits_for_it(
    raising: int, ends_first: tuple[int, ...]
) -> None:
    """If rank 0 raises, the other ranks get its error at once. All this ends long before the deadline."""

    def script(job: Job) -> None:
        job.until_held(1, "away")
        job.until_done(*ends_first)
        job.go(1)

    held = {1: "away"}
    for outcome in run_ranks(3, raise_while_one_is_away, raising, hold=held, script=script, timeout=25):
        assert "the loader broke" in outcome.value


def suspect_on(values: dict[int, list[float]], log: str) -> tuple[int, str, list[int]]:
    machine = rerun.RerunMachine(rendezvous=rendezvous(deadline=30.0), log=log)
    mine = iter(values.get(rank(), []))
    while machine.should_run(None):
        machine.validate(next(mine, 1.0), rerun.not_finite, message="loss")
    decision = machine.decide()
    pending = machine.state_tree()["job"].state_dict()["suspects"]
    return decision.code, str(decision.attribution), [suspect["rank"] for suspect in pending]


def test_only_suspects_that_fail_again_need_another_device(tmp_path: Any) -> None:
    log = str(tmp_path / "log.jsonl")
    values = {1: [math.nan, 2.0], 2: [math.nan, math.nan]}
    for outcome in run_ranks(3, suspect_on, values, log):
        assert outcome.value == (16, "None", [2])
    (record,) = rerun.read_rejected(log)
    assert (record.rank, record.verdict, record.second) == (1, "transient fault", 2.0)


def test_several_suspects_that_do_not_fail_again_are_all_named(tmp_path: Any) -> None:
    values = {1: [math.nan, 2.0], 2: [math.nan, 3.0]}
    for outcome in run_ranks(3, suspect_on, values, str(tmp_path / "log.jsonl")):
        code, text, pending = outcome.value
        assert code == 0 and pending == []
        assert text.count("when run again") == 2 and "rank 1 on" in text and "rank 2 on" in text

"""The rerun machine in one process, as a training loop uses it. A second machine stands for a restart."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof import rerun
from shardproof.errors import PlainDataError, StructureError
from shardproof.rerun import AttributionKind, Decision, DeviceIdentity, RerunMachine, State
from shardproof.state import Catalogue, bind, collect
from shardproof.training.rerun.injection import FaultInjector

HERE, THERE = DeviceIdentity("here"), DeviceIdentity("there")
PLAIN = Decision()


def batches(start: int = 0) -> Iterator[torch.Tensor]:
    for number in range(start, start + 100):
        yield torch.full((2,), float(number))


class Job:
    """One process of a run: a weight, its data, a machine, and a record of its steps."""

    def __init__(self, start: int = 0, **options: Any) -> None:
        self.weight = torch.zeros(2)
        self.data = rerun.ReplayableIterator(batches(start))
        self.machine = RerunMachine(identity=options.pop("identity", HERE), **options)
        self.seen: list[tuple[float, float]] = []
        """Batch and draw of each run of a step."""
        self.drawn: list[float] = []
        """The draws of the steps that counted."""

    def step(self, check: Callable[[float], Any] = math.isnan, **options: Any) -> Decision:
        while self.machine.should_run(self.data):
            batch = next(self.data)
            draw = random.random()
            self.seen.append((float(batch[0]), draw))
            update = batch * draw
            batch.zero_()  # a step may write into its microbatch
            self.machine.validate(float(update.sum()), check, message="loss", **options)
        decision = self.machine.decide()
        if not decision.exit:
            self.weight += update
            self.drawn.append(draw)
        return decision

    def saved(self) -> dict[str, Any]:
        return {"weight": self.weight, "rerun": self.machine}


def stored(tree: Any) -> tuple[Catalogue, dict[str, torch.Tensor]]:
    """What a checkpoint of one rank would hold."""
    collected = collect(tree)
    tensors = {entry.key: (entry.dtype, entry.shape) for entry in collected.tensors}
    values = {entry.key: entry.pieces[0].view.clone() for entry in collected.tensors if entry.pieces}
    objects = {entry.key: entry.value for entry in collected.objects}
    return Catalogue(tensors, {}, objects, 1), values


def load(tree: Any, checkpoint: tuple[Catalogue, dict[str, torch.Tensor]]) -> None:
    catalogue, values = checkpoint
    binding = bind(tree, catalogue)
    for refused in binding.refused:
        raise refused
    assert not binding.missing and not binding.mismatched
    for entry in binding.tensors:
        for piece in entry.pieces:
            piece.view.detach().copy_(values[entry.key])
    for act in binding.finish:
        act()


def without_fault(steps: int) -> Job:
    random.seed(5)
    job = Job()
    for _ in range(steps):
        assert job.step() == PLAIN
    return job


def test_quiet_steps_run_once() -> None:
    job = without_fault(3)
    assert [batch for batch, _ in job.seen] == [0.0, 1.0, 2.0]
    assert job.machine.step == 3 and job.machine.state is State.NOT_RUNNING


def test_a_transient_fault_reruns_the_step_and_does_not_change_training() -> None:
    clean = without_fault(4)
    random.seed(5)
    job = Job(inject=FaultInjector("transient", steps=[2]))
    decisions = [job.step() for _ in range(4)]
    assert [decision.attribution is not None for decision in decisions] == [False, False, True, False]
    found = decisions[2].attribution
    assert found.kind is AttributionKind.TRANSIENT_FAULT and found.step == 2
    assert (found.suspects[0].identity, found.suspects[0].message) == (HERE, "loss")
    assert math.isnan(found.suspects[0].first) and found.suspects[0].second == pytest.approx(
        job.seen[3][1] * 4
    )
    assert not decisions[2].checkpoint and not decisions[2].exit and not decisions[2].settles
    assert [batch for batch, _ in job.seen] == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert job.seen[2] == job.seen[3]
    assert torch.equal(job.weight, clean.weight) and job.drawn == clean.drawn


def test_another_bad_value_in_place_ends_the_job_without_a_checkpoint_if_it_is_fatal() -> None:
    values = iter([math.nan, math.inf])
    machine = RerunMachine()
    while machine.should_run(None):
        machine.validate(next(values), rerun.not_finite)
    decision = machine.decide()
    assert (decision.checkpoint, decision.exit, decision.code) == (False, True, 17)
    assert decision.attribution.kind is AttributionKind.TRANSIENT_FAULT

    values = iter([math.nan, math.inf])
    machine = RerunMachine()
    while machine.should_run(None):
        machine.validate(next(values), rerun.not_finite, fatal=False)
    decision = machine.decide()
    assert (decision.checkpoint, decision.exit, decision.code) == (False, False, 0)


@pytest.mark.parametrize(
    ("kind", "identity", "fatal", "verdict", "code"),
    [
        ("persistent", THERE, True, AttributionKind.PERSISTENT_FAULT, 0),
        ("persistent", HERE, True, None, 16),
        ("correct", THERE, True, AttributionKind.CORRECT_RESULT, 17),
        ("correct", THERE, False, AttributionKind.CORRECT_RESULT, 0),
        ("correct", HERE, True, None, 16),
    ],
)
def test_a_reproduced_result_is_rerun_after_a_restart_with_its_data(
    kind: Any, identity: DeviceIdentity, fatal: bool, verdict: AttributionKind | None, code: int
) -> None:
    clean = without_fault(4)
    random.seed(5)
    first = Job(inject=FaultInjector(kind, steps=[2]))
    assert [first.step(), first.step()] == [PLAIN, PLAIN]
    decision = first.step(fatal=fatal)
    assert (decision.checkpoint, decision.exit, decision.code) == (True, True, 16)
    assert decision.attribution is None and not decision.settles
    assert first.machine.state is State.WILL_RERUN and first.machine.step == 2
    checkpoint = stored(first.saved())

    random.seed(99)
    second = Job(start=3, inject=FaultInjector(kind, steps=[2]), identity=identity)  # the loader has moved on
    load(second.saved(), checkpoint)
    decision = second.step(fatal=fatal)
    assert second.seen[0] == first.seen[2]
    assert decision.code == code and decision.exit == (code != 0) and not decision.checkpoint
    if verdict is None:
        assert decision.attribution is None and not decision.settles
        assert second.machine.state is State.WILL_RERUN
        return
    assert decision.settles and decision.attribution.kind is verdict
    assert decision.attribution.suspects[0].identity == HERE
    if code == 0:
        assert second.step() == PLAIN
        assert torch.equal(second.weight, clean.weight)
        assert first.drawn + second.drawn == clean.drawn


def test_a_fault_that_is_gone_on_the_same_device_after_a_restart_was_transient() -> None:
    first = Job(inject=FaultInjector("correct", steps=[0]))
    assert first.step().checkpoint
    second = Job(start=1)
    load(second.saved(), stored(first.saved()))
    decision = second.step()
    assert decision.attribution.kind is AttributionKind.TRANSIENT_FAULT and decision.settles
    assert not decision.exit


def test_a_restart_on_the_same_device_warns_and_keeps_the_pending_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Job(inject=FaultInjector("persistent", steps=[0]))
    first.step()
    checkpoint = stored(first.saved())
    for _ in range(2):
        again = Job(start=1, inject=FaultInjector("persistent", steps=[0]))
        load(again.saved(), checkpoint)
        with caplog.at_level(logging.WARNING, "shardproof"):
            assert again.step().code == 16
        assert (
            "ran on the same device again, so nothing is attributed: exclude device 0 of node here"
            in caplog.text
        )
        checkpoint = stored(again.saved())
    elsewhere = Job(start=1, inject=FaultInjector("persistent", steps=[0]), identity=THERE)
    load(elsewhere.saved(), checkpoint)
    assert elsewhere.step().attribution.kind is AttributionKind.PERSISTENT_FAULT
    assert [batch for batch, _ in elsewhere.seen] == [0.0]


def test_an_idle_and_a_pending_machine_have_the_same_checkpoint_keys() -> None:
    idle, pending = Job(), Job(inject=FaultInjector("correct", steps=[0]))
    pending.step()
    (quiet, _), (busy, values) = stored(idle.saved()), stored(pending.saved())
    assert sorted(quiet.tensors) == sorted(busy.tensors) and sorted(quiet.objects) == sorted(busy.objects)
    key = "rerun.@part.own.@rank-0.step_data"
    assert quiet.tensors[key] == ("uint8", (0,)) and values[key].numel() > 0


def test_a_save_in_the_middle_of_a_step_is_refused() -> None:
    job = Job()
    assert job.machine.should_run(job.data)
    with pytest.raises(StructureError, match=r"in the middle of step 0 \(initial run\)"):
        collect(job.saved())
    assert not job.machine.should_run(job.data)
    with pytest.raises(StructureError, match=r"after decide\(\)"):
        collect(job.saved())
    job.machine.decide()
    collect(job.saved())


def test_a_pending_rerun_of_another_layout_is_refused_or_dropped(caplog: pytest.LogCaptureFixture) -> None:
    first = Job(inject=FaultInjector("correct", steps=[1]), layout="dp2 tp1")
    first.step()
    first.step()
    checkpoint = stored(first.saved())
    second = Job(start=2, layout="dp1 tp2")
    with pytest.raises(
        StructureError, match=r"step 1 waits.*layout 'dp2 tp1', now 'dp1 tp2'.*pending=\"drop\""
    ):
        load(second.saved(), checkpoint)
    assert second.machine.state is State.NOT_RUNNING and second.weight.tolist() == [0.0, 0.0]

    third = Job(start=2, layout="dp1 tp2", pending="drop")
    with caplog.at_level(logging.WARNING, "shardproof"):
        load(third.saved(), checkpoint)
    assert "dropped, with its microbatches" in caplog.text
    assert third.machine.step == 1 and third.step() == PLAIN
    assert [batch for batch, _ in third.seen] == [2.0]


def test_a_load_ignores_state_that_a_failed_load_left() -> None:
    reporting, idle, machine = Job(mode="report"), RerunMachine(), RerunMachine()
    reporting.step()
    machine.state_tree()["own"].value.load_state_dict(
        reporting.machine.state_tree()["own"].value.state_dict()
    )  # this load fails; the next one is of fewer ranks, so this rank gets no state of its own
    job = idle.state_tree()["job"].state_dict()
    machine.check_stored({"job": job})
    machine.state_tree()["job"].load_state_dict(job)
    machine.state_loaded()
    assert "loss" in reporting.machine.report() and "loss" not in machine.report()


def test_idle_state_of_another_layout_loads() -> None:
    first = Job(layout="dp2")
    first.step()
    second = Job(start=1, layout="tp2")
    load(second.saved(), stored(first.saved()))
    assert second.machine.step == 1 and second.step() == PLAIN


@pytest.mark.parametrize("mode", ["disabled", "report"])
def test_a_pending_step_gets_its_data_in_modes_that_reject_nothing(mode: Any) -> None:
    first = Job(inject=FaultInjector("correct", steps=[0]))
    first.step()
    second = Job(start=1, mode=mode)
    load(second.saved(), stored(first.saved()))
    assert second.step() == PLAIN and second.step() == PLAIN
    assert [batch for batch, _ in second.seen] == ([0.0, 1.0] if mode == "disabled" else [0.0, 0.0, 1.0, 1.0])


def test_report_mode_finds_differences_between_runs_and_rejects_nothing() -> None:
    noise = iter(range(1000))
    machine = RerunMachine("report")
    for _ in range(5):
        while machine.should_run(None):
            machine.validate(1.0, rerun.not_finite, message="same")
            machine.validate(100.0 + next(noise) % 2, rerun.not_finite, message="planted")
            machine.validate(math.nan, rerun.not_finite, message="bad")
        assert machine.decide() == PLAIN
    text = machine.report()
    assert "same: 5 compared, none differed" in text and "bad: 5 compared, none differed" in text
    assert "planted: 5 compared, 5 differed" in text and "max 9.9e-03" in text


def test_report_mode_restores_generators_and_data() -> None:
    job = Job(mode="report")
    for _ in range(3):
        job.step()
    assert "loss: 3 compared, none differed" in job.machine.report()
    assert [batch for batch, _ in job.seen] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_disabled_machine_validates_nothing() -> None:
    job = Job(mode="disabled")
    assert job.step(lambda value: True) == PLAIN
    assert len(job.seen) == 1 and job.machine.step == 1


def test_the_first_steps_of_a_process_are_not_validated_except_a_pending_one() -> None:
    job = Job(skip_first=2, inject=FaultInjector("correct", rate=1.0))
    assert [job.step(), job.step()] == [PLAIN, PLAIN]
    assert job.step().checkpoint
    again = Job(start=3, skip_first=2, inject=FaultInjector("correct", rate=1.0), identity=THERE)
    load(again.saved(), stored(job.saved()))
    assert again.step(fatal=False).attribution.kind is AttributionKind.CORRECT_RESULT
    assert [again.step(), again.step()] == [PLAIN, PLAIN]
    assert again.step().checkpoint


def test_statistics_of_rejections_take_each_result_once_and_are_saved() -> None:
    large = rerun.UnexpectedlyLarge(10.0, window=2)
    machine = RerunMachine()
    runs = iter([1.0, math.nan, 2.0])  # the second step's first run is rejected
    for _ in range(2):
        while machine.should_run(None):
            machine.validate(next(runs), large, message="norm")
        machine.decide()
    assert large.state_dict() == {"values": [1.0, 2.0]}

    fresh, other = rerun.UnexpectedlyLarge(10.0, window=2), RerunMachine()
    load({"rerun": other}, stored({"rerun": machine}))
    while other.should_run(None):
        other.validate(3.0, fresh, message="norm")
        assert fresh.state_dict() == {"values": [1.0, 2.0]}
    other.decide()
    assert fresh.state_dict() == {"values": [2.0, 3.0]}


def test_a_new_rejection_object_in_each_step_is_refused() -> None:
    machine = RerunMachine()

    def step() -> None:
        while machine.should_run(None):
            machine.validate(1.0, rerun.Spike(3.0), message="loss")
        machine.decide()

    for _ in range(64):
        step()
    with pytest.raises(ValueError, match=r"65 different objects.*Make one for each validated result, before"):
        step()


def test_several_iterators_are_rewound_and_saved_together() -> None:
    def step(machine: RerunMachine, data: list[Any]) -> tuple[Decision, list[list[int]]]:
        seen = []
        while machine.should_run(data):
            seen.append([next(one) for one in data for _ in range(2)])
            machine.validate(1.0, lambda value: True)
        return machine.decide(), seen

    first = RerunMachine(identity=HERE)
    decision, seen = step(first, [rerun.ReplayableIterator(range(at, at + 50)) for at in (0, 100)])
    assert decision.checkpoint and seen == [[0, 1, 100, 101]] * 2
    second = RerunMachine(identity=THERE)
    load({"rerun": second}, stored({"rerun": first}))
    decision, seen = step(second, [rerun.ReplayableIterator(range(at, at + 50)) for at in (2, 102)])
    assert decision.settles and seen == [[0, 1, 100, 101]]


def drawing() -> Iterator[torch.Tensor]:
    """Data that draws from the generators of the process, as a loader without workers does."""
    while True:
        yield torch.rand(1) + random.random()


def test_a_rerun_has_the_same_draws_if_its_data_uses_the_same_generators() -> None:
    def step(
        machine: RerunMachine, data: Any, bad: Callable[[float], Any]
    ) -> tuple[Decision, list[list[float]]]:
        seen = []
        while machine.should_run(data):
            given = [float(next(data)), random.random(), float(next(data)), float(torch.rand(1))]
            seen.append(given)
            machine.validate(sum(given), bad, fatal=False)
        return machine.decide(), seen

    def fresh(seed: int, identity: DeviceIdentity) -> tuple[RerunMachine, Any]:
        random.seed(seed), torch.manual_seed(seed)
        return RerunMachine(identity=identity), rerun.ReplayableIterator(drawing())

    clean = fresh(8, HERE)
    wanted = [step(*clean, lambda value: False)[1] for _ in range(3)]
    machine, data = fresh(8, HERE)
    assert step(machine, data, lambda value: False)[1] == wanted[0]
    decision, seen = step(machine, data, lambda value: True)
    assert decision.checkpoint and seen == wanted[1] * 2
    after, data = fresh(9, THERE)
    load({"rerun": after}, stored({"rerun": machine}))
    decision, seen = step(after, data, lambda value: True)
    assert decision.attribution.kind is AttributionKind.CORRECT_RESULT and seen == wanted[1]
    assert step(after, data, lambda value: False)[1] == wanted[2]


def test_reproduced_values_that_cannot_be_saved_are_refused() -> None:
    machine = RerunMachine()
    for _ in range(2):
        assert machine.should_run(None)
        machine.validate(object(), lambda value: True, compare=lambda a, b: 0.0)
    with pytest.raises(PlainDataError, match=r"the step's beginning\.suspicion\.value"):
        machine.should_run(None)


def test_all_results_rejected_from_outside_are_logged(tmp_path: Path) -> None:
    machine = RerunMachine(log=tmp_path / "log")
    machine.reject("replicas of a differ", ranks=[3, 4])
    machine.reject("replicas of b differ", ranks=[3])
    machine.reject("the room is on fire", ranks=[])
    while machine.should_run(None):
        pass
    assert machine.decide().code == 17
    assert [(record.rank, record.message) for record in rerun.read_rejected(tmp_path / "log")] == [
        (3, "replicas of a differ"),
        (4, "replicas of a differ"),
        (3, "replicas of b differ"),
        (0, "the room is on fire"),
    ]


def test_a_device_with_the_same_uuid_is_the_same_under_another_node_and_index() -> None:
    job = Job(identity=DeviceIdentity("pod-1", "GPU-7", 3))
    assert job.step(lambda value: True).checkpoint
    again = Job(start=1, identity=DeviceIdentity("pod-2", "GPU-7", 0))
    load(again.saved(), stored(job.saved()))
    assert again.step(lambda value: True).code == 16
    assert again.machine.state is State.WILL_RERUN


def test_a_loss_with_its_graph_can_be_given_to_any_rejection(recwarn: pytest.WarningsRecorder) -> None:
    weight, machine = torch.ones(2, requires_grad=True), RerunMachine()
    while machine.should_run(None):
        machine.validate(weight.sum(), math.isnan)
        machine.validate(weight.sum(), lambda value: value.requires_grad)
    assert machine.decide() == PLAIN and not recwarn.list


def test_the_iterators_of_stages_without_data_may_be_none() -> None:
    machine, data = RerunMachine(), rerun.ReplayableIterator(range(9))
    values = iter([math.nan, 1.0])
    seen = []
    while machine.should_run([None, data]):
        seen.append(next(data))
        machine.validate(next(values), math.isnan)
    assert machine.decide().attribution is not None and seen == [0, 0]


def test_statistics_are_bounded_for_any_number_of_messages() -> None:
    machine = RerunMachine("report")
    for step in range(400):
        while machine.should_run(None):
            machine.validate(float(step), math.isnan, message=f"loss of step {step}")
        machine.decide()
    lines = machine.report().splitlines()
    assert len(lines) < 300 and "(others): 144 compared, none differed" in lines[1]


def test_a_pending_step_needs_as_many_iterators_and_step_states_as_before() -> None:
    first = Job(inject=FaultInjector("correct", steps=[0]))
    first.step()
    second = RerunMachine()
    load({"weight": torch.zeros(2), "rerun": second}, stored(first.saved()))
    with pytest.raises(StructureError, match="from 1 iterators, and should_run got 0"):
        second.should_run(None)
    third = Job(step_state=[rerun.BufferState(torch.nn.BatchNorm1d(1))])
    load(third.saved(), stored(first.saved()))
    with pytest.raises(StructureError, match="began with 0 step_state objects"):
        third.step()


def test_step_state_is_restored_in_place_and_after_a_restart() -> None:
    def job(identity: DeviceIdentity) -> tuple[torch.nn.BatchNorm1d, RerunMachine]:
        norm = torch.nn.BatchNorm1d(1)
        return norm, RerunMachine(step_state=[rerun.BufferState(norm)], identity=identity)

    def step(norm: torch.nn.Module, machine: RerunMachine, check: Callable[[Any], Any]) -> Decision:
        while machine.should_run(None):
            norm(torch.tensor([[1.0], [3.0]]))
            machine.validate(1.0, check)
        return machine.decide()

    norm, machine = job(HERE)
    step(norm, machine, lambda value: False)
    step(norm, machine, lambda value: True)
    assert int(norm.num_batches_tracked) == 2
    other, after = job(THERE)
    load({"norm": other, "rerun": after}, stored({"norm": norm, "rerun": machine}))
    step(other, after, lambda value: False)
    assert int(other.num_batches_tracked) == 2


def test_a_microbatch_that_cannot_be_saved_is_named_in_the_first_step() -> None:
    machine, data = RerunMachine(), rerun.ReplayableIterator([{"x": object()}])
    assert machine.should_run(data)
    next(data)
    with pytest.raises(PlainDataError, match=r"microbatches\.0\.0\.x"):
        machine.should_run(data)


def test_a_result_rejected_from_outside_ends_the_job(tmp_path: Path) -> None:
    for mode in ("validate", "disabled"):
        machine = RerunMachine(mode, log=tmp_path / mode)
        machine.reject("replicas of w differ", ranks=[3])
        while machine.should_run(None):
            pass
        decision = machine.decide()
        assert (decision.checkpoint, decision.exit, decision.code) == (False, True, 17)
        (record,) = rerun.read_rejected(tmp_path / mode)
        assert (record.rank, record.message) == (3, "replicas of w differ")
        assert rerun.steps_to_skip(tmp_path / mode) == set()


def test_results_are_logged_once_they_are_decided(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    first = Job(inject=FaultInjector("correct", steps=[1]), log=path)
    first.step()
    first.step()
    assert rerun.read_rejected(path) == []
    second = Job(start=2, inject=FaultInjector("correct", steps=[1]), identity=THERE, log=str(path))
    load(second.saved(), stored(first.saved()))
    second.step()
    (record,) = rerun.read_rejected(path)
    assert (record.step, record.rank, record.node, record.verdict) == (1, 0, "here", "correct result")
    assert rerun.steps_to_skip(path) == {1}


def test_the_caller_sets_the_exit_codes() -> None:
    machine = RerunMachine(exit_codes=rerun.ExitCodes(restart=75, failed=76))
    while machine.should_run(None):
        machine.validate(1.0, lambda value: True)
    assert machine.decide().code == 75


def test_calls_in_the_wrong_order_are_refused() -> None:
    machine, data = RerunMachine(), rerun.ReplayableIterator(range(9))
    with pytest.raises(RuntimeError, match="once after each"):
        machine.decide()
    with pytest.raises(RuntimeError, match="inside of"):
        machine.validate(1.0, math.isnan)
    with pytest.raises(TypeError, match="Wrap it once"):
        machine.should_run([1, 2])  # type: ignore[list-item]
    assert machine.should_run(data)
    with pytest.raises(RuntimeError, match="in the middle of step 0"):
        machine.decide()
    with pytest.raises(RuntimeError, match="cannot be nested"):
        machine.should_run(rerun.ReplayableIterator(range(9)))
    assert not machine.should_run(data)
    with pytest.raises(RuntimeError, match=r"call decide\(\)"):
        machine.should_run(data)
    machine.decide()
    with pytest.raises(ValueError, match="not a valid Mode"):
        RerunMachine("on")  # type: ignore[arg-type]
    while machine.should_run(data):
        machine.validate(1.0, lambda value: True)
    assert machine.decide().exit
    with pytest.raises(RuntimeError, match="this process ends"):
        machine.should_run(data)


def test_a_rerun_that_takes_another_path_did_not_reproduce_the_result() -> None:
    machine, runs = RerunMachine(), iter([True, False])
    while machine.should_run(None):
        if next(runs):
            machine.validate(math.nan, math.isnan, message="loss")
    found = machine.decide().attribution
    assert found.kind is AttributionKind.TRANSIENT_FAULT
    assert "'loss' was nan, and was not computed when run again" in str(found)


def test_a_tolerance_or_a_compare_function_decides_whether_a_result_is_reproduced() -> None:
    for options, code in (({}, 0), ({"tolerance": 0.2}, 16), ({"compare": lambda a, b: 0.0}, 16)):
        machine, values = RerunMachine(), iter([1.0, 1.1])
        while machine.should_run(None):
            machine.validate(next(values), lambda value: True, fatal=False, **options)
        assert machine.decide().code == code


class Level:
    """A rejection that records the accepted values."""

    def __init__(self) -> None:
        self.accepted: list[float] = []

    def __call__(self, value: float) -> bool:
        return value > 10.0

    def accept(self, value: float) -> None:
        self.accepted.append(value)

    def state_dict(self) -> dict[str, Any]:
        return {"accepted": self.accepted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accepted = state["accepted"]


def test_a_rejected_result_enters_the_statistics_only_once_it_is_found_to_be_correct() -> None:
    def step(machine: RerunMachine, level: Level, values: list[float]) -> None:
        runs = iter(values)
        while machine.should_run(None):
            machine.validate(next(runs), level, fatal=False, message="norm")
        machine.decide()

    level, first = Level(), RerunMachine(identity=HERE)
    step(first, level, [1.0])
    step(first, level, [11.0, 12.0])
    assert level.accepted == [1.0]  # a transient fault left another bad value
    step(first, level, [13.0, 13.0])
    checkpoint = stored({"rerun": first})
    for value, accepted in ((13.0, [1.0, 13.0]), (14.0, [1.0]), (2.0, [1.0, 2.0])):
        level, second = Level(), RerunMachine(identity=THERE)
        load({"rerun": second}, checkpoint)
        step(second, level, [value])
        assert level.accepted == accepted

"""Schedules, and the agreement on the call that saves, against every order of events."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardproof as sp
from shardproof.rendezvous import Decide, LocalRendezvous
from shardproof.runs.checkpointer.agreed_calls import AgreedCalls, Gate, Request, choose
from shardproof.runs.checkpointer.due_saves import DueSaves
from shardproof.runs.checkpointer.preemption import SignalNotices, lead_seconds, limit_of
from shardproof.runs.checkpointer.schedules import Schedule, advice_of, best_interval
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.gate import Gate as WriteGate


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.lists(st.integers(1, 25), min_size=1, max_size=60),
)
def test_a_schedule_by_steps_saves_at_the_first_call_at_or_after_each_multiple(
    multiples: list[int], strides: list[int]
) -> None:
    schedule: Schedule = sp.Every(steps=multiples[0])
    for multiple in multiples[1:]:
        schedule = schedule | sp.Every(steps=multiple)
    before = 0
    for stride in strides:
        step = before + stride
        passed = any(one % multiple == 0 for one in range(before + 1, step + 1) for multiple in multiples)
        assert schedule.is_due_at(step, before) == passed
        before = step


@pytest.mark.parametrize("wrong", [{}, {"steps": 0}, {"steps": True}, {"minutes": 0}, {"minutes": math.inf}])
def test_wrong_schedules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Every needs"):
        sp.Every(**wrong)


def test_options_that_are_no_schedule_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        _ = sp.Every(steps=1) | 3
    for wrong in ({"every": 500}, {"preemption": True}, {"mtbf_hours": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sp.Checkpointer(tmp_path, **wrong)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=150), st.data())
def test_all_ranks_save_at_the_same_calls_in_every_order_of_events(
    ranks: int, order: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """A rank calls, or its monitor moves. The reference sees all ranks at once, and knows what each did."""
    gates = [Gate() for _ in range(ranks)]
    saved: list[dict[int, Request]] = [{} for _ in range(ranks)]
    posts: dict[int, int] = {}
    choice: tuple[int, Request] | None = None
    noted: set[int] = set()
    expected: dict[int, Request] = {}

    def call(rank: int) -> None:
        gate = gates[rank]
        if gate.is_open:
            request = gate.answer()
            if request is not None:
                saved[rank][gate.answered] = request

    def monitor(rank: int) -> None:
        nonlocal choice
        if rank not in posts:
            posts[rank] = gates[rank].promise()
            if len(posts) == ranks:
                request = data.draw(st.sampled_from([Request(), Request(True), Request(True, "signal")]))
                number = choose([posts[rank] for rank in range(ranks)]) if request else 0
                choice = number, request
                if number:
                    assert all(gate.answered < number for gate in gates)  # no rank has passed it
                    expected[number] = expected.get(number, Request()) | request
        elif choice is not None and rank not in noted:
            gates[rank].note(*choice)
            noted.add(rank)
            if len(noted) == ranks:
                posts.clear()
                noted.clear()
                choice = None

    for number, is_call in order:
        (call if is_call else monitor)(number % ranks)
    while posts:  # no call is needed for the monitors to end
        before = len(posts), len(noted)
        for rank in range(ranks):
            if posts and (rank not in posts or (choice is not None and rank not in noted)):
                monitor(rank)
        assert not posts or (len(posts), len(noted)) != before
    last = max([*expected, *(gate.answered for gate in gates)], default=0)
    for rank in range(ranks):
        while gates[rank].answered < last:
            call(rank)
        assert saved[rank] == expected


def made(every: Schedule | None, preemption: sp.Preemption | None = None, **options: Any) -> DueSaves:
    return DueSaves(every, preemption, None, LocalRendezvous(), "run", **options)


def test_each_call_after_a_failed_choice_raises_an_error_of_its_own() -> None:
    class _Lost(LocalRendezvous):
        def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
            raise sp.RankSilent("rank 1 is silent", ranks=[1])

    class _NoRequests:
        has_clock = False

        def requested(self) -> Request:
            return Request()

        def granted(self, request: Request) -> None:
            pass

    calls = AgreedCalls(_Lost(), "schedule", _NoRequests())
    calls.start()
    errors = []
    while len(errors) < 3:
        try:
            calls.answer()
        except sp.RankSilent as error:
            errors.append(error)
    assert len({id(error) for error in errors}) == 3
    assert {(str(error), str(error.details)) for error in errors} == {("rank 1 is silent", "{'ranks': [1]}")}
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1


def first_due(due: DueSaves, step: int) -> int:
    """The first due step from this one on, within a minute."""
    limit = time.monotonic() + 60
    while not due.is_due(step):
        assert time.monotonic() < limit, "no call is due"
        step += 1
    return step


def test_a_schedule_holds_after_a_rollback() -> None:
    due = made(sp.Every(steps=10))
    assert [step for step in (*range(8, 13), *range(5, 23)) if due.is_due(step)] == [10, 10, 20]
    assert not made(sp.Every(steps=10)).is_due(0)


def test_the_interval_in_minutes_starts_at_each_save() -> None:
    now = 0.0
    due = made(sp.Every(minutes=1), clock=lambda: now)
    assert not any(due.is_due(step) for step in range(1, 100))
    now = 60.0
    step = first_due(due, 100)
    now = 119.0
    assert not any(due.is_due(step) for step in range(step + 1, step + 200))
    now = 120.0
    first_due(due, step + 200)


def test_the_lead_covers_saves_and_steps() -> None:
    """The request comes before the limit by the reserve, two saves and a step."""
    now = wall = 0.0
    preemption = sp.Preemption(signals=(), end_time=1100.0, reserve=10.0)
    due = made(None, preemption, clock=lambda: now, wall=lambda: wall)
    due.committed(40.0)
    assert not due.is_due(1)
    now = 5.0
    assert not due.is_due(2)
    wall = 1006.0  # 94 s are left
    first_due(due, 3)
    assert due.is_preempted
    assert lead_seconds(preemption, [40.0, 5.0], 5.0) == 95.0
    assert lead_seconds(preemption, [], 0.0) > 10.0


def test_the_limit_is_read_from_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"SLURM_JOB_END_TIME": "5000"}
    assert limit_of(sp.Preemption(), environment, 4000.0) == 5000.0
    assert limit_of(sp.Preemption(end_time=4500.0), environment, 4000.0) == 4500.0
    assert limit_of(sp.Preemption(), {}, 4000.0) == math.inf
    with caplog.at_level(logging.WARNING, "shardproof"):
        assert limit_of(sp.Preemption(), environment, 6000.0) == math.inf
    assert "SLURM_JOB_END_TIME is 1000 s ago" in caplog.text
    for text in ("NONE", "nan"):  # an error of rank 0 alone would leave the others waiting
        with caplog.at_level(logging.WARNING, "shardproof"):
            assert limit_of(sp.Preemption(), {"SLURM_JOB_END_TIME": text}, 0.0) == math.inf
        assert f"SLURM_JOB_END_TIME is {text!r}, expected Unix seconds" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"signals": (9,)}, {"signals": (9999,)}, {"end_time": -1}, {"reserve": -1}, {"exit_code": 256}]
)
def test_wrong_options_of_preemption_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sp.Preemption(**wrong)


@pytest.fixture
def received() -> Any:
    """The signals that the previously installed handlers receive. Restores the handlers after the test."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, lambda number, _: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_previous_handler_is_called_and_gets_the_second_notice_alone(received: list[int]) -> None:
    now, calls = 0.0, []
    notices = SignalNotices((signal.SIGUSR1, signal.SIGUSR2), lambda: calls.append(1), lambda: now)
    signal.raise_signal(signal.SIGUSR1)
    assert (notices.first, received, len(calls)) == (signal.SIGUSR1, [signal.SIGUSR1], 1)
    now = 10.0
    signal.raise_signal(signal.SIGUSR1)
    assert (received, len(calls)) == ([signal.SIGUSR1] * 2, 1)
    signal.raise_signal(signal.SIGUSR2)  # the first of its kind
    assert (notices.first, len(calls)) == (signal.SIGUSR1, 2)


def test_handlers_are_removed_with_their_owner(received: list[int]) -> None:
    notices = SignalNotices((signal.SIGUSR1,), lambda: None)
    ours = signal.getsignal(signal.SIGUSR1)
    del notices
    signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is not ours


def forked(pipe: Any, received: list[int]) -> None:
    """A child that reports what it received from another process, and then from its parent."""
    pipe.send("ready")
    pipe.recv()  # another process has sent its signals
    while signal.sigpending():
        os.sched_yield()
    # a program that the child starts has no blocked signals
    program = subprocess.run(["sh", "-c", "kill -USR2 $$; exit 3"], timeout=60, check=False)
    pipe.send((program.returncode, list(received)))
    while not received:  # the main thread runs the handler, and no signal ends a pause of it
        os.sched_yield()
    pipe.send((0, list(received)))
    signal.pause()


def test_a_forked_child_obeys_the_signals_of_its_parent_and_of_no_other_process() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    notices = SignalNotices((signal.SIGUSR1, signal.SIGUSR2), lambda: None)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe()
    child = context.Process(target=forked, args=(writer, received), daemon=True)
    try:
        child.start()
        assert reader.poll(60) and reader.recv() == "ready"
        for name in ("-USR1", "-USR2"):
            subprocess.run(["kill", name, str(child.pid)], timeout=60, check=True)
        reader.send("sent")
        assert reader.poll(60) and reader.recv() == (-signal.SIGUSR2, [])
        os.kill(child.pid, signal.SIGUSR1)  # the handler from before the notices
        assert reader.poll(60) and reader.recv() == (0, [signal.SIGUSR1])
        os.kill(child.pid, signal.SIGUSR2)
        child.join(60)
        assert child.exitcode == -signal.SIGUSR2
        assert notices.first is None
    finally:
        child.kill()
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    raised: list[str] = []

    def make() -> None:
        try:
            sp.Checkpointer(tmp_path, preemption=sp.Preemption())
        except ValueError as error:
            raised.append(str(error))
        sp.Checkpointer(tmp_path, preemption=sp.Preemption(signals=()))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert raised and "in the main thread only" in raised[0] and "Preemption(signals=())" in raised[0]


def test_a_handler_that_replaced_one_of_a_dropped_checkpointer_notes_the_signal() -> None:
    """As after ``checkpointer = make(); checkpointer = make()``. The dropped one has no effect."""
    before = signal.getsignal(signal.SIGUSR1)
    first = SignalNotices((signal.SIGUSR1,), lambda: None)
    second = SignalNotices((signal.SIGUSR1,), lambda: None)
    del first
    gc.collect()
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert second.first == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_handler_is_installed_without_preemption(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    _ = sp.Checkpointer(tmp_path, every=sp.Every(steps=1, minutes=1))
    assert signal.getsignal(signal.SIGTERM) is before


def until_preempted(step: Callable[[int], object], first: int) -> sp.Preempted:
    limit = time.monotonic() + 60
    number = first
    while time.monotonic() < limit:
        try:
            step(number)
        except sp.Preempted as preempted:
            return preempted
        number += 1
    raise AssertionError("not preempted")


def test_the_last_save_is_tried_again_and_survives_an_earlier_failure(
    tmp_path: Path, received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The save before the signal fails in the background, and so does the first try of the last one."""
    storage = FaultyStorage(LocalStorage(tmp_path))
    fails = {"step-00000001", "step-00000002"}

    class Failing(FaultyStorage):
        def within(self, name: str) -> Any:
            if name in fails:
                return FaultyStorage(storage.within(name), 0, OSError(28, "full"), only=("create",))
            return storage.within(name)

    checkpointer = sp.Checkpointer(
        Failing(LocalStorage(tmp_path)), preemption=sp.Preemption(signals=(signal.SIGUSR1,), exit_code=7)
    )
    state = {"w": torch.ones(4)}
    checkpointer.save(1, state)
    signal.raise_signal(signal.SIGUSR1)
    failures: list[sp.ShardproofError] = []

    def train(step: int) -> None:
        try:
            checkpointer.save_if_due(step, state)
        except sp.ShardproofError as error:
            fails.clear()
            failures.append(error)

    limit = time.monotonic() + 60
    while not failures and time.monotonic() < limit:
        train(2)
    assert len(failures) == 1 and "step-00000002" in str(failures[0])
    with caplog.at_level(logging.WARNING, "shardproof"):
        preempted = until_preempted(train, 3)
    assert (preempted.step, preempted.reason, preempted.code) == (3, "SIGUSR1 on rank 0", 7)
    assert checkpointer.steps() == [3]
    assert "with exit code 7" in caplog.text


def test_a_forced_save_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save before it writes until the forced one has begun."""
    gate = WriteGate(monkeypatch)
    checkpointer = sp.Checkpointer(tmp_path, when_busy="skip")
    state = {"w": torch.ones(4)}
    first = checkpointer.save(1, state)
    assert gate.reached.wait(60)

    def opened(event: sp.events.Event) -> None:
        if (event.kind, event.phase, event.step) == ("begin", "blocked", 2):
            gate.open()

    with closing(sp.events.subscribe(opened)):
        forced = checkpointer.save_if_due(2, state, force=True)
    assert forced is not None and not forced.skipped
    assert (first.result(60).step, forced.result(60).step) == (1, 2)


def test_save_if_due_without_a_schedule_is_an_error(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="pass every= or preemption="):
        checkpointer.save_if_due(1, {"w": torch.ones(4)})
    forced = checkpointer.save_if_due(1, {"w": torch.ones(4)}, force=True)
    assert forced is not None and forced.result(60).step == 1


@pytest.mark.parametrize("wrong", ["1000", 1e4, True, -1, 10**18])
def test_a_wrong_step_is_refused_and_not_remembered(wrong: Any, tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, every=sp.Every(steps=10))
    assert checkpointer.save_if_due(9, {"w": torch.ones(4)}) is None
    with pytest.raises(sp.StructureError, match="not an int from 0"):
        checkpointer.save_if_due(wrong, {"w": torch.ones(4)})
    due = checkpointer.save_if_due(11, {"w": torch.ones(4)})
    assert due is not None and due.result(60).step == 11


def test_the_best_interval_has_the_least_lost_time() -> None:
    """Against the exact expectation for failures at random times, by trying every second."""
    cost, mtbf = 20.0, 4 * 3600.0

    def lost(interval: float) -> float:
        # Daly: the expected wall time of one interval of work, by failures with an exponential distribution
        return mtbf * math.expm1(interval / mtbf) / (interval - cost)

    best = min(range(30, 10_000), key=lost)
    assert abs(best_interval(cost, mtbf) - best) <= 0.01 * best
    assert best_interval(1000.0, 10.0) == 1010.0


def test_advice_needs_saves_and_says_if_the_interval_is_far_off() -> None:
    assert advice_of([0.0], [1.0], 3600.0) is None and advice_of([0.0, 1.0], [], 3600.0) is None
    close = advice_of([0.0, best_interval(2.0, 3600.0)], [2.0], 3600.0)
    far = advice_of([0.0, 3600.0], [2.0], 3600.0)
    assert close is not None and far is not None
    assert not close.differs_much and far.differs_much


def test_the_log_suggests_an_interval_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = sp.Checkpointer(tmp_path, every=sp.Every(steps=1), mtbf_hours=1e6)
    with caplog.at_level(logging.INFO, "shardproof"):
        for step in range(1, 12):
            checkpointer.save_if_due(step, {"w": torch.ones(4)})
        checkpointer.wait()
    assert caplog.text.count("the formula of Daly suggests a save every") == 1
    assert "medians of 6 saves" in caplog.text


def test_a_program_that_the_job_starts_ends_by_the_signals(tmp_path: Path) -> None:
    """Also one with a function before its exec, or started without a fork by Python."""
    notices = SignalNotices((signal.SIGUSR1,), lambda: None)
    try:
        for options in ({"preexec_fn": os.setsid}, {"close_fds": False}, {}):
            program = subprocess.Popen(["sleep", "60"], **options)  # type: ignore[call-overload]
            program.send_signal(signal.SIGUSR1)
            assert program.wait(30) == -signal.SIGUSR1
        assert notices.first is None
    finally:
        del notices
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

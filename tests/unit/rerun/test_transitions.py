"""The table of the rerun machine, for every state with every combination of votes."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from shardproof.rerun.decision import Decision, ExitCodes
from shardproof.rerun.transitions import TABLE, AttributionKind, Effect, State, Votes, transition

RUNNING = {State.INITIAL_RUN, State.IN_PLACE, State.FROM_CHECKPOINT, State.AGAIN_FROM_CHECKPOINT}
ELSEWHERE = {State.FROM_CHECKPOINT, State.AGAIN_FROM_CHECKPOINT}
VOTES = [Votes(*votes) for votes in product((False, True), repeat=len(fields(Votes)))]
ALL = list(product(State, VOTES))


def test_each_state_has_one_row_for_each_combination_of_votes() -> None:
    """So `transition` always has one answer, and each row is the answer to something."""
    used = set()
    for state, votes in ALL:
        rows = [number for number, row in enumerate(TABLE) if row.matches(state, votes)]
        assert len(rows) == 1, (state, votes, [TABLE[number] for number in rows])
        used.update(rows)
    assert used == set(range(len(TABLE)))


@pytest.mark.parametrize(("state", "votes"), ALL)
def test_what_must_hold_whatever_the_votes(state: State, votes: Votes) -> None:
    then, action = transition(state, votes)
    decision = Decision.of(action, None, ExitCodes())
    runs_on = action.effect in (Effect.RUN, Effect.RUN_AGAIN, Effect.RESUME)

    # The loop goes on exactly in the states of a run, and ends exactly in the others.
    assert runs_on == (then in RUNNING)
    # A step waits for a run elsewhere exactly if the job ends in order to be started again.
    assert (then is State.WILL_RERUN) == (decision.code == ExitCodes().restart)
    # A checkpoint is taken of a step that is to be run again, and of no other.
    if decision.checkpoint:
        assert then is State.WILL_RERUN and votes.reproduced and decision.exit
    # After a fault that did not come back there is nothing that a checkpoint should hold.
    if action.kind is AttributionKind.TRANSIENT_FAULT:
        assert not decision.checkpoint and then is State.NOT_RUNNING
    # What a checkpoint was taken for is decided by a run from a checkpoint, with a finding.
    assert action.settles == (state in ELSEWHERE and action.kind is not None)
    # A result is only put down to something after a second run.
    if action.kind is not None:
        assert state in RUNNING - {State.INITIAL_RUN}
    # A correct result came up again, and faults did not; a device is named once another was asked.
    if action.kind is AttributionKind.CORRECT_RESULT:
        assert votes.reproduced and state in ELSEWHERE
        assert state is State.FROM_CHECKPOINT or not votes.same_device
    if action.kind is AttributionKind.PERSISTENT_FAULT:
        assert not votes.reproduced and state in ELSEWHERE
        assert state is State.FROM_CHECKPOINT or votes.moved
    # Only what came up again on the same device is to be looked at elsewhere once more.
    if action.effect is Effect.RESTART_UNSAVED:
        assert votes.reproduced and votes.same_device
    # Training goes on with a step only if nothing fatal is left.
    if action.effect is Effect.GO_ON and state in RUNNING and not votes.report:
        assert not (votes.rejected and votes.fatal)
    if votes.outside and state in RUNNING:
        assert action.effect is Effect.STOP


@pytest.mark.parametrize("state", list(State))
def test_mode_report_never_ends_the_job_for_what_it_sees_in_place(state: State) -> None:
    for votes in VOTES:
        if votes.report and not votes.outside and state in (State.INITIAL_RUN, State.IN_PLACE):
            assert not Decision.of(transition(state, votes)[1], None, ExitCodes()).exit


def test_a_quiet_step_runs_once() -> None:
    assert transition(State.NOT_RUNNING, Votes())[0] is State.INITIAL_RUN
    then, action = transition(State.INITIAL_RUN, Votes())
    assert (then, action.effect, action.kind) == (State.NOT_RUNNING, Effect.GO_ON, None)


@pytest.mark.parametrize(
    ("state", "votes", "then", "effect", "kind"),
    [
        (State.INITIAL_RUN, "rejected fatal", State.IN_PLACE, Effect.RUN_AGAIN, None),
        (State.IN_PLACE, "", State.NOT_RUNNING, Effect.GO_ON, "transient fault"),
        (State.IN_PLACE, "rejected", State.NOT_RUNNING, Effect.GO_ON, "transient fault"),
        (State.IN_PLACE, "rejected fatal", State.NOT_RUNNING, Effect.STOP, "transient fault"),
        (State.IN_PLACE, "rejected fatal reproduced", State.WILL_RERUN, Effect.RESTART, None),
        (State.IN_PLACE, "rejected reproduced", State.WILL_RERUN, Effect.RESTART, None),
        (State.WILL_RERUN, "", State.FROM_CHECKPOINT, Effect.RESUME, None),
        (State.WILL_RERUN, "same_device", State.AGAIN_FROM_CHECKPOINT, Effect.RESUME, None),
        (State.FROM_CHECKPOINT, "", State.NOT_RUNNING, Effect.GO_ON, "persistent fault"),
        (State.FROM_CHECKPOINT, "rejected fatal", State.NOT_RUNNING, Effect.STOP, "persistent fault"),
        (State.FROM_CHECKPOINT, "rejected reproduced", State.NOT_RUNNING, Effect.GO_ON, "correct result"),
        (
            State.FROM_CHECKPOINT,
            "rejected fatal reproduced",
            State.NOT_RUNNING,
            Effect.STOP,
            "correct result",
        ),
        (State.AGAIN_FROM_CHECKPOINT, "", State.NOT_RUNNING, Effect.GO_ON, "transient fault"),
        (
            State.AGAIN_FROM_CHECKPOINT,
            "rejected fatal reproduced same_device",
            State.WILL_RERUN,
            Effect.RESTART_UNSAVED,
            None,
        ),
        (State.AGAIN_FROM_CHECKPOINT, "moved", State.NOT_RUNNING, Effect.GO_ON, "persistent fault"),
        (State.AGAIN_FROM_CHECKPOINT, "moved reproduced", State.NOT_RUNNING, Effect.GO_ON, "correct result"),
    ],
)
def test_the_ways_through_the_machine(
    state: State, votes: str, then: State, effect: Effect, kind: str | None
) -> None:
    found, action = transition(state, replace(Votes(), **dict.fromkeys(votes.split(), True)))
    assert (found, action.effect) == (then, effect)
    assert (action.kind.value if action.kind else None) == kind

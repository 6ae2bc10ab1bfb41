"""The transition table of the rerun machine, for every state with every combination of votes."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from shardproof.training.rerun.step_effects import Decision, ExitCodes
from shardproof.training.rerun.transitions import TABLE, AttributionKind, Effect, State, Votes, transition

RUNNING = {State.INITIAL_RUN, State.IN_PLACE, State.FROM_CHECKPOINT, State.AGAIN_FROM_CHECKPOINT}
ELSEWHERE = {State.FROM_CHECKPOINT, State.AGAIN_FROM_CHECKPOINT}
VOTES = [Votes(*votes) for votes in product((False, True), repeat=len(fields(Votes)))]
ALL = list(product(State, VOTES))


def test_each_state_has_one_row_for_each_combination_of_votes() -> None:
    """So `transition` always has one answer, and no row is unused."""
    used = set()
    for state, votes in ALL:
        rows = [number for number, row in enumerate(TABLE) if row.matches(state, votes)]
        assert len(rows) == 1, (state, votes, [TABLE[number] for number in rows])
        used.update(rows)
    assert used == set(range(len(TABLE)))


@pytest.mark.parametrize(("state", "votes"), ALL)
def test_invariants_hold_for_every_state_and_votes(state: State, votes: Votes) -> None:
    then, action = transition(state, votes)
    decision = Decision.of(action, None, ExitCodes())
    runs_on = action.effect in (Effect.RUN, Effect.RUN_AGAIN, Effect.RESUME)

    # The loop continues if and only if the new state is that of a run.
    assert runs_on == (then in RUNNING)
    # A step is pending if and only if the job exits to be restarted.
    assert (then is State.WILL_RERUN) == (decision.code == ExitCodes().restart)
    # A checkpoint is taken only for a step that is to be rerun.
    if decision.checkpoint:
        assert then is State.WILL_RERUN and votes.reproduced and decision.exit
    # A transient fault needs no checkpoint.
    if action.kind is AttributionKind.TRANSIENT_FAULT:
        assert not decision.checkpoint and then is State.NOT_RUNNING
    # A run from a checkpoint settles the pending step if it attributes the result.
    assert action.settles == (state in ELSEWHERE and action.kind is not None)
    # A result is attributed only after a second run.
    if action.kind is not None:
        assert state in RUNNING - {State.INITIAL_RUN}
    # A correct result was reproduced, a fault was not. A device is named only after a run on another one.
    if action.kind is AttributionKind.CORRECT_RESULT:
        assert votes.reproduced and state in ELSEWHERE
        assert state is State.FROM_CHECKPOINT or not votes.same_device
    if action.kind is AttributionKind.PERSISTENT_FAULT:
        assert not votes.reproduced and state in ELSEWHERE
        assert state is State.FROM_CHECKPOINT or votes.moved
    # Only a result that was reproduced on the same device restarts the job once more.
    if action.effect is Effect.RESTART_UNSAVED:
        assert votes.reproduced and votes.same_device
    # Training continues with a step only if nothing fatal is left.
    if action.effect is Effect.GO_ON and state in RUNNING and not votes.report:
        assert not (votes.rejected and votes.fatal)
    if votes.outside and state in RUNNING:
        assert action.effect is Effect.STOP


@pytest.mark.parametrize("state", list(State))
def test_report_mode_never_ends_the_job_after_a_run_in_place(state: State) -> None:
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
def test_each_vote_leads_to_its_state_effect_and_attribution(
    state: State, votes: str, then: State, effect: Effect, kind: str | None
) -> None:
    found, action = transition(state, replace(Votes(), **dict.fromkeys(votes.split(), True)))
    assert (found, action.effect) == (then, effect)
    assert (action.kind.value if action.kind else None) == kind

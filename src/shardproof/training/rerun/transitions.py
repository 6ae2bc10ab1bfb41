"""The transitions of the rerun machine as a pure table: (state, votes) to (state, action).

`shardproof.training.rerun.step_effects` applies the actions.

The three attributions and the two stages (a rerun in place, then a rerun from a checkpoint on another device)
are those of Megatron-LM's rerun state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum


class Mode(Enum):
    """The mode of the machine in this run."""

    DISABLED = "disabled"
    """No validation and no communication."""
    VALIDATE = "validate"
    """Steps with a rejected result are rerun, and the results attributed."""
    REPORT = "report"
    """Every step runs twice in place, and the differences are counted."""


class State(Enum):
    """The state of the machine."""

    NOT_RUNNING = "not running"
    """Between steps, with no pending rerun."""
    INITIAL_RUN = "initial run"
    """In the first run of a step."""
    IN_PLACE = "rerunning in place"
    """In the second run of a step, in the same process."""
    WILL_RERUN = "will rerun from checkpoint"
    """Both runs gave the same rejected result: the step waits for a rerun on another device."""
    FROM_CHECKPOINT = "rerunning from checkpoint"
    """In the rerun from a checkpoint, on another device."""
    AGAIN_FROM_CHECKPOINT = "rerunning again from checkpoint"
    """In the rerun from a checkpoint, with a suspect on the same device as before."""


class AttributionKind(Enum):
    """The cause of a rejected result."""

    TRANSIENT_FAULT = "transient fault"
    """A rerun on the same device gave another result."""
    PERSISTENT_FAULT = "persistent fault"
    """The device gives the result each time, and another device does not."""
    CORRECT_RESULT = "correct result"
    """Another device gives the same result: the cause is the data or the program."""


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes of all ranks after a run, or before a run from a checkpoint. Each is true if one rank's is.

    Args:
        rejected: this run gave a rejected result.
        fatal: this run gave a rejected result with which training must not continue.
        reproduced: this run reproduced a suspicious result.
        same_device: this run reproduced a suspicious result on the device of the first run.
        moved: another device computed a suspicious result in the first run.
        outside: a fault outside of the step was reported.
        report: every step runs twice.
    """

    rejected: bool = False
    fatal: bool = False
    reproduced: bool = False
    same_device: bool = False
    moved: bool = False
    outside: bool = False
    report: bool = False


class Effect(Enum):
    """The next action of all ranks."""

    RUN = "run"
    """Run the step, with new data."""
    RUN_AGAIN = "run again"
    """Run the step from its start."""
    RESUME = "resume"
    """Run the step from the start in the checkpoint."""
    GO_ON = "go on"
    """Use the results of this run."""
    RESTART = "restart"
    """Save the state from before the step, with the start of the step, and restart on other devices."""
    RESTART_UNSAVED = "restart, unsaved"
    """Restart on other devices from the existing checkpoint."""
    STOP = "stop"
    """Training cannot continue with this step."""


@dataclass(frozen=True, slots=True)
class Action:
    """The action that the table gives for the votes."""

    effect: Effect
    kind: AttributionKind | None = None
    settles: bool = False
    """True if this action resolves a pending rerun."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. None matches both values of a vote."""

    state: State
    then: State
    action: Action
    rejected: bool | None = None
    fatal: bool | None = None
    reproduced: bool | None = None
    same_device: bool | None = None
    moved: bool | None = None
    outside: bool | None = False
    report: bool | None = None

    def matches(self, state: State, votes: Votes) -> bool:
        """Return True if this row applies to a state and votes."""
        return self.state is state and all(
            getattr(self, vote.name) in (None, getattr(votes, vote.name)) for vote in fields(Votes)
        )


def _not_reproduced(
    state: State,
    fault: AttributionKind,
    *,
    moved: bool | None = None,
    report: bool | None = None,
    settles: bool = True,
) -> tuple[Row, ...]:
    """No suspicious result was reproduced: the device was at fault."""
    go_on, stop = Action(Effect.GO_ON, fault, settles), Action(Effect.STOP, fault, settles)

    def row(action: Action, rejected: bool, fatal: bool | None) -> Row:
        return Row(
            state, State.NOT_RUNNING, action, rejected, fatal, reproduced=False, moved=moved, report=report
        )

    return row(go_on, False, None), row(go_on, True, False), row(stop, True, True)


def _reproduced(state: State, same_device: bool | None = None) -> tuple[Row, ...]:
    """Another device reproduced a result: the cause is the data or the program."""
    go_on, stop = Action(Effect.GO_ON, _CORRECT, settles=True), Action(Effect.STOP, _CORRECT, settles=True)
    return (
        Row(state, State.NOT_RUNNING, go_on, fatal=False, reproduced=True, same_device=same_device),
        Row(state, State.NOT_RUNNING, stop, fatal=True, reproduced=True, same_device=same_device),
    )


_TRANSIENT, _CORRECT = AttributionKind.TRANSIENT_FAULT, AttributionKind.CORRECT_RESULT
_PERSISTENT = AttributionKind.PERSISTENT_FAULT

TABLE: tuple[Row, ...] = (
    # Before a run.
    Row(State.NOT_RUNNING, State.INITIAL_RUN, Action(Effect.RUN), outside=None),
    Row(State.WILL_RERUN, State.FROM_CHECKPOINT, Action(Effect.RESUME), same_device=False, outside=None),
    Row(State.WILL_RERUN, State.AGAIN_FROM_CHECKPOINT, Action(Effect.RESUME), same_device=True, outside=None),
    # After the first run.
    Row(State.INITIAL_RUN, State.IN_PLACE, Action(Effect.RUN_AGAIN), report=True),
    Row(State.INITIAL_RUN, State.IN_PLACE, Action(Effect.RUN_AGAIN), rejected=True, report=False),
    Row(State.INITIAL_RUN, State.NOT_RUNNING, Action(Effect.GO_ON), rejected=False, report=False),
    # After the run in place.
    Row(State.IN_PLACE, State.NOT_RUNNING, Action(Effect.GO_ON), report=True),
    Row(State.IN_PLACE, State.WILL_RERUN, Action(Effect.RESTART), reproduced=True, report=False),
    *_not_reproduced(State.IN_PLACE, _TRANSIENT, report=False, settles=False),
    # After the run from a checkpoint, in any mode.
    *_reproduced(State.FROM_CHECKPOINT),
    *_not_reproduced(State.FROM_CHECKPOINT, _PERSISTENT),
    # With several suspects, some may be on another device now and some on the same device.
    Row(
        State.AGAIN_FROM_CHECKPOINT,
        State.WILL_RERUN,
        Action(Effect.RESTART_UNSAVED),
        reproduced=True,
        same_device=True,
    ),
    *_reproduced(State.AGAIN_FROM_CHECKPOINT, same_device=False),
    *_not_reproduced(State.AGAIN_FROM_CHECKPOINT, _PERSISTENT, moved=True),
    *_not_reproduced(State.AGAIN_FROM_CHECKPOINT, _TRANSIENT, moved=False),
    # A fault outside of the step: the results of the step are discarded.
    *(
        Row(state, State.NOT_RUNNING, Action(Effect.STOP), outside=True)
        for state in (State.INITIAL_RUN, State.IN_PLACE, State.FROM_CHECKPOINT, State.AGAIN_FROM_CHECKPOINT)
    ),
)
"""Exactly one row matches each state with each combination of votes."""


def transition(state: State, votes: Votes) -> tuple[State, Action]:
    """Return the next state and the action.

    >>> transition(State.INITIAL_RUN, Votes(rejected=True, fatal=True))[0]
    <State.IN_PLACE: 'rerunning in place'>
    """
    (row,) = (row for row in TABLE if row.matches(state, votes))
    return row.then, row.action

"""The rerun machine as one pure table: (state, votes) to (state, action).

The table says what all ranks do once they know what each of them found; `shardproof.rerun.machine` does it.

Source: the three attributions and the two stages (again in place, then elsewhere from a checkpoint) are those
of Megatron-LM's rerun state machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["TABLE", "Action", "AttributionKind", "Effect", "Mode", "Row", "State", "Votes", "transition"]


class Mode(Enum):
    """What the machine is for in this run."""

    DISABLED = "disabled"
    """Nothing is looked at and nothing is exchanged."""
    VALIDATE = "validate"
    """Steps with a rejected result are run again, and attributed."""
    REPORT = "report"
    """Every step runs twice in place, and the differences are counted."""


class State(Enum):
    """Where the machine is."""

    NOT_RUNNING = "not running"
    """Between steps, with nothing to find out."""
    INITIAL_RUN = "initial run"
    """In the first run of a step."""
    IN_PLACE = "rerunning in place"
    """In the second run of a step, in the same process."""
    WILL_RERUN = "will rerun from checkpoint"
    """A result was rejected twice alike: it waits for a run elsewhere."""
    FROM_CHECKPOINT = "rerunning from checkpoint"
    """In that run, on another device."""
    AGAIN_FROM_CHECKPOINT = "rerunning again from checkpoint"
    """In that run, but a suspect came back to the same device."""


class AttributionKind(Enum):
    """Whom a rejected result is put down to."""

    TRANSIENT_FAULT = "transient fault"
    """The device computed something else when it was asked again."""
    PERSISTENT_FAULT = "persistent fault"
    """The device computes it each time, and another one does not."""
    CORRECT_RESULT = "correct result"
    """Other devices compute it too: it is the data or the program."""


@dataclass(frozen=True, slots=True)
class Votes:
    """What all ranks together say after a run, or before a run from a checkpoint.

    Args:
        rejected: some rank rejected a result of this run.
        fatal: one of those was such that training must not go on with it.
        reproduced: some rank's suspicious result came out the same in this run.
        same_device: some rank's suspicious result that came out the same did so on one and the same device.
        moved: some rank's suspicious result was, the first time, computed on another device.
        outside: somebody says that something outside of the step is wrong.
        report: every step shall run twice.
    """

    rejected: bool = False
    fatal: bool = False
    reproduced: bool = False
    same_device: bool = False
    moved: bool = False
    outside: bool = False
    report: bool = False


class Effect(Enum):
    """What the ranks do next."""

    RUN = "run"
    """Run the step, with new data."""
    RUN_AGAIN = "run again"
    """Run the step from its beginning."""
    RESUME = "resume"
    """Run the step from the beginning that the checkpoint holds."""
    GO_ON = "go on"
    """The step is done: take what this run computed."""
    RESTART = "restart"
    """Save the state from before the step, with the step's beginning, and start again elsewhere."""
    RESTART_UNSAVED = "restart, unsaved"
    """Start again elsewhere, from the checkpoint that is there."""
    STOP = "stop"
    """Training cannot go on with this step."""


@dataclass(frozen=True, slots=True)
class Action:
    """What follows from the votes."""

    effect: Effect
    kind: AttributionKind | None = None
    settles: bool = False
    """Whether this decides what a checkpoint was taken for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A vote that is None may be either."""

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
        """Whether this row is the one for a state and votes."""
        return self.state is state and all(
            wanted is None or wanted is found
            for wanted, found in (
                (self.rejected, votes.rejected),
                (self.fatal, votes.fatal),
                (self.reproduced, votes.reproduced),
                (self.same_device, votes.same_device),
                (self.moved, votes.moved),
                (self.outside, votes.outside),
                (self.report, votes.report),
            )
        )


def _gone(
    state: State,
    fault: AttributionKind,
    *,
    moved: bool | None = None,
    report: bool | None = None,
    settles: bool = True,
) -> tuple[Row, ...]:
    """No result came back in a further run: it was the device's."""
    go_on, stop = Action(Effect.GO_ON, fault, settles), Action(Effect.STOP, fault, settles)

    def row(action: Action, rejected: bool, fatal: bool | None) -> Row:
        return Row(
            state, State.NOT_RUNNING, action, rejected, fatal, reproduced=False, moved=moved, report=report
        )

    return row(go_on, False, None), row(go_on, True, False), row(stop, True, True)


def _came_back(state: State, same_device: bool | None = None) -> tuple[Row, ...]:
    """A result came back on another device: it is the data's or the program's."""
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
    Row(
        State.WILL_RERUN,
        State.FROM_CHECKPOINT,
        Action(Effect.RESUME),
        same_device=False,
        outside=None,
    ),
    Row(
        State.WILL_RERUN,
        State.AGAIN_FROM_CHECKPOINT,
        Action(Effect.RESUME),
        same_device=True,
        outside=None,
    ),
    # After the first run.
    Row(State.INITIAL_RUN, State.IN_PLACE, Action(Effect.RUN_AGAIN), report=True),
    Row(State.INITIAL_RUN, State.IN_PLACE, Action(Effect.RUN_AGAIN), rejected=True, report=False),
    Row(State.INITIAL_RUN, State.NOT_RUNNING, Action(Effect.GO_ON), rejected=False, report=False),
    # After the run in place.
    Row(State.IN_PLACE, State.NOT_RUNNING, Action(Effect.GO_ON), report=True),
    Row(State.IN_PLACE, State.WILL_RERUN, Action(Effect.RESTART), reproduced=True, report=False),
    *_gone(State.IN_PLACE, _TRANSIENT, report=False, settles=False),
    # After the run from a checkpoint. It is for one result, whatever the mode.
    *_came_back(State.FROM_CHECKPOINT),
    *_gone(State.FROM_CHECKPOINT, _PERSISTENT),
    # Of several suspects some may be on another device now, and some on the same.
    Row(
        State.AGAIN_FROM_CHECKPOINT,
        State.WILL_RERUN,
        Action(Effect.RESTART_UNSAVED),
        reproduced=True,
        same_device=True,
    ),
    *_came_back(State.AGAIN_FROM_CHECKPOINT, same_device=False),
    *_gone(State.AGAIN_FROM_CHECKPOINT, _PERSISTENT, moved=True),
    *_gone(State.AGAIN_FROM_CHECKPOINT, _TRANSIENT, moved=False),
    # Something outside of the step is wrong: nothing that this step computed is worth keeping.
    *(
        Row(state, State.NOT_RUNNING, Action(Effect.STOP), outside=True)
        for state in (
            State.INITIAL_RUN,
            State.IN_PLACE,
            State.FROM_CHECKPOINT,
            State.AGAIN_FROM_CHECKPOINT,
        )
    ),
)
"""Exactly one row is for each state with each combination of votes."""


def transition(state: State, votes: Votes) -> tuple[State, Action]:
    """What follows.

    >>> transition(State.INITIAL_RUN, Votes(rejected=True, fatal=True))[0]
    <State.IN_PLACE: 'rerunning in place'>
    """
    (row,) = (row for row in TABLE if row.matches(state, votes))
    return row.then, row.action

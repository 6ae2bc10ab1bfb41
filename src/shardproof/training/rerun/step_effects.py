"""The effects of transitions on one rank, from the start of a step to its decision, and their log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.training.rerun.attribution import Attribution, DeviceIdentity, Suspect
from shardproof.training.rerun.persistent_state import JobState, PersistentState
from shardproof.training.rerun.result_log import Differences, Rejected, ResultLog, Spread, shown_value
from shardproof.training.rerun.step_run import StepRun
from shardproof.training.rerun.step_start import Iterators, StepStart, StepState
from shardproof.training.rerun.transitions import (
    Action,
    AttributionKind,
    Effect,
    Mode,
    State,
    Votes,
    transition,
)
from shardproof.training.rerun.votes import Ballot, BallotExchange, count

_log = logging.getLogger("shardproof")
_FROM_OUTSIDE = "rejected from outside of the step"


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """The exit codes of a job, for its launcher.

    >>> ExitCodes(restart=75).failed
    17
    """

    restart: int = 16
    """Restart the job on other devices, to rerun a step with a rejected result."""
    failed: int = 17
    """A result was rejected, and training must not continue with it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a step. Equal on all ranks."""

    checkpoint: bool = False
    """Save the state as it is now, before the optimizer step, as a suspect checkpoint."""
    exit: bool = False
    """Exit this process with `code`, and discard the results of the step."""
    code: int = 0
    attribution: Attribution | None = None
    """The attribution of the rejected results of the step, if this step decided it."""
    settles: bool = False
    """True if `attribution` resolves the pending rerun of a suspect checkpoint."""

    @classmethod
    def of(cls, action: Action, attribution: Attribution | None, codes: ExitCodes) -> Decision:
        """Convert an action of the table."""
        restart = action.effect in (Effect.RESTART, Effect.RESTART_UNSAVED)
        stop = action.effect is Effect.STOP
        return cls(
            checkpoint=action.effect is Effect.RESTART,
            exit=restart or stop,
            code=codes.restart if restart else codes.failed if stop else 0,
            attribution=attribution,
            settles=action.settles,
        )


@dataclass
class Steps:
    """Runs the steps of one process in order."""

    mode: Mode
    persistent: PersistentState
    exchange: BallotExchange
    recorder: Recorder
    identity: Callable[[], DeviceIdentity]
    step_state: Sequence[StepState]
    codes: ExitCodes
    to_skip: int
    """Number of next steps that are not validated."""
    start: StepStart | None = None
    run: StepRun | None = None
    """The current run."""
    decision: Decision | None = None
    """The decision about the last step, until the loop takes it."""
    outside: tuple[tuple[int, str], ...] = ()
    """Faults found outside of steps, each with its rank, for the next vote."""
    validates: bool = False
    """True if this step is validated."""
    _first: StepRun | None = None
    """The first run of this step, while the step runs again."""
    _suspect: Suspect | None = None
    """The first rejected result of this rank in this step."""
    _can_pack: bool = False
    """True once a step start was packed: a checkpoint can hold it."""

    @property
    def job(self) -> JobState:
        """State that is equal on all ranks."""
        return self.persistent.job

    def begin(self, iterators: Iterators) -> None:
        """Begins a new step, or the pending step of a checkpoint."""
        self._first = self._suspect = None
        if self.job.pending:
            self._resume(iterators)
            return
        self.validates = self.mode is not Mode.DISABLED and self.to_skip == 0
        self.to_skip = max(self.to_skip - 1, 0)
        self.start = StepStart.new(iterators, self.step_state, captured=self.validates)
        self.run = StepRun("initial", stores_results=self.mode is Mode.REPORT)
        self.job.state = transition(State.NOT_RUNNING, Votes())[0]

    def _resume(self, iterators: Iterators) -> None:
        """Begins the pending step of a checkpoint from its original start."""

        def load_start() -> Ballot:
            self.start, suspicion = StepStart.stored(
                self.persistent.own.step_data, iterators, self.step_state
            )
            self.run = StepRun("from checkpoint", suspicion)
            for suspect in self.job.suspects:
                if suspect.rank == self.exchange.rank:
                    self._suspect = replace(
                        suspect, same_device=suspect.identity.same_device(self.identity())
                    )
            return Ballot(suspect=self._suspect)

        if self.mode is not Mode.VALIDATE:
            load_start()
            self.run, self._suspect = StepRun("initial", stores_results=self.mode is Mode.REPORT), None
            self.validates = self.mode is Mode.REPORT
            self.job.state = State.INITIAL_RUN
            self.recorder.warn(
                self.job.step,
                f"runs on its saved data without an attribution, because the mode is {self.mode.value!r}",
            )
            return
        self.validates = True
        ballots = self.exchange.vote(self.job.step, self.job.state, load_start, quick=False)
        self.job.state = transition(self.job.state, count(ballots, report=False))[0]
        self.recorder.warn(self.job.step, f"resumes: {self.job.state.value}")

    def finish(self) -> bool:
        """Ends a run. Returns True if the step runs again."""
        if self.mode is Mode.DISABLED:
            ballots = [Ballot(outside=self.outside)]
        else:
            ballots = self.exchange.vote(self.job.step, self.job.state, self._fill_ballot)
        votes = count(ballots, report=self.mode is Mode.REPORT and self.validates)
        then, action = transition(self.job.state, votes)
        suspects = tuple(ballot.suspect for ballot in ballots if ballot.suspect is not None)
        if action.effect is not Effect.RUN_AGAIN:
            self._conclude(then, action, suspects, ballots)
            return False
        assert self.start is not None and self.run is not None
        for suspect in suspects:
            self.recorder.warn(self.job.step, f"reruns in place: {suspect.suspicion}")
        self.start.again(self.step_state)
        self._first = self.run
        self.run = StepRun("in place", self._first.found, stores_results=self._first.stores_results)
        self.job.state = then
        return True

    def _fill_ballot(self) -> Ballot:
        run, start = self.run, self.start
        assert run is not None and start is not None
        if self.validates and not self._can_pack and self.mode is Mode.VALIDATE:
            start.pack(None)  # fails at the first step, not at the first fault, if the data cannot be stored
            self._can_pack = True
        if self._suspect is not None:
            self._suspect = self._suspect.again(shown_value(run.second), reproduced=run.reproduced)
            if run.name == "in place" and run.reproduced:
                # A failure reaches all ranks in this vote, before any of them saves.
                start.pack(run.suspicion)
        elif run.name == "initial" and run.found is not None:
            found, first = run.found, shown_value(run.found.value)
            self._suspect = Suspect(self.exchange.rank, self.identity(), found.call, found.message, first)
        return Ballot(run.rejected, run.fatal, self._suspect, self.outside)

    def _conclude(
        self, then: State, action: Action, suspects: tuple[Suspect, ...], ballots: Sequence[Ballot]
    ) -> None:
        """Ends the step after its last run in this process."""
        run, start, job, own = self.run, self.start, self.job, self.persistent.own
        assert run is not None and start is not None
        attribution = None
        for rank, ballot in enumerate(ballots):
            if ballot.rejected and ballot.suspect is None:
                self.recorder.warn(self.job.step, f"rank {rank} rejects a result of the last run only")
        if action.kind is not None:
            attribution = Attribution(action.kind, self.job.step, suspects)
            self._attribute(attribution)
        if action.effect is Effect.RESTART:
            job.suspects = tuple(suspect for suspect in suspects if suspect.reproduced)
            others = tuple(suspect for suspect in suspects if not suspect.reproduced)
            if others:
                self._attribute(Attribution(AttributionKind.TRANSIENT_FAULT, self.job.step, others))
            suspected = any(suspect.rank == self.exchange.rank for suspect in job.suspects)
            own.step_data = start.pack(run.suspicion if suspected else None)
            for suspect in job.suspects:
                self.recorder.warn(self.job.step, f"will rerun on another device: {suspect}")
        elif action.effect is Effect.RESTART_UNSAVED:
            for suspect in suspects:
                if suspect.same_device:
                    self.recorder.warn(
                        self.job.step,
                        f"ran on the same device again, so nothing is attributed: exclude {suspect.identity}",
                    )
        else:
            self.persistent.clear_pending()
        if action.effect is Effect.GO_ON:
            run.accept(include_rejected=action.kind is AttributionKind.CORRECT_RESULT)
            if self._first is not None and run.stores_results:
                own.count(run.differences(self._first))
        self.outside = ()
        if action.effect is Effect.STOP and action.kind is None:
            self.recorder.outside(job.step, dict.fromkeys(fault for one in ballots for fault in one.outside))
        job.state = then
        self.decision = Decision.of(action, attribution, self.codes)
        self.run = self._first = self.start = None

    def _attribute(self, attribution: Attribution) -> None:
        self.job.attributed[attribution.kind] += 1
        self.recorder.attributed(attribution)


class Recorder:
    """Writes on rank 0 and does nothing on other ranks."""

    def __init__(self, rank: int, results: ResultLog | None) -> None:
        self._writes = rank == 0
        self._results = results

    def warn(self, step: int, text: str) -> None:
        """Log a text about a step."""
        if self._writes:
            _log.warning("rerun: step %d %s", step, text)

    def attributed(self, attribution: Attribution) -> None:
        """Log the attribution of rejected results."""
        if self._writes:
            _log.warning("rerun: %s", attribution)
            self._append(attribution.records(time.time()))

    def outside(self, step: int, faults: Collection[tuple[int, str]]) -> None:
        """Log faults outside of a step."""
        if not self._writes:
            return
        for rank, message in faults:
            _log.error("rerun: the results of step %d are discarded, due to rank %d: %s", step, rank, message)
        self._append(
            [
                Rejected(
                    step=step,
                    rank=rank,
                    node="",
                    device="",
                    index=-1,
                    call=-1,
                    message=message,
                    first=None,
                    second=None,
                    verdict=_FROM_OUTSIDE,
                    time=time.time(),
                )
                for rank, message in faults
            ]
        )

    def spreads(self, step: int, differences: Mapping[str, Differences]) -> None:
        """Log the differences between runs so far.

        Args:
            step: number of decided steps.
            differences: the differences on this rank, by the message of `validate`.
        """
        if self._writes:
            now = time.time()
            self._append(
                [
                    Spread(
                        spread_of=name,
                        step=step,
                        rank=0,
                        count=seen.count,
                        quantiles=dict(seen.quantiles()),
                        time=now,
                    )
                    for name, seen in sorted(differences.items())
                    if seen.count
                ]
            )

    def _append(self, records: Sequence[Rejected | Spread]) -> None:
        if self._results is not None:
            self._results.append(*records)

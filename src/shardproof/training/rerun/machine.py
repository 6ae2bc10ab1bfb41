"""The rerun machine: reruns a suspicious step, to distinguish a faulty device from a bad batch.

`training.rerun.transitions` is the table of transitions; this module is the interface to the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import torch
from torch.distributed import ProcessGroup

from shardproof.engine.rendezvous import Rendezvous, check_deadline, connect
from shardproof.errors import RankFailure, RankSilent, StructureError
from shardproof.training.rerun.attribution import DeviceIdentity
from shardproof.training.rerun.injection import FaultInjector
from shardproof.training.rerun.persistent_state import PersistentState
from shardproof.training.rerun.replay import ReplayableIterator
from shardproof.training.rerun.result_log import ResultLog
from shardproof.training.rerun.step_effects import Decision, ExitCodes, Recorder, Steps
from shardproof.training.rerun.step_run import Call, Compare, Rejection
from shardproof.training.rerun.step_start import StepState, iterators_of
from shardproof.training.rerun.transitions import Mode, State
from shardproof.training.rerun.votes import BallotExchange

_DATA_ENDED = (
    "the data of this rank ended within a step. Every rank needs the same number of microbatches: let the "
    "sampler drop or pad the last ones (DistributedSampler, drop_last=True), or pass an endless iterator and "
    "end the loop after a number of steps"
)

Data: TypeAlias = "ReplayableIterator[Any] | Sequence[ReplayableIterator[Any] | None] | None"


class RerunMachine:
    """Decides about each step, equally on all ranks.

    A step runs once. If a rank rejects a result, all ranks rerun the step from the same start. A result that
    differs in the rerun is a transient fault of that rank's device. If the result is the same, the loop saves
    a checkpoint and the job exits. The restarted job reruns the step on another device, with the
    microbatches from the checkpoint. A result that differs there is a persistent fault of the first device.
    A result that is the same is correct.

    The body of the loop must be able to run twice. It begins by zeroing the gradients, and changes only
    gradients, random generators, data and the objects in `step_state`. The machine must be part of the state
    of every checkpoint: ``{"model": model, ..., "rerun": machine}``.

    Args:
        mode: "validate", "report" (every step runs twice, and the differences are counted) or "disabled".
        rendezvous: the rendezvous for votes. None connects as `Checkpointer` does.
        group: a process group of all ranks for the votes of steps without a rejected result. Use it for
            nothing else. None holds a meeting after each run.
        deadline: seconds of silence after which a meeting gives up a rank. An all-reduce over `group` has the
            group's own timeout: create the group with the same value.
        identity: the identity of this rank's device, or a function that returns it, called once. None:
            `DeviceIdentity.here`.
        step_state: objects that save and restore other state of a step, such as `BufferState`.
        skip_first: number of steps, from the start of this process, that are not validated. A pending rerun
            is always validated.
        exit_codes: see `ExitCodes`.
        layout: a text for the parallel layout, such as "dp2 tp2". A pending rerun requires the same layout.
        pending: what to do with a pending rerun that another world size or layout saved: "refuse" to load it
            (StructureError), or "drop" it.
        log: the log of rejected results, which rank 0 writes: a `ResultLog` or its path.
        inject: replaces results by wrong ones, for tests.

    Raises:
        ValueError: an argument has an invalid value.

    >>> import math, torch
    >>> weight, data = torch.ones(2, requires_grad=True), ReplayableIterator([torch.ones(2)] * 3)
    >>> optimizer, machine = torch.optim.SGD([weight], lr=0.1), RerunMachine()
    >>> while machine.should_run(data):
    ...     optimizer.zero_grad()
    ...     loss = (next(data) * weight).sum()
    ...     loss.backward()
    ...     machine.validate(loss, rejected=math.isnan, message="loss")
    >>> machine.decide()
    Decision(checkpoint=False, exit=False, code=0, attribution=None, settles=False)
    >>> optimizer.step()
    """

    def __init__(
        self,
        mode: Literal["disabled", "validate", "report"] = "validate",
        *,
        rendezvous: Rendezvous | None = None,
        group: ProcessGroup | None = None,
        deadline: float | None = None,
        identity: DeviceIdentity | Callable[[], DeviceIdentity] | None = None,
        step_state: Sequence[StepState] = (),
        skip_first: int = 0,
        exit_codes: ExitCodes | None = None,
        layout: str = "",
        pending: Literal["refuse", "drop"] = "refuse",
        log: ResultLog | str | os.PathLike[str] | None = None,
        inject: FaultInjector | None = None,
    ) -> None:
        check_deadline(rendezvous, deadline)
        if pending not in ("refuse", "drop"):
            raise ValueError(f"pending is {pending!r}, not 'refuse' or 'drop'")
        results = log if log is None or isinstance(log, ResultLog) else ResultLog(log)
        self._exchange = BallotExchange(rendezvous or connect(deadline=deadline), group)
        self._persistent = PersistentState(
            self._exchange.world_size, layout, drops=pending == "drop", inject=inject
        )
        self._identity_of = identity or DeviceIdentity.here
        self._inject = inject
        self._recorder = Recorder(self._exchange.rank, results)
        self._exiting = False
        """True after a decision to exit."""
        self._steps = Steps(
            Mode(mode),
            self._persistent,
            self._exchange,
            self._recorder,
            identity=lambda: self.identity,
            step_state=tuple(step_state),
            codes=exit_codes or ExitCodes(),
            to_skip=skip_first,
        )

    @property
    def step(self) -> int:
        """Number of decided steps over all processes of the run, which is the number of the next step."""
        return self._persistent.job.step

    @property
    def state(self) -> State:
        """The state of the machine."""
        return self._persistent.job.state

    @cached_property
    def identity(self) -> DeviceIdentity:
        """This rank's device."""
        return self._identity_of() if callable(self._identity_of) else self._identity_of

    # ------------------------------------------------------------------------------------------- the loop

    def should_run(self, data: Data) -> bool:
        """Return True if the body of the loop runs now, for the first time or again.

        Args:
            data: the iterators of the step's microbatches: one, or a list for a virtual pipeline. None stands
                for a stage without data.

        Raises:
            RankFailure, RankSilent: another rank raised or is silent. Equal on all ranks.
            StructureError: ranks are in different steps, or a pending step cannot run with this data.
            PlainDataError: a checkpoint cannot store a microbatch or a value of `step_state`.
            TypeError: the data is not a `ReplayableIterator`.
            RuntimeError: the call is out of order.
        """
        iterators = iterators_of(data)
        if self._exiting:
            raise RuntimeError(
                "the machine has decided that this process ends: leave the loop when Decision.exit is True"
            )
        if self._steps.decision is not None:
            raise RuntimeError(f"step {self.step} has been run: call decide() before the next should_run")
        if self._steps.run is None:
            self._steps.begin(iterators)
            return True
        assert self._steps.start is not None
        if iterators != self._steps.start.iterators:
            raise RuntimeError(
                f"should_run was called with other data in the middle of step {self.step}: loops of one "
                "machine cannot be nested. Use one loop a step, with all of its iterators"
            )
        return self._steps.finish()

    def validate(
        self,
        value: Any,
        rejected: Rejection,
        *,
        compare: Compare | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
        message: str = "",
    ) -> None:
        """Check a result of this step. The result and the control flow do not change.

        Args:
            value: a number, or a tensor of any shape, dtype and device.
            rejected: returns True for a suspicious value: `not_finite`, `UnexpectedlyLarge`, `Spike` or any
                function. Within a step, it must return the same for the same value.
            compare: returns the relative difference of two runs' values; `relative_difference` when None.
            tolerance: largest relative difference of values that count as the same. 0.0 requires equality.
            fatal: True if training must not continue with a value that the last run rejects too.
            message: the name of the value, for logs and statistics.

        Raises:
            RuntimeError: no step is running.
        """
        if self._steps.run is None:
            raise RuntimeError("validate() must be called inside of `while machine.should_run(data):`")
        if not self._steps.validates:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach()  # math.isnan converts it to a number: torch warns if it has a gradient
        if self._inject is not None:
            value = self._inject.apply(
                value,
                step=self.step,
                rank=self._exchange.rank,
                call=self._steps.run.calls,
                run=self._steps.run.name,
                identity=self.identity,
            )
        self._persistent.own.rejections.register(rejected, message)
        self._steps.run.record(Call(value, rejected, compare, tolerance, fatal, message))

    def decide(self) -> Decision:
        """Return the decision about the step. Call it after the loop and before the optimizer step.

        Involves no communication.

        Raises:
            RuntimeError: the step is not over, or no step has run.
        """
        if self._steps.run is not None:
            raise RuntimeError(
                f"decide() in the middle of step {self.step}: end the loop by should_run, not by break"
            )
        if self._steps.decision is None:
            raise RuntimeError("decide() must be called once after each `while machine.should_run(data):`")
        decision, self._steps.decision = self._steps.decision, None
        self._exiting = decision.exit
        if self.state is not State.WILL_RERUN:
            self._persistent.job.step += 1
        return decision

    def reject(self, message: str, *, ranks: Sequence[int]) -> None:
        """Report a fault outside of the steps, such as a replica that has diverged.

        The next vote discards its step: the decision is to exit as failed, without a checkpoint. One rank's
        report is enough, unless the machine is disabled. Every report is logged.

        Args:
            message: description of the fault.
            ranks: the ranks that are or may be at fault; empty for this rank.
        """
        self._steps.outside += tuple((rank, message) for rank in ranks or [self._exchange.rank])

    def report(self) -> str:
        """Return a text with the attributions so far and the differences between this rank's runs.

        Rank 0 appends its differences to the log, if there is one.
        """
        self._recorder.spreads(self.step, self._persistent.own.differences)
        found = [f"{n} × {kind.value}" for kind, n in self._persistent.job.attributed.items() if n]
        summary = ", ".join(found) or "nothing attributed"
        lines = [f"rerun machine ({self._steps.mode.value}): {self.step} steps, {summary}"]
        lines += [f"  {name}: {seen}" for name, seen in sorted(self._persistent.own.differences.items())]
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------- in checkpoints

    def state_tree(self) -> dict[str, Any]:
        """The machine's state for a checkpoint. A pending rerun does not change the keys.

        Raises:
            StructureError: a step is running.
        """
        if self._steps.run is not None or self._steps.decision is not None:
            raise StructureError(
                f"the rerun machine is in the middle of step {self.step} ({self.state.value}). The loader "
                "has already returned the microbatches of the step: a run that resumes from here would skip "
                "them. Save and load after decide() and before the next should_run"
            )
        return self._persistent.tree()

    def check_stored(self, stored: dict[str, Any]) -> None:
        """Check, before a load overwrites anything, that this run can load the stored state.

        Args:
            stored: the plain data that is equal on all ranks, by key.

        Raises:
            StructureError: a run of another shape saved a pending rerun, and `pending` is "refuse".
        """
        self._persistent.check(stored)

    def state_loaded(self) -> None:
        """Apply the loaded state, after a load."""
        if dropped := self._persistent.apply_loaded():
            self._recorder.warn(
                self.step,
                f"was pending in a run of another shape ({dropped}): dropped, with its microbatches",
            )
        self._exiting = False

    # --------------------------------------------------------------------------------------- exceptions

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Fail the next vote of the other ranks if an exception leaves the block. See the note in `votes`."""
        # All ranks raise a meeting's errors, and all ranks exit by the same decision.
        known_to_all = isinstance(error, RankFailure | RankSilent) or (
            isinstance(error, SystemExit) and self._exiting
        )
        if isinstance(error, StopIteration):
            error.add_note(_DATA_ENDED)
        if error is None or known_to_all or self._steps.mode is Mode.DISABLED:
            return
        between = self._steps.run is None and not self._persistent.job.pending
        over = self._steps.decision is not None and not self._persistent.job.pending
        told = StopIteration(_DATA_ENDED) if isinstance(error, StopIteration) else error
        self._exchange.fail(self.step + over, State.INITIAL_RUN if between else self.state, told)

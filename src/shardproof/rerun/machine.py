"""The rerun machine: runs a suspicious step again, and tells a faulty device from a bad batch.

`shardproof.rerun.transitions` says what follows from what the ranks found; here it is done.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import torch
from torch.distributed import ProcessGroup

from shardproof.errors import RankFailure, RankSilent, StructureError
from shardproof.rendezvous import Rendezvous, check_deadline, connect
from shardproof.rerun.attribution import DeviceIdentity
from shardproof.rerun.comparison import Compare
from shardproof.rerun.decision import Decision, ExitCodes
from shardproof.rerun.injection import FaultInjector
from shardproof.rerun.persistent_state import PersistentState
from shardproof.rerun.recorder import Recorder
from shardproof.rerun.replay import ReplayableIterator
from shardproof.rerun.result_log import ResultLog
from shardproof.rerun.step_effects import Steps
from shardproof.rerun.step_run import Call, Rejection
from shardproof.rerun.step_start import StepState, iterators_of
from shardproof.rerun.transitions import Mode, State
from shardproof.rerun.votes import BallotExchange

__all__ = ["RerunMachine"]

Data: TypeAlias = "ReplayableIterator[Any] | Sequence[ReplayableIterator[Any] | None] | None"


class RerunMachine:
    """Decides, on all ranks alike, what becomes of each step.

    A step is run once. If some rank rejects a result, all ranks run it again from the same beginning: what
    does not come out the same was a transient fault of that rank's device. What does is looked at on another
    device: a checkpoint is taken, the job ends, and the restarted job runs the step with the microbatches
    that the checkpoint holds. There it is a persistent fault of the first device, or a correct result.

    The body of the loop must be able to run twice: it begins by zeroing the gradients, and changes nothing
    but gradients, random generators, data and what is in `step_state`. The machine belongs
    in the state of every checkpoint: ``{"model": model, ..., "rerun": machine}``.

    Args:
        mode: "validate", "report" (every step runs twice, and the differences are counted) or "disabled".
        rendezvous: where the ranks meet for votes; found by itself when None, as `Checkpointer` does.
        group: a process group of all ranks for the votes of quiet steps, used for nothing else; None to meet
            after each run.
        deadline: seconds of silence after which a rank is given up at a meeting. An all-reduce over `group`
            ends by the group's own timeout: make the group with the same.
        identity: of this rank's device, or what gives it; `DeviceIdentity.here` when None. Asked for once.
        step_state: what a step changes besides, each with save and restore: see `BufferState`.
        skip_first: number of steps, from the start of this process, that are not validated. A step that was
            pending when the process started is.
        exit_codes: see `ExitCodes`.
        layout: your text for the parallel layout, such as "dp2 tp2": a pending rerun needs the same.
        pending: what to do with a pending rerun that another world size or layout saved: "refuse" to load it
            (StructureError), or "drop" it.
        log: where rejected results are written to (rank 0 writes): a `ResultLog` or its path.
        inject: puts wrong results in the place of right ones, for trials.
        kept: the deprecated name of `step_state`.

    Raises:
        ValueError: an argument is not as described.
        TypeError: both `step_state` and `kept` are given.

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
        kept: Sequence[StepState] | None = None,
    ) -> None:
        if kept is not None:
            if step_state:
                raise TypeError("RerunMachine takes step_state= or its old name kept=, not both")
            warnings.warn(
                "RerunMachine(kept=) is now RerunMachine(step_state=): use that name",
                DeprecationWarning,
                stacklevel=2,
            )
            step_state = kept
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
        self._ends = False
        """Whether this process has nothing to do but to exit."""
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
        """Number of steps that were decided, over all processes of the run: the number of the next one."""
        return self._persistent.job.step

    @property
    def state(self) -> State:
        """Where the machine is."""
        return self._persistent.job.state

    @cached_property
    def identity(self) -> DeviceIdentity:
        """This rank's device."""
        return self._identity_of() if callable(self._identity_of) else self._identity_of

    # ------------------------------------------------------------------------------------------- the loop

    def should_run(self, data: Data) -> bool:
        """Whether the body of the loop runs now, for the first time or again.

        Args:
            data: what the step takes its microbatches from; several for a virtual pipeline; None for none,
                also in place of one of several.

        Raises:
            RankFailure, RankSilent: another rank raised, or is gone. Equal on all ranks.
            StructureError: ranks are in different steps, or a pending step cannot be run with this data.
            PlainDataError: a microbatch or a kept value is nothing that a checkpoint can hold.
            TypeError: the data cannot be given twice.
            RuntimeError: it is not its turn.
        """
        iterators = iterators_of(data)
        if self._ends:
            raise RuntimeError(
                "the machine has decided that this process ends: leave the loop when decide() says exit"
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
        """Look at a result of this step. Changes neither the result nor the flow.

        Args:
            value: a number, or a tensor of any shape, dtype and device.
            rejected: whether a value is suspicious: `not_finite`, `UnexpectedlyLarge`, `Spike` or any
                function. The same value must get the same answer within a step.
            compare: gives the relative difference of two runs' values; `relative_difference` when None.
            tolerance: largest relative difference of values that count as the same. With 0.0, equal.
            fatal: whether training must not go on with a value that is rejected to the end.
            message: what the value is, for logs; names the statistics.

        Raises:
            RuntimeError: no step runs.
        """
        if self._steps.run is None:
            raise RuntimeError("validate() is called inside of `while machine.should_run(data):`")
        if not self._steps.validates:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach()  # a rejection such as math.isnan may convert it
        if self._inject is not None:
            value = self._inject.apply(
                value,
                step=self.step,
                rank=self._exchange.rank,
                call=self._steps.run.calls,
                run=self._steps.run.name,
                identity=self.identity,
            )
        self._persistent.own.rejections.use(rejected, message)
        self._steps.run.take(Call(value, rejected, compare, tolerance, fatal, message))

    def decide(self) -> Decision:
        """What becomes of the step, after the loop and before the optimizer step. Exchanges nothing.

        Raises:
            RuntimeError: the step is not over, or there is none.
        """
        if self._steps.run is not None:
            raise RuntimeError(
                f"decide() in the middle of step {self.step}: let the loop end by should_run, not by break"
            )
        if self._steps.decision is None:
            raise RuntimeError("decide() is called once after each `while machine.should_run(data):`")
        decision, self._steps.decision = self._steps.decision, None
        self._ends = decision.exit
        if self.state is not State.WILL_RERUN:
            self._persistent.job.step += 1
        return decision

    def reject(self, message: str, *, ranks: Sequence[int]) -> None:
        """Say that something outside of the steps is wrong, such as a replica that has diverged.

        The step that is voted on next is not used: its decision is to exit as failed, without a checkpoint.
        It is enough that one rank says so, unless the machine is disabled. All that is said is logged.

        Args:
            message: what is wrong.
            ranks: whose fault it is, or may be; none given: this rank's.
        """
        self._steps.outside += tuple((rank, message) for rank in ranks or [self._exchange.rank])

    def report(self) -> str:
        """What was found so far, for people: attributions, and how much this rank's runs differed.

        Rank 0 adds how much they differed to the log, if there is one.
        """
        self._recorder.spreads(self.step, self._persistent.own.differences)
        found = [f"{n} × {kind.value}" for kind, n in self._persistent.job.attributed.items() if n]
        summary = ", ".join(found) or "nothing attributed"
        lines = [f"rerun machine ({self._steps.mode.value}): {self.step} steps, {summary}"]
        lines += [f"  {name}: {seen}" for name, seen in sorted(self._persistent.own.differences.items())]
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------- in checkpoints

    def state_tree(self) -> dict[str, Any]:
        """What a checkpoint holds of the machine: the same keys whether a rerun is pending or not.

        Raises:
            StructureError: a step is under way.
        """
        if self._steps.run is not None or self._steps.decision is not None:
            raise StructureError(
                f"the rerun machine is in the middle of step {self.step} ({self.state.value}), whose "
                "microbatches the loader has given already: a run that resumed from here would miss them. "
                "Save and load after decide() and before the next should_run"
            )
        return self._persistent.tree()

    def check_stored(self, stored: dict[str, Any]) -> None:
        """Before a load overwrites anything: whether this run can take what is stored.

        Args:
            stored: the plain data that all ranks have in common, by key.

        Raises:
            StructureError: a rerun is pending that a run of another shape saved, and it is not to be dropped.
        """
        self._persistent.check(stored)

    def state_loaded(self) -> None:
        """After a load: go on from what it brought."""
        dropped = self._persistent.take_over()
        if dropped:
            self._recorder.say(
                self.step, f"was pending in a run of another shape ({dropped}): it is dropped with its data"
            )
        self._ends = False

    # ------------------------------------------------------------------------------- in step with the others

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An exception that leaves the block fails the others' next vote. See the note in `votes`."""
        told = isinstance(error, RankFailure | RankSilent) or (isinstance(error, SystemExit) and self._ends)
        if error is None or told or self._steps.mode is Mode.DISABLED:
            return
        between = self._steps.run is None and not self._persistent.job.pending
        over = self._steps.decision is not None and not self._persistent.job.pending
        self._exchange.fail(self.step + over, State.INITIAL_RUN if between else self.state, error)

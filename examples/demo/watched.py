"""The trainer under the rerun machine: ``python -m examples.demo.watched TASK.json`` under torchrun.

`WatchedTrainer.run_step` shows all calls of a training script to the machine.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import cast

from examples.demo.fault_story import FAILED, RESTART, FaultTask
from examples.demo.train import DEADLINE, Trainer, draws, leave, run_task
from shardproof import rerun
from shardproof.rerun import FaultKind

__all__ = ["WatchedTrainer"]


class WatchedTrainer(Trainer):
    """One rank of a run whose steps are validated."""

    def __init__(self, task: FaultTask) -> None:
        super().__init__(task)
        self.watched = task
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.machine = rerun.RerunMachine(
            "validate" if task.node else "disabled",
            deadline=DEADLINE,
            identity=rerun.DeviceIdentity(task.node, f"GPU-{task.node}-{local_rank}", local_rank),
            exit_codes=rerun.ExitCodes(restart=RESTART, failed=FAILED),
            layout=str(task.layout),
            log=task.log,
            inject=_injector(task),
        )
        self.batches = rerun.ReplayableIterator(iter(self.data.next, None))
        self.left_out = {step + 1 for step in rerun.steps_to_skip(task.log)} | {task.left_out}
        self.state["rerun"] = self.machine

    def run(self) -> int:
        """Train to the task's last step, or until the machine decides to exit. Returns the exit code."""
        task = self.watched
        if task.restore:
            self.restore(suspect=True)
        with self.machine:
            while self.step < task.stop:
                code = self.run_step()
                if code is not None:
                    self.record("exit", code=code)
                    return code
                if task.save_every and self.step % task.save_every == 0:
                    self.save()
        self.record_state("end", self.step)
        self.record("done")
        return 0

    def run_step(self) -> int | None:
        """Run one step, and rerun it if the machine requires it. Returns an exit code to exit the process."""
        number = self.step + 1
        while self.machine.should_run(self.batches):
            self.optimizer.zero_grad()
            batch = next(self.batches)
            drawn = draws()
            if number in self.left_out:
                continue
            self.record("ran", step=number)
            share = self.compute_gradients(*batch)
            self.machine.validate(share, rejected=rerun.not_finite, message="loss")

        decision = self.machine.decide()
        self.record_decision(number, decision)
        if decision.checkpoint:
            self.checkpointer.save(self.step, self.state, suspect=True).result()
        if decision.settles:
            self.checkpointer.settle_suspect(self.step, str(decision.attribution))
        if decision.exit:
            code: int = decision.code
            return code

        self.step = number
        if number in self.left_out:
            self.record("left out", step=number)
        else:
            rate = self.apply_gradients()
            self.record("step", step=number, loss=self.mean_loss(share), rate=rate, draws=drawn)
        return None

    def record_decision(self, number: int, decision: rerun.Decision) -> None:
        """Record a decision, unless no result was rejected."""
        if decision == rerun.Decision():
            return
        found = decision.attribution
        self.record(
            "decided",
            step=number,
            checkpoint=decision.checkpoint,
            exit=decision.exit,
            code=decision.code,
            settles=decision.settles,
            attribution=None if found is None else str(found),
        )


def _injector(task: FaultTask) -> rerun.FaultInjector | None:
    if not task.fault:
        return None
    kind = cast(FaultKind, task.fault)
    return rerun.FaultInjector(kind, steps=[task.fault_step - 1], ranks=[task.fault_rank])  # steps from 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    leave(run_task(WatchedTrainer, FaultTask.read(Path(sys.argv[1]))))

"""The runs of the fault demo: the injected fault, the node of each run and its expected end.

This module imports no torch, because the parent process needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from examples.demo.story import RankLayout, Story, Task

__all__ = ["FAILED", "FAULTS", "RESTART", "FaultRun", "FaultStory", "FaultTask"]

RESTART = 16
FAILED = 17
"""Exit codes of the trainer: restart on another node; the last run of a step gave a rejected result."""

FAULTS = {
    "transient": "transient fault",
    "persistent": "persistent fault",
    "correct": "correct result",
}
"""Each kind of injected fault, with its expected verdict."""


@dataclass(frozen=True, slots=True)
class FaultTask(Task):
    """One run of the trainer under the rerun machine."""

    node: str = ""
    """Node name of the run's devices; "" for a run without the machine."""
    fault: str = ""
    """Kind of the injected fault; "" for none."""
    fault_step: int = 0
    """The step with the wrong loss, counted from 1."""
    fault_rank: int = 0
    """The rank with the wrong loss."""
    log: str = ""
    """Log of rejected results. The run skips the steps of `steps_to_skip`."""
    left_out: int = 0
    """A step to skip in any case; 0 for none."""


@dataclass(frozen=True, slots=True)
class FaultRun:
    """A run of the story, and its expected end."""

    name: str
    node: str
    source: str
    """The initial state of the run: "the beginning", "step 8", "suspect 9"."""
    code: int
    times: int
    """Number of runs of the step with the fault."""
    suspects: tuple[int, ...] = ()
    """Steps of suspect checkpoints after the run."""
    finds: bool = False
    """True if this run reaches the verdict."""


@dataclass(frozen=True, slots=True)
class FaultStory:
    """A fault, and the sizes of its runs.

    >>> story = FaultStory.of("persistent", 4, 24, 4)
    >>> story.fault_step, story.fault_rank, [run.code for run in story.runs]
    (10, 3, [16, 16, 0])
    """

    fault: str
    layout: RankLayout
    steps: int
    save_every: int

    @classmethod
    def of(
        cls,
        fault: str,
        ranks: int,
        steps: int,
        save_every: int,
        *,
        optimizer: str = "adamw",
        sharding: str = "fsdp2",
    ) -> FaultStory:
        """Make a story of these sizes.

        Raises:
            ValueError: the sizes do not fit together, or `fault` is unknown.
        """
        if fault not in FAULTS:
            raise ValueError(f"fault is {fault!r}, not one of {', '.join(FAULTS)}")
        story = Story.of(ranks, (), steps, save_every, optimizer=optimizer, sharding=sharding)
        return cls(fault, story.layout, steps, save_every)

    @property
    def fault_step(self) -> int:
        """The step with the fault, counted from 1. It is between two saves if `save_every` is above 1."""
        return 2 * self.save_every + (self.save_every + 1) // 2

    @property
    def fault_rank(self) -> int:
        """The last rank."""
        return self.layout.ranks - 1

    @property
    def runs(self) -> tuple[FaultRun, ...]:
        """The runs after the reference."""
        before = self.fault_step - 1
        begin, suspect = "the beginning", f"suspect {before}"
        saved = f"step {2 * self.save_every}"
        first = FaultRun("faulty", "node-a", begin, RESTART, times=2, suspects=(before,))
        if self.fault == "transient":
            return (FaultRun("faulty", "node-a", begin, 0, times=2, finds=True),)
        if self.fault == "persistent":
            return (
                first,
                FaultRun("restarted-same-node", "node-a", suspect, RESTART, times=1, suspects=(before,)),
                FaultRun("restarted-elsewhere", "node-b", suspect, 0, times=1, finds=True),
            )
        return (
            first,
            FaultRun("restarted-elsewhere", "node-b", suspect, FAILED, times=1, finds=True),
            FaultRun("left-out", "node-b", saved, 0, times=0),
        )

    def task(self, number: int, *, folder: Path, text: Path, device: str) -> FaultTask:
        """The task of one run, in the folder of the demo. Run 0 is the reference without the fault.

        With a correct result, the reference skips the step. Each resumed run starts with other weights and
        generators, so that only the checkpoint can give the right state.
        """
        run = self.runs[number - 1] if number else None
        return FaultTask(
            name="reference" if run is None else run.name,
            folder=str(folder / "runs"),
            text=str(text),
            device=device,
            layout=self.layout,
            checkpoints=str(folder / "checkpoints"),
            horizon=self.steps,
            stop=self.steps,
            save_every=0 if run is None else self.save_every,
            restore=number > 1,
            seed=100 + number if number > 1 else 0,
            node="" if run is None else run.node,
            fault="" if run is None else self.fault,
            fault_step=self.fault_step,
            fault_rank=self.fault_rank,
            log=str(folder / "rejected.jsonl"),
            left_out=self.fault_step if run is None and self.fault == "correct" else 0,
        )

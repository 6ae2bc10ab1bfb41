"""The runs of the fault demo: the injected fault, the node of each run and its expected end.

This module imports no torch, because the parent process needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardproof.demo.story import Layout, Story, Task

__all__ = ["FAILED", "FAULTS", "RESTART", "FaultRun", "FaultStory", "FaultTask"]

RESTART = 16
FAILED = 17
"""Exit codes of the trainer: start again on another node; a result was rejected and stays so."""

FAULTS = {
    "transient": "transient fault",
    "persistent": "persistent fault",
    "correct": "correct result",
}
"""Each kind of injected fault, and the verdict that it must get."""


@dataclass(frozen=True, slots=True)
class FaultTask(Task):
    """One run of the trainer under the rerun machine."""

    node: str = ""
    """The name that the run's devices have; "" for a run without the machine."""
    fault: str = ""
    """Kind of the injected fault; "" for none."""
    fault_step: int = 0
    """The step, counted from 1, in which the loss is wrong."""
    fault_rank: int = 0
    """The rank on which it is."""
    log: str = ""
    """File for rejected results. The steps that it says to skip are left out."""
    left_out: int = 0
    """A step to leave out in any case; 0 for none."""


@dataclass(frozen=True, slots=True)
class FaultRun:
    """A run of the story, and its expected end."""

    name: str
    node: str
    source: str
    """The state that it starts from: "the beginning", "step 8", "suspect 9"."""
    code: int
    times: int
    """How often the step with the fault is run."""
    suspects: tuple[int, ...] = ()
    """Steps of suspect checkpoints afterwards."""
    finds: bool = False
    """Whether this run reaches the verdict."""


@dataclass(frozen=True, slots=True)
class FaultStory:
    """A fault and its sizes.

    >>> story = FaultStory.of("persistent", 4, 24, 4)
    >>> story.fault_step, story.fault_rank, [run.code for run in story.runs]
    (10, 3, [16, 16, 0])
    """

    fault: str
    layout: Layout
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
        """The story of these sizes.

        Raises:
            ValueError: the sizes do not fit together, or `fault` is unknown.
        """
        if fault not in FAULTS:
            raise ValueError(f"fault {fault!r}: choose one of {', '.join(FAULTS)}")
        story = Story.of(ranks, (), steps, save_every, optimizer=optimizer, sharding=sharding)
        return cls(fault, story.layout, steps, save_every)

    @property
    def fault_step(self) -> int:
        """Counted from 1; between two saves where there is room."""
        return 2 * self.save_every + (self.save_every + 1) // 2

    @property
    def fault_rank(self) -> int:
        """The last one."""
        return self.layout.ranks - 1

    @property
    def runs(self) -> tuple[FaultRun, ...]:
        """After the reference."""
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
        """The task of one run; run 0 is the reference without the fault.

        In the story of a correct result the reference leaves the step out. Each resumed run starts with
        other weights and generators, so that a right state must come from the checkpoint.

        Args:
            number: of the run, from 1; 0 for the reference.
            folder: of the whole demo.
            text: to train on.
            device: of the tensors.
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

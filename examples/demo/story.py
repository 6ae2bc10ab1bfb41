"""The plan of the recovery demo: layouts, runs and the task that each run's workers read.

A task is a JSON file. Each worker appends its records as lines of JSON to its own file and flushes each line,
so the records of a killed run are complete up to the kill. This module imports no torch, because the parent
process needs none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

__all__ = [
    "LOSS_TOLERANCE",
    "OPTIMIZERS",
    "SHARDINGS",
    "STORAGES",
    "RankLayout",
    "Record",
    "Story",
    "Task",
    "read_records",
]

OPTIMIZERS = ("adamw", "distributed", "hybrid")
"""torch's AdamW; AdamW under `optim.DistributedOptimizer`; AdamW under `optim.HybridDeviceOptimizer`."""

SHARDINGS = ("fsdp2", "flat", "none")
"""Sharding of the parameters over data-parallel ranks: torch's FSDP2, `shardproof.fsdp`, or none."""

STORAGES = ("folder", "s3")
"""Storage of the checkpoints: a folder, or a bucket of an S3 server that the demo starts on loopback."""

_SHARDING_NAMES = {"fsdp2": "FSDP2", "flat": "flat", "none": "DP"}


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The numbers of data-parallel and tensor-parallel ranks, the sharding and the optimizer.

    Raises:
        ValueError: an unknown choice, or choices that exclude each other.
    """

    data: int
    tensor: int = 1
    sharding: str = "fsdp2"
    """One of `SHARDINGS`."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    cpu_fraction: float = 0.5
    """Fraction of the elements that the hybrid optimizer updates on the CPU."""

    def __post_init__(self) -> None:
        for what, choices in (("sharding", SHARDINGS), ("optimizer", OPTIMIZERS)):
            if getattr(self, what) not in choices:
                raise ValueError(f"{what} is {getattr(self, what)!r}, not one of {', '.join(choices)}")
        if self.optimizer == "distributed" and self.sharding != "none":
            raise ValueError(
                f"the distributed optimizer needs unsharded parameters, but {self.sharding} shards them: use "
                f"--optimizer distributed with --sharding none, or --sharding {self.sharding} with "
                "--optimizer adamw or hybrid"
            )

    def widest(self) -> RankLayout:
        """The layout with the same number of ranks, and tensor parallelism of 2 for even numbers from 4 on.

        >>> str(RankLayout(4).widest()), str(RankLayout(3).widest()), str(RankLayout(1).widest())
        ('4 ranks, FSDP2 2 × TP 2', '3 ranks, FSDP2', '1 rank')
        """
        ranks = self.ranks
        return replace(self, data=ranks // 2, tensor=2) if ranks >= 4 and ranks % 2 == 0 else self

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor

    @property
    def method(self) -> str:
        """The optimizer, as a text.

        >>> RankLayout(2, optimizer="hybrid", cpu_fraction=0.25).method
        'hybrid, 25% on CPU'
        """
        return f"hybrid, {self.cpu_fraction:.0%} on CPU" if self.optimizer == "hybrid" else self.optimizer

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        sharding = _SHARDING_NAMES[self.sharding]
        if self.tensor == 1:
            return f"{self.ranks} ranks, {sharding}"
        return f"{self.ranks} ranks, {sharding} {self.data} × TP {self.tensor}"


LOSS_TOLERANCE = 1e-4
"""Largest relative difference of a loss between layouts, whose float32 sums have another order. The
difference grows over the steps. A misplaced tensor or a repeated step gives a much larger difference."""

KILLED_IN_SAVE = 3
"""Number of the save that the kill interrupts, from 1."""

BATCH = 12
"""Number of windows in a step's batch, and largest number of ranks."""


@dataclass(frozen=True, slots=True)
class Story:
    """Sizes of the demo.

    >>> story = Story(RankLayout(4), resume_ranks=(3, 1), steps=24, save_every=4)
    >>> story.restored_step, story.killed_step, story.stops
    (8, 12, (16, 24))
    """

    layout: RankLayout
    """Layout of the runs before the kill, and of the resume on the same layout."""
    resume_ranks: tuple[int, ...]
    steps: int
    save_every: int

    @classmethod
    def of(
        cls,
        ranks: int,
        resume_ranks: Sequence[int],
        steps: int,
        save_every: int,
        *,
        optimizer: str = "adamw",
        sharding: str = "fsdp2",
    ) -> Story:
        """Make a story of these sizes.

        Raises:
            ValueError: the sizes do not fit together.
        """
        for count in (ranks, *resume_ranks):
            if not 1 <= count <= BATCH:
                raise ValueError(f"{count} ranks: the demo runs on 1 to {BATCH} ranks")
        least = save_every * (2 + max(1, len(resume_ranks)))
        if save_every < 1 or steps % save_every or steps < least:
            raise ValueError(
                f"steps is {steps}: it must be a multiple of save_every, {save_every}, and at least {least}, "
                f"for two saves, one interrupted save and {len(resume_ranks)} resumed runs"
            )
        layout = RankLayout(ranks, sharding=sharding, optimizer=optimizer).widest()
        return cls(layout, tuple(resume_ranks), steps, save_every)

    @property
    def resume_layouts(self) -> tuple[RankLayout, ...]:
        """Layouts of the runs on other ranks. The hybrid optimizer's CPU fraction changes too: 1, 0, 1, ...

        >>> story = Story.of(4, (3, 1), 24, 4, optimizer="hybrid", sharding="flat")
        >>> [f"{layout}: {layout.method}" for layout in story.resume_layouts]
        ['3 ranks, flat: hybrid, 100% on CPU', '1 rank: hybrid, 0% on CPU']
        """
        return tuple(
            replace(self.layout, data=ranks, tensor=1, cpu_fraction=float(part % 2 == 0))
            for part, ranks in enumerate(self.resume_ranks)
        )

    @property
    def killed_step(self) -> int:
        """The step whose save the kill interrupts."""
        return self.save_every * KILLED_IN_SAVE

    @property
    def restored_step(self) -> int:
        """The step of the last save before the kill."""
        return self.save_every * (KILLED_IN_SAVE - 1)

    @property
    def stops(self) -> tuple[int, ...]:
        """Last step of each run on another layout. Each run resumes from the previous one."""
        parts = len(self.resume_ranks)
        saves = self.steps // self.save_every - (KILLED_IN_SAVE - 1)
        return tuple(
            self.restored_step + self.save_every * (saves * (part + 1) // parts) for part in range(parts)
        )


Record = dict[str, Any]
"""One line of a record file. "event" is one of "start", "model", "restored", "step", "digests", "saving",
"saved", "done" and "failed"."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the trainer."""

    name: str
    folder: str
    """Folder of the records."""
    text: str
    """File with the text to train on."""
    device: str
    layout: RankLayout
    checkpoints: str
    """The run folder of the `Checkpointer`, or its URL."""
    horizon: int
    """Number of steps of the learning rate schedule, over all runs."""
    stop: int
    """Last step of this run."""
    save_every: int = 0
    """Number of steps between saves; 0: no saves."""
    restore: bool = False
    """Start from the newest checkpoint."""
    die_in_save_of: int = 0
    """The step in whose save the last rank stops, after it has written some bytes; 0: none."""
    seed: int = 0
    """Seed of the initial weights and of the generators."""
    storage_options: dict[str, str] | None = None
    """Settings of the store, if `checkpoints` is a URL."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a task from a file that `write` made."""
        values = json.loads(path.read_text())
        return cls(**values | {"layout": RankLayout(**values["layout"])})

    def write(self) -> Path:
        """Writes the task to a file in its folder; returns the path."""
        path = Path(self.folder) / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    def records(self, rank: int) -> Path:
        """The file of a rank's records."""
        return Path(self.folder) / f"{self.name}.{rank}.jsonl"

    @property
    def stalled(self) -> Path:
        """The file that the last rank makes when it stops in the middle of a save."""
        return Path(self.folder) / f"{self.name}.stalled"


def read_records(path: Path) -> list[Record]:
    """Read the complete lines of a record file. A line that a kill cut short is ignored."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

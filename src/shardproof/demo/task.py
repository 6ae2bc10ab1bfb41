"""What one run of the demo's trainer is asked to do, and the records it leaves. No torch here.

The task is a JSON file that every worker reads. What a worker did, it appends as lines of JSON to a file of
its own, flushed line by line, so that the record of a killed run reaches as far as the run did.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from shardproof.demo.layout import Layout

__all__ = ["Record", "Task", "read_records"]

Record = dict[str, Any]
"""One line. Events: "start", "model", "restored", "step", "digests", "saving", "saved", "done", "failed"."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the trainer."""

    name: str
    folder: str
    """Where the records go."""
    text: str
    """File with the text to train on."""
    device: str
    layout: Layout
    checkpoints: str
    """The run folder of the `Checkpointer`."""
    horizon: int
    """Steps over which the learning rate falls, whatever part of them this run does."""
    stop: int
    """Last step of this run."""
    save_every: int = 0
    """Save after each so many steps; 0: never."""
    restore: bool = False
    """Start from the newest checkpoint."""
    die_in_save_of: int = 0
    """The step in whose save the last rank stops, once some of its bytes are written; 0: none."""
    seed: int = 0
    """Of the weights before the first step and of the generators."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The task in a file that `write` made."""
        values = json.loads(path.read_text())
        return cls(**values | {"layout": Layout(**values["layout"])})

    def write(self) -> Path:
        """Store the task in its folder and say where."""
        path = Path(self.folder) / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    def records(self, rank: int) -> Path:
        """Where a rank's records go."""
        return Path(self.folder) / f"{self.name}.{rank}.jsonl"

    @property
    def stalled(self) -> Path:
        """The file whose presence says that the last rank has stopped in the middle of a save."""
        return Path(self.folder) / f"{self.name}.stalled"


def read_records(path: Path) -> list[Record]:
    """The whole lines of a record file; a line that a kill cut short is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

"""What the demo found, as values: the table for a person and the JSON for a program say the same."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shardproof.demo.evidence import RunRecords, TensorComparison
from shardproof.demo.task import Task

__all__ = ["DemoReport", "KillFacts", "RunFacts", "StoredFacts", "facts_of"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run of the trainer. None: there was nothing of the kind to compare."""

    name: str
    layout: str
    method: str
    """The optimizer."""
    ranks: int
    first_step: int
    last_step: int
    seconds: float
    saves: dict[int, float]
    """Step to seconds from the call to the commit."""
    last_loss: float
    loss_difference: float | None
    """Largest relative difference to the uninterrupted run."""
    loss_tolerance: float
    """What is allowed; 0.0 where the layout is the same, and every bit has to be."""
    restored_step: int | None = None
    restore_seconds: float = 0.0
    passed_over: dict[str, str] | None = None
    """Newer checkpoints that were not restored, and why."""
    expected_step: int | None = None
    """The step that it had to restore."""
    restored: TensorComparison | None = None
    """The state after the restore with the state that was saved."""
    end: TensorComparison | None = None
    """The state at the end with that of the uninterrupted run, where the layout is the same."""
    draws_identical: bool | None = None
    """Whether random generators went on as in the uninterrupted run, on every rank that both have."""

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is as it has to be."""
        return (
            self.restored_step == self.expected_step
            and (self.restored is None or self.restored.ok)
            and (self.end is None or self.end.ok)
            and self.draws_identical is not False
            and (self.loss_difference is None or self.loss_difference <= self.loss_tolerance)
        )


@dataclass(frozen=True, slots=True)
class KillFacts:
    """What the kill in the middle of a save left."""

    step: int
    workers: int
    """Processes that SIGKILL ended."""
    files: int
    """Shard files of the unfinished save, as the kill left them."""
    bytes: int
    committed: bool

    @property
    def ok(self) -> bool:
        """Whether it was a kill in the middle: data had been written, nothing was committed."""
        return self.workers > 0 and self.files > 0 and self.bytes > 0 and not self.committed


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The last checkpoint, as one process without a process group finds it."""

    step: int
    location: str
    verified: bool
    faults: tuple[str, ...]
    chunks: int
    bytes: int
    seconds: float
    read: TensorComparison
    """What `shardproof.open` reads with what was saved."""

    @property
    def ok(self) -> bool:
        """Whether it verified and reads as saved."""
        return self.verified and self.read.ok


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demo found."""

    versions: dict[str, str]
    text: str
    text_bytes: int
    device: str
    optimizer: str
    sharding: str
    parameters: int
    steps: int
    save_every: int
    runs: tuple[RunFacts, ...]
    kill: KillFacts
    stored: StoredFacts
    steps_left: tuple[int, ...]
    """Committed steps in the run folder at the end."""
    folder: str | None
    """Where everything is; None if it was removed."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every claim held."""
        return all(run.ok for run in self.runs) and self.kill.ok and self.stored.ok

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, with the verdicts; a number that is not finite as its text."""
        values = asdict(self) | {"ok": self.ok}
        for run, facts in zip(values["runs"], self.runs, strict=True):
            run["ok"] = facts.ok
            run["saves"] = {str(step): seconds for step, seconds in facts.saves.items()}
            for name in ("last_loss", "loss_difference"):
                if run[name] is not None and not math.isfinite(run[name]):
                    run[name] = str(run[name])
        values["kill"]["ok"] = self.kill.ok
        values["stored"]["ok"] = self.stored.ok
        return values


def facts_of(
    task: Task,
    records: RunRecords,
    seconds: float,
    *,
    expected_step: int | None = None,
    restored: TensorComparison | None = None,
    end: TensorComparison | None = None,
    draws_identical: bool | None = None,
    loss_difference: float | None = None,
    loss_tolerance: float = 0.0,
) -> RunFacts:
    """The facts of a run: what its records say, and what the caller compared."""
    losses = records.losses()
    restore = next(iter(records.all("restored")), None)
    return RunFacts(
        name=task.name,
        layout=str(task.layout),
        method=task.layout.method,
        ranks=task.layout.ranks,
        first_step=min(losses, default=0),
        last_step=max(losses, default=0),
        seconds=seconds,
        saves={record["step"]: record["seconds"] for record in records.all("saved")},
        last_loss=losses[max(losses)] if losses else float("nan"),
        loss_difference=loss_difference,
        loss_tolerance=loss_tolerance,
        restored_step=restore["step"] if restore else None,
        restore_seconds=restore["seconds"] if restore else 0.0,
        passed_over=restore["passed_over"] if restore else None,
        expected_step=expected_step,
        restored=restored,
        end=end,
        draws_identical=draws_identical,
    )

"""Facts and comparisons of the demo's runs, computed from the records that the ranks wrote.

`DemoReport` contains all facts. Both the printed table and the JSON show it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from examples.demo.story import Record, Task, read_records

if TYPE_CHECKING:
    from shardproof.storage import Storage

__all__ = [
    "DemoReport",
    "KillFacts",
    "RunFacts",
    "RunRecords",
    "StoredFacts",
    "TensorComparison",
    "compare_draws",
    "compare_losses",
    "compare_tensors",
    "facts_of",
    "stored_facts",
]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of every rank of one run."""

    ranks: tuple[tuple[Record, ...], ...]

    @classmethod
    def of(cls, task: Task) -> RunRecords:
        """Read the records of a task."""
        return cls(tuple(tuple(read_records(task.records(rank))) for rank in range(task.layout.ranks)))

    def all(self, event: str, rank: int = 0) -> list[Record]:
        """A rank's records of one event."""
        return [record for record in self.ranks[rank] if record["event"] == event]

    def losses(self) -> dict[int, float]:
        """Step to loss over the whole batch."""
        return {record["step"]: record["loss"] for record in self.all("step")}

    def rates(self) -> dict[int, float]:
        """Step to learning rate."""
        return {record["step"]: record["rate"] for record in self.all("step")}

    def draws(self, rank: int) -> dict[int, list[float]]:
        """Step to the numbers that a rank drew from its random generators."""
        return {record["step"]: record["draws"] for record in self.all("step", rank)}

    def digests(self, when: str, step: int, rank: int = 0) -> Record | None:
        """The last digests of a rank at this point of this step, or None."""
        found = [
            record for record in self.all("digests", rank) if (record["when"], record["step"]) == (when, step)
        ]
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """A comparison of tensors by the digests of all their bits."""

    compared: int
    identical: int
    bytes: int
    """Size of the compared tensors, each counted once."""
    differing: tuple[str, ...] = field(default=())
    """Names that differ, or that only one side has."""
    plain_identical: bool = True
    """Whether the states that are plain values (schedule, data position) are equal too."""

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.compared > 0 and not self.differing and self.plain_identical


def compare_tensors(
    before: RunRecords, when_before: str, after: RunRecords, when_after: str, step: int
) -> TensorComparison:
    """Compare every tensor of `before` at a step with every tensor of `after`, over all ranks of both.

    A tensor whose digests differ between two ranks of one run counts as different: replicas must be equal.
    """
    first, plain_first = _digests(before, when_before, step)
    second, plain_second = _digests(after, when_after, step)
    names = sorted(first.keys() | second.keys())
    differing = [name for name in names if first.get(name) != second.get(name) or len(first[name]) > 1]
    size = sum(max(size for _, size in found) for found in first.values())
    is_plain_equal = len(plain_first | plain_second) == 1
    return TensorComparison(len(names), len(names) - len(differing), size, tuple(differing), is_plain_equal)


def _digests(run: RunRecords, when: str, step: int) -> tuple[dict[str, set[tuple[str, int]]], set[str]]:
    """The distinct (digest, bytes) over all ranks by name, and plain states; none if a rank has no record."""
    seen: dict[str, set[tuple[str, int]]] = {}
    plain: set[str] = set()
    for rank in range(len(run.ranks)):
        record = run.digests(when, step, rank)
        if record is None:
            return {}, set()
        plain.add(record["plain"])
        for name, (digest, size) in record["tensors"].items():
            seen.setdefault(name, set()).add((digest, size))
    return seen, plain


def compare_losses(reference: RunRecords, run: RunRecords) -> float:
    """Largest relative difference of a step's loss; infinity if the learning rates or the steps differ."""
    expected, found = reference.losses(), run.losses()
    rates = reference.rates()
    if not found or not found.keys() <= expected.keys():
        return float("inf")
    if any(rates[step] != rate for step, rate in run.rates().items()):
        return float("inf")
    return max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in found.items())


def compare_draws(reference: RunRecords, run: RunRecords, ranks: int) -> bool:
    """True if the generators of the first `ranks` ranks gave the same numbers at the same steps."""
    for rank in range(ranks):
        expected, found = reference.draws(rank), run.draws(rank)
        if not found or any(expected.get(step) != draws for step, draws in found.items()):
            return False
    return True


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run of the trainer. A comparison is None if it does not apply to the run."""

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
    loss_difference: float | None = None
    """Largest relative difference to the uninterrupted run."""
    loss_tolerance: float = 0.0
    """Largest allowed difference; 0.0 for the same layout, which must repeat every bit."""
    restored_step: int | None = None
    restore_seconds: float = 0.0
    passed_over: dict[str, str] | None = None
    """Newer checkpoints that were not restored, with the reasons."""
    expected_step: int | None = None
    """The expected step of the restore."""
    restored: TensorComparison | None = None
    """Comparison of the restored state with the saved state."""
    end: TensorComparison | None = None
    """Comparison of the final state with the uninterrupted run, for the same layout only."""
    draws_identical: bool | None = None
    """True if random generators continued as in the uninterrupted run, on all common ranks."""

    @property
    def ok(self) -> bool:
        """True if every comparison succeeded."""
        return (
            self.restored_step == self.expected_step
            and (self.restored is None or self.restored.ok)
            and (self.end is None or self.end.ok)
            and self.draws_identical is not False
            and (self.loss_difference is None or self.loss_difference <= self.loss_tolerance)
        )


@dataclass(frozen=True, slots=True)
class KillFacts:
    """The state of the run folder after the kill in the middle of a save."""

    step: int
    workers: int
    """Number of processes that SIGKILL ended."""
    files: int
    """Number of shard files of the unfinished save after the kill."""
    bytes: int
    committed: bool
    only_whole_files: bool = False
    """True if the storage is a bucket, which shows no file of a rank that stopped in the middle of it."""

    @property
    def ok(self) -> bool:
        """True if the kill came after the first bytes and before the commit."""
        began = self.only_whole_files or (self.files > 0 and self.bytes > 0)
        return self.workers > 0 and began and not self.committed


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The last checkpoint, read by one process without a process group."""

    step: int
    location: str
    verified: bool
    faults: tuple[str, ...]
    chunks: int
    bytes: int
    seconds: float
    read: TensorComparison
    """Comparison of the tensors that `shardproof.open` reads with the saved ones."""

    @property
    def ok(self) -> bool:
        """True if the checkpoint verified and reads as saved."""
        return self.verified and self.read.ok


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of the recovery demo."""

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
    """Folder of the demo; None if it was removed."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if every claim is true."""
        return all(run.ok for run in self.runs) and self.kill.ok and self.stored.ok

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, with the verdicts. A number that is not finite becomes a text."""
        values = asdict(self) | {"ok": self.ok}
        for run, facts in zip(values["runs"], self.runs, strict=True):
            run["ok"] = facts.ok
            for name in ("last_loss", "loss_difference"):
                if run[name] is not None and not math.isfinite(run[name]):
                    run[name] = str(run[name])
        values["kill"]["ok"] = self.kill.ok
        values["stored"]["ok"] = self.stored.ok
        return values


def facts_of(task: Task, records: RunRecords, seconds: float, **compared: Any) -> RunFacts:
    """The facts of a run, from its records and the caller's comparisons, by their names in `RunFacts`."""
    losses = records.losses()
    restore = next(iter(records.all("restored")), {})
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
        restored_step=restore.get("step"),
        restore_seconds=restore.get("seconds", 0.0),
        passed_over=restore.get("passed_over"),
        **compared,
    )


def stored_facts(run: Storage, step: int, saved: RunRecords) -> StoredFacts:
    """Verify the checkpoint of a step, and compare it with the digests of the run that saved it."""
    from shardproof.maintenance import verify

    folder = run.within(f"step-{step:08d}")
    found = verify(folder)
    return StoredFacts(
        step=step,
        location=folder.location,
        verified=found.ok,
        faults=tuple(str(fault) for fault in found.faults),
        chunks=found.chunks,
        bytes=found.bytes,
        seconds=found.seconds,
        read=_read(folder, step, saved),
    )


def _read(folder: Storage, step: int, saved: RunRecords) -> TensorComparison:
    import shardproof as sp
    from examples.demo.parallel import digest_of

    record = saved.digests("saved", step)
    expected = record["tensors"] if record else {}
    differing = []
    with sp.open(folder) as checkpoint:
        keys: list[str] = checkpoint.keys()
        stored = {key for key in keys if key.startswith(("model.", "optimizer."))}
        for name, (digest, _) in expected.items():
            parameter, _, slot = name.partition(" · ")
            key = f"optimizer.{parameter}.{slot}" if slot else f"model.{parameter}"
            if key not in stored or digest_of(checkpoint[key].read())[0] != digest:
                differing.append(name)
            stored.discard(key)
        # Options of parameter groups are plain values; any other key is a tensor that the run did not save.
        differing += sorted(key for key in stored if not key.endswith(".@options"))
    size = sum(int(size) for _, size in expected.values())
    return TensorComparison(len(expected), len(expected) - len(differing), size, tuple(differing))

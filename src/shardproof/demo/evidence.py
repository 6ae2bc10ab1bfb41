"""What the records of the demo's runs prove: comparisons, and nothing but comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardproof.demo.task import Record, Task, read_records

__all__ = ["RunRecords", "TensorComparison", "compare_draws", "compare_losses", "compare_tensors"]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of every rank of one run."""

    ranks: tuple[tuple[Record, ...], ...]

    @classmethod
    def of(cls, task: Task) -> RunRecords:
        """Read them."""
        return cls(tuple(tuple(read_records(task.records(rank))) for rank in range(task.layout.ranks)))

    def all(self, event: str, rank: int = 0) -> list[Record]:
        """A rank's records of one kind."""
        return [record for record in self.ranks[rank] if record["event"] == event]

    def losses(self) -> dict[int, float]:
        """Step to loss over the whole batch."""
        return {record["step"]: record["loss"] for record in self.all("step")}

    def rates(self) -> dict[int, float]:
        """Step to learning rate."""
        return {record["step"]: record["rate"] for record in self.all("step")}

    def draws(self, rank: int) -> dict[int, list[float]]:
        """Step to what a rank's random generators gave."""
        return {record["step"]: record["draws"] for record in self.all("step", rank)}

    def digests(self, when: str, step: int, rank: int = 0) -> Record | None:
        """The digests that a rank took then, if it did."""
        found = [
            record for record in self.all("digests", rank) if (record["when"], record["step"]) == (when, step)
        ]
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """Tensors before and after, by the digests of all their bits."""

    compared: int
    identical: int
    bytes: int
    """Of the tensors compared, each once."""
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
    """Every tensor of `before` at a step with every tensor of `after`, as each rank of either saw it.

    A tensor that two ranks of one run saw differently is one that differs: replicas must be equal as well.
    """
    sides = [_seen(before, when_before, step), _seen(after, when_after, step)]
    names = sorted({name for side in sides for name in side[0]})
    differing = [
        name for name in names if len({side[0].get(name) for side in sides}) > 1 or _split(sides, name)
    ]
    size = sum(int(sides[0][0][name][0][1]) for name in sides[0][0])
    plain = {text for side in sides for text in side[1]}
    return TensorComparison(len(names), len(names) - len(differing), size, tuple(differing), len(plain) == 1)


Seen = dict[str, tuple[tuple[str, int], ...]]


def _seen(run: RunRecords, when: str, step: int) -> tuple[Seen, list[str]]:
    """Name to the distinct (digest, bytes) that the ranks saw, and the ranks' plain states."""
    records = [run.digests(when, step, rank) for rank in range(len(run.ranks))]
    present = [record for record in records if record is not None]
    seen: dict[str, set[tuple[str, int]]] = {}
    for record in present:
        for name, (digest, size) in record["tensors"].items():
            seen.setdefault(name, set()).add((digest, size))
    if len(present) < len(records):
        return {}, []
    return {name: tuple(sorted(values)) for name, values in seen.items()}, [
        record["plain"] for record in present
    ]


def _split(sides: list[tuple[Seen, list[str]]], name: str) -> bool:
    return any(len(side[0].get(name, ())) != 1 for side in sides)


def compare_losses(reference: RunRecords, run: RunRecords) -> float:
    """Largest relative difference of a step's loss; infinity where the learning rates or the steps differ."""
    expected, found = reference.losses(), run.losses()
    rates = reference.rates()
    if not found or not found.keys() <= expected.keys():
        return float("inf")
    if any(rates[step] != rate for step, rate in run.rates().items()):
        return float("inf")
    return max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in found.items())


def compare_draws(reference: RunRecords, run: RunRecords, ranks: int) -> bool:
    """Whether the generators of the first `ranks` ranks gave the same numbers at the same steps."""
    for rank in range(ranks):
        expected, found = reference.draws(rank), run.draws(rank)
        if not found or any(expected.get(step) != draws for step, draws in found.items()):
            return False
    return True

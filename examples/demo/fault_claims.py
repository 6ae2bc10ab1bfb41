"""The claims that the fault demo checks, each with the expected and the found value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo.evidence import RunRecords, compare_draws, compare_losses, compare_tensors
from examples.demo.fault_story import FAULTS, FaultRun, FaultStory
from shardproof.rerun import read_rejected, steps_to_skip

__all__ = ["Claim", "FaultRunFacts", "claims_of"]


@dataclass(frozen=True, slots=True)
class FaultRunFacts:
    """The facts of one run, from its processes and its records."""

    name: str
    node: str
    code: int
    """Exit code of its processes."""
    source: str
    """The initial state of the run, as in `FaultRun`."""
    times: int
    """Number of runs of the step with the fault; -1 if the ranks' records differ."""
    suspects: tuple[int, ...]
    """Steps of suspect checkpoints without a verdict after the run."""
    verdict: str | None
    """The verdict of rank 0, as text."""
    decisions: int
    """Number of different lists of decisions among its ranks; 1 if all ranks decided equally."""
    in_output: bool
    """True if the verdict is a line of its output."""
    seconds: float

    @classmethod
    def of(
        cls,
        run: FaultRun,
        records: RunRecords,
        fault_step: int,
        *,
        code: int,
        suspects: Sequence[int],
        output: str,
        seconds: float,
    ) -> FaultRunFacts:
        """The facts of a run that has ended."""
        ranks = range(len(records.ranks))
        times = {sum(record["step"] == fault_step for record in records.all("ran", rank)) for rank in ranks}
        decided = [records.all("decided", rank) for rank in ranks]
        verdicts = [record["attribution"] for record in decided[0] if record["attribution"] is not None]
        verdict = verdicts[-1] if verdicts else None
        return cls(
            run.name,
            run.node,
            code,
            _source(records),
            times.pop() if len(times) == 1 else -1,
            tuple(suspects),
            verdict,
            len({repr(each) for each in decided}),
            verdict is not None and verdict in output,
            seconds,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, with the expected and the found value as texts."""

    what: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        """True if the claim is true."""
        return self.expected == self.found


def claims_of(
    story: FaultStory,
    reference: RunRecords,
    runs: Sequence[tuple[FaultRunFacts, RunRecords]],
    log: Path,
) -> tuple[Claim, ...]:
    """All claims of a story, from the runs with the fault, in order, and the file of rejected results."""
    planned, facts = story.runs, [each for each, _ in runs]
    number = story.fault_step
    claims = [
        Claim("exit codes", _each(run.code for run in planned), _each(run.code for run in facts)),
        Claim(
            f"times that step {number} was run",
            _each(run.times for run in planned),
            _each(run.times for run in facts),
        ),
        Claim("started from", _each(run.source for run in planned), _each(run.source for run in facts)),
        Claim(
            "suspect checkpoints afterwards",
            _each(_steps(run.suspects) for run in planned),
            _each(_steps(run.suspects) for run in facts),
        ),
        Claim(
            "the run that reaches a verdict and prints it",
            _each(run.name for run in planned if run.finds),
            _each(run.name for run in facts if run.in_output),
        ),
        Claim(
            "runs whose ranks decided equally",
            _each(run.name for run in planned),
            _each(run.name for run in facts if run.decisions == 1),
        ),
    ]
    return (*claims, *_logged(story, log), *_identical(story, reference, runs))


def _logged(story: FaultStory, log: Path) -> list[Claim]:
    rejected = read_rejected(log)
    local_rank = story.fault_rank
    named = f"rank {story.fault_rank}, GPU-node-a-{local_rank}, index {local_rank} of node-a"
    step = story.fault_step - 1
    return [
        Claim("verdict in the log", FAULTS[story.fault], _each(record.verdict for record in rejected)),
        Claim(
            "device in the log",
            named,
            _each(f"rank {each.rank}, {each.device}, index {each.index} of {each.node}" for each in rejected),
        ),
        Claim(
            "step (counted from 0) and result",
            f"{step}: loss, first nan",
            _each(f"{each.step}: {each.message}, first {each.first}" for each in rejected),
        ),
        Claim(
            "the result of the rerun",
            "nan" if story.fault == "correct" else "a number",
            _each("nan" if str(each.second) == "nan" else "a number" for each in rejected),
        ),
        Claim(
            "steps to skip (counted from 0)",
            _steps([step] if story.fault == "correct" else []),
            _steps(steps_to_skip(log)),
        ),
    ]


def _identical(
    story: FaultStory, reference: RunRecords, runs: Sequence[tuple[FaultRunFacts, RunRecords]]
) -> list[Claim]:
    """Claims that the runs equal the reference bit for bit and train the same steps."""
    skipped = f"skipped step {story.fault_step}"
    other = f"a run that {skipped if story.fault == 'correct' else 'had no fault'}"
    last = runs[-1][1]
    end = compare_tensors(reference, "end", last, "end", story.steps)
    trained = [records for _, records in runs if records.losses()]
    losses = max((compare_losses(reference, records) for records in trained), default=float("inf"))
    done = {step for records in trained for step in records.losses()}
    same_draws = all(compare_draws(reference, records, story.layout.ranks) for records in trained)
    every = f"{end.compared} of {end.compared}"
    return [
        Claim(
            f"tensors at the end as in {other}, bit for bit",
            every if end.compared else "some",
            f"{end.identical} of {end.compared}",
        ),
        Claim("schedule and data position as in that run", "yes", _yes(end.plain_identical)),
        Claim("largest difference of a loss to that run", "0.0", str(losses)),
        Claim("steps trained, as in that run", _steps(reference.losses()), _steps(done)),
        Claim("random numbers as in that run, on every rank", "yes", _yes(same_draws)),
    ]


def _source(records: RunRecords) -> str:
    """The initial state of all ranks."""
    folders = {
        "".join(record["folder"] for record in records.all("restored", rank))
        for rank in range(len(records.ranks))
    }
    if len(folders) > 1:
        return "ranks differ"
    kind, _, step = folders.pop().partition("-")
    return f"{kind} {int(step)}" if step else "the beginning"


def _each(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _steps(steps: Iterable[int]) -> str:
    """Steps in order, as ranges: "1-9, 11-24"."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return _each(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _yes(fine: bool) -> str:
    return "yes" if fine else "no"

"""The fault demo: one reference run, the runs with the fault, and the report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import shardproof as sp
from examples.demo.evidence import RunRecords
from examples.demo.fault_claims import Claim, FaultRunFacts, claims_of
from examples.demo.fault_story import FAILED, RESTART, FaultStory, FaultTask
from examples.demo.launch import Job, check_device
from examples.demo.run import TEXT, DemoEvent, demo_folder
from examples.demo.story import Record

__all__ = ["FaultReport", "run_fault_demo"]


@dataclass(frozen=True, slots=True)
class FaultReport:
    """The result of the fault demo."""

    fault: str
    layout: str
    optimizer: str
    steps: int
    save_every: int
    fault_step: int
    """The step with the fault, counted from 1."""
    runs: tuple[FaultRunFacts, ...]
    """The runs with the fault, in order."""
    claims: tuple[Claim, ...]
    folder: str | None
    """Folder of the demo; None if it was removed."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if every claim is true."""
        return all(claim.ok for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, with the verdict on each claim."""
        values = asdict(self) | {"ok": self.ok}
        for values_of_claim, claim in zip(values["claims"], self.claims, strict=True):
            values_of_claim["ok"] = claim.ok
        return values


def run_fault_demo(
    fault: str,
    *,
    text: Path | None = None,
    ranks: int = 4,
    device: str = "cpu",
    steps: int = 24,
    save_every: int = 4,
    optimizer: str = "adamw",
    sharding: str = "fsdp2",
    run_dir: Path | None = None,
    keep: bool = False,
    on_event: Callable[[DemoEvent], None] | None = None,
) -> FaultReport:
    """Train with a wrong result on one rank, restart if the rerun machine requires it, and check its verdict.

    Args:
        fault: "transient" (the second run of the step is right), "persistent" (the first node's device is
            always wrong; the job restarts on it, and then on another node), or "correct" (all devices give
            the same result, and the last run skips the step).
        text: file to train on; None for the text in the package.
        ranks: number of processes of every run. Even numbers from 4 on use tensor parallelism too.
        device: "cpu", or the type of an accelerator, such as "cuda".
        steps: training steps.
        save_every: steps between saves.
        optimizer: "adamw", "distributed" or "hybrid".
        sharding: sharding of the parameters: "fsdp2", "flat" or "none".
        run_dir: an empty or new folder; None for a temporary folder.
        keep: True to keep the temporary folder. A failure keeps it too.
        on_event: called with each event of the runs.

    Raises:
        ValueError: an unknown fault, sizes that do not fit together, an optimizer and a sharding that exclude
            each other, a device that is not here, or a folder that is not empty.
        DemoError: a run failed. A false claim is not an error, but ``ok`` of the report is False.
    """
    begin = time.monotonic()
    story = FaultStory.of(fault, ranks, steps, save_every, optimizer=optimizer, sharding=sharding)
    check_device(device)
    folder, stays = demo_folder(run_dir, keep)
    emit = on_event or (lambda _: None)
    task_of = partial(story.task, folder=folder, text=(text or TEXT).resolve(), device=device)
    reference = task_of(0)
    _finish(reference, emit)
    runs = []
    for number, run in enumerate(story.runs, start=1):
        task = task_of(number)
        code, job = _finish(task, emit)
        records = RunRecords.of(task)
        facts = FaultRunFacts.of(
            run,
            records,
            story.fault_step,
            code=code,
            suspects=sp.Checkpointer(task.checkpoints).suspects(),
            output=job.log.read_text(errors="replace"),
            seconds=job.seconds,
        )
        runs.append((facts, records))
        if code != run.code:
            break
    claims = claims_of(story, RunRecords.of(reference), runs, Path(reference.log))
    report = FaultReport(
        fault=fault,
        layout=str(story.layout),
        optimizer=story.layout.method,
        steps=steps,
        save_every=save_every,
        fault_step=story.fault_step,
        runs=tuple(facts for facts, _ in runs),
        claims=claims,
        folder=None,
        seconds=time.monotonic() - begin,
    )
    if stays or not report.ok:
        return replace(report, folder=str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return report


def _finish(task: FaultTask, emit: Callable[[DemoEvent], None]) -> tuple[int, Job]:
    """Runs a task to its end and emits its events."""

    def on_record(record: Record) -> None:
        for kind, text in _events_of(record):
            emit(DemoEvent(task.name, kind, text, record["step"], task.stop))

    node = f" on {task.node}" if task.node else ""
    emit(DemoEvent(task.name, "begin", f"{task.layout}{node}", last_step=task.stop))
    with Job(task, module="examples.demo.watched") as job:
        code = job.finish(on_record, codes=(0, RESTART, FAILED))
    emit(DemoEvent(task.name, "end", f"exit code {code}, {job.seconds:.1f} s", last_step=task.stop))
    return code, job


def _events_of(record: Record) -> list[tuple[str, str]]:
    """Kinds and texts of the events of a record."""
    if record["event"] == "step":
        return [("step", f"loss {record['loss']:.4f}")]
    if record["event"] == "restored":
        return [("restored", f"restored {record['folder']} in {record['seconds']:.2f} s")]
    if record["event"] == "saved":
        return [("saved", f"saved step {record['step']} in {record['seconds']:.2f} s")]
    if record["event"] == "left out":
        return [("left out", f"step {record['step']} skipped")]
    if record["event"] == "decided":
        texts = [record["attribution"]] if record["attribution"] else []
        if record["checkpoint"]:
            texts.append("the rerun in place gave the same rejected result: saving a suspect checkpoint")
        elif record["code"] == RESTART:
            texts.append("the rerun on the same device allows no attribution: the checkpoint stays")
        return [("decided", text) for text in texts]
    return []

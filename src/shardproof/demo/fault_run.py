"""The demo of a fault from end to end: a run without it, the runs with it, and the evidence."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import shardproof as sp
from shardproof.demo.evidence import RunRecords
from shardproof.demo.fault_claims import FaultRunFacts, claims_of
from shardproof.demo.fault_report import FaultReport
from shardproof.demo.fault_story import FAILED, RESTART, FaultStory, FaultTask
from shardproof.demo.launch import Job
from shardproof.demo.run import RUN_LIMIT, TEXT, DemoEvent, demo_folder, ignore
from shardproof.demo.task import Record

__all__ = ["run_fault_demo"]

TRAINER = "shardproof.demo.watched"


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
    limit: float = RUN_LIMIT,
) -> FaultReport:
    """Train with a wrong result on one rank, restart where the rerun machine says so, and check its verdict.

    Args:
        fault: "transient" (the second run of the step is right), "persistent" (the first node's device is
            always wrong; the job is restarted on it, and then on another node), or "correct" (the result is
            the same everywhere; the step is left out in the end).
        text: file to train on; None for the one that comes with the package.
        ranks: processes of every run; even numbers from 4 on use tensor parallelism beneath.
        device: "cpu", or "cuda" and the like for tensors on an accelerator.
        steps: training steps.
        save_every: steps between saves.
        optimizer: "adamw", "distributed" or "hybrid".
        sharding: of the parameters: "fsdp2", "flat" or "none".
        run_dir: an empty or new folder that stays; None for a temporary one.
        keep: keep the temporary folder as well. It is also kept when something fails.
        on_event: told what happens, as it happens.
        limit: seconds that one run may take.

    Raises:
        ValueError: no such fault, sizes that make no story, an optimizer and a sharding that do not go
            together, or a folder that is not empty.
        DemoError: a run failed. A claim that does not hold is no error, but ``ok`` of the report is False.
    """
    begin = time.monotonic()
    story = FaultStory.of(fault, ranks, steps, save_every, optimizer=optimizer, sharding=sharding)
    folder, stays = demo_folder(run_dir, keep)
    tell = on_event or ignore
    task_of = partial(story.task, folder=folder, text=(text or TEXT).resolve(), device=device)
    reference = task_of(0)
    _finish(reference, tell, limit)
    runs = []
    for number, run in enumerate(story.runs, start=1):
        task = task_of(number)
        code, job = _finish(task, tell, limit)
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
        folder=str(folder) if stays or not all(claim.ok for claim in claims) else None,
        seconds=time.monotonic() - begin,
    )
    if not stays and report.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _finish(task: FaultTask, tell: Callable[[DemoEvent], None], limit: float) -> tuple[int, Job]:
    """Run a task to its end, and say meanwhile what happens."""

    def hear(record: Record) -> None:
        for kind, text in _told(record):
            tell(DemoEvent(task.name, kind, text, record["step"], task.stop))

    node = f" on {task.node}" if task.node else ""
    tell(DemoEvent(task.name, "begin", f"{task.layout}{node}", last_step=task.stop))
    with Job(task, limit=limit, module=TRAINER) as job:
        code = job.end(hear, codes=(0, RESTART, FAILED))
    tell(DemoEvent(task.name, "end", f"exit code {code}, {job.seconds:.1f} s", last_step=task.stop))
    return code, job


def _told(record: Record) -> list[tuple[str, str]]:
    """Kinds and texts of what a record says to a person."""
    if record["event"] == "step":
        return [("step", f"loss {record['loss']:.4f}")]
    if record["event"] == "restored":
        return [("restored", f"restored {record['folder']} in {record['seconds']:.2f} s")]
    if record["event"] == "saved":
        return [("saved", f"saved step {record['step']} in {record['seconds']:.2f} s")]
    if record["event"] == "left out":
        return [("left out", f"step {record['step']} left out")]
    if record["event"] == "decided":
        told = [("decided", record["attribution"])] if record["attribution"] else []
        if record["checkpoint"]:
            told.append(("decided", "a rejected result came out twice here: a suspect checkpoint is taken"))
        elif record["code"] == RESTART:
            told.append(("decided", "nothing learnt on the same device: the checkpoint stays as it is"))
        return told
    return []

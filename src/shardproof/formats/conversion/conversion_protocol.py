"""A conversion, from the stored checkpoint to the published one.

    plan (every rank) -> begin (meet) -> write units -> commit (meet) -> verify units -> verified (meet)
        -> upload files, to an object store -> publish (meet)

Under ``torchrun`` each rank has a share of the units and of the files to upload. In one process the meetings
return at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from shardproof._utils.arguments import check_boolean, wrong_type
from shardproof.engine import events
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous, connected
from shardproof.engine.storage import Storage, storage_error
from shardproof.errors import StructureError
from shardproof.formats.conversion.key_maps import CONFIG
from shardproof.formats.conversion.plan import ConversionRequest
from shardproof.formats.conversion.work import ConversionWork
from shardproof.workers import Executor, Job, Task, Where, check_where, start_workers

_log = logging.getLogger("shardproof")
_VERIFY_BOXES = 1024
"""Boxes that one task verifies."""

_JOB = Job("the conversion", "run it again: it continues where it stopped")


class ConversionReport(msgspec.Struct, frozen=True):
    """The result of a conversion."""

    source: str
    location: str
    """The new checkpoint."""
    format: str
    """The format that was written."""
    tensors: int
    objects: int
    bytes: int
    """Bytes of the tensors of the new checkpoint."""
    units: int
    resumed: int
    """Units that an interrupted conversion had written before."""
    verified: int
    """Bytes of the new checkpoint that were read again and compared."""
    seconds: float
    left_out: tuple[str, ...] = ()
    """Keys of the stored checkpoint that were not converted."""
    notes: tuple[str, ...] = ()
    """What the formats cannot hold or prove, a sentence each."""
    dry_run: bool = False
    """True if nothing was written."""


def carry_out(
    request: ConversionRequest,
    *,
    on: Where = "processes",
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
) -> ConversionReport:
    """Converts a checkpoint; see `shardproof.convert` for the arguments."""
    check_boolean("dry_run", dry_run)
    if not (on_progress is None or callable(on_progress)):
        raise wrong_type("on_progress", on_progress, "a function of two numbers, or None")
    check_where(on)
    begun = time.monotonic()
    operation = f"convert {request.source} to {request.destination}"
    with connected(rendezvous, deadline) as ranks, ranks.operation(operation):
        conversion = _Conversion(request, ranks, on, on_progress, operation)
        try:
            if dry_run:
                conversion.check_model_files()
                return conversion.report(begun, dry_run=True)
            meetings = MeetingSequence(ranks, operation)
            todo = meetings.exchange("plan", conversion.plan, conversion.begin, str, list[int])
            meetings.exchange("write", lambda: conversion.write(todo), conversion.commit, NoneType, NoneType)
            groups = meetings.exchange("verify", conversion.verify, conversion.verified, int, list[list[str]])
            meetings.exchange(
                "publish", lambda: conversion.upload(groups), conversion.publish, NoneType, NoneType
            )
            return conversion.report(begun)
        finally:
            conversion.close()


class _Conversion:
    """One rank's part of a conversion."""

    def __init__(
        self,
        request: ConversionRequest,
        ranks: Rendezvous,
        on: Where,
        on_progress: Callable[[int, int], None] | None,
        operation: str,
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._on = on
        self._on_progress = on_progress
        self._operation = operation
        self._work = ConversionWork(request)
        self._executor: Executor | None = None
        self._done = self._total = 0
        self._resumed = 0
        self._verified = 0

    def close(self) -> None:
        """Ends the workers and releases the work folder."""
        if self._executor is not None:
            self._executor.close()
        self._work.folder.close()
        self._work.close()

    def check_model_files(self) -> None:
        """Raises StructureError if the files of the model cannot be copied beside the weights."""
        if not self._request.like:
            return
        model_files(self._request.like)
        destination = self._work.folder.destination
        if destination.is_file:
            raise StructureError(
                f"{destination.location} names a file, and like (--like) needs a folder for the files of the "
                "model"
            )

    def plan(self) -> str:
        """The digest of this rank's plan."""
        return self._work.plan.digest

    def begin(self, posts: Sequence[str]) -> list[int]:
        """Coordinator: locks the work folder, and answers which units the ranks have to write.

        Raises:
            StructureError: the plans of the ranks differ.
        """
        for rank, post in enumerate(posts):
            if post != posts[0]:
                raise StructureError(
                    f"{self._operation}: rank {rank} has another plan than rank 0. Do all ranks see "
                    "the same checkpoint, and have the same options?",
                    ranks=[0, rank],
                )
        plan, folder = self._work.plan, self._work.folder
        self.check_model_files()
        folder.begin(plan.digest, plan.nbytes)
        written = folder.records()
        return [at for at, unit in enumerate(plan.writer.units) if unit.name not in written]

    def write(self, units: Sequence[int]) -> None:
        """Writes this rank's share of the units that are not written yet."""
        self._resumed = len(self._work.plan.writer.units) - len(units)
        largest_first = sorted(units, key=lambda at: -self._work.plan.writer.units[at].nbytes)
        share = largest_first[self._ranks.rank :: self._ranks.world_size]
        self._total = self._work.folder.destination.passes * sum(
            self._work.plan.writer.units[at].nbytes for at in share
        )
        with self._phase("write"):
            self._run([partial(ConversionWork.write, unit=at) for at in share])

    def commit(self, posts: Sequence[None]) -> None:
        """Coordinator: writes the metadata of the new checkpoint when all units are written."""
        records = self._work.folder.records()
        missing = [unit.name for unit in self._work.plan.writer.units if unit.name not in records]
        if missing:
            raise StructureError(
                f"{self._operation}: {len(missing)} units have no record ({missing[0]}, ...): is "
                f"{self._work.folder.path} shared by all nodes?"
            )
        written: Mapping[str, dict[str, object]] = {name: record.written for name, record in records.items()}
        self._work.plan.writer.commit(written, self._work.folder.files)
        if self._request.like:
            copy_model_files(self._request.like, self._work.folder.files)

    def verify(self) -> int:
        """Verifies this rank's share of the new checkpoint."""
        records = self._work.folder.records()
        boxes = [box for name in sorted(records) for box in records[name].boxes]
        tasks = [
            partial(ConversionWork.verify, boxes=boxes[at : at + _VERIFY_BOXES])
            for at in range(0, len(boxes), _VERIFY_BOXES)
        ]
        with self._phase("verify"):
            return sum(self._run(tasks[self._ranks.rank :: self._ranks.world_size]))

    def verified(self, counts: Sequence[int]) -> list[list[str]]:
        """Coordinator: answers which files the ranks have to upload. For a folder, there are none."""
        self._verified = sum(counts)
        return self._work.folder.uploads(self._work.plan.writer.last_file)

    def upload(self, groups: Sequence[list[str]]) -> None:
        """Uploads this rank's share of the files."""
        share = groups[self._ranks.rank :: self._ranks.world_size]
        with self._phase("publish"):
            self._run([partial(ConversionWork.upload, names=names) for names in share])

    def publish(self, posts: Sequence[None]) -> None:
        """Coordinator: makes the new checkpoint visible at the destination."""
        self._work.folder.publish(self._work.plan.writer.last_file)

    def report(self, begun: float, *, dry_run: bool = False) -> ConversionReport:
        """What was converted."""
        plan, checkpoint = self._work.plan, self._work.checkpoint
        read_notes = checkpoint.reader.notes if isinstance(checkpoint, ForeignCheckpoint) else []
        own_notes = [_MODEL_NOTE] if self._request.to == "hf" and not self._request.like else []
        return ConversionReport(
            checkpoint.location,
            self._work.folder.destination.location,
            self._request.to,
            len(plan.tensors),
            plan.objects,
            plan.nbytes,
            len(plan.writer.units),
            self._resumed,
            self._verified,
            time.monotonic() - begun,
            plan.left_out,
            (*read_notes, *plan.writer.notes, *own_notes),
            dry_run,
        )

    def _run(self, tasks: Sequence[Task]) -> list[Any]:
        """Runs tasks and returns their results. The first tasks determine the number of workers."""
        if self._executor is None:
            workers = max(1, min(self._request.workers, len(tasks)))
            self._executor = start_workers(
                _JOB,
                self._on,
                workers,
                own=self._work,
                make_context=partial(ConversionWork, self._request),
                deadline=self._ranks.deadline,
            )
        return list(self._executor.run(tasks, self._on_bytes))

    def _phase(self, name: str) -> events.Phase:
        return events.phase(self._operation, name, rank=self._ranks.rank, world_size=self._ranks.world_size)

    def _on_bytes(self, count: int) -> None:
        self._done += count
        self._ranks.progress(min(self._done, self._total), self._total)
        if self._on_progress is not None:
            self._on_progress(min(self._done, self._total), self._total)


_MODEL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
_MODEL_NOTE = (
    f"from_pretrained also reads {CONFIG} and the files of the tokenizer, which no conversion writes. "
    "--like FOLDER (like= in Python) copies them from the folder of a model"
)


def model_files(folder: str) -> list[Path]:
    """The files of a model's folder that are no weights and no program."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise StructureError(
            f"like: {folder} has no {CONFIG}: name the local folder of a model that from_pretrained loads"
        )
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _MODEL_FILES)
    )


def copy_model_files(folder: str, target: Storage) -> None:
    """Copies `model_files` to the folder of a new checkpoint, durably.

    Raises:
        StructureError: as `model_files`.
        StorageError: a file cannot be read or written.
    """
    for file in model_files(folder):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise storage_error(error, "read", file) from error
        target.publish(file.name, content, replace=True)

"""Boxes of stored tensors, read by workers, and what a function finds in each, in the order of the boxes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np

from shardproof._utils.arguments import check_number, check_whole
from shardproof.commands.report.description import Stored, describe
from shardproof.commands.report.stored_bits import Bits, StoredBits, open_bits
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Foreign, foreign_of
from shardproof.engine.format import TensorRecord
from shardproof.engine.geometry import Boxes, cut
from shardproof.engine.storage import ObjectStorage, Storage, is_url
from shardproof.errors import ShardproofError, StorageError, StructureError
from shardproof.workers import Job, Where, batches, check_where, start_workers

Found = TypeVar("Found")
Use: TypeAlias = Callable[[Sequence[Bits], str], Found]
"""A function of a box in each checkpoint and of its dtype. Pickle can send it to a worker."""
_TASK_BYTES = 256 << 20
"""Bytes of the boxes of a task, at most, unless a single box has more."""
_TASKS_OF_A_WORKER = 4
"""Tasks of each worker, at least, if there are enough boxes: so the workers end at about the same time."""


@dataclass(frozen=True, slots=True)
class ReadBox:
    """A box of a tensor that every checkpoint has."""

    keys: tuple[str, ...]
    """Key of the tensor in each checkpoint."""
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that are read, in all checkpoints."""
        return len(self.keys) * self.elements * DTYPES[self.dtype].itemsize


def boxes_of(tensor: TensorRecord, keys: tuple[str, ...], most: int) -> list[ReadBox]:
    """The boxes that tile a tensor, in row-major order. A tensor without elements has none.

    Args:
        tensor: the tensor, as it is stored in one of the checkpoints.
        keys: its key in each checkpoint.
        most: elements of a box, at most, unless a single row has more.
    """
    if 0 in tensor.shape:
        return []
    boxes, _ = cut(Boxes.whole(tensor.shape), np.array([most]))
    rows = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
    return [ReadBox(keys, tensor.dtype, tuple(offsets), tuple(sizes)) for offsets, sizes in rows]


@dataclass(frozen=True, slots=True)
class Readers:
    """The workers that read.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    workers: int = 1
    on: Where = "processes"
    deadline: float = 300.0
    """Seconds that all workers may go without progress."""

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, "of processes", optional=False)
        check_number("deadline", self.deadline, "of seconds", optional=False)
        check_where(self.on)
        if self.workers < 1:
            raise ValueError(f"workers is at least 1, not {self.workers}")
        if not self.deadline > 0:
            raise ValueError(f"a deadline is a positive number of seconds, not {self.deadline!r}")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that a worker opens."""

    path: str
    format: str
    attempt: str
    """Identity of the checkpoint that the calling process has described."""

    @classmethod
    def of(cls, place: Storage | Foreign, stored: Stored) -> CheckpointSource:
        """The source of a described checkpoint.

        Raises:
            StructureError: no path or URL names its storage, or the storage has options.
        """
        foreign = place if isinstance(place, Foreign) else Foreign(place)
        storage = foreign.storage
        if storage.path is None and not isinstance(storage, ObjectStorage):
            raise StructureError(
                f"{storage!r} has no path or URL by which workers can open it: read it in this process "
                '(workers=1, on="processes")'
            )
        if isinstance(storage, ObjectStorage) and storage.has_options:
            raise StructureError(
                f"{storage!r} has options, which do not reach workers: put them in the environment of the "
                'workers, or read it in this process (workers=1, on="processes")'
            )
        folder = storage.location if storage.path is None else os.fsdecode(storage.path)
        path = folder if foreign.file is None else f"{folder}/{foreign.file}"
        return cls(path, stored.format, stored.manifest.attempt)

    def open(self) -> StoredBits:
        """Opens it in a worker.

        Raises:
            StorageError: it is not there, or is another checkpoint than the one that was described.
        """
        need = "storage and credentials" if is_url(self.path) else "file system"
        try:
            place = foreign_of(self.path)
            stored = describe(place, format=self.format)
        except ShardproofError as error:
            raise StorageError(
                f"a worker on {socket.gethostname()} cannot open {self.path}, which the calling process has "
                f"read: {error.message}. All nodes need the same {need}",
                file=self.path,
                damaged=False,
            ) from error
        if stored.manifest.attempt != self.attempt:
            raise StorageError(
                f"a worker on {socket.gethostname()} found another checkpoint at {self.path}: attempt "
                f"{stored.manifest.attempt}, expected {self.attempt}. All nodes need the same {need}. "
                "If the checkpoint was replaced meanwhile, run it again",
                file=self.path,
                damaged=False,
            )
        return open_bits(place, stored)


class OpenBits:
    """The bits of the checkpoints, as one worker has them open.

    Args:
        bits: those of each checkpoint.
    """

    def __init__(self, bits: Sequence[StoredBits]) -> None:
        self._bits = bits
        self.on_bytes: Callable[[int], None] = lambda count: None

    @classmethod
    def opened(cls, sources: Sequence[CheckpointSource]) -> OpenBits:
        """The work of another process than the calling one. It ends with its process."""
        return cls([source.open() for source in sources])

    def read(self, at: int, boxes: Sequence[ReadBox], use: Use[Found]) -> tuple[int, list[Found]]:
        """Task `at`: what a function finds in each of some boxes."""
        found = []
        for box in boxes:
            sides = zip(self._bits, box.keys, strict=True)
            found.append(use([bits.box(key, box.offsets, box.sizes) for bits, key in sides], box.dtype))
            self.on_bytes(box.nbytes)
        return at, found


def divided(boxes: Sequence[ReadBox], workers: int) -> list[list[ReadBox]]:
    """Neighbouring boxes in groups, one for each task."""
    share = sum(box.nbytes for box in boxes) // (_TASKS_OF_A_WORKER * workers)
    return list(batches(boxes, lambda box: box.nbytes, min(_TASK_BYTES, share)))


def read_boxes(
    job: Job,
    sides: Sequence[tuple[Storage | Foreign, Stored]],
    boxes: Sequence[ReadBox],
    use: Use[Found],
    readers: Readers = Readers(),
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Found]:
    """What a function finds in each box, in the order of the boxes, wherever they are read.

    So a result that is joined in this order does not depend on the number of workers. Every byte that is read
    is verified.

    Args:
        job: what is done, for errors.
        sides: the checkpoints, with their descriptions.
        boxes: to read in each checkpoint.
        use: the function.
        readers: the workers.
        on_progress: called with the bytes read so far and in all.

    Raises:
        CorruptChunkError, StorageError, TilingError: a box cannot be read.
        StructureError: other processes cannot open a checkpoint.
        ShardproofError: Ray is not installed, or a worker ended or made no progress.
    """
    done, total = 0, sum(box.nbytes for box in boxes)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None and count:
            on_progress(done, total)

    groups = divided(boxes, readers.workers)
    tasks = [partial(OpenBits.read, at=at, boxes=group, use=use) for at, group in enumerate(groups)]
    workers = max(1, min(readers.workers, len(tasks)))
    is_here = readers.on == "processes" and workers == 1
    sources = [] if is_here else [CheckpointSource.of(place, stored) for place, stored in sides]
    with ExitStack() as opened:
        own = OpenBits(
            [opened.enter_context(closing(open_bits(place, stored))) for place, stored in sides if is_here]
        )
        executor = start_workers(
            job,
            readers.on,
            workers,
            own=own,
            make_context=partial(OpenBits.opened, sources),
            deadline=readers.deadline,
        )
        opened.enter_context(closing(executor))
        early: dict[int, list[Found]] = {}
        """Results of later groups, by group."""
        expected = 0
        for at, results in executor.run(tasks, on_bytes):
            early[at] = results
            while expected in early:
                yield from early.pop(expected)
                expected += 1

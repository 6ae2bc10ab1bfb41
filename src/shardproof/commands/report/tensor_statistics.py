"""Measures of the tensors of one checkpoint, read box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from shardproof.commands.report.description import check_files, describe
from shardproof.commands.report.divided_reads import Readers, boxes_of, read_boxes
from shardproof.commands.report.measures import MOST_NUMBERS, Measure, numbers
from shardproof.commands.report.stored_bits import Bits
from shardproof.engine.foreign import Foreign
from shardproof.engine.format import TensorRecord
from shardproof.engine.storage import Storage
from shardproof.errors import KeyMismatchError
from shardproof.workers import Job, Where

_JOB = Job("the measurement", "run it again")


def measure_tensors(
    place: Storage | Foreign,
    patterns: Sequence[str] = (),
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
    workers: int = 1,
    on: Where = "processes",
    deadline: float = 300.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[tuple[TensorRecord, Measure]]:
    """Measures stored tensors: counts, extremes, mean, norm and magnitudes.

    Every byte that is read is verified. The memory of a worker is bounded: a box has at most `MOST_NUMBERS`
    numbers, unless a single row has more. The result does not depend on the workers: the measures of the
    boxes of a tensor are joined in the order of the boxes.

    Args:
        place: a checkpoint of any format.
        patterns: keys, keys above them, or patterns of keys (`fnmatch`); empty for all tensors.
        format: name of its format; None to find it.
        workers: processes that read. One on "processes" is this process. Several processes import the main
            module: a script calls `measure_tensors` below ``if __name__ == "__main__":``.
        on: "processes" for processes of this machine, "ray" for a Ray cluster. All nodes need the file
            system of the checkpoint.
        deadline: seconds that the workers may go without progress.
        on_progress: called with the bytes read so far and in all.

    Returns:
        Each tensor with its measure, in the order of the checkpoint.

    Raises:
        KeyMismatchError: a pattern fits no tensor.
        NotCommittedError, FormatError, StorageError, CorruptChunkError, TilingError: it cannot be read.
        TypeError, ValueError: an argument does not fit.
        StructureError: there are several workers, and the storage has options, or no path or URL names it.
        ShardproofError: Ray is not installed, or a worker ended or made no progress.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.report import measure_tensors
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> _ = sp.save(folder, {"w": torch.tensor([3.0, -4.0])})
        >>> [(_, measure)] = measure_tensors(LocalStorage(folder))
        >>> measure.norm.value
        5.0
    """
    readers = Readers(workers, on, deadline)
    stored = describe(place, format=format)
    wanted = [
        tensor
        for tensor in stored.manifest.tensors
        if not patterns or any(_fits(tensor.key, pattern) for pattern in patterns)
    ]
    for pattern in patterns:
        if not any(_fits(tensor.key, pattern) for tensor in wanted):
            raise KeyMismatchError(f"{stored.location}: no tensor has a key like {pattern!r}", key=pattern)
    check_files(place, stored)
    boxes = [boxes_of(tensor, (tensor.key,), MOST_NUMBERS) for tensor in wanted]
    every = [box for group in boxes for box in group]
    parts = read_boxes(_JOB, [(place, stored)], every, _measure_box, readers, on_progress)
    found = []
    for tensor, group in zip(wanted, boxes, strict=True):
        whole = Measure()
        for part in islice(parts, len(group)):
            whole.join(part)
        found.append((tensor, whole))
    return found


def _measure_box(sides: Sequence[Bits], dtype: str) -> Measure:
    """The measure of a box of the one checkpoint."""
    (bits,) = sides
    return Measure.of(numbers(bits, dtype))


def _fits(key: str, pattern: str) -> bool:
    return key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern)

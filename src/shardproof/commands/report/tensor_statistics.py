"""Measures of the tensors of one checkpoint, read box by box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase

import numpy as np

from shardproof.commands.report.description import describe
from shardproof.commands.report.measures import MOST_NUMBERS, Measure, numbers
from shardproof.commands.report.stored_bits import open_bits
from shardproof.commands.report.summary import tensor_bytes
from shardproof.engine.foreign import Foreign
from shardproof.engine.format import TensorRecord
from shardproof.engine.geometry import Boxes, cut
from shardproof.engine.storage import Storage
from shardproof.errors import KeyMismatchError


def measure_tensors(
    place: Storage | Foreign,
    patterns: Sequence[str] = (),
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
    on_progress: Callable[[int, int], None] | None = None,
) -> list[tuple[TensorRecord, Measure]]:
    """Measures stored tensors: counts, extremes, mean, norm and magnitudes.

    Every byte that is read is verified. The memory is bounded: a box has at most `MOST_NUMBERS` numbers,
    unless a single row has more.

    Args:
        place: a checkpoint of any format.
        patterns: keys, keys above them, or patterns of keys (`fnmatch`); empty for all tensors.
        format: name of its format; None to find it.
        on_progress: called with the bytes read so far and in all.

    Returns:
        Each tensor with its measure, in the order of the checkpoint.

    Raises:
        KeyMismatchError: a pattern fits no tensor.
        NotCommittedError, FormatError, StorageError, CorruptChunkError, TilingError: it cannot be read.
    """
    stored = describe(place, format=format)
    wanted = [
        tensor
        for tensor in stored.manifest.tensors
        if not patterns or any(_fits(tensor.key, pattern) for pattern in patterns)
    ]
    for pattern in patterns:
        if not any(_fits(tensor.key, pattern) for tensor in wanted):
            raise KeyMismatchError(f"{stored.location}: no tensor has a key like {pattern!r}", key=pattern)
    done, total = 0, sum(map(tensor_bytes, wanted))
    found = []
    with closing(open_bits(place, stored)) as bits:
        for tensor in wanted:
            measure = Measure()
            for offsets, sizes in boxes_to_measure(tensor.shape):
                box = bits.box(tensor.key, offsets, sizes)
                measure.add(numbers(box, tensor.dtype))
                done += box.nbytes
                if on_progress is not None:
                    on_progress(done, total)
            found.append((tensor, measure))
    return found


def boxes_to_measure(shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the boxes that are read one after the other.

    A box has at most `MOST_NUMBERS` elements, unless a single row has more. A tensor without elements has no
    box.
    """
    if 0 not in shape:
        boxes, _ = cut(Boxes.whole(tuple(shape)), np.array([MOST_NUMBERS]))
        yield from zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)


def _fits(key: str, pattern: str) -> bool:
    return key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern)

"""Verifies a checkpoint of another project, as far as its format can prove anything."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.foreign import NATIVE, Foreign, StoredBox, ZeroRule, foreign_faults, format_of
from shardproof.engine.planning import prove_chunks
from shardproof.engine.storage import UncachedStorage
from shardproof.errors import CorruptChunkError, FormatError, ShardproofError, StorageError, TilingError
from shardproof.runs.maintenance.verify import VerifyReport, verify

if TYPE_CHECKING:
    from shardproof.engine.loading import ForeignCheckpoint

_DAMAGE = (CorruptChunkError, FormatError, StorageError)


def verify_any(
    foreign: Foreign,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
) -> VerifyReport:
    """Verifies a checkpoint of any format; see `verify` and `verify_foreign`.

    Args:
        foreign: where it is.
        on_progress: called with bytes done and bytes in all.
        format: name of the format; None to find it.

    Raises:
        NotCommittedError: there is no checkpoint, or its save did not finish.
    """
    begun = time.monotonic()
    try:
        name = format or format_of(foreign)
        if name == NATIVE:
            storage = foreign.storage
            uncached = storage if storage.path is None else UncachedStorage(storage.path)
            return verify(uncached, on_progress)
        from shardproof.engine.loading import ForeignCheckpoint, open_storage  # imports torch

        checkpoint = open_storage(foreign, format=name, warn=False)
    except (FormatError, StorageError) as error:
        return VerifyReport(foreign.location, None, 0, 0, 0, time.monotonic() - begun, [error])
    with checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint, on_progress)


def verify_foreign(
    checkpoint: ForeignCheckpoint, on_progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads a whole checkpoint of another project and checks what its format lets a reader check.

    - The stored boxes of each tensor must tile it.
    - Files must exist, with their recorded sizes. What they hold must have the described dtypes and shapes.
    - Bytes must match their checksums. The report counts bytes without a checksum as unproved.
    - Zeros must not contradict another tensor, where the format has rules for that. Tensors of a rule are
      read once more.

    Args:
        checkpoint: open for reading.
        on_progress: called with bytes done and bytes in all.

    Returns:
        The report, with all faults.
    """
    begun = time.monotonic()
    faults: list[ShardproofError] = []
    rows = np.arange(len(checkpoint.tensors))
    if _tiling_fault(checkpoint, rows) is not None:  # proved tensor by tensor, to find all faults
        faults.extend(filter(None, (_tiling_fault(checkpoint, rows[at : at + 1]) for at in rows.tolist())))
    where = operator.attrgetter("file", "start", "nbytes")
    rules = checkpoint.reader.zero_rules()
    boxes = sorted(checkpoint.boxes, key=where)
    groups = [list(group) for _, group in groupby(boxes, key=where)]
    total = sum(group[0].nbytes for group in groups)
    total += sum(box.nbytes for rule in rules for box in checkpoint.reader.tensors[rule.key].boxes)
    proved = unproved = done = 0
    files = list(checkpoint.file_faults())
    cut = {fault.details["file"] for fault in files if not fault.details["missing"]}
    """Files whose one fault names all values that they lack."""

    def add(box: StoredBox) -> None:
        nonlocal done
        done += box.nbytes
        if on_progress is not None:
            on_progress(done, total)

    for group in groups:
        try:
            for extent in dict.fromkeys(box.located().extent for box in group):
                extent.verify()
                proved += extent.stored_bytes if extent.has_checksum else 0
                unproved += 0 if extent.has_checksum else extent.stored_bytes
        except _DAMAGE as error:
            if not isinstance(error, StorageError) or error.details.get("file") not in cut:
                faults.append(error)
        add(group[0])
    named = {fault.message for fault in faults}
    faults += [fault for fault in files if fault.message not in named]
    try:
        with foreign_faults(checkpoint.location):
            proved += checkpoint.reader.verify_extra()
    except _DAMAGE as error:
        if error.details.get("file") not in {fault.details["file"] for fault in files}:
            faults.append(error)
    for rule in rules:
        try:
            lost = _lost_ranges(checkpoint, rule, add)
        except ShardproofError:  # one of the faults above
            continue
        faults += [] if lost is None else [lost]
    return VerifyReport(
        checkpoint.location,
        checkpoint.step,
        len(checkpoint.reader.files()),
        len(boxes),
        proved,
        time.monotonic() - begun,
        faults,
        unproved,
        list(checkpoint.reader.notes),
        checkpoint.reader.name,
    )


def _tiling_fault(checkpoint: ForeignCheckpoint, rows: NDArray[np.int64]) -> ShardproofError | None:
    try:
        prove_chunks(checkpoint.tensors, checkpoint.table, rows, advice=checkpoint.tiling_advice)
    except (FormatError, TilingError) as error:
        return error
    return None


def _lost_ranges(
    checkpoint: ForeignCheckpoint, rule: ZeroRule, on_box: Callable[[StoredBox], None]
) -> CorruptChunkError | None:
    """Names the ranges that a writer lost as zeros. Reads both tensors of a rule, one stored box at a time.

    Args:
        checkpoint: open for reading.
        rule: see `ZeroRule`.
        on_box: called after each stored box of the first tensor.

    Returns:
        An error that names the elements which contradict the rule; None without any.

    Raises:
        ShardproofError: a box cannot be read.
    """
    count, files = 0, {}
    first: list[int] = []
    last: list[int] = []
    for box in checkpoint.reader.tensors[rule.key].boxes:
        index = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        is_zero = checkpoint[rule.key][index] == 0
        if is_zero.any():
            places = (is_zero & (checkpoint[rule.other][index].abs() > rule.bound)).nonzero()
            if len(places):
                found = [
                    [at + start for at, start in zip(place, box.offsets, strict=True)]
                    for place in (places[0].tolist(), places[-1].tolist())
                ]
                first, last = min(filter(None, (first, found[0]))), max(last, found[1])
                count += len(places)
                files[box.file] = True
        on_box(box)
    if not count:
        return None
    path = f"{checkpoint.location}/{next(iter(files))}"
    return CorruptChunkError(
        f"{path}: {rule.key} is 0 at {count} elements from {first} to {last}, where {rule.other} is not: "
        f"{rule.reason}. The save lost these ranges, in {len(files)} files. Restore another step",
        file=path,
        key=rule.key,
    )

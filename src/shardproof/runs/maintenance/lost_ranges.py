"""Names ranges that a writer lost as zeros, by the rules of a format; see `engine.foreign.ZeroRule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardproof.engine.foreign import StoredBox, ZeroRule
from shardproof.errors import CorruptChunkError

if TYPE_CHECKING:
    from shardproof.engine.loading import ForeignCheckpoint


def lost_ranges(
    checkpoint: ForeignCheckpoint, rule: ZeroRule, on_box: Callable[[StoredBox], None]
) -> CorruptChunkError | None:
    """Reads both tensors of a rule, one stored box at a time.

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

"""What a save takes note of while training waits. All the rest can be done beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from shardproof.saving.device_copy import DeviceCopies, copies_of
from shardproof.saving.write_watch import WriteWatch
from shardproof.state import Collected, ObjectEntry, Piece, Stepped

__all__ = ["Capture"]

_LOOSE_BYTES = 1 << 20
"""As many bytes that change outside of optimizers are copied before it is known which of them this rank
writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The state of one rank as of a save."""

    pieces: Sequence[Piece]
    """In the order of the structure."""
    names: Sequence[str]
    """Of the pieces' tensors, for messages."""
    objects: dict[str, bytes]
    """As JSON, by key."""
    copies: dict[torch.device, DeviceCopies]
    """Of the values that the pieces have now."""
    watch: WriteWatch | None
    """Of the pieces; None: nothing changes until the save is over."""
    is_complete: bool
    """Whether nothing changes any more but what the watch calls fenced."""

    @staticmethod
    def of(collected: Collected, stepped: Sequence[Stepped], *, guarded: bool, complete: bool) -> Capture:
        """Takes note of what a walk has found.

        Args:
            collected: of this rank.
            stepped: the optimizers whose steps a fence stops.
            guarded: whether memory may change before the save is over.
            complete: whether to copy all that no fence keeps from changing, if that is little and not all.
        """
        pieces = [piece for entry in collected.tensors for piece in entry.pieces]
        watch = WriteWatch(pieces, stepped) if guarded else None
        is_complete = complete and _copy_loose(pieces, watch)
        return Capture(
            pieces,
            [entry.key for entry in collected.tensors for _ in entry.pieces],
            _encoded(collected.objects),
            copies_of(piece.view for piece in pieces),
            watch,
            is_complete,
        )


def _copy_loose(pieces: list[Piece], watch: WriteWatch | None) -> bool:
    """Replaces the pieces that no fence keeps from changing with copies; False where that is too much."""
    if not watch:
        return False
    loose = [row for row in range(len(pieces)) if not watch.is_fenced(row)]
    if sum(pieces[row].view.nbytes for row in loose) > _LOOSE_BYTES:
        return False
    try:
        for row in loose:
            piece = pieces[row]
            pieces[row] = Piece.of(piece.view.clone(), piece.offsets, piece.sizes)
    except torch.OutOfMemoryError:  # of a device: to stage through host memory takes none of it
        return False
    return True


def _encoded(objects: Sequence[ObjectEntry]) -> dict[str, bytes]:
    """Objects as JSON, by key. Several keys may have one value, which is encoded once."""
    known: dict[int, bytes] = {}
    for entry in objects:
        if id(entry.value) not in known:
            known[id(entry.value)] = msgspec.json.encode(entry.value)
    return {entry.key: known[id(entry.value)] for entry in objects}

"""The record of a state, which a save makes while training waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from shardproof.saving.device_copy import DeviceCopies, copies_of
from shardproof.saving.write_watch import WriteWatch
from shardproof.state import Collected, ObjectEntry, Piece, Stepped, canonical_json

__all__ = ["Capture"]

_UNFENCED_BYTES = 1 << 20
"""Largest size of unfenced tensors that a save copies before the ranks agree on a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The state of one rank at the start of a save."""

    pieces: Sequence[Piece]
    """In the order of the structure."""
    names: Sequence[str]
    """Names of the pieces' tensors, for messages."""
    objects: dict[str, bytes]
    """As JSON, by key."""
    copies: dict[torch.device, DeviceCopies]
    """Copies of the pieces' current values, by device."""
    watch: WriteWatch | None
    """Detects writes to the pieces; None: the caller waits, so no memory changes."""
    goes_ahead: bool
    """True if all unfenced memory is copied. Only fenced memory can change, so the caller may continue."""

    @staticmethod
    def of(collected: Collected, stepped: Sequence[Stepped], *, guarded: bool, goes_ahead: bool) -> Capture:
        """Records the collected state.

        Args:
            collected: collected state of this rank.
            stepped: the optimizers whose steps the fence delays.
            guarded: True if memory may change before the save is over.
            goes_ahead: True to copy the unfenced memory, if it is small.
        """
        pieces = [piece for entry in collected.tensors for piece in entry.pieces]
        watch = WriteWatch(pieces, stepped) if guarded else None
        goes_ahead = goes_ahead and _copy_unfenced(pieces, watch)
        return Capture(
            pieces,
            [entry.key for entry in collected.tensors for _ in entry.pieces],
            _encoded(collected.objects),
            copies_of(piece.view for piece in pieces),
            watch,
            goes_ahead,
        )

    def object_digests(self) -> tuple[bytes, dict[str, bytes]]:
        """The fields `object_digests` and `orders` of `WriteReport`."""
        known: dict[int, tuple[bytes, bytes]] = {}
        for text in self.objects.values():
            if id(text) not in known:
                canonical = canonical_json(msgspec.json.decode(text))
                order = b"" if text == canonical else xxhash.xxh3_64_digest(text)
                known[id(text)] = xxhash.xxh3_128_digest(canonical), order
        found = {key: known[id(text)] for key, text in self.objects.items()}
        digests = b"".join([digest for digest, _ in found.values()])
        return digests, {key: order for key, (_, order) in found.items() if order}


def _copy_unfenced(pieces: list[Piece], watch: WriteWatch | None) -> bool:
    """Replaces unfenced pieces with copies; False if they are too large, or none is fenced."""
    if not watch:
        return False
    unfenced = [row for row in range(len(pieces)) if not watch.is_fenced(row)]
    if sum(pieces[row].view.nbytes for row in unfenced) > _UNFENCED_BYTES:
        return False
    try:
        for row in unfenced:
            piece = pieces[row]
            pieces[row] = Piece.of(piece.view.clone(), piece.offsets, piece.sizes)
    except torch.OutOfMemoryError:  # staging through host memory takes no device memory
        return False
    return True


def _encoded(objects: Sequence[ObjectEntry]) -> dict[str, bytes]:
    """Objects as JSON, by key. A value that several keys share is encoded once."""
    encoded: dict[int, bytes] = {}
    for entry in objects:
        if id(entry.value) not in encoded:
            encoded[id(entry.value)] = msgspec.json.encode(entry.value)
    return {entry.key: encoded[id(entry.value)] for entry in objects}

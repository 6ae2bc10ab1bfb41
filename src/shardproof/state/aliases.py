"""Tied tensors: several keys for the same memory are stored once and tied again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from shardproof.state.records import TensorEntry
from shardproof.state.tensors import same_memory

__all__ = ["tie"]


def tie(entries: Sequence[TensorEntry], anchors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """The same entries, where each that repeats the memory of an earlier one is an alias of it.

    Args:
        entries: sorted by key, so that every rank picks the same key to store.
        anchors: for entries without pieces, an empty tensor whose storage tells them apart.
    """
    tied = list(entries)
    addresses = [entry.pieces[0].address if entry.pieces else 0 for entry in tied]
    if len(set(addresses)) == len(addresses):
        return tied
    shared = {address for address, count in Counter(addresses).items() if count > 1}
    by_address: dict[int, list[int]] = {}
    for row, address in enumerate(addresses):
        if address in shared:
            by_address.setdefault(address, []).append(row)
    for rows in by_address.values():
        first: dict[Any, str] = {}
        for row in rows:
            entry = tied[row]
            identity = _identity(entry, anchors.get(entry.key))
            if identity is not None:
                key = first.setdefault(identity, entry.key)
                if key != entry.key:
                    tied[row] = replace(entry, alias_of=key)
    return tied


def _identity(entry: TensorEntry, anchor: torch.Tensor | None) -> Any:
    if entry.pieces:
        return entry.shape, tuple((same_memory(piece.view), piece.offsets) for piece in entry.pieces)
    return None if anchor is None else (entry.dtype, entry.shape, same_memory(anchor))

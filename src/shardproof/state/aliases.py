"""Tied tensors: several keys for the same memory are stored once and tied again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardproof.state.entries import TensorEntry
from shardproof.state.tensors import same_memory

__all__ = ["tie"]


def tie(entries: Sequence[TensorEntry], anchors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """The same entries, where each that repeats the memory of an earlier one is an alias of it.

    Args:
        entries: sorted by key, so that every rank picks the same key to store.
        anchors: for entries without pieces, an empty tensor whose storage tells them apart.
    """
    tied = list(entries)
    by_address: dict[int, list[int]] = {}
    for row, entry in enumerate(tied):
        address = entry.pieces[0].view.data_ptr() if entry.pieces else 0
        by_address.setdefault(address, []).append(row)
    for rows in by_address.values():
        if len(rows) == 1:
            continue
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

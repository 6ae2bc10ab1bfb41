"""Compares two checkpoints bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from tests.interop.peer import assert_same_tensors

__all__ = ["assert_same_checkpoints"]


def assert_same_checkpoints(
    found: Path, expected: Path, *, ranks: int | None = None, but: Sequence[str] = ()
) -> None:
    """Fails unless both have the same keys, tensors and values.

    Args:
        found: a checkpoint.
        expected: a checkpoint.
        ranks: compares the values of this many ranks; None for all.
        but: keys that are not compared, with those below them. A part of an object may be named, too.
    """
    with sp.open(found) as ours, sp.open(expected) as theirs:
        keys = [_compared(checkpoint.keys(), ranks, but) for checkpoint in (ours, theirs)]
        assert keys[0] == keys[1]
        assert any(key.endswith(".exp_avg") for key in keys[0]), "no optimizer state is compared"
        tensors: list[dict[str, torch.Tensor]] = [{}, {}]
        for key in keys[0]:
            for checkpoint, into in zip((ours, theirs), tensors, strict=True):
                into |= _tensors(key, checkpoint[key], but)
        assert_same_tensors(*tensors)


def _compared(keys: Sequence[str], ranks: int | None, but: Sequence[str]) -> list[str]:
    return [key for key in keys if not _is_below(key, but) and not _is_of_rank_from(key, ranks)]


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def _is_of_rank_from(key: str, ranks: int | None) -> bool:
    rank = key.partition(".@rank-")[2].partition(".")[0]
    return bool(rank) and ranks is not None and int(rank) >= ranks


def _tensors(key: str, value: Any, but: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of a stored value, and other leaves as the bytes of their text."""
    if _is_below(key, but):
        return {}
    if isinstance(value, sp.StoredTensor):
        return {key: value.read()}
    if isinstance(value, torch.Tensor):
        return {key: value}
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = dict(enumerate(value)).items()
    else:
        return {key: torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)}
    return {name: leaf for at, item in items for name, leaf in _tensors(f"{key}.{at}", item, but).items()}

"""Whether memory that only the step of an optimizer should write to was written to in another way."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from operator import attrgetter, is_not

import torch

from shardproof.state import Piece, Stepped
from shardproof.state.entries import memory_of

__all__ = ["WriteWatch", "written_by"]

_VERSION = attrgetter("_version")
_UNCOUNTED = math.inf
"""Stands for the version of a tensor that keeps none, and so for every sum with it."""


class WriteWatch:
    """Which pieces change only in an optimizer's step, and whether one was changed since this was made.

    A piece is *fenced* when it shares memory with what an optimizer steps. Steps that torch may replay
    without calling hooks (``capturable``), and tensors that keep no version, are not counted on. An operation
    on a DTensor raises the version of the DTensor and not that of its local tensor, so both are looked at.

    Args:
        pieces: of this rank.
        stepped: the optimizers of the state, and what they write.

    >>> weight = torch.ones(2)
    >>> piece = Piece.of(weight.detach(), (0,), (2,))
    >>> optimizer = torch.optim.SGD([weight])
    >>> watch = WriteWatch([piece], [Stepped(optimizer, (weight,), (weight,))])
    >>> watch.is_fenced(0), watch.is_changed(0)
    (True, False)
    >>> _ = weight.zero_()
    >>> watch.is_changed(0)
    True
    """

    def __init__(self, pieces: Sequence[Piece], stepped: Iterable[Stepped]) -> None:
        hooked = [
            item
            for item in stepped
            if not any(group.get("capturable") for group in item.optimizer.param_groups)
        ]
        self._views = [piece.view for piece in pieces]
        self._starts = memory_of(self._views) if hooked else []
        """Where the storages of the pieces begin."""
        self._placed, self._placed_starts = list[torch.Tensor](), list[int]()
        """The DTensors that are stepped, and where the storages of their local tensors begin."""
        for item in hooked:
            are_placed = list(map(is_not, item.tensors, item.held))
            self._placed += compress(item.tensors, are_placed)
            self._placed_starts += compress(item.starts, are_placed)
        memory, raised = written_by(hooked), defaultdict[int, float](int)
        for start, version in zip(self._placed_starts, _versions(self._placed), strict=True):
            raised[start] += version
        rows = [row for row, start in enumerate(self._starts) if start in memory]
        versions = [
            version + raised.get(self._starts[row], 0)
            for row, version in zip(rows, _versions([self._views[row] for row in rows]), strict=True)
        ]
        self._versions = {
            row: version for row, version in zip(rows, versions, strict=True) if version != _UNCOUNTED
        }
        """Of the fenced pieces: a number that grows when any of the piece's tensors is written to."""

    def __bool__(self) -> bool:
        """Whether any piece is fenced."""
        return bool(self._versions)

    def is_fenced(self, row: int) -> bool:
        """Whether a piece changes only in an optimizer's step."""
        return row in self._versions

    def is_changed(self, row: int) -> bool:
        """Whether a fenced piece was written to since."""
        known = self._versions.get(row)
        if known is None:
            return False
        version: float = self._views[row]._version
        if placed := self._placed_at.get(self._starts[row]):
            version += sum(_versions(placed))
        return version != known

    @cached_property
    def _placed_at(self) -> dict[int, list[torch.Tensor]]:
        """The DTensors that are stepped, by where the storages of their local tensors begin."""
        placed = defaultdict[int, list[torch.Tensor]](list)
        for start, tensor in zip(self._placed_starts, self._placed, strict=True):
            placed[start].append(tensor)
        return placed


def written_by(stepped: Iterable[Stepped]) -> frozenset[int]:
    """Where the storages begin that the steps of these optimizers write to."""
    return frozenset[int]().union(*(item.memory for item in stepped))


def _versions(tensors: Sequence[torch.Tensor]) -> list[float]:
    """How often each tensor was written to, as torch counts; `_UNCOUNTED` for what inference mode made."""
    # Torch itself is asked, not what a subclass makes of the question. A DTensor makes nothing of it, and
    # answers in half the time.
    with torch._C.DisableTorchFunctionSubclass():
        if not any(map(torch.Tensor.is_inference, tensors)):
            return list(map(_VERSION, tensors))
        return [_UNCOUNTED if tensor.is_inference() else tensor._version for tensor in tensors]

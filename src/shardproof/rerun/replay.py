"""Data that a step can be given twice."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from shardproof.state import RandomState

__all__ = ["ReplayableIterator", "copy_of"]

Batch = TypeVar("Batch")


class ReplayableIterator(Generic[Batch]):
    """An iterator that keeps the microbatches of the current step, and gives them again when asked.

    Args:
        iterator: gives microbatches: tensors, plain data, and dicts, lists and tuples of these.
        copy: whether to keep copies, as a step may write into its microbatches. Without it a step that does
            so is not run again on the same data.
        draws: whether the iterator may draw from the random generators of this process, so that these are
            noted with each microbatch (about 0.1 ms) where the machine asks for it.

    >>> data = ReplayableIterator(iter(range(10)))
    >>> next(data), next(data)
    (0, 1)
    >>> data.rewind()
    >>> next(data), next(data), next(data)
    (0, 1, 2)
    >>> data.advance()
    >>> data.rewind()
    >>> next(data)
    3
    """

    def __init__(self, iterator: Iterable[Batch], *, copy: bool = True, draws: bool = True) -> None:
        self._iterator = iter(iterator)
        self._copy = copy
        self._draws = draws
        self._kept: list[Batch] = []
        self._after: list[dict[str, Any] | None] = []
        """For each that is kept: where random generators stood once it had come, if that was noted."""
        self._notes = False
        self._given = 0
        self._theirs = 0
        """How many of the first that are kept came by `load`, and are the caller's."""
        self._spare: list[Batch] = []
        """Copies of the step before, into which those of this step go: memory new to a process costs more."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._given == len(self._kept):
            batch = next(self._iterator)
            spare = self._spare.pop(0) if self._spare else None
            self._kept.append(copy_of(batch, spare) if self._copy else batch)
            self._after.append(RandomState().state_dict() if self._notes else None)
        else:
            batch, after = self._kept[self._given], self._after[self._given]
            batch = copy_of(batch) if self._copy else batch
            if after is not None:  # the iterator may have drawn, which it does not do again
                RandomState().load_state_dict(after)
        self._given += 1
        return batch

    @property
    def microbatches(self) -> Sequence[Batch]:
        """What was given since the last `advance`, or will be given first. Not to be written to."""
        return tuple(self._kept)

    @property
    def generators(self) -> Sequence[dict[str, Any] | None]:
        """For each of `microbatches`: where random generators stood once it had come, if that was noted."""
        return tuple(self._after)

    def rewind(self) -> None:
        """Give the step's microbatches once more, then go on with new ones."""
        self._given = 0

    def advance(self, *, generators: bool = False) -> None:
        """A new step begins: forget what was given. What `load` brought and nobody took is given yet.

        Args:
            generators: whether a microbatch that is given once more also puts the random generators of this
                process to where they stood when it had come first. An iterator that draws from them
                (augmentation, a shuffle at the end of an epoch) then leaves the same draws to the step.
        """
        if self._copy:
            self._spare = self._kept[self._theirs : self._given]
        del self._kept[: self._given]
        self._after, self._notes = [None] * len(self._kept), generators and self._draws
        self._theirs = max(self._theirs - self._given, 0)
        self._given = 0

    def load(
        self, microbatches: Iterable[Batch], generators: Iterable[dict[str, Any] | None] | None = None
    ) -> None:
        """Give these before anything else, in place of what is kept.

        Args:
            microbatches: as `microbatches` gave them.
            generators: as `generators` gave them with these; None: nothing was noted.
        """
        self._kept = list(microbatches)
        self._after = [None] * len(self._kept) if generators is None else list(generators)
        self._notes = generators is not None and self._draws
        self._theirs = len(self._kept)
        self._given = 0


def copy_of(value: Any, into: Any = None) -> Any:
    """A copy that shares no memory with the value: tensors are detached and cloned on their device.

    Args:
        value: tensors, plain data, and dicts, lists and tuples of these.
        into: an earlier copy, of which nobody needs the values any more: tensors that are alike are reused.

    >>> batch = {"tokens": torch.arange(3), "lengths": [3]}
    >>> kept = copy_of(batch)
    >>> _ = batch["tokens"].zero_(); batch["lengths"].clear()
    >>> kept
    {'tokens': tensor([0, 1, 2]), 'lengths': [3]}
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if kind is torch.Tensor and _is_like(into, value):
            return into.copy_(value.detach())
        return value.detach().clone()
    if kind is dict:
        old = into if type(into) is dict else {}
        return {name: copy_of(item, old.get(name)) for name, item in value.items()}
    if kind in (list, tuple):
        spare = list(into) if type(into) is kind else []
        spare += [None] * (len(value) - len(spare))
        return kind(copy_of(item, old) for item, old in zip(value, spare, strict=False))
    return copying.deepcopy(value)


def _is_like(into: Any, value: torch.Tensor) -> bool:
    return (
        type(into) is torch.Tensor
        and not into.is_inference()
        and (into.shape, into.dtype, into.device) == (value.shape, value.dtype, value.device)
        and into.stride() == value.stride()
    )

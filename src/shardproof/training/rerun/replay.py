"""Data that can be replayed when a step runs again."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from shardproof.engine.state import RandomState
from shardproof.training.rerun.batch_classes import content_of, of_content

Batch = TypeVar("Batch")


class ReplayableIterator(Generic[Batch]):
    """An iterator that stores the microbatches of the current step and can replay them.

    The first `next` calls `iter`, so that a restore between the construction and the first step reaches a
    loader whose state applies to the next `iter` (such as torchdata's `StatefulDataLoader`).

    Args:
        iterator: yields microbatches: tensors, plain data, and dicts, lists and tuples, namedtuples,
            dataclasses and `collections.UserDict`s of these.
        copy: True to store copies. False is safe only if a step does not write into its microbatches.
        draws: True if the iterator may draw from the random generators of this process. For steps that may
            run again, their state is then stored with each microbatch (about 0.1 ms).

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
        self._data = iterator
        self._iterator: Iterator[Batch] | None = None
        self._copy = copy
        self._draws = draws
        self._batches: list[Batch] = []
        self._generators: list[dict[str, Any] | None] = []
        """For each batch, the state of the random generators after it was drawn, or None."""
        self._captures = False
        """True if the state of the random generators is stored in this step."""
        self._position = 0
        self._loaded = 0
        """Number of batches at the front that came from `load` and belong to the caller."""
        self._reusable: list[Batch] = []
        """Copies of the previous step, whose memory the copies of this step reuse."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._position == len(self._batches):
            if self._iterator is None:
                self._iterator = iter(self._data)
            batch = next(self._iterator)
            reusable = self._reusable.pop(0) if self._reusable else None
            self._batches.append(copy_of(batch, reusable) if self._copy else batch)
            self._generators.append(RandomState().state_dict() if self._captures else None)
        else:
            batch, generators = self._batches[self._position], self._generators[self._position]
            batch = copy_of(batch) if self._copy else batch
            if generators is not None:  # a replay skips the draws of the iterator
                RandomState().load_state_dict(generators)
        self._position += 1
        return batch

    @property
    def microbatches(self) -> Sequence[Batch]:
        """The stored microbatches since the last `advance` or `load`. The caller must not write to them."""
        return tuple(self._batches)

    @property
    def generators(self) -> Sequence[dict[str, Any] | None]:
        """For each of `microbatches`, the state of the random generators after it was drawn, or None."""
        return tuple(self._generators)

    def rewind(self) -> None:
        """Replay the step's microbatches, then continue with new ones."""
        self._position = 0

    def advance(self, *, generators: bool = False) -> None:
        """Begin a new step and drop the microbatches of the last one. Loaded ones that were not read remain.

        Args:
            generators: True if the replay of a microbatch also restores the state that the random generators
                of this process had after its first draw. The step then draws the same numbers, even if the
                iterator draws too (augmentation, a shuffle at the end of an epoch).
        """
        if self._copy:
            self._reusable = self._batches[self._loaded : self._position]
        del self._batches[: self._position]
        self._generators, self._captures = [None] * len(self._batches), generators and self._draws
        self._loaded = max(self._loaded - self._position, 0)
        self._position = 0

    def load(
        self, microbatches: Iterable[Batch], generators: Iterable[dict[str, Any] | None] | None = None
    ) -> None:
        """Replace the stored microbatches by these, which come before new ones.

        Args:
            microbatches: the value of `microbatches`.
            generators: the value of `generators` for these microbatches; None if none was stored.
        """
        self._batches = list(microbatches)
        self._generators = [None] * len(self._batches) if generators is None else list(generators)
        self._captures = generators is not None and self._draws
        self._loaded = len(self._batches)
        self._position = 0


def copy_of(value: Any, into: Any = None) -> Any:
    """A copy that shares no memory with the value: tensors are detached and cloned on their device.

    Args:
        value: a microbatch (see `ReplayableIterator`).
        into: an earlier copy whose values are not needed any more. Similar tensors are overwritten.

    >>> batch = {"tokens": torch.arange(3), "lengths": [3]}
    >>> copy = copy_of(batch)
    >>> _ = batch["tokens"].zero_(); batch["lengths"].clear()
    >>> copy
    {'tokens': tensor([0, 1, 2]), 'lengths': [3]}
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if kind is torch.Tensor and type(into) is torch.Tensor and not into.is_inference():
            mine, its = ((one.shape, one.dtype, one.device, one.stride()) for one in (into, value))
            if mine == its:
                return into.copy_(value.detach())
        return value.detach().clone()
    if kind is dict:
        old = into if type(into) is dict else {}
        return {name: copy_of(item, old.get(name)) for name, item in value.items()}
    if kind in (list, tuple):
        reusable = list(into) if type(into) is kind else []
        reusable += [None] * (len(value) - len(reusable))
        return kind(copy_of(item, old) for item, old in zip(value, reusable, strict=False))
    content = content_of(value)
    if content is not None:
        return of_content(kind, copy_of(content, content_of(into) if type(into) is kind else None))
    return copying.deepcopy(value)

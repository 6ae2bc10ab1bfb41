"""Data that can be replayed when a step runs again.

Microbatches may have classes beyond plain data: namedtuples, dataclasses and `collections.UserDict`, such as
`BatchEncoding` and `BatchFeature` of transformers. An object of such a class is described by its content, a
plain container, and made again without a call of the class's own code.

A packed step has the class's name. `_class_named` finds the class among the modules that the program has
imported and imports none, so that a checkpoint cannot choose code to run.
"""

from __future__ import annotations

import copy as copying
import dataclasses
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from shardproof.engine.state import RandomState
from shardproof.errors import PlainDataError, StructureError

Batch = TypeVar("Batch")
_Described = list[list[Any]]
"""For each described object, the outer ones first: the path to it, and the name of its class."""


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
    content = _content_of(value)
    if content is not None:
        return _of_content(kind, copy_of(content, _content_of(into) if type(into) is kind else None))
    return copying.deepcopy(value)


def _content_of(value: Any) -> Any:
    """The content of an object of these classes, as a plain tuple or dict; None for any other value.

    >>> @dataclasses.dataclass
    ... class Batch:
    ...     tokens: list[int]
    >>> _content_of(Batch([1, 2])), _content_of([1, 2])
    ({'tokens': [1, 2]}, None)
    """
    kind = type(value)
    if isinstance(value, tuple) and _is_namedtuple(kind):
        return tuple(value)
    if isinstance(value, UserDict):
        return dict(vars(value))
    if _is_plain_dataclass(kind):
        names = {field.name: None for field in dataclasses.fields(value)} | getattr(value, "__dict__", {})
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _of_content(kind: Any, content: Any) -> Any:
    """The object of a class with this content. Runs neither ``__init__`` nor ``__post_init__``."""
    if _is_namedtuple(kind):
        return tuple.__new__(kind, content)
    made = object.__new__(kind)
    for name, item in content.items():
        object.__setattr__(made, name, item)
    return made


def described(value: Any, path: str) -> tuple[Any, _Described]:
    """Replaces the objects of these classes by their contents, in nested dicts, lists and tuples.

    Returns:
        The value of plain containers, and the classes for `restored`.
    """
    found: _Described = []

    def plain(value: Any, at: list[Any]) -> Any:
        content = _content_of(value)
        if content is not None:
            kind = type(value)
            name = f"{kind.__module__}:{kind.__qualname__}"
            if _class_named(name) is kind:
                found.append([at, name])
                value = content
            elif not dataclasses.is_dataclass(kind):  # a registered dataclass has a name of its own
                where = ".".join(map(str, [path, *at]))
                raise PlainDataError(
                    f"{where}: a {kind.__qualname__} cannot be saved for a rerun, because {kind.__module__} "
                    "has no class of this name. Define the class at the top of a module",
                    path=where,
                )
        if type(value) is dict:
            return {key: plain(item, [*at, key]) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(plain(item, [*at, index]) for index, item in enumerate(value))
        return value

    return plain(value, []), found


def restored(value: Any, found: _Described) -> Any:
    """The inverse of `described`."""
    by_path = {tuple(at): name for at, name in found}
    above = {tuple(at[:end]) for at, _ in found for end in range(len(at) + 1)}

    def whole(value: Any, at: tuple[Any, ...]) -> Any:
        if at not in above:
            return value
        if type(value) is dict:
            value = {key: whole(item, (*at, key)) for key, item in value.items()}
        elif type(value) in (list, tuple):
            value = type(value)(whole(item, (*at, index)) for index, item in enumerate(value))
        if at not in by_path:
            return value
        name = by_path[at]
        kind = _class_named(name)
        is_tuple = _is_namedtuple(kind)
        is_dict = _is_plain_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, UserDict))
        if type(value) is not (tuple if is_tuple else dict) or not (is_tuple or is_dict):
            raise StructureError(
                f"the suspicious step has a microbatch of class {name.replace(':', '.')}, which this program "
                f"has not imported as it was: import {name.partition(':')[0]} before the first should_run"
            )
        return _of_content(kind, value)

    return whole(value, ())


def _class_named(name: str) -> Any:
    """The class of a name ``module:qualified.name`` in the imported modules; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_plain_dataclass(kind: Any) -> bool:
    """True for a dataclass whose fields are all of its content."""
    containers = (dict, list, tuple, set)
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not issubclass(kind, containers)

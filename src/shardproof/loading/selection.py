"""Which keys a load is about, and under which names the checkpoint has them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof.errors import StructureError
from shardproof.state import Catalogue

__all__ = ["Cast", "Patterns", "casts", "check_patterns", "renamed", "selects"]

Patterns = str | Sequence[str] | None
Cast = bool | str | Sequence[str]


def selects(include: Patterns, exclude: Patterns) -> Callable[[str], bool]:
    """Whether a key takes part: it matches a pattern of `include` (or there is none) and none of `exclude`.

    Patterns are those of `fnmatch`, over the whole key; a pattern also takes all keys below it.

    >>> selected = selects("model", "*.bias")
    >>> [selected(key) for key in ("model.w", "model.bias", "optimizer.w.exp_avg")]
    [True, False, False]
    """
    included, excluded = _as_tuple(include), _as_tuple(exclude)
    if include is None and not excluded:
        return lambda key: True

    def selected(key: str) -> bool:
        return (include is None or _matches(key, included)) and not _matches(key, excluded)

    return selected


def casts(cast: Cast) -> Callable[[str], bool]:
    """Whether the values of a key may be converted to the dtype of their destination."""
    if isinstance(cast, bool):
        return lambda key: cast
    patterns = _as_tuple(cast)
    return lambda key: _matches(key, patterns)


def check_patterns(option: str, patterns: Patterns, keys: Sequence[str]) -> None:
    """Refuses a pattern that matches no key: a typo would load nothing and report success.

    Raises:
        StructureError: naming the patterns.
    """
    unused = [item for item in _as_tuple(patterns) if not any(_matches(key, (item,)) for key in keys)]
    if unused:
        raise StructureError(
            f"{option}: no key matches {unused}; `shardproof inspect` lists the keys of the checkpoint"
        )


def renamed(catalogue: Catalogue, rename: Mapping[str, str] | None) -> tuple[Catalogue, dict[str, str]]:
    """The catalogue under the target's names, and each of those names as the checkpoint has it.

    Args:
        catalogue: of the checkpoint.
        rename: key in the target to key in the checkpoint; a key stands for all keys below it too. The
        longest wins.

    Raises:
        StructureError: the target of a rename is not in the checkpoint, or two keys get one name.
    """
    if not rename:
        return catalogue, {}
    stored_names: dict[str, str] = {}
    for target, stored in rename.items():
        other = stored_names.setdefault(stored, target)
        if other != target:
            raise StructureError(
                f"rename: both {other!r} and {target!r} would be {stored!r} of the checkpoint", key=stored
            )
    unused = set(stored_names)
    names: dict[str, str] = {}
    for key in (*catalogue.tensors, *catalogue.objects):
        head, tail = key, ""
        while head not in stored_names and "." in head:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        if head in stored_names:
            unused.discard(head)
        names[key] = stored_names[head] + tail if head in stored_names else key
    if unused:
        raise StructureError(
            f"rename: the checkpoint has no {sorted(unused)}; `shardproof inspect` lists its keys",
            keys=sorted(unused),
        )
    stored_of: dict[str, str] = {}
    for stored, target in names.items():
        if stored_of.setdefault(target, stored) != stored:
            raise StructureError(
                f"rename: both {stored_of[target]!r} and {stored!r} of the checkpoint would be {target!r}",
                key=target,
            )
    view = replace(
        catalogue,
        tensors={names[key]: value for key, value in catalogue.tensors.items()},
        aliases={names[key]: names[value] for key, value in catalogue.aliases.items()},
        objects=_RenamedObjects(catalogue.objects, names),
    )
    return view, stored_of


class _RenamedObjects(Mapping[str, Any]):
    """The plain values of a checkpoint under other keys. It reads a value when it is asked for.

    Args:
        objects: the values.
        names: key of each value and of each tensor to the new key.
    """

    def __init__(self, objects: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._objects = objects
        self._names = names
        self._stored = {names[key]: key for key in objects}

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def __getitem__(self, key: str) -> Any:
        return _with_references(self._objects[self._stored[key]], self._names)


def _with_references(value: Any, names: Mapping[str, str]) -> Any:
    """A plain value whose references to tensors follow the renaming."""
    if isinstance(value, list):
        return [_with_references(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: names.get(item, item)
            if key == "$tensor" and isinstance(item, str)
            else _with_references(item, names)
            for key, item in value.items()
        }
    return value


def _as_tuple(patterns: Patterns) -> tuple[str, ...]:
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, item) or fnmatch.fnmatchcase(key, f"{item}.*") for item in patterns)

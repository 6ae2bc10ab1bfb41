"""Objects of a foreign checkpoint that are not plain data: their names, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Part = TypeVar("Part")

_CLASS_IN_ARGS = {"torch._tensor._rebuild_from_type_v2": 1, "torch._utils._rebuild_wrapper_subclass": 0}
"""Functions that make a tensor of a subclass, and which argument is the class."""


@dataclass(eq=False, slots=True)
class Opaque:
    """An object of a class that the reader does not know, or a reference to such a class.

    Two references to the same class are equal only if they are the same object.
    """

    name: str
    """Module and qualified name, for example "argparse.Namespace"."""
    args: tuple[Any, ...] | None = None
    """Arguments of the constructor; None for a reference to the class itself."""
    state: Any = None
    """The state that the pickle sets, usually a dict of attributes."""
    items: list[Any] = field(default_factory=list)
    """Elements that the pickle appends, or pairs of key and value that it sets."""

    def __repr__(self) -> str:
        return f"<{self.name}, not imported>"


def opaque_names(value: Any) -> list[str]:
    """Sorted names of the classes and functions in a value that are not plain data.

    Example:
        >>> opaque_names({"a": [Opaque("argparse.Namespace", ()), 3]})
        ['argparse.Namespace']
    """
    return sorted({_class_name(item) for item in parts_of(value, Opaque)})


def _class_name(value: Opaque) -> str:
    """Name of the class of a value. A tensor of a subclass is pickled as the call of a function of torch."""
    row = _CLASS_IN_ARGS.get(value.name)
    kind = value.args[row] if row is not None and value.args is not None and len(value.args) > row else None
    return kind.name if isinstance(kind, Opaque) else value.name


def parts_of(value: Any, kind: type[Part]) -> Iterator[Part]:
    """The objects of a class in a value and in the containers in it.

    Example:
        >>> list(parts_of({"a": [1.5, "text"]}, float))
        [1.5]
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, kind):
            yield item
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            pending.extend([*item.keys(), *item.values()] if isinstance(item, dict) else item)

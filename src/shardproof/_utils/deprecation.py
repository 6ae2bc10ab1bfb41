"""Old public names that still work, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["renamed"]


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that resolves old names and warns at the caller.

    Args:
        module: ``__name__`` of the module.
        names: new name by old name.
    """

    def resolve(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(
            f"{module}.{name} is now {module}.{new}: use that name", DeprecationWarning, stacklevel=2
        )
        return getattr(sys.modules[module], new)

    return resolve

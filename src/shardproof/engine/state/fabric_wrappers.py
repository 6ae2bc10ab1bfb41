"""The wrappers that Lightning Fabric puts around modules and optimizers."""

from __future__ import annotations

import sys
from typing import Any

_PACKAGES = ("lightning.fabric", "lightning_fabric")
_INNER = {"_FabricModule": "_forward_module", "_FabricOptimizer": "optimizer"}
"""Class of a wrapper, and its attribute that has the wrapped object."""


def without_fabric(value: Any) -> Any:
    """The object inside Fabric's wrapper of a module or an optimizer; other values unchanged.

    Does not import Fabric: until the program imports it, no wrapper exists.

    >>> without_fabric(3)
    3
    """
    for package in _PACKAGES:
        wrappers = sys.modules.get(f"{package}.wrappers")
        for name, attribute in _INNER.items():
            kind = getattr(wrappers, name, None)
            if kind is not None and isinstance(value, kind):
                return getattr(value, attribute)
    return value

"""Wrappers of Fabric and of Megatron-FSDP."""

from __future__ import annotations

import sys
from typing import Any

from shardproof.engine.state.module_names import NamedModule
from shardproof.engine.state.visitor import Place
from shardproof.errors import StructureError

_PACKAGES = ("lightning.fabric", "lightning_fabric")
MEGATRON_FSDP = ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")
"""The package, and its copy in Megatron-Core."""
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


def refuse_collective(module: NamedModule, place: Place) -> None:
    """Raises for a module whose state_dict is a collective: collecting must not communicate.

    Raises:
        StructureError: Megatron-FSDP, or the copy of it in Megatron-Core, wraps the module or a part of it.
    """
    kinds = tuple(
        kind
        for package in MEGATRON_FSDP
        if (kind := getattr(sys.modules.get(f"{package}.megatron_fsdp"), "MegatronFSDP", None)) is not None
    )
    if kinds and any(isinstance(part, kinds) for _, part in module.parts):
        raise StructureError(
            f"{place.path} holds MegatronFSDP, whose state_dict is a collective. Save "
            "shardproof.frameworks.megatron_fsdp.module_state(model) instead",
            key=place.key,
        )

"""Wrappers of Fabric, and modules of Megatron-Core.

The weights of the latter have one name on ranks that have different parts of the model.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

from shardproof.engine.state.dtensor import is_dtensor
from shardproof.engine.state.module_names import NamedModule
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError

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


def refuse_undeclared(module: NamedModule, place: Place) -> None:
    """Raises for a weight that other ranks have with other values, and that has no declared layout.

    A plain tensor is a replica of those with its key on other ranks, so a save would store one of them. The
    function does not import Megatron-Core: until the program imports it, there is no such weight.

    Raises:
        StructureError: tensor, expert or pipeline parallel ranks have another part of the model under a key.
    """
    parallel = sys.modules.get("megatron.core.parallel_state")
    if parallel is None or is_per_rank(place.key) or not parallel.model_parallel_is_initialized():
        return
    found = _undeclared(module, parallel)
    if found is not None:
        name, ranks, declaration = found
        raise StructureError(
            f"{join(place.key, name)} has this key on all {ranks} parallel ranks of Megatron-Core, and each "
            "of them has another part of the model. Save `live_state(model, optimizer)` by `save` of "
            "shardproof.frameworks.megatron_core, or declare the part of this rank: "
            f"shardproof.layouts.{declaration}. `shardproof.PerRank(model)` keeps it for this rank alone",
            key=join(place.key, name),
        )


def _undeclared(module: NamedModule, parallel: Any) -> tuple[str, str, str] | None:
    """The first such weight or layer: its name, the kind of ranks, and the function that declares it."""
    divides_tensors = parallel.get_tensor_model_parallel_world_size() > 1
    divides_experts = parallel.get_expert_model_parallel_world_size() > 1
    expert_tensors = getattr(parallel, "get_expert_tensor_parallel_world_size", None)
    divides_expert_tensors = divides_tensors if expert_tensors is None else expert_tensors() > 1
    divides = divides_tensors or divides_experts or divides_expert_tensors
    experts = {path for path, part in module.parts if getattr(part, "is_expert", False)} if divides else set()
    for name, parameter in module.parameters() if divides else ():
        if module.layout(name) is not None or is_dtensor(parameter):
            continue
        if divides_experts and not getattr(parameter, "allreduce", True):
            return module.clean(name), "expert", "experts.sequential"
        above = accumulate(name.split("."), "{}.{}".format)
        if ".experts." in f".{name}" or not experts.isdisjoint(above):
            if divides_expert_tensors:
                return module.clean(name), "expert tensor", "experts.sequential"
        elif divides_tensors and getattr(parameter, "tensor_model_parallel", False):
            return module.clean(name), "tensor", "fused or swiglu"
    if parallel.get_pipeline_model_parallel_world_size() > 1:
        for path, part in module.parts:
            number = getattr(part, "layer_number", None)
            if not isinstance(number, int):
                continue
            parent, _, last = module.clean(f"{path}.")[:-1].rpartition(".")
            if parent.endswith("layers") and last.isdecimal() and int(last) != number - 1:
                return f"{parent}.{last}", "pipeline", "layers"
    return None

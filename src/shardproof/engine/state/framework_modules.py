"""Wrappers of Fabric, of Megatron-FSDP, and modules of Megatron-Core.

The weights of the last have one name on ranks that have different parts of the model.

Note: how a tensor is recognised as a part of a model
    Megatron-Core marks parameters and layers, and not the tensors of a ``state_dict()``. These share the
    memory of the parameters. So `refuse_loose_parts` finds the modules of this process through Python's
    garbage collector, and compares addresses. It searches only if Megatron-Core divides a model, and the tree
    has tensors outside of modules. It does not recognise a copy, nor a module that ``gc.freeze`` hides.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from shardproof.engine.state.dtensor import is_dtensor
from shardproof.engine.state.module_names import NamedModule, clean_name
from shardproof.engine.state.tensors import PLAIN_TYPES
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError

_PACKAGES = ("lightning.fabric", "lightning_fabric")
_MEGATRON_FSDP = ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")
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
        for package in _MEGATRON_FSDP
        if (kind := getattr(sys.modules.get(f"{package}.megatron_fsdp"), "MegatronFSDP", None)) is not None
    )
    if kinds and any(isinstance(part, kinds) for _, part in module.parts):
        raise StructureError(
            f"{place.path} holds MegatronFSDP, whose state_dict is a collective. Save "
            "shardproof.frameworks.megatron_fsdp.module_state(model) instead",
            key=place.key,
        )


def parallel_state_of(world_size: int) -> Any:
    """Megatron-Core's module ``parallel_state`` if it divides a model among ranks, otherwise None.

    The function does not import Megatron-Core: until the program imports it, there is no such model. A rank
    that saves or loads alone has no other ranks to disagree with.

    Args:
        world_size: number of ranks that save or load together.
    """
    parallel = sys.modules.get("megatron.core.parallel_state")
    if world_size == 1 or parallel is None or not parallel.model_parallel_is_initialized():
        return None
    is_divided = parallel.get_pipeline_model_parallel_world_size() > 1 or any(_divisions(parallel))
    return parallel if is_divided else None


def refuse_undeclared(module: NamedModule, place: Place, parallel: Any) -> None:
    """Raises for a weight that other ranks have with other values, and that has no declared layout.

    A plain tensor is a replica of those with its key on other ranks, so a save would store one of them.

    Args:
        module: the module.
        place: its place in the tree.
        parallel: the result of `parallel_state_of`.

    Raises:
        StructureError: tensor, expert or pipeline parallel ranks have another part of the model under a key.
    """
    if parallel is None or is_per_rank(place.key):
        return
    for name, _, way in _divided(module, parallel):
        if module.layout(name) is None:
            raise _refused(join(place.key, module.clean(name)), way)
    for path, _, number in _layers(module, parallel):
        key = join(place.key, module.clean(f"{path}.")[:-1])
        if _has_other_number(key, number):
            raise _refused(key, _PIPELINE)


def refuse_loose_parts(tensors: Mapping[str, torch.Tensor], parallel: Any) -> None:
    """Raises for a tensor outside of modules that is a part of a model, such as one of a ``state_dict()``.

    See "how a tensor is recognised as a part of a model".

    Args:
        tensors: the tensors by key.
        parallel: Megatron-Core's ``parallel_state``; see `parallel_state_of`.

    Raises:
        StructureError: see `refuse_undeclared`.
    """
    keys = {_memory(tensor): key for key, tensor in tensors.items() if _may_be_weight(tensor)}
    for module in _root_modules() if keys else ():
        named = NamedModule(module)
        for _, parameter, way in _divided(named, parallel):
            if (key := _key_of(parameter, keys)) is not None:
                raise _refused(key, way)
        for _, layer, number in _layers(named, parallel):
            for name, parameter in layer.named_parameters():
                key = _key_of(parameter, keys)
                if key is not None and _has_other_number(key.removesuffix(f".{clean_name(name)}"), number):
                    raise _refused(key, _PIPELINE)


@dataclass(frozen=True, slots=True)
class _Division:
    """How parallel ranks divide a model."""

    ranks: str
    """The kind of ranks."""
    declaration: str
    """The function of `shardproof.layouts` that declares the part of a rank."""


_TENSOR = _Division("tensor", "fused or swiglu")
_EXPERT = _Division("expert", "experts.sequential")
_EXPERT_TENSOR = _Division("expert tensor", "experts.sequential")
_PIPELINE = _Division("pipeline", "layers")


def _refused(key: str, way: _Division) -> StructureError:
    return StructureError(
        f"{key} has this key on all {way.ranks} parallel ranks of Megatron-Core, and each of them has "
        "another part of the model. Save `{'model': model.sharded_state_dict()}`, or `live_state(model, "
        "optimizer)`, by `save` of shardproof.frameworks.megatron_core. Or save the module itself by "
        "shardproof.save, and declare the part of this rank: "
        f"shardproof.layouts.{way.declaration}. `shardproof.PerRank` around the value keeps it for this rank "
        "alone",
        key=key,
    )


def _divisions(parallel: Any) -> tuple[bool, bool, bool]:
    """Whether ranks divide weights, experts, and the weights of an expert."""
    tensors = parallel.get_tensor_model_parallel_world_size() > 1
    of_experts = getattr(parallel, "get_expert_tensor_parallel_world_size", None)
    expert_tensors = tensors if of_experts is None else of_experts() > 1
    return tensors, parallel.get_expert_model_parallel_world_size() > 1, expert_tensors


def _divided(module: NamedModule, parallel: Any) -> Iterator[tuple[str, torch.Tensor, _Division]]:
    """Name, parameter and division of each parameter of which ranks have parts, or of which experts."""
    divides_tensors, divides_experts, divides_expert_tensors = divisions = _divisions(parallel)
    divides = any(divisions)
    experts = {path for path, part in module.parts if getattr(part, "is_expert", False)} if divides else set()
    for name, parameter in module.parameters() if divides else ():
        if is_dtensor(parameter):
            continue
        if divides_experts and not getattr(parameter, "allreduce", True):
            yield name, parameter, _EXPERT
            continue
        above = accumulate(name.split("."), "{}.{}".format)
        if ".experts." in f".{name}" or not experts.isdisjoint(above):
            if divides_expert_tensors:
                yield name, parameter, _EXPERT_TENSOR
        elif divides_tensors and getattr(parameter, "tensor_model_parallel", False):
            yield name, parameter, _TENSOR


def _layers(module: NamedModule, parallel: Any) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Path, module, and number in the model from 0 of each layer, if pipeline ranks divide the layers."""
    if parallel.get_pipeline_model_parallel_world_size() > 1:
        for path, part in module.parts:
            number = getattr(part, "layer_number", None)
            if isinstance(number, int):
                yield path, part, number - 1


def _has_other_number(key: str, number: int) -> bool:
    """True if a key is that of a layer in a list of layers, with another number than the layer has.

    >>> _has_other_number("model.layers.0", 2), _has_other_number("model.layers.0.attention", 2)
    (True, False)
    """
    parent, _, last = key.rpartition(".")
    return parent.endswith("layers") and last.isdecimal() and int(last) != number


def _root_modules() -> list[torch.nn.Module]:
    """The modules of this process that are in no other module."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
    found = [item for item in objects if type(item) in kinds]
    inner = {id(item) for module in found for item in (vars(module).get("_modules") or {}).values()}
    return [module for module in found if id(module) not in inner and "_modules" in vars(module)]


def _may_be_weight(tensor: torch.Tensor) -> bool:
    """True for a plain tensor of floats in memory. Random states, for example, are none."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.is_floating_point()
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _key_of(parameter: torch.Tensor, keys: Mapping[tuple[int, torch.Size], str]) -> str | None:
    """The key of the loose tensor that has the memory of a parameter."""
    return keys.get(_memory(parameter)) if _may_be_weight(parameter) else None

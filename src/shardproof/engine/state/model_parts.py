"""Parts of a model with one name on all ranks: of Megatron-Core, or declared by `shardproof.layouts`.

Note: how a tensor is recognised as a part of a model
    Megatron-Core marks parameters and layers, and `shardproof.layouts` marks modules. The tensors of a
    ``state_dict()`` have no mark. They share the memory of the parameters, or are the state of an optimizer.
    So `refuse_loose_parts` finds the modules and optimizers of this process through Python's garbage
    collector, and compares addresses. It searches only if Megatron-Core divides a model, or the process has
    declared a part, and the tree has tensors of floats outside of modules. It reads the attributes of the
    found objects, and calls none of their methods. It does not recognise a copy, nor an object that
    ``gc.freeze`` hides.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress
from typing import Any

import torch
import torch.distributed as dist

from shardproof._utils.contexts import no_garbage_collection
from shardproof.engine.state.dtensor import is_dtensor, local_tensor
from shardproof.engine.state.layout import has_parts
from shardproof.engine.state.module_names import NamedModule, Numbers, clean_name, declared_parts
from shardproof.engine.state.tensors import memory_range
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks that save or load together divide a model."""

    ranks: str
    """The kind of ranks."""
    declaration: str
    """The function of `shardproof.layouts` that declares the part of a rank."""
    members: frozenset[int]
    """The ranks of the default process group that divide the model with this rank."""


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """How ranks that save or load together divide models."""

    ranks: int
    """Number of these ranks."""
    tensor: Division | None = None
    """As the others, of Megatron-Core; None if these ranks have replicas."""
    expert: Division | None = None
    expert_tensor: Division | None = None
    pipeline: Division | None = None
    is_declared: bool = False
    """True if this process may have declared parts by `shardproof.layouts`."""

    @property
    def is_of_megatron(self) -> bool:
        """True if Megatron-Core divides a model."""
        return any((self.tensor, self.expert, self.expert_tensor, self.pipeline))


def model_parallel(world_size: int, ranks: Collection[int] | None = None) -> ModelParallel | None:
    """How the ranks that save or load together divide models; None if each of them has whole models.

    The function does not import Megatron-Core: until the program imports it, there is no such model. It does
    not communicate.

    Args:
        world_size: number of ranks that save or load together.
        ranks: their numbers in the default process group. None: all ranks if `world_size` is that of the
            group. Otherwise they are not known, and Megatron-Core's divisions are left out.
    """
    if world_size == 1:
        return None
    only_declared = ModelParallel(world_size, is_declared=True) if has_parts() else None
    parallel = sys.modules.get("megatron.core.parallel_state")
    if parallel is None or not parallel.model_parallel_is_initialized():
        return only_declared
    if ranks is None:
        if not dist.is_initialized() or dist.get_world_size() != world_size:
            return only_declared
        ranks = range(world_size)

    def division(group: str, kind: str, declaration: str) -> Division | None:
        found = getattr(parallel, f"get_{group}_group")()
        found = found[0] if isinstance(found, list) else found  # those of an encoder, in 0.11, have one size
        members = sorted(dist.get_process_group_ranks(found))
        if len(members) == 1:
            return None
        # The groups of a kind are the lines of a grid of ranks, so that all have this stride.
        stride = members[1] - members[0]
        places = {rank // stride % len(members) for rank in ranks}
        if len(places) == 1 and len(set(members).intersection(ranks)) < 2:
            return None
        return Division(kind, declaration, frozenset(members))

    has_own = hasattr(parallel, "get_expert_tensor_parallel_group")  # from 0.9 on
    expert_tensor = "expert_tensor_parallel" if has_own else "tensor_model_parallel"
    divisions = ModelParallel(
        world_size,
        division("tensor_model_parallel", "tensor", "fused or swiglu"),
        division("expert_model_parallel", "expert", "experts.sequential"),
        division(expert_tensor, "expert tensor", "experts.sequential"),
        division("pipeline_model_parallel", "pipeline", "layers"),
        has_parts(),
    )
    return divisions if divisions.is_of_megatron else only_declared


def refuse_undeclared(module: NamedModule, place: Place, parallel: ModelParallel | None) -> None:
    """Raises for a weight that other ranks have with other values, and that has no declared layout.

    A plain tensor is a replica of those with its key on other ranks, so a save would store one of them. A
    DTensor is one, too, on ranks outside of its mesh.

    Args:
        module: the module.
        place: its place in the tree.
        parallel: the result of `model_parallel`.

    Raises:
        StructureError: tensor, expert or pipeline parallel ranks have another part of the model under a key.
    """
    if parallel is None or is_per_rank(place.key):
        return
    for name, _, way in _divided(module.parts, module.parameters(), parallel):
        if module.layout(name) is None:
            raise _refused(join(place.key, module.clean(name)), way)
    if parallel.pipeline is not None:
        for path, _, number in _layers(module.parts):
            key = join(place.key, module.clean(f"{path}.")[:-1])
            if _has_other_number(key, number):
                raise _refused(key, parallel.pipeline)


def refuse_loose_parts(
    tensors: Iterable[tuple[str, torch.Tensor]], parallel: ModelParallel, placed: Collection[str] = ()
) -> None:
    """Raises for a tensor outside of modules that is a part of a model, such as one of a ``state_dict()``.

    See "how a tensor is recognised as a part of a model". A DTensor on a mesh of all ranks is none.

    Args:
        tensors: each key with its tensor.
        parallel: the result of `model_parallel`.
        placed: the keys whose tensors have their declared layout in this save or load.

    Raises:
        StructureError: see `refuse_undeclared`. Or `shardproof.layouts` declares the part on a module.
    """
    wanted = [
        (key, memory)
        for key, tensor in tensors
        if not (is_dtensor(tensor) and tensor.device_mesh.size() >= parallel.ranks)
        for local in [local_tensor(tensor)]
        if (memory := memory_range(local)) is not None and local.is_floating_point()  # no random state
    ]
    if not wanted:
        return
    parts = sorted(_parts_in_process(parallel), key=lambda part: part.memory)
    ends = list(accumulate((part.memory[1] for part in parts), max))
    for key, (begin, end) in wanted:
        for part in parts[bisect_right(ends, begin) :]:
            if part.memory[0] >= end:
                break
            if part.memory[1] > begin and part.is_refused_as(key, key in placed):
                raise _refused(key, part.way)


def _refused(key: str, way: Division | None) -> StructureError:
    own = "keeps the part of each rank by itself. Use it also if the ranks have different keys"
    if way is None:
        return StructureError(
            f"{key} is this rank's part of a model: shardproof.layouts declares it on a module, or the "
            "number of its layer or expert. A save stores a plain tensor once for all ranks that have its "
            "key. Save the module itself by shardproof.save, and its optimizer, instead of their "
            f"state_dict(): {{'model': model, 'optimizer': optimizer}}. "
            f"`shardproof.PerRank(model.state_dict())` {own}",
            key=key,
        )
    return StructureError(
        f"{key} is this rank's part of a model that Megatron-Core divides among {len(way.members)} "
        f"{way.ranks} parallel ranks, and a save stores a plain tensor once for all ranks that have its key. "
        "Save `live_state(model, optimizer)`, or `{'model': model.sharded_state_dict()}` of the model inside "
        "its wrappers, by `save` of shardproof.frameworks.megatron_core. Or save the module itself by "
        f"shardproof.save, and declare the part of this rank: shardproof.layouts.{way.declaration}. "
        f"`shardproof.PerRank({{'model': ..., 'optimizer': ...}})` {own}",
        key=key,
    )


def _divided(
    parts: Sequence[tuple[str, torch.nn.Module]],
    parameters: Iterable[tuple[str, torch.Tensor]],
    parallel: ModelParallel,
) -> Iterator[tuple[str, torch.Tensor, Division]]:
    """Name, parameter and division of each parameter of which ranks have parts, or of which experts."""
    if not parallel.is_of_megatron:
        return
    experts = {path for path, part in parts if _attributes(part).get("is_expert")}
    of_megatron = {
        path
        for path, part in parts
        if any(base.__module__.startswith("megatron.core.") for base in type(part).__mro__)
    }
    meshes: dict[int, frozenset[int]] = {}
    for name, parameter in parameters:
        marks = _attributes(parameter)
        above = ["", *accumulate(name.split("."), "{}.{}".format)]
        is_marked = "allreduce" in marks or "tensor_model_parallel" in marks
        is_expert = not experts.isdisjoint(above) or (
            ".experts." in f".{name}" and (is_marked or not of_megatron.isdisjoint(above))
        )
        way = None
        if not marks.get("allreduce", True):
            way = parallel.expert
        if way is None and is_expert:
            way = parallel.expert_tensor
        elif way is None and marks.get("tensor_model_parallel"):
            way = parallel.tensor
        if way is None:
            continue
        if is_dtensor(parameter):
            mesh = parameter.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = frozenset(mesh.mesh.flatten().tolist())
            if way.members <= meshes[id(mesh)]:
                continue
        yield name, parameter, way


def _layers(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Path, module, and number in the model from 0 of each layer."""
    for path, part in parts:
        number = _attributes(part).get("layer_number")
        if type(number) is int:
            yield path, part, number - 1


def _has_other_number(key: str, number: int) -> bool:
    """True if a key is that of a layer in a list of layers, with another number than the layer has.

    >>> _has_other_number("model.layers.0", 2), _has_other_number("model.layers.0.attention", 2)
    (True, False)
    """
    parent, _, last = key.rpartition(".")
    return parent.endswith("layers") and last.isdecimal() and int(last) != number


@dataclass(frozen=True, slots=True)
class _PartOfModel:
    """A tensor of this process that is a part of a model."""

    memory: tuple[int, int]
    way: Division | None
    """None if `shardproof.layouts` declares the part."""
    layer: int | None = None
    """Number in the model of the layer that has the tensor; None if ranks divide the tensor itself."""
    name: str = ""
    """Name of the parameter in this layer."""
    numbers: Numbers | None = None
    """Declared numbers of the layers and experts that have the tensor; None as for `layer`."""
    is_slot: bool = False
    """True for the state of an optimizer."""

    def is_refused_as(self, key: str, is_placed: bool) -> bool:
        """False for a key with the model's numbers, and for a tensor with its declared layout."""
        if self.numbers is not None:
            return not self.numbers.are_in(key, self.is_slot)
        if self.layer is None:
            return not is_placed
        if self.is_slot:
            return f".layers.{self.layer}." not in f".{key}."
        return _has_other_number(key.removesuffix(f".{self.name}"), self.layer)


def _parts_in_process(parallel: ModelParallel) -> list[_PartOfModel]:
    """The parts of models among the parameters of this process, and the state of its optimizers for them."""
    kinds = {id(kind) for kind in _classes_below(torch.nn.Module, torch.optim.Optimizer)}  # some have no hash
    both = _objects_of(kinds)
    modules = [item for item in both if issubclass(type(item), torch.nn.Module)]
    optimizers = [item for item in both if issubclass(type(item), torch.optim.Optimizer)]
    children = {id(child) for module in modules for _, child in _items(module, "_modules")}
    found: list[_PartOfModel] = []
    of_tensor: dict[int, list[_PartOfModel]] = {}
    """The found parts of each parameter, by identity."""

    def add(tensor: torch.Tensor, way: Division | None, **more: Any) -> None:
        memory = memory_range(local_tensor(tensor))
        if memory is not None:
            found.append(_PartOfModel(memory, way, **more))
            of_tensor.setdefault(id(tensor), []).append(found[-1])

    for root in modules:
        if id(root) in children:
            continue
        parts = _parts_below(root)
        for tensor, numbers in declared_parts(parts) if parallel.is_declared else ():
            add(tensor, None, numbers=numbers)
        for _, parameter, way in _divided(parts, _parameters(parts), parallel):
            add(parameter, way)
        if parallel.pipeline is not None:
            for _, layer, number in _layers(parts):
                for name, parameter in _parameters(_parts_below(layer)):
                    add(parameter, parallel.pipeline, layer=number, name=clean_name(name))
    for optimizer in optimizers:
        states = _items(optimizer, "state")
        trained = [("", parameter) for parameter, _ in states if isinstance(parameter, torch.Tensor)]
        for _, parameter, way in _divided((), trained, parallel):
            if id(parameter) not in of_tensor:  # a copy of a parameter with another dtype has its marks
                add(parameter, way)
        for parameter, slots in states:
            for slot in dict.values(slots) if isinstance(slots, dict) else ():
                if isinstance(slot, torch.Tensor) and slot.dim() and (at := memory_range(local_tensor(slot))):
                    parts_of = of_tensor.get(id(parameter), ())
                    found += [replace(part, memory=at, is_slot=True) for part in parts_of]
    return found


def _objects_of(kinds: set[int]) -> list[Any]:
    """The objects of this process whose classes have these identities.

    CPython raises a SystemError in a thread that makes a tuple from an iterator if anything else refers to
    the unfinished tuple. So one call of C gets all objects, and drops them before another thread can run.
    Both of its iterators have to end for that: hence the item None beyond the last object.
    """
    held: list[list[Any]] = []
    with no_garbage_collection():
        found = list(
            chain(
                map(held.append, map(gc.get_objects, (None,))),
                compress(
                    chain(chain.from_iterable(held), (None,)),
                    map(kinds.__contains__, map(id, map(type, chain.from_iterable(held)))),
                ),
                map(held.__delitem__, (0,)),
            )
        )
    return found[1:-1]  # without the results of append and __delitem__


def _classes_below(*roots: type) -> Iterator[type]:
    """Classes, and all that derive from them."""
    seen: set[int] = set()
    left = list(roots)
    while left:
        kind = left.pop()
        if id(kind) not in seen:
            seen.add(id(kind))
            left += type.__subclasses__(kind)
            yield kind


def _parts_below(root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Path and module of a module and all below it, each once, as by torch's `named_modules`."""
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    left = [("", root)]
    while left:
        path, module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((path, module))
            left += [
                (join(path, name), child)
                for name, child in reversed(_items(module, "_modules"))
                if issubclass(type(child), torch.nn.Module)
            ]
    return found


def _parameters(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in parts:
        for name, parameter in _items(part, "_parameters"):
            if issubclass(type(parameter), torch.Tensor):
                yield join(path, name), parameter


def _items(value: Any, attribute: str) -> list[tuple[Any, Any]]:
    """The items of a dict that an object has as an attribute; none for another value."""
    items: Any = _attributes(value).get(attribute)
    return list(dict.items(items)) if issubclass(type(items), dict) else []


def _attributes(value: Any) -> dict[str, Any]:
    """The object's own attributes, without a call of the methods that its class may define for access."""
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return attributes

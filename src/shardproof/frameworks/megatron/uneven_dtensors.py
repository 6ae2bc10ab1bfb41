"""Describes Megatron-FSDP's uneven DTensors, also for `torch.distributed.checkpoint`, without communication.

Megatron-FSDP packs the parameters of a group into one buffer, and cuts the buffer into equal parts. The index
of the buffer gives the rows of a parameter on each rank, so no rank needs to ask another.

DCP asks the local tensor of a DTensor for its chunk (``__create_chunk_list__``) and for its write items
(``__create_write_items__``). Megatron-FSDP gathers the chunk of each tensor. This module computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardproof as sp
from shardproof.engine.state import dtensor_index_map, is_dtensor, local_tensor


def megatron_fsdp_of(model: torch.nn.Module) -> Any:
    """The Megatron-FSDP model in a model: the model, or the one that Megatron-Core's wrapper holds."""
    inner: Any = model
    while isinstance(inner, torch.nn.Module):
        if hasattr(inner, "param_and_grad_buffer") and hasattr(inner, "raw_param"):
            return inner
        inner = getattr(inner, "module", None)
    raise sp.StructureError(
        f"expected a model of Megatron-FSDP, found {type(model).__name__}. Pass the result of "
        "megatron_fsdp.fully_shard, not the module inside"
    )


@dataclass(frozen=True)
class UnevenDTensor:
    """This rank's rows of one parameter, and of every DTensor with the parameter's layout.

    Args:
        name: name of the parameter.
        parameter: the parameter as the optimizer has it, a DTensor.
        shape: shape of the parameter on this tensor parallel rank.
        start: first row-major element of this rank in `shape`.
        stop: element after the last. `start` for a rank without an element: the elements before it are on
            lower ranks.
        first: offset of this tensor parallel rank in the global tensor, for each dimension.
    """

    name: str
    parameter: Any
    shape: tuple[int, ...]
    start: int
    stop: int
    first: tuple[int, ...]

    def chunk_of(self, tensor: Any, key: str) -> ChunkStorageMetadata:
        """The position of the rows of `tensor`, which has the parameter's layout.

        Raises:
            StructureError: the tensor has another layout.
        """
        local = local_tensor(tensor)
        if tuple(tensor.shape) != tuple(self.parameter.shape) or local.numel() != self.stop - self.start:
            raise sp.StructureError(
                f"{key} has shape {list(tensor.shape)} and {local.numel()} elements on this rank, and its "
                f"parameter {self.name} has shape {list(self.parameter.shape)} and "
                f"{self.stop - self.start} elements. Save a tensor of another shape under a key of its own",
                key=key,
            )
        return self._chunk(0, self.start, local.shape)

    def parts_of(
        self, tensor: Any, key: str, rows: Mapping[str, int]
    ) -> dict[str, tuple[Any, ChunkStorageMetadata]]:
        """The parts of a fused tensor by suffix: DTensors that share its memory, and their positions.

        Raises:
            StructureError: the rows are not those of the parameter, or the tensor has another layout.
        """
        self.chunk_of(tensor, key)
        if not self.shape or sum(rows.values()) != self.shape[0] or is_dtensor(self.parameter.orig_param):
            raise sp.StructureError(
                f"{self.name} has shape {list(self.shape)} on this rank and cannot be split into "
                f"{dict(rows)}. The rows of the parts must have the sum of its rows, and a weight that is "
                "tensor parallel by DTensor cannot be split",
                key=key,
            )
        row, ranks = prod(self.shape[1:]), self.parameter.shape[0] // self.shape[0]
        flat, parts, begin = local_tensor(tensor).detach().view(-1), {}, 0
        for suffix, count in rows.items():
            end = begin + count * row
            start, stop = (min(max(at, begin), end) for at in (self.start, self.stop))
            local = flat[start - self.start : stop - self.start].view(-1, *self.shape[1:])
            shape = torch.Size((count * ranks, *self.parameter.shape[1:]))
            part = distributed_like(local, self.parameter, shape)
            first = self.first[0] // self.shape[0] * count  # the part of this tensor parallel rank
            parts[suffix] = (part, self._chunk(first - self.first[0], start - begin, local.shape))
            begin = end
        return parts

    def _chunk(self, shift: int, start: int, sizes: torch.Size) -> ChunkStorageMetadata:
        """The position of rows that begin at element `start`, `shift` rows after `first`."""
        offsets = list(self.first)
        if offsets:
            offsets[0] += shift + start // max(prod(self.shape[1:]), 1)
        return ChunkStorageMetadata(torch.Size(offsets), sizes)


def uneven_dtensors(model: Any) -> dict[str, UnevenDTensor]:
    """The parameters of a Megatron-FSDP model by name; tied ones have one value. Does not communicate."""
    buffer = model.param_and_grad_buffer
    sharded = model.data_parallel_sharding_strategy != "no_shard"
    distributed = dict(buffer.optimizer_named_parameters)
    found = {}
    for group in buffer.parameter_groups:
        index = group.main_weight_buffer or group.model_weight_buffer
        for number, raw in enumerate(group.params):
            name = buffer.param_to_name[raw]
            shape = tuple(local_tensor(raw).shape)
            start, stop = _range_in(index, number) if sharded else (0, prod(shape))
            found[name] = UnevenDTensor(
                name, distributed[name], shape, start, stop, _first_of(raw, distributed[name])
            )
    by_tensor = {id(item.parameter): item for item in found.values()}
    by_tensor |= {id(model.raw_param[name]): item for name, item in found.items()}
    return {
        name: by_tensor[id(parameter)]
        for name, parameter in model.module.named_parameters(remove_duplicate=False)
    }


def _gated_weights(module: torch.nn.Module) -> dict[str, dict[str, int]]:
    """The fused gate and up of Megatron-Core's layers by name: rows of the parts ``_w`` and ``_v``."""
    found = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        fused = getattr(layer, "linear_fc1", None)
        if isinstance(fused, torch.nn.Module) and getattr(
            getattr(layer, "config", None), "gated_linear_unit", False
        ):
            for name, parameter in fused.named_parameters(recurse=False):
                if name.startswith(("weight", "bias")):  # the layer norm of a fused module is not split
                    raw = getattr(parameter, "orig_param", parameter)
                    half = local_tensor(raw).shape[0] // 2
                    found[f"{prefix}.linear_fc1.{name}" if prefix else f"linear_fc1.{name}"] = {
                        "_w": half,
                        "_v": half,
                    }
    return found


def distributed_like(local: torch.Tensor, like: Any, shape: torch.Size | None = None) -> DTensor:
    """A DTensor with the mesh and the placements of another, whose local tensor is `local`.

    `DTensor.from_local` would copy `local` to the device of the mesh. The state of an offloaded optimizer
    stays on the CPU.
    """
    shape = like.shape if shape is None else shape
    described = TensorMeta(shape, torch.empty(shape, dtype=local.dtype, device="meta").stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(like.placements), tensor_meta=described)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _range_in(index: Any, number: int) -> tuple[int, int]:
    """The elements of parameter `number` in this rank's part of a buffer."""
    item, shard = index.item_index_map[number], index.shard_bucket_index
    begin = shard.global_data_index - item.global_data_index
    return min(max(begin, 0), item.size), min(max(begin + shard.size, 0), item.size)


def _first_of(raw: Any, parameter: Any) -> tuple[int, ...]:
    """The offset of a tensor parallel shard in the global tensor."""
    if is_dtensor(raw):
        placed = dtensor_index_map(raw, "a parameter").placed
        if not len(placed):
            return (0,) * len(raw.shape)
        return tuple(int(at) for at in placed.offsets.min(axis=0))
    # Megatron-Core's tensor parallelism, in the last dimension of the mesh.
    return tuple(
        parameter.device_mesh.get_coordinate()[-1] * own if own != whole else 0
        for own, whole in zip(raw.shape, parameter.shape, strict=True)
    )


def attach_chunk_metadata(
    state_dict: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    fused: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Describe the DTensors of a state dict for `torch.distributed.checkpoint`, without communication.

    Replaces ``preprocess_state_dict_for_uneven_dtensor`` of Megatron-FSDP, and
    ``handle_swiglu_in_state_dict`` of Megatron-Core. These run several collectives for each tensor, and wait
    for a rank that has fewer tensors. ``state_dict()`` of a model and of an optimizer runs them too, unless
    both were made with ``preproc_state_dict_for_dcp_ckpt=False``:

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        described = megatron_fsdp.attach_chunk_metadata(state, model, optimizer)
        dcp.save(described, checkpoint_id=path)  # or dcp.load, which fills the tensors of `state`

    Args:
        state_dict: nested dicts and lists with the state dict of the model, of the optimizer, or both. Names
            of parameters may begin with ``module.``.
        model: the model, of megatron-fsdp or of Megatron-Core.
        optimizer: the optimizer, if its state dict has numbers of parameters (every torch optimizer) or names
            of experts in the whole model (`DistributedOptimizer` of Megatron-Core).
        fused: for each fused weight, the suffixes and rows of its parts on this tensor parallel rank, in
            order. Each part gets an entry of its own. None: gate and up of Megatron-Core's gated layers, as
            ``_w`` and ``_v``.

    Returns:
        The described state dict. A dict that has a fused weight, and each dict around it, is a new dict. All
        other values are those of `state_dict`, and parts share the memory of their weight: a load into
        the result also fills the tensors of `state_dict`.

    Raises:
        StructureError: a DTensor belongs to no parameter of the model, or has another shape; the parts do not
            have the rows of their weight; the model is not of Megatron-FSDP; a key has the number that this
            rank gives to an expert, and `optimizer` has its number in the whole model.
    """
    inner = megatron_fsdp_of(model)
    parameters = uneven_dtensors(inner)
    parts = _gated_weights(inner.module) if fused is None else fused
    unknown = sorted(set(parts) - set(parameters))
    if unknown:
        raise sp.StructureError(
            f"the fused weights {unknown} are no parameters of the model. Give names of "
            "model.module.named_parameters()"
        )
    state = _StateDict(parameters, parts)
    state.name_by(optimizer)
    described = state.described(state_dict, "")
    assert isinstance(described, dict)
    return described


class _StateDict:
    """Finds the parameter of each value in a state dict, by the keys on its path."""

    def __init__(
        self, parameters: Mapping[str, UnevenDTensor], parts: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._by_name = dict(parameters)
        self._by_number: list[UnevenDTensor | None] = []
        self._rows = {id(parameters[name]): rows for name, rows in parts.items()}
        self._renamed: dict[str, str] = {}
        """Names of experts on this rank, to their names in the whole model where these differ."""

    def name_by(self, optimizer: Any) -> None:
        """Adds the numbers and names that an optimizer gives to its parameters."""
        found = {id(item.parameter): item for item in self._by_name.values()}
        for member in _members(optimizer):
            name_of: Callable[[torch.Tensor], str] | None = getattr(member, "_param_name", None)
            tensors = {id(tensor): tensor for group in member.param_groups for tensor in group["params"]}
            self._by_number = [found.get(identity) for identity in tensors]
            for identity, tensor in tensors.items():
                if name_of is not None and identity in found:
                    whole = _without_prefix(name_of(tensor))
                    self._by_name[whole] = found[identity]
                    if whole != found[identity].name:
                        self._renamed[found[identity].name] = whole

    def described(self, value: Any, key: str, owner: UnevenDTensor | None = None) -> Any:
        """`value` with positions and with parts. The same object if nothing below it is fused."""
        if is_dtensor(value):
            if owner is None:
                raise sp.StructureError(
                    f"{key}: this DTensor belongs to no parameter of the model. Pass the state dicts of the "
                    "model and of its optimizer, and optimizer=OPTIMIZER if the keys are numbers or "
                    "Megatron-Core's names of experts",
                    key=key,
                )
            attach_chunk(value, owner.chunk_of(value, key))
            return value
        if isinstance(value, list):
            items = [self.described(item, f"{key}.{at}", owner) for at, item in enumerate(value)]
            return value if all(map(_is, items, value)) else items
        if not isinstance(value, Mapping):
            return value
        result = {}
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            found = owner or self._named(name, key)
            if owner is None and found is not None:
                self._check_expert(name, path)
            rows = self._rows.get(id(found)) if owner is None else None
            if rows is None:
                result[name] = self.described(item, path, found)
            else:
                assert found is not None
                for suffix in rows:
                    result[f"{name}{suffix}"] = _part(item, path, found, suffix, rows)
        same = result.keys() == value.keys() and all(map(_is, result.values(), value.values()))
        return value if same and isinstance(value, dict) else result

    def _check_expert(self, name: Any, key: str) -> None:
        """Refuses the name of an expert on this rank. Other ranks give it to other experts."""
        whole = self._renamed.get(_without_prefix(name)) if isinstance(name, str) else None
        if whole is not None:
            raise sp.StructureError(
                f"{key} is a name that each expert parallel rank gives to another expert: all but one would "
                f"be lost. In the whole model it is {whole}. Pass the model's state dict through "
                "megatron.core.transformer.fsdp_dtensor_checkpoint.handle_experts_in_state_dict(STATE_DICT, "
                "NUM_EXPERTS) first",
                key=key,
            )

    def _named(self, name: Any, key: str) -> UnevenDTensor | None:
        if isinstance(name, int) and key.rpartition(".")[2] == "state":
            return self._by_number[name] if name < len(self._by_number) else None
        while isinstance(name, str):
            if name in self._by_name:
                return self._by_name[name]
            prefix, _, rest = name.partition(".")
            name = rest if prefix == "module" else None
        return None


def _without_prefix(name: str) -> str:
    """A name without the ``module.`` of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _part(value: Any, key: str, owner: UnevenDTensor, suffix: str, rows: Mapping[str, int]) -> Any:
    """One part of every DTensor in `value`. Other values belong to each part."""
    if is_dtensor(value):
        part, chunk = owner.parts_of(value, key, rows)[suffix]
        attach_chunk(part, chunk)
        return part
    if isinstance(value, Mapping):
        return {name: _part(item, f"{key}.{name}", owner, suffix, rows) for name, item in value.items()}
    return value


def attach_chunk(tensor: Any, chunk: ChunkStorageMetadata) -> None:
    """Describes one DTensor: its local tensor has the elements of `chunk`."""

    def write_items(key: str, written: Any) -> list[WriteItem]:
        local = local_tensor(written)
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), written.size())
        return [WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    local = cast(Any, local_tensor(tensor))
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items


def _members(optimizer: Any) -> Iterator[Any]:
    """The optimizer, or those that Megatron-Core chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for member in chained:
            yield from _members(member)
    elif optimizer is not None:
        yield optimizer


def _is(one: object, other: object) -> bool:
    return one is other

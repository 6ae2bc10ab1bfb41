"""The position of Megatron-FSDP's uneven DTensors in the global tensor, from its buffers.

Megatron-FSDP packs the parameters of a group into one buffer, and cuts the buffer into equal parts. The index
of the buffer gives the rows of a parameter on each rank, so no rank needs to ask another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardproof as sp
from shardproof.engine.state import dtensor_index_map, is_dtensor, local_tensor


def megatron_fsdp_of(model: torch.nn.Module) -> Any:
    """The Megatron-FSDP model in a model: the model, or the one that Megatron-Core's wrapper holds.

    Raises:
        StructureError: there is none.
    """
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

        Args:
            tensor: a tensor with the parameter's layout.
            key: its key, for errors.
            rows: the number of rows of each part on this tensor parallel rank, in order.

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


def gated_weights(module: torch.nn.Module) -> dict[str, dict[str, int]]:
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

    Args:
        local: the local tensor.
        like: a DTensor.
        shape: the global shape, if it is not that of `like`.
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

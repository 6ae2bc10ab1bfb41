"""The places of a wrapper's parts in a checkpoint; see "kinds of parts" in `engine.state.subclasses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from shardproof.engine.state.dtensor import dtensor_index_map, is_dtensor, is_sharded, local_tensor
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.tensors import dtensor_like
from shardproof.errors import StructureError

PARTS = "__shardproof_parts__"
_GRID, _BLOCKS, _WHOLE = "grid", "blocks", "whole"

_Box: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Offsets in the local tensor, sizes, and offsets in the global tensor."""


def name_of_class(kind: type) -> str:
    """The full name of a class, as a checkpoint stores it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def distributed(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor with this local tensor if `like` is a DTensor; otherwise the tensor itself."""
    if not is_dtensor(like) or is_dtensor(local):
        return local
    return dtensor_like(local.detach(), like)


def shape_on_rank(description: Mapping[str, Any], name: str, parameter: torch.Tensor, key: str) -> list[int]:
    """The shape of a stored part on this rank, in a wrapper of the parameter's shard.

    Args:
        description: the object of the stored wrapper. Its shape is the parameter's.
        name: name of a part that is no ``"whole"``.
        parameter: a plain tensor or DTensor.
        key: key of the wrapper, for messages.

    Raises:
        StructureError: the shard of this rank cuts a block.
    """
    kind, local = description["parts"][name], local_tensor(parameter).shape
    if _GRID in kind:
        for box in _boxes(parameter, key):
            _scaled(box, kind[_GRID], key, description["class"])
        return [size // block for size, block in zip(local, kind[_GRID], strict=True)]
    _blocks_of(parameter, kind[_BLOCKS], key, description["class"])
    return [prod(local) // kind[_BLOCKS]]


def kind_of_part(tensor: torch.Tensor, name: str, part: torch.Tensor, declared: str | None, key: str) -> Any:
    """The kind of a part, as plain JSON data.

    Args:
        tensor: the wrapper, or a DTensor of wrappers.
        name: name of the part.
        part: the part on this rank.
        declared: the kind that the class declares, if any.
        key: key of the wrapper, for messages.

    Raises:
        StructureError: the tensor is sharded, and the place of the part is unknown.
    """
    local = local_tensor(tensor)
    blocks = _block_sizes(local.shape, part.shape)
    if declared == _BLOCKS and part.dim() == 1 and part.numel() and not local.numel() % part.numel():
        return {_BLOCKS: local.numel() // part.numel()}
    if declared == _WHOLE:
        return _WHOLE
    if declared in (None, _GRID) and blocks is not None:
        return {_GRID: blocks}
    if declared is None and not is_sharded(tensor):
        return _WHOLE
    cls = type(local)
    if declared is not None:
        advice = f"{PARTS} of the class declares it as {declared!r}"
    elif cls.__module__.startswith("torchao."):
        advice = "Import shardproof.frameworks.torchao, which declares the parts of torchao's classes"
    else:
        advice = f'Declare it in the class: {PARTS} = {{"{name}": "blocks"}} (or "grid", or "whole")'
    raise StructureError(
        f"{key}: it is unknown which elements of the sharded {name_of_class(cls)} of local shape "
        f"{list(local.shape)} its part {name!r} of shape {list(part.shape)} belongs to. {advice}",
        key=key,
    )


def _block_sizes(shape: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """The sizes of the boxes that have one element of a part each; None if the part is no grid."""
    if len(part) != len(shape) or not shape:
        return None
    sizes = []
    for whole, count in zip(shape, part, strict=True):
        if whole and (not count or whole % count):
            return None
        sizes.append(whole // count if count else 1)
    return sizes


def placed(tensor: torch.Tensor, part: torch.Tensor, kind: Any, key: str) -> torch.Tensor | LocalShards:
    """The part as a tensor of the checkpoint."""
    if kind == _WHOLE or is_dtensor(part):
        return part
    class_name = name_of_class(type(local_tensor(tensor)))
    if _GRID in kind:
        if kind[_GRID] == [1] * tensor.dim():
            return distributed(part, tensor)
        return _grid(tensor, part, kind[_GRID], key, class_name)
    size = kind[_BLOCKS]
    shape = tensor.shape
    if shape[-1] % size:
        start = _blocks_of(tensor, size, key, class_name)
        pieces = [(part, (start,))] if part.numel() else []
        return LocalShards((prod(shape) // size,), pieces, dtype=part.dtype)
    _blocks_of(tensor, size, key, class_name)
    local = local_tensor(tensor).shape
    return _grid(
        tensor,
        part.view(*local[:-1], local[-1] // size),
        [1] * (len(local) - 1) + [size],
        key,
        class_name,
    )


def _grid(
    tensor: torch.Tensor, part: torch.Tensor, blocks: list[int], key: str, class_name: str
) -> LocalShards:
    """The pieces of a part with one element for each box of these sizes."""
    pieces = []
    for box in _boxes(tensor, key):
        starts, sizes, offsets = _scaled(box, blocks, key, class_name)
        index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        pieces.append((part[index], offsets))
    shape = [-(-size // block) for size, block in zip(tensor.shape, blocks, strict=True)]
    return LocalShards(shape, pieces, dtype=part.dtype)


def _boxes(tensor: torch.Tensor, key: str) -> list[_Box]:
    """The boxes of the local tensor that are not empty."""
    if not is_dtensor(tensor):
        zeros = [0] * tensor.dim()
        return [(zeros, list(tensor.shape), zeros)] if tensor.numel() else []
    index_map = dtensor_index_map(tensor, key)
    columns = index_map.local.offsets, index_map.local.sizes, index_map.offsets
    boxes = zip(*(column.tolist() for column in columns), strict=True)
    return [box for box in boxes if 0 not in box[1]]


def _scaled(box: _Box, blocks: Sequence[int], key: str, class_name: str) -> _Box:
    """The box in units of blocks."""
    for values in box:
        if any(value % block for value, block in zip(values, blocks, strict=True)):
            starts, sizes, offsets = box
            raise _cut(f"offsets {list(offsets)} and sizes {list(sizes)}", list(blocks), key, class_name)
    starts, sizes, offsets = (
        [value // block for value, block in zip(values, blocks, strict=True)] for values in box
    )
    return starts, sizes, offsets


def _blocks_of(tensor: torch.Tensor, size: int, key: str, class_name: str) -> int:
    """The number of the first block of this rank. Raises if the shard is no range of whole blocks."""
    shape = tensor.shape
    boxes = _boxes(tensor, key)
    if not boxes:
        return 0
    if not shape[-1] % size:
        for box in boxes:
            _scaled(box, [1] * (len(shape) - 1) + [size], key, class_name)
        return 0
    start = _flat_start(boxes, shape)
    count = local_tensor(tensor).numel()
    if start is None or start % size or count % size:
        where = "parts of several rows" if start is None else f"elements {start} to {start + count}"
        raise _cut(f"{where} of shape {list(shape)}", size, key, class_name)
    return start // size


def _flat_start(boxes: list[_Box], shape: Sequence[int]) -> int | None:
    """The first row-major element of a shard; None if it is no range of elements."""
    ((_, sizes, offsets),) = boxes if len(boxes) == 1 else [((), (), ())]
    lead = next((dim for dim, size in enumerate(sizes) if size != 1), len(shape))
    if not sizes or any(sizes[dim] != shape[dim] for dim in range(lead + 1, len(shape))):
        return None
    start = 0
    for offset, size in zip(offsets, shape, strict=True):
        start = start * size + offset
    return start


def _cut(what: str, block: Any, key: str, class_name: str) -> StructureError:
    return StructureError(
        f"{key}: the shard of this rank ({what}) cuts a block of {block} elements that {class_name} "
        "quantises together. Use a number of ranks whose shards are whole blocks, or a block size that "
        "divides the rows",
        key=key,
    )

"""Tensor subclasses that wrap other tensors, such as quantised weights and low-bit optimizer state.

Such a class has torch's protocol of wrapper subclasses: ``__tensor_flatten__`` returns the names of its inner
tensors and a context, and ``__tensor_unflatten__`` makes a tensor from both. A save stores each inner tensor
under ``<key>.<name>``, and an object ``<key>.@subclass`` with the class, the shape, the context and the kinds
of the parts. A load fills the inner tensors of a target with an equal object. A wrapper of one tensor with
its own shape and dtype is stored as that tensor, without an object.

Note: kinds of parts
    The ranks of a sharded DTensor have wrappers of their shards. The kind of a part maps its elements to
    elements of the global tensor, so that a load may shard it differently:

    - ``{"grid": [b0, b1, ...]}``: one element for each box of these sizes. A grid of ones has the shape of
      the tensor.
    - ``{"blocks": k}``: one element for each ``k`` consecutive elements, in row-major order, as a 1-D tensor.
      If ``k`` divides the last dimension, a checkpoint stores it as a grid of ``[1, ..., k]``. Otherwise it
      stores the blocks of the flattened tensor, and shards must be ranges of that.
    - ``"whole"``: equal on all ranks.

    A class declares its parts in ``__shardproof_parts__``: name to ``"grid"``, ``"blocks"``, ``"whole"`` or
    ``"derived"``. A derived part is computed from others: it is not stored, and a load sets it to None.
    Without a declaration, a part with as many dimensions as the tensor is a grid, and others are whole. Other
    parts of sharded tensors are refused, because a guess could put them at the wrong place. Shards that cut a
    block are refused, because a load must restore every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from shardproof.engine.state.dtensor import dtensor_index_map, is_dtensor, is_sharded, local_tensor
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.plain_decode import decode
from shardproof.engine.state.plain_encode import encode
from shardproof.engine.state.tensors import PLAIN_TYPES, dtensor_like
from shardproof.errors import PlainDataError, StructureError

SUBCLASS = "@subclass"
"""Segment of the object with class, shape, context and parts of a wrapper."""

_DERIVED = "derived"
_SHAPE = "@shape"
"""Stands for the shape of the local tensor, which differs between ranks, in a stored context."""
_IN_FLIGHT = frozenset(("AsyncCollectiveTensor", "FunctionalTensor", "FakeTensor"))
"""torch's wrappers of tensors with pending values."""

_PARTS = "__shardproof_parts__"
_GRID, _BLOCKS, _WHOLE = "grid", "blocks", "whole"
_Box: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Offsets in the local tensor, sizes, and offsets in the global tensor."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True if a tensor, or the local tensor of a DTensor, wraps other tensors.

    torch's ``ShardedTensor`` counts as a wrapper of its shards.

    >>> is_wrapper(torch.ones(2))
    False
    """
    if type(tensor) in PLAIN_TYPES:
        return False
    local = local_tensor(tensor)
    kind = type(local)
    if kind in PLAIN_TYPES or kind.__name__ in _IN_FLIGHT:
        return False
    if _is_sharded_tensor(local):
        return True
    has_protocol = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return has_protocol and not local.is_nested


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors with the elements of a tensor: itself, or the inner tensors of wrappers.

    A DTensor with a plain local tensor is returned itself.
    """
    if not is_wrapper(tensor):
        return [tensor]
    local: Any = local_tensor(tensor)
    if _is_sharded_tensor(local):
        return [shard.tensor for shard in local.local_shards()]
    return [inner for name in local.__tensor_flatten__()[0] for inner in inner_tensors(getattr(local, name))]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The parts of one wrapper on this rank."""

    description: dict[str, Any] | None
    """The object at ``<key>.@subclass``, as plain JSON data; None for a wrapper stored as its one part."""
    parts: Mapping[str, torch.Tensor | LocalShards]
    """By name. The empty name is the wrapper itself."""
    derived: tuple[str, ...]
    """Names of the parts that are not stored."""

    def keys(self, key: str) -> Iterator[tuple[str, torch.Tensor | LocalShards]]:
        """Each part with its key, for a wrapper with this key."""
        return ((f"{key}.{name}" if name else key, part) for name, part in self.parts.items())


def unwrapped(tensor: torch.Tensor, key: str) -> Wrapped:
    """The parts of a wrapper, or of a DTensor of wrappers. An empty shard has no parts.

    Raises:
        StructureError: the place of a part is unknown, or the shard of a rank cuts a block.
        PlainDataError: the context of the class is no plain data.
    """
    local: Any = local_tensor(tensor)
    if _is_sharded_tensor(local):
        pieces = [(shard.tensor.detach(), shard.metadata.shard_offsets) for shard in local.local_shards()]
        return Wrapped(None, {"": LocalShards(local.size(), pieces, dtype=local.dtype)}, ())
    if is_dtensor(tensor) and not local.numel():
        return Wrapped(None, {}, ())  # the sizes of its blocks are unknown
    names, context = local.__tensor_flatten__()
    declared: Mapping[str, str] = getattr(type(local), _PARTS, {})
    derived = tuple(name for name in names if declared.get(name) == _DERIVED)
    inner = {name: getattr(local, name) for name in names if name not in derived}
    first = next(iter(inner.values()), None)
    if first is not None and len(inner) == 1 and (first.shape, first.dtype) == (local.shape, local.dtype):
        return Wrapped(None, {"": _distributed(first, tensor)}, derived)
    kinds = {name: _kind_of_part(tensor, name, part, declared.get(name), key) for name, part in inner.items()}
    description = {
        "class": _name_of_class(type(local)),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "context": _encoded(_replaced(context, local.shape, _SHAPE), type(local), key),
        "parts": kinds,
    }
    parts = {name: _placed(tensor, part, kinds[name], f"{key}.{name}") for name, part in inner.items()}
    return Wrapped(description, parts, derived)


def new_wrapper(
    description: Mapping[str, Any], parts: Mapping[str, torch.Tensor], parameter: torch.Tensor, key: str
) -> torch.Tensor:
    """A wrapper with the class and context of a stored one, distributed as a parameter.

    `parts` are its inner tensors on this rank. The parameter is a plain tensor or DTensor of the wrapper's
    shape.

    Raises:
        StructureError: the program has not imported the class.
    """
    shape = local_tensor(parameter).shape
    kind = _imported(description["class"], key)
    context = _replaced(decode(description["context"], path=f"{key}.{SUBCLASS}"), _SHAPE, shape)
    local = kind.__tensor_unflatten__(dict(parts), context, shape, local_tensor(parameter).stride())
    return _distributed(local, parameter)


def _is_sharded_tensor(local: torch.Tensor) -> bool:
    """True for a tensor in the sharded state dict of FSDP1 without a device mesh."""
    kind = type(local)
    return kind.__name__ == "ShardedTensor" and kind.__module__.startswith("torch.distributed._shard.")


def _encoded(context: Any, kind: type, key: str) -> Any:
    try:
        return encode(context, f"{key}.{SUBCLASS}")
    except PlainDataError as error:
        advice = (
            ". shardproof.frameworks.torchao registers the types of torchao: import it"
            if kind.__module__.startswith("torchao.")
            else ""
        )
        raise PlainDataError(
            f"{key}: the context of {_name_of_class(kind)} is no plain data: {error}{advice}", path=key
        ) from error


def _replaced(context: Any, old: Any, new: Any) -> Any:
    """The context with `new` in place of each value that equals `old` and has its type."""
    if isinstance(context, dict):
        return {name: _replaced(item, old, new) for name, item in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_replaced(item, old, new) for item in context)
    return new if type(context) is type(old) and context == old else context


def _imported(name: str, key: str) -> Any:
    """The tensor subclass of this name, among those that the program has imported."""
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if _name_of_class(kind) == name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        waiting += kind.__subclasses__()
    raise StructureError(
        f"{key}: the checkpoint has a {name}, which this program has not imported. Import it before the load",
        key=key,
    )


def _name_of_class(kind: type) -> str:
    """The full name of a class, as a checkpoint stores it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _distributed(local: torch.Tensor, like: Any) -> torch.Tensor:
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


def _kind_of_part(tensor: torch.Tensor, name: str, part: torch.Tensor, declared: str | None, key: str) -> Any:
    """The kind of a part, as plain JSON data.

    `tensor` is the wrapper, or a DTensor of wrappers, and `declared` the kind that its class declares, if
    any.

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
        advice = f"{_PARTS} of the class declares it as {declared!r}"
    elif cls.__module__.startswith("torchao."):
        advice = "Import shardproof.frameworks.torchao, which declares the parts of torchao's classes"
    else:
        advice = f'Declare it in the class: {_PARTS} = {{"{name}": "blocks"}} (or "grid", or "whole")'
    raise StructureError(
        f"{key}: it is unknown which elements of the sharded {_name_of_class(cls)} of local shape "
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


def _placed(tensor: torch.Tensor, part: torch.Tensor, kind: Any, key: str) -> torch.Tensor | LocalShards:
    """The part as a tensor of the checkpoint."""
    if kind == _WHOLE or is_dtensor(part):
        return part
    class_name = _name_of_class(type(local_tensor(tensor)))
    if _GRID in kind:
        if kind[_GRID] == [1] * tensor.dim():
            return _distributed(part, tensor)
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

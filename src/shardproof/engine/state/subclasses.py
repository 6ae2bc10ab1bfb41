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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.engine.state.dtensor import is_dtensor, local_tensor
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.plain.decode import decode
from shardproof.engine.state.plain.encode import encode
from shardproof.engine.state.subclass_parts import PARTS, distributed, kind_of_part, name_of_class, placed
from shardproof.engine.state.tensors import PLAIN_TYPES
from shardproof.errors import PlainDataError, StructureError

SUBCLASS = "@subclass"
"""Segment of the object with class, shape, context and parts of a wrapper."""

_DERIVED = "derived"
_SHAPE = "@shape"
"""Stands for the shape of the local tensor, which differs between ranks, in a stored context."""
_IN_FLIGHT = frozenset(("AsyncCollectiveTensor", "FunctionalTensor", "FakeTensor"))
"""torch's wrappers of tensors with pending values."""


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
    declared: Mapping[str, str] = getattr(type(local), PARTS, {})
    derived = tuple(name for name in names if declared.get(name) == _DERIVED)
    inner = {name: getattr(local, name) for name in names if name not in derived}
    first = next(iter(inner.values()), None)
    if first is not None and len(inner) == 1 and (first.shape, first.dtype) == (local.shape, local.dtype):
        return Wrapped(None, {"": distributed(first, tensor)}, derived)
    kinds = {name: kind_of_part(tensor, name, part, declared.get(name), key) for name, part in inner.items()}
    description = {
        "class": name_of_class(type(local)),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "context": _encoded(_replaced(context, local.shape, _SHAPE), type(local), key),
        "parts": kinds,
    }
    parts = {name: placed(tensor, part, kinds[name], f"{key}.{name}") for name, part in inner.items()}
    return Wrapped(description, parts, derived)


def new_wrapper(
    description: Mapping[str, Any], parts: Mapping[str, torch.Tensor], parameter: torch.Tensor, key: str
) -> torch.Tensor:
    """A wrapper with the class and context of a stored one, distributed as a parameter.

    Args:
        description: the object of the stored wrapper.
        parts: its inner tensors on this rank.
        parameter: a plain tensor or DTensor of the wrapper's shape.
        key: key of the wrapper, for messages.

    Raises:
        StructureError: the program has not imported the class.
    """
    shape = local_tensor(parameter).shape
    kind = _imported(description["class"], key)
    context = _replaced(decode(description["context"], path=f"{key}.{SUBCLASS}"), _SHAPE, shape)
    local = kind.__tensor_unflatten__(dict(parts), context, shape, local_tensor(parameter).stride())
    return distributed(local, parameter)


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
            f"{key}: the context of {name_of_class(kind)} is no plain data: {error}{advice}", path=key
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
        if name_of_class(kind) == name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        waiting += kind.__subclasses__()
    raise StructureError(
        f"{key}: the checkpoint has a {name}, which this program has not imported. Import it before the load",
        key=key,
    )

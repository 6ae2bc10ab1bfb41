"""The state dict of DCP as a flat state tree, with the keys that DCP gives to its values.

`io.BytesIO` objects in the values are stored as their bytes and positions.
"""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.engine.foreign import paths_object
from shardproof.engine.loading import Checkpoint
from shardproof.engine.state import StreamBytes
from shardproof.errors import KeyMismatchError, StructureError

_Place = tuple[str, Any, Any]
"""The key of a value, the dict or list that holds it, and its name there."""

_HANDLED = (
    torch.Tensor,
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    sp.FlatShard,
    sp.LocalShards,
    sp.PerRank,
    sp.RandomState,
)
"""Classes of values that `shardproof.save` collects by itself. DCP stores other values whole, under one
key."""
_PER_RANK = (sp.PerRank, sp.RandomState)
"""Classes of values that are stored under keys below their own."""


def is_stateful(value: Any) -> bool:
    """True for an object at the top level of a state dict whose `state_dict` DCP calls."""
    return isinstance(value, Stateful) and not isinstance(value, _HANDLED)


class WholeValue:
    """A value that is stored whole: plain data, with the tensors and arrays in it."""

    def __init__(self, container: Any, name: Any) -> None:
        self._container = container
        self._name = name

    def state_dict(self) -> Any:
        """The current value, with the bytes of streams."""
        return with_bytes(self._container[self._name])

    def load_state_dict(self, value: Any) -> None:
        """Replaces the value in its container."""
        self._container[self._name] = with_streams(value)


class _PathsPart:
    """A value with a state tree, which is an optional part of a checkpoint."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree

    def state_tree(self) -> dict[str, Any]:
        """The entries of the part."""
        return self._tree


class FlatTree:
    """The values of a state dict by their DCP keys: the steps of each path, joined by dots.

    DCP goes into dicts, and into lists that hold tensors or dicts. An empty dict has no key.

    Raises:
        StructureError: two values have the same key, or a module or an optimizer is inside a dict or list.

    Example:
        >>> state = {"model": {"w": torch.ones(2)}, "optim": {"param_groups": [{"lr": 0.1}]}, "sizes": [1, 2]}
        >>> list(FlatTree(state).tree)
        ['model.w', 'optim.param_groups.0.lr', 'sizes']
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.tree: dict[str, Any] = {}
        """The state tree, for `shardproof.save` and `shardproof.load`."""
        self._places: dict[str, list[_Place]] = {}
        """Key of each value to the positions on the path to it, its own position last."""
        self._new: dict[str, torch.Tensor] = {}
        """Tensors that `materialise` made, by key."""
        for key, places in _leaves((), [], state_dict):
            if key in self.tree:
                raise StructureError(
                    f"two values of the state dict have the key {key!r}. Rename one of them", key=key
                )
            self.tree[key] = _stored_as(*places[-1])
            self._places[key] = places

    def with_paths(self) -> dict[str, Any]:
        """The tree for a save, which records the paths of the keys where the keys do not determine them."""
        steps = {
            key: tuple(name if isinstance(container, list) else str(name) for _, container, name in places)
            for key, places in self._places.items()
        }
        recorded = paths_object(steps)
        if recorded is None:
            return self.tree
        head, _, name = recorded[0].split(".")  # "@part" is the second segment
        return {**self.tree, head: _PathsPart({name: WholeValue({name: recorded[1]}, name)})}

    def fit(self, checkpoint: Checkpoint, *, partial: bool) -> None:
        """Adapts the tree to the keys of a checkpoint.

        A checkpoint may store a dict or list whole under one key, as DCP before torch 2.4 and
        `shardproof.save` do. Then the tree also has one entry for it.

        Args:
            checkpoint: the checkpoint to load.
            partial: True to leave out values that the checkpoint lacks.
        """
        missing = []
        for key, value in list(self.tree.items()):
            if key in checkpoint:
                continue
            if isinstance(value, _PER_RANK) and any(stored.startswith(f"{key}.") for stored in checkpoint):
                continue
            whole = next((place for place in self._places[key] if place[0] in checkpoint.objects), None)
            if whole is not None:
                self.tree[whole[0]] = WholeValue(*whole[1:])
            elif not partial:
                missing.append(key)
            del self.tree[key]
        if missing:
            shown = "\n    ".join(missing[:20]) + ("\n    ..." if len(missing) > 20 else "")
            raise KeyMismatchError(
                f"{checkpoint.location} does not fit the state dict; nothing was changed.\n  missing in the "
                f"checkpoint ({len(missing)}; DefaultLoadPlanner(allow_partial_load=True) leaves them "
                f"alone):\n    {shown}",
                missing=missing,
                unexpected=[],
                mismatched=[],
            )

    def materialise(self, device: str) -> None:
        """Makes tensors with memory for those on the meta device. `place_new` puts them into the state dict.

        Args:
            device: type of the new tensors' device.
        """
        for key, value in self.tree.items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                made = torch.empty_like(
                    value.to_local() if isinstance(value, DTensor) else value, device=device
                )
                if isinstance(value, DTensor):
                    made = DTensor.from_local(
                        made, value.device_mesh, value.placements, shape=value.size(), stride=value.stride()
                    )
                self.tree[key] = self._new[key] = made

    def place_new(self) -> None:
        """Puts the tensors that `materialise` made into the state dict."""
        for key, tensor in self._new.items():
            _, container, name = self._places[key][-1]
            container[name] = tensor

    def takes(self, key: str) -> bool:
        """True if a load uses the value of a stored key, by itself or as a part of another value."""
        while key and key not in self.tree:
            key = key.rpartition(".")[0]
        return bool(key)

    def converted(self, checkpoint: Checkpoint) -> list[str]:
        """Keys of tensors that a load converts from the dtype of the checkpoint to that of the state dict."""
        return [
            key
            for key, value in self.tree.items()
            if isinstance(value, (torch.Tensor, sp.LocalShards))
            and key not in checkpoint.objects
            and checkpoint.dtype(key) != str(value.dtype).removeprefix("torch.")
        ]


def _leaves(path: tuple[str, ...], places: list[_Place], value: Any) -> Iterator[tuple[str, list[_Place]]]:
    """The key of each value below a value, and the positions on the path to it."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        key = (*path, str(name))
        inner = [*places, (".".join(key), value, name)]
        if isinstance(item, Mapping) or (isinstance(item, list) and _has_values(item)):
            yield from _leaves(key, inner, item)
        else:
            yield inner[-1][0], inner


def _has_values(items: list[Any]) -> bool:
    """True if a list, or a list inside it, holds a tensor or a dict."""
    return any(
        isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and _has_values(item))
        for item in items
    )


def _stored_as(key: str, container: Any, name: Any) -> Any:
    """The entry of the state tree for a value."""
    value = container[name]
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        raise StructureError(
            f"{key}: a {type(value).__name__} is inside another value. Put it at the top level of the state "
            "dict, or put its state_dict() here and call its load_state_dict() after the load",
            key=key,
        )
    if isinstance(value, ShardedTensor):
        shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        return sp.LocalShards(tuple(value.size()), shards, dtype=value.dtype)
    has_state = any(callable(getattr(type(value), method, None)) for method in ("state_tree", "state_dict"))
    return value if isinstance(value, _HANDLED) or has_state else WholeValue(container, name)


def with_bytes(value: Any) -> Any:
    """The value with the content of each stream in its dicts, lists and tuples instead of the stream.

    A value without streams is returned itself.

    >>> with_bytes((1, io.BytesIO(b"ab")))
    (1, StreamBytes(b'ab', 0))
    """
    return _mapped(value, lambda item: StreamBytes.of(item) if type(item) is io.BytesIO else item)


def with_streams(value: Any) -> Any:
    """Inverse of `with_bytes`.

    >>> with_streams([StreamBytes(b"ab", 1)])[0].read()
    b'b'
    """
    return _mapped(value, lambda item: item.stream() if type(item) is StreamBytes else item)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        pairs = [(key, item, _mapped(item, change)) for key, item in value.items()]
        if all(new is item for _, item, new in pairs):
            return value
        return kind((key, new) for key, _, new in pairs)
    if kind is list or kind is tuple:
        items = [_mapped(item, change) for item in value]
        return value if all(new is item for new, item in zip(items, value, strict=True)) else kind(items)
    return change(value)

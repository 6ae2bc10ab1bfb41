"""Megatron's sharded state dicts as state trees of shardproof, and the proof of one main replica a box.

Keys are those of Megatron's ``torch_dist`` format: the key of a ShardedTensor, and
``<key>/shard_<offset>_<shape>`` of a ShardedObject. Several ShardedTensors of a rank with one key (layers of
a stack, the halves of a SwiGLU) are boxes of one tensor. Prepended axes are axes of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)

import shardproof as sp
from shardproof.engine.format import box_name
from shardproof.frameworks.megatron.megatron_optimizer import FlatRange, box_of, sharded
from shardproof.frameworks.megatron.megatron_plain import Typed, from_plain, to_plain

COMMON = "common"
"""Key of the common state in the checkpoint."""
TYPES = "common_types"
"""Key of the types that the common state has and plain data lacks, and of the digest of `common.pt`."""
COMMON_KEY = "common_state"
"""Key of the ShardedObject that has the common state, in Megatron-Core 0.19."""


class StoredObject:
    """A value that is stored whole, and restored as it was stored."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """Returns the value as plain data."""
        value, types = to_plain(self.value)
        return Typed(value, types) if types else value

    def load_state_dict(self, state: Any) -> None:
        """Sets the value."""
        self.value = from_plain(state.value, state.types) if isinstance(state, Typed) else state


def _sharded_key(item: ShardedBase) -> str:
    """The key under which a ShardedTensor or ShardedObject is stored."""
    if isinstance(item, ShardedObject):
        return COMMON if item.key == COMMON_KEY else str(item.unique_key)
    return str(item.key)


def boxes_of(sharded_state_dict: Mapping[Any, Any]) -> list[Box]:
    """The boxes with elements and the objects of this rank, replicas included.

    An empty box has no bytes to write, so any number of ranks may have it.
    """
    boxes = []
    for item in nested_values(sharded_state_dict):
        if not isinstance(item, FlatRange):
            offsets, sizes = ((), ()) if isinstance(item, ShardedObject) else box_of(item)
            boxes.append(Box(_sharded_key(item), offsets, sizes, bool(is_main_replica(item.replica_id))))
    return [box for box in boxes if 0 not in box.sizes]


def save_tree(sharded_state_dict: Mapping[Any, Any], *, replicas: bool) -> dict[str, Any]:
    """The state tree to save on this rank.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensors and ShardedObjects.
        replicas: True to add boxes of which another rank has the main replica. The planner then chooses among
            all ranks that hold a box.

    Raises:
        StructureError: two ShardedTensors of one key have different dtypes or global shapes, or one has no
            data.
    """
    tree: dict[str, Any] = {}
    groups: dict[str, list[ShardedTensor]] = {}
    ranges: dict[str, list[FlatRange]] = {}
    for item in nested_values(sharded_state_dict):
        if isinstance(item, ShardedTensor):
            groups.setdefault(item.key, []).append(item)
        elif isinstance(item, FlatRange):
            if is_main_replica(item.replica_id):
                ranges.setdefault(item.key, []).append(item)
        elif is_main_replica(item.replica_id) and item.key != COMMON_KEY:
            tree[_sharded_key(item)] = StoredObject(item.data)
    for key, items in groups.items():
        tree[key] = _to_save(key, items, replicas)
    add_keys(tree, {key: sharded(items) for key, items in ranges.items()})
    return tree


def add_keys(tree: dict[str, Any], added: Mapping[str, Any]) -> None:
    """Adds entries to a state tree."""
    for key, value in added.items():
        if key in tree:
            raise sp.StructureError(
                f"two entries of the sharded state dict have the key {key!r}. Rename one of them", key=key
            )
        tree[key] = value


@dataclass(frozen=True)
class Load:
    """The reads of this rank from a checkpoint.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensors and ShardedObjects. Their data is filled
            in place. A ShardedTensor without data gets new memory on the CPU.
    """

    sharded_state_dict: Mapping[Any, Any]

    def tree(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The state tree to fill.

        Args:
            stored: key to shape of each stored tensor, and of each stored object, which has none.

        Raises:
            KeyMismatchError: the checkpoint lacks a key, or has a tensor of another global shape under it.
        """
        tree: dict[str, Any] = {}
        groups: dict[str, list[ShardedTensor]] = {}
        ranges: dict[str, list[FlatRange]] = {}
        for item in nested_values(self.sharded_state_dict):
            key = _sharded_key(item)
            if key not in stored:
                raise sp.KeyMismatchError(
                    f"the checkpoint has no {key!r}, which the sharded state dict asks for. Pass strict= to "
                    "load without such keys, for example strict='log_unexpected'",
                    key=key,
                )
            if isinstance(item, ShardedTensor):
                groups.setdefault(key, []).append(item)
            elif isinstance(item, FlatRange):
                ranges.setdefault(key, []).append(item)
            else:
                tree[key] = StoredObject()
                if key == COMMON:
                    tree[TYPES] = StoredObject()
        for key, items in groups.items():
            tree[key] = _to_load(key, items, stored[key])
        return tree | {key: sharded(items) for key, items in ranges.items()}

    def result(self, tree: Mapping[str, Any]) -> Any:
        """The state dict with tensors and objects in place of ShardedTensors and ShardedObjects."""

        def loaded(item: Any) -> Any:
            if isinstance(item, ShardedObject):
                value = tree[_sharded_key(item)].value
                return from_plain(value, tree[TYPES].value["types"]) if item.key == COMMON_KEY else value
            return item.data if isinstance(item, (ShardedTensor, FlatRange)) else item

        return dict_list_map_outplace(loaded, self.sharded_state_dict)


def _to_save(key: str, items: Iterable[ShardedTensor], replicas: bool) -> sp.LocalShards:
    first, *others = items
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    for item in sorted([first, *others], key=lambda item: not is_main_replica(item.replica_id)):
        if (item.dtype, item.global_shape) != (first.dtype, first.global_shape):
            raise sp.StructureError(
                f"two ShardedTensors of this rank have the key {key!r}, but are {first.dtype} "
                f"{list(first.global_shape)} and {item.dtype} {list(item.global_shape)}. Give one of them "
                "another key",
                key=key,
            )
        if item.data is None:
            raise sp.StructureError(f"the ShardedTensor {key!r} has no data to save", key=key)
        if replicas or is_main_replica(item.replica_id):
            pieces.setdefault(box_of(item), _view(item))
    placed = [(view, offsets) for (offsets, _), view in pieces.items()]
    return sp.LocalShards(first.global_shape, placed, dtype=first.dtype)


def _to_load(key: str, items: Iterable[ShardedTensor], shape: tuple[int, ...]) -> sp.LocalShards:
    pieces: list[tuple[torch.Tensor, tuple[int, ...]]] = []
    dtype = None
    for item in items:
        if item.data is None:
            item.init_data("cpu", init_fn=torch.zeros if item.allow_shape_mismatch else torch.empty)
        item.data = item.data.detach()
        dtype = item.dtype
        view = _view(item)
        if item.allow_shape_mismatch:
            item.data.zero_()
            for axis, (offset, size) in enumerate(zip(item.global_offset, shape, strict=True)):
                view = view.narrow(axis, 0, min(view.shape[axis], max(0, size - offset)))
        elif tuple(item.global_shape) != shape:
            raise sp.KeyMismatchError(
                f"{key!r} has the global shape {list(shape)} in the checkpoint, and "
                f"{list(item.global_shape)} in the sharded state dict. Check the options of the model, or "
                "set allow_shape_mismatch where the difference is padding",
                key=key,
            )
        if view.numel():
            pieces.append((view, tuple(map(int, item.global_offset))))
    return sp.LocalShards(shape, pieces, dtype=dtype)


def _view(item: ShardedTensor) -> torch.Tensor:
    """The local tensor with the prepended axes, in the same memory."""
    data: torch.Tensor = item.data.detach()
    return data[(None,) * item.prepend_axis_num]


class Box(NamedTuple):
    """A box of a tensor on this rank, or a ShardedObject, which has no offsets."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_main: bool
    """True if this rank has the main replica."""


class MainReplicas:
    """Proves that each box has one main replica, and caches the proof."""

    def __init__(self) -> None:
        self._proved: tuple[bytes, ...] = ()
        """The digests of all ranks that the coordinator proved last."""

    def prove(
        self,
        rendezvous: sp.rendezvous.Rendezvous,
        location: str,
        describe: Callable[[], Sequence[Box]],
    ) -> None:
        """Compares the boxes of all ranks, which `describe` returns on each. All ranks call it.

        Raises:
            StructureError: two ranks have the main replica of one box, or no rank has one. The message names
                key, box and ranks.
            RankFailure, RankSilent: a rank failed or became silent.
        """
        meetings = sp.rendezvous.MeetingSequence(rendezvous, f"compare replicas of {location}")
        boxes: list[Box] = []

        def digest() -> bytes:
            nonlocal boxes
            boxes = [*describe()]
            return xxhash.xxh3_128_digest(msgspec.msgpack.encode(boxes))

        seen: list[bytes] = []

        def is_proved(digests: list[bytes]) -> bool:
            seen[:] = digests
            return tuple(digests) == self._proved

        if meetings.exchange("digest", digest, is_proved, bytes, bool):
            return

        def compare(ranks: list[list[Box]]) -> None:
            _check_main_replicas(ranks)
            self._proved = tuple(seen)

        meetings.exchange("boxes", lambda: boxes, compare, list[Box], NoneType)


def _check_main_replicas(ranks: Sequence[Sequence[Box]]) -> None:
    """Checks the boxes of each rank.

    >>> _check_main_replicas([[Box("w", (0,), (2,), True)], [Box("w", (2,), (2,), False)]])
    Traceback (most recent call last):
    shardproof.errors.StructureError: key 'w', box [2:4]: no rank has the main replica, and other replicas \
are on rank 1. Give it replica_id 0 on one rank
    """
    mains: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    others: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, boxes in enumerate(ranks):
        for key, offsets, sizes, is_main in boxes:
            box = key, offsets, sizes
            if not is_main:
                others.setdefault(box, []).append(rank)
            elif box in mains:
                first = mains[box]
                who = (
                    f"rank {rank} has it twice" if first == rank else f"ranks {first} and {rank} both have it"
                )
                raise sp.StructureError(
                    f"{_name(*box)}: expected one main replica (replica_id of zeros), but {who}. Give one of "
                    "the two another replica_id",
                    key=key,
                    ranks=[first, rank],
                )
            else:
                mains[box] = rank
    for box, holders in others.items():
        if box not in mains:
            word = "rank" if len(set(holders)) == 1 else "ranks"
            named = f"{word} {sp.rendezvous.format_rank_ranges(holders)}"
            raise sp.StructureError(
                f"{_name(*box)}: no rank has the main replica, and other replicas are on {named}. Give "
                "it replica_id 0 on one rank",
                key=box[0],
                ranks=sorted(set(holders)),
            )


def _name(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return f"key {key!r}" + (f", box {box_name(offsets, sizes)}" if sizes else "")

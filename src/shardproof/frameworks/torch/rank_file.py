"""The shard file of one rank, written from a plan of torch DCP."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import paths_object
from shardproof.engine.format import (
    FORMAT_VERSION,
    Declared,
    FileRecord,
    ShardFileWriter,
    chunk_entries,
    declared_header,
    shard_name,
)
from shardproof.engine.geometry import BoxTable
from shardproof.engine.planning import CHUNK_BYTES, tensor_order
from shardproof.engine.state import (
    as_bytes,
    encode_plain,
    hoisted_key,
    hoisted_tensor,
    model_parallel,
    refuse_loose_parts,
)
from shardproof.engine.storage import FileWriter, Storage
from shardproof.errors import StructureError
from shardproof.frameworks.torch.flat_state import with_bytes


@dataclass(frozen=True, slots=True)
class Assignment:
    """The coordinator's answer to a rank, which its plan carries."""

    attempt: str
    time: float
    rank: int
    world_size: int
    files: int
    """Number of ranks that write a file."""
    ranks: tuple[int, ...] | None
    """The numbers of the ranks in the default process group; None if they are all of its ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """A rank's report of its shard file."""

    record: FileRecord
    attempt: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Key to dtype and global shape."""
    objects: dict[str, Any]
    """Encoded plain values by key."""
    keys: list[str]
    """The tensor of each of n chunks, in the order of the file."""
    boxes: BoxTable
    """n boxes."""
    byte_start: NDArray[np.int64]
    """(n,) first byte of each chunk, counted from the start of the file."""
    byte_count: NDArray[np.int64]
    digests: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _BoxPart:
    """A box of a tensor that this rank writes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], Any]


def refuse_parts(values: Mapping[str, Any], world_size: int, ranks: Collection[int] | None) -> None:
    """Raises for a part of a model. torch keeps each plain tensor of one rank, whichever part it has.

    Args:
        values: the values of this rank by key. Those that are no tensors are ignored.
        world_size: number of ranks that save or load together.
        ranks: their numbers, as in `Assignment`.
    """
    parallel = model_parallel(world_size, ranks)
    if parallel is not None:
        tensors = ((key, item) for key, item in values.items() if isinstance(item, torch.Tensor))
        refuse_loose_parts(tensors, parallel)


class ShardFile:
    """The shard file of a rank, built from its plan.

    Args:
        plan: the plan of the rank, with its `Assignment`.
        planner: resolves the items of the plan to values.

    Raises:
        StructureError, PlainDataError: a value cannot be stored. Or a tensor is this rank's part of a model,
            also one that another rank stores.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._assignment: Assignment = plan.storage_data
        self._planner = planner
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._objects: dict[str, Any] = {}
        self._parts: list[_BoxPart] = []
        self._hoisted: dict[str, torch.Tensor] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self._add_value(item.index)
                continue
            data = item.tensor_data
            assert data is not None
            key, offsets, sizes = item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            self._declare(key, data.properties.dtype, tuple(data.size))
            if 0 not in sizes:
                self._parts.append(_BoxPart(key, offsets, sizes, partial(planner.resolve_data, item)))
        if isinstance(plan.planner_data, dict) and (recorded := paths_object(plan.planner_data)) is not None:
            self._objects[recorded[0]] = encode_plain(recorded[1])
        flat = planner.state_dict if isinstance(planner, DefaultSavePlanner) else {}  # another may store it
        refuse_parts({**flat, **self._hoisted}, self._assignment.world_size, self._assignment.ranks)

    def write(self, storage: Storage) -> RankFile:
        """Writes the file into the folder of the checkpoint, and flushes it.

        Raises:
            StructureError: the planner gives other values than it planned.
            StorageError: the storage failed.
        """
        row = {key: number for number, key in enumerate(self._tensors)}
        itemsize = {key: DTYPES[dtype].itemsize for key, (dtype, _) in self._tensors.items()}
        rows = np.array([row[part.key] for part in self._parts], np.int64)
        nbytes = [math.prod(part.sizes) * itemsize[part.key] for part in self._parts]
        counts = np.minimum(np.array(nbytes, np.int64), CHUNK_BYTES)
        place = tensor_order([dtype for dtype, _ in self._tensors.values()], rows, counts)
        order = np.argsort(place[rows], kind="stable") if len(rows) else rows
        parts = [self._parts[at] for at in order.tolist()]
        whole = BoxTable.of(
            [len(part.sizes) for part in parts],
            np.array([at for part in parts for at in part.offsets], np.int64),
            np.array([size for part in parts for size in part.sizes], np.int64),
        )
        limits = np.array([CHUNK_BYTES // itemsize[part.key] for part in parts], np.int64)
        boxes, of, _ = whole.cut(limits)
        chunk_keys = [parts[at].key for at in of.tolist()]
        byte_count = boxes.volumes() * np.array([itemsize[key] for key in chunk_keys], np.int64)
        chunks = [(key, self._tensors[key][0], *boxes.pair(at)) for at, key in enumerate(chunk_keys)]
        entries = chunk_entries(chunks, byte_count)
        header = declared_header(self._declared(), entries)
        first = np.searchsorted(of, np.arange(len(parts) + 1)).tolist()
        name = shard_name(self._assignment.rank, self._assignment.attempt)
        with FileWriter(storage.create(name)) as file:
            shard = ShardFileWriter(file, header, entries.padding)
            for number, part in enumerate(parts):
                of_part = byte_count[first[number] : first[number + 1]].tolist()
                shard.put_chunks([as_bytes(self._values(part)).numpy().data], of_part)
            record = shard.finish(name, self._assignment.rank)
        return RankFile(
            record,
            self._assignment.attempt,
            self._tensors,
            self._objects,
            chunk_keys,
            boxes,
            len(header) + np.cumsum(byte_count) - byte_count,
            byte_count,
            shard.digests,
        )

    def _add_value(self, index: MetadataIndex) -> None:
        """Encodes a plain value. Its tensors and large arrays become tensors of their own."""
        kind, default = type(self._planner), DefaultSavePlanner
        if not isinstance(self._planner, default) or any(
            getattr(kind, name) is not getattr(default, name) for name in ("resolve_data", "transform_object")
        ):
            raise StructureError(
                f"{index.fqn}: {kind.__name__} encodes values that are not tensors to bytes itself, and a "
                "checkpoint of shardproof stores no pickles. Do not override resolve_data and "
                "transform_object of DefaultSavePlanner, or store tensors only",
                key=index.fqn,
            )
        used: set[str] = set()

        def hoist(path: str, kind: str, value: Any) -> str:
            tensor = hoisted_tensor(kind, value).detach()
            key = hoisted_key(index.fqn, path, used)
            self._hoisted[key] = tensor
            self._declare(key, tensor.dtype, tuple(tensor.shape))
            if tensor.numel():
                self._parts.append(_BoxPart(key, (0,) * tensor.dim(), tuple(tensor.shape), lambda: tensor))
            return key

        value = with_bytes(self._planner.lookup_object(index))
        self._objects[index.fqn] = encode_plain(value, index.fqn, hoist)

    def _declare(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise StructureError(f"{key!r}: shardproof cannot store tensors of dtype {name}", key=key)
        self._tensors[key] = name, shape

    def _declared(self) -> Declared:
        assignment = self._assignment
        return Declared(
            version=FORMAT_VERSION,
            attempt=assignment.attempt,
            step=None,
            time=assignment.time,
            rank=assignment.rank,
            world_size=assignment.world_size,
            files=assignment.files,
            tensors=self._tensors,
            aliases={},
            objects=self._objects,
            metadata={},
        )

    def _values(self, part: _BoxPart) -> torch.Tensor:
        """The values of a box, in host memory."""
        values = part.values()
        assert isinstance(values, torch.Tensor)
        found = str(values.dtype).removeprefix("torch."), tuple(values.shape)
        expected = self._tensors[part.key][0], part.sizes
        if found != expected:
            raise StructureError(
                f"{part.key}: the planner gives {found[0]} of shape {list(found[1])}, but planned "
                f"{expected[0]} of shape {list(expected[1])}",
                key=part.key,
            )
        return values.detach().to("cpu")

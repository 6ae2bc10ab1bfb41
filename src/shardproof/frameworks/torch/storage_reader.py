"""A storage reader of torch DCP for every checkpoint that shardproof opens."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardproof.engine.foreign import foreign_of, is_paths_key, state_paths
from shardproof.engine.loading import Checkpoint, open_storage
from shardproof.engine.state import references
from shardproof.frameworks.torch.byte_streams import with_streams

_BATCH_BYTES = 256 << 20
"""Maximum bytes of one read, unless a single item is larger. Bounds the memory that a load needs in addition
to the state."""


class ShardproofReader(StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`. Every byte is verified.

    It opens checkpoints that `shardproof.save` or `ShardproofWriter` wrote, and those of other projects that
    `shardproof.open` opens.

    Args:
        path: the folder or file of the checkpoint.

    Example:
        >>> import tempfile, torch, shardproof as sp
        >>> import torch.distributed.checkpoint as dcp
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> result = sp.save(path, {"model": {"w": torch.ones(2)}})
        >>> state = {"model": {"w": torch.zeros(2)}}
        >>> dcp.load(state, storage_reader=ShardproofReader(path))
        >>> state["model"]["w"]
        tensor([1., 1.])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for the next read, of another checkpoint if `checkpoint_id` is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._checkpoint = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describes the checkpoint as DCP does, each tensor as one chunk.

        Raises:
            NotCommittedError: no checkpoint is here.
            FormatError, StorageError: the checkpoint is damaged or cannot be read.
        """
        checkpoint = self._opened()
        inner = {name for data in checkpoint.objects.values() for name, _ in references(data)}
        described: dict[str, Any] = {}
        for key in checkpoint:
            if is_paths_key(key):
                continue
            if key in checkpoint.objects:
                described[key] = BytesStorageMetadata()
            elif key not in inner:
                size = torch.Size(checkpoint.shape(key))
                properties = TensorProperties(dtype=getattr(torch, checkpoint.dtype(key)))
                whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                described[key] = TensorStorageMetadata(properties, size, [whole])
        tensors = [key for key, kind in described.items() if isinstance(kind, TensorStorageMetadata)]
        objects = [key for key in described if key in checkpoint.objects]
        paths = dict(state_paths(tensors, objects, checkpoint.paths))
        return Metadata(described, planner_data=paths, storage_meta=StorageMeta(checkpoint_id=self.path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Checks on the coordinator that every file is there with its size.

        Raises:
            StorageError: a file is missing or has another size.
        """
        if is_coordinator:
            self._opened().check_files()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and verifies the items of a plan.

        Raises:
            CorruptChunkError: stored bytes do not match their digest. Tensors may be partly filled.
            FormatError, StorageError, TilingError: the checkpoint is damaged or cannot be read.
        """
        checkpoint = self._opened()
        for batch in _batches(checkpoint, [item for item in plan.items if item.type == LoadItemType.TENSOR]):
            boxes = [(item.storage_index.fqn, item.storage_offsets, item.lengths) for item in batch]
            for item, values in zip(batch, checkpoint.read_boxes(boxes), strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(with_streams(checkpoint[item.storage_index.fqn]), data)
                data.seek(0)
                planner.load_bytes(item, data)
        checkpoint.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a path in a file system."""
        return "://" not in os.fspath(checkpoint_id)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_storage(foreign_of(self.path))
        return self._checkpoint


def _batches(checkpoint: Checkpoint, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    """Items that are read together."""
    batch: list[ReadItem] = []
    used = 0
    for item in items:
        itemsize = getattr(torch, checkpoint.dtype(item.storage_index.fqn)).itemsize
        count = math.prod(item.lengths) * itemsize
        if batch and used + count > _BATCH_BYTES:
            yield batch
            batch, used = [], 0
        if count:
            batch.append(item)
            used += count
    if batch:
        yield batch

"""A storage writer of torch DCP for checkpoints of shardproof, and a reader for all that shardproof opens.

torch's `save` plans and communicates. The writer takes these steps:

    coordinator: name the attempt, in every rank's plan
    each rank:   write one shard file, and return its chunks and digests
    coordinator: prove that the chunks tile every tensor, write the index, publish the manifest

torch calls the last step only if every rank has written. So a rank that fails leaves no committed checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardproof.engine.foreign import foreign_of, is_paths_key, state_paths
from shardproof.engine.format import (
    MANIFEST_NAME,
    Manifest,
    TensorRecord,
    check_sizes,
    encode_index,
    new_manifest,
    publish,
    with_files,
)
from shardproof.engine.geometry import BoxTable
from shardproof.engine.loading import Checkpoint, open_storage
from shardproof.engine.planning import chunk_table, prove_chunks
from shardproof.engine.saving import refuse_run
from shardproof.engine.state import references
from shardproof.engine.storage import LocalStorage, Storage
from shardproof.errors import AlreadyCommittedError, StorageError, StructureError
from shardproof.formats import Named, PickledCall, write_pickle
from shardproof.frameworks.torch.flat_state import with_streams
from shardproof.frameworks.torch.rank_file import Assignment, RankFile, ShardFile, refuse_parts

_log = logging.getLogger("shardproof")
_MARK = ".metadata"
_SENTENCE = (
    "This is a checkpoint of shardproof, which torch.distributed.checkpoint cannot read by itself. Load it "
    "with shardproof.frameworks.dcp.load, or pass "
    "storage_reader=shardproof.frameworks.dcp.ShardproofReader(checkpoint_id)"
)
_MARK_TEXT = write_pickle(PickledCall(Named("torch.serialization", "_get_layout"), (_SENTENCE,)), 2)
"""A pickle of a layout with this name. torch has none, so its loader raises a `KeyError` of the sentence."""
_BATCH_BYTES = 256 << 20
"""Maximum bytes of one read, unless a single item is larger. Bounds the memory that a load needs in addition
to the state."""


def mark_as_committed(storage: Storage) -> None:
    """Writes the file by which programs of torch DCP, such as torchtitan, recognise a finished checkpoint.

    The file is only a hint for these programs; the manifest is the commit. So a failure is only logged.
    """
    try:
        storage.publish(_MARK, _MARK_TEXT, replace=True)
    except StorageError as error:
        _log.error(
            "%s is committed, but programs that look for %s do not find it: %s",
            storage.location,
            _MARK,
            error,
        )


def refuse_checkpoint_of_torch(storage: Storage) -> None:
    """Fails if the folder has the ``.metadata`` of a checkpoint that torch wrote."""
    if storage.size(_MARK) is not None and b"shardproof" not in storage.read(_MARK)[:1024]:
        raise AlreadyCommittedError(
            f"{storage.location} has a checkpoint of torch.distributed.checkpoint, and overwrite is False. "
            "Save to another folder, or pass ShardproofWriter(path, overwrite=True) to replace it",
            path=storage.location,
        )


class ShardproofWriter(StorageWriter):
    """Writes a checkpoint of shardproof for `torch.distributed.checkpoint.save`.

    Every planner that derives from `DefaultSavePlanner` works, but its plans must not be cached. Values that
    are no tensors are stored as plain data.

    Args:
        path: the folder of the checkpoint.
        overwrite: True to replace a committed checkpoint. It stays valid until the new one is committed.
            False to refuse the save if the folder has a checkpoint, also one that torch wrote.

    Example:
        >>> import tempfile, torch, shardproof as sp
        >>> import torch.distributed.checkpoint as dcp
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> state = {"model": {"w": torch.ones(2)}}
        >>> metadata = dcp.save(state, storage_writer=ShardproofWriter(path))
        >>> sp.open(path)["model.w"].read()
        tensor([1., 1.])
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        self.path = path
        self.overwrite = overwrite
        self._attempt, self._time = "", 0.0
        """On the coordinator: the current attempt, and its start time."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for the next save, to another folder if `checkpoint_id` is given."""
        if checkpoint_id:
            self.path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a save whose ranks do not plan together."""
        if kwargs.get("use_collectives") is False:
            raise StructureError(
                f"{self.path}: with use_collectives=False no rank has the plan of the whole checkpoint, so "
                "it cannot be proved complete. Leave use_collectives out, or use "
                "shardproof.frameworks.dcp.save, which runs no collectives"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tells the coordinator the number of this rank."""
        if not getattr(plan, "usable", True):
            raise StructureError(
                f"{self.path}: the planner reuses its plan of an earlier save. Leave out enable_plan_caching "
                "of DefaultSavePlanner"
            )
        return dataclasses.replace(plan, storage_data=_own_number())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the attempt, and tells each rank its number.

        Raises:
            AlreadyCommittedError: a checkpoint is committed here, and `overwrite` is False.
            StructureError: the folder is that of a run with committed steps.
        """
        refuse_run(LocalStorage(self.path))
        if not self.overwrite:
            self._check_unused(LocalStorage(self.path))
        self._attempt, self._time = uuid4().hex, time.time()
        files, ranks = sum(bool(plan.items) for plan in plans), _numbers(plans)
        return [
            dataclasses.replace(
                plan, storage_data=Assignment(self._attempt, self._time, rank, len(plans), files, ranks)
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's shard file and flushes it.

        Raises:
            StructureError, PlainDataError: a value cannot be stored. Or a plain tensor is this rank's part of
                a model; see `shardproof.save`.
            StorageError: the storage failed.
        """
        results: list[WriteResult] = []
        shard = ShardFile(plan, planner)
        if plan.items:
            file = shard.write(LocalStorage(self.path))
            results = [WriteResult(item.index, 0, None) for item in plan.items]
            results[0] = WriteResult(plan.items[0].index, file.record.size, file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Proves that the files hold every tensor once, then writes the index and the manifest.

        Raises:
            StructureError: the files of the ranks do not match the plan.
            TilingError: the chunks of a tensor do not cover it exactly once.
            AlreadyCommittedError: a checkpoint is committed here, and `overwrite` is False.
            StorageError: a file is missing or has another size, or the storage failed.
        """
        storage = LocalStorage(self.path)
        files = [rank_results[0].storage_data for rank_results in results if rank_results]
        manifest, index = _merged(self._attempt, self._time, len(results), metadata, files)
        check_sizes(
            [(storage, record) for record in manifest.files],
            lambda record: f"Rank {record.rank} wrote this file: check that all nodes share this storage",
        )
        publish(storage, manifest, index, overwrite=self.overwrite)
        mark_as_committed(storage)

    @staticmethod
    def _check_unused(storage: Storage) -> None:
        """Fails if the folder has a checkpoint."""
        if storage.size(MANIFEST_NAME) is not None:
            raise AlreadyCommittedError(
                f"{storage.location} has a committed checkpoint, and overwrite is False. Save to another "
                "folder, or pass ShardproofWriter(path, overwrite=True) to replace it",
                path=storage.location,
            )
        refuse_checkpoint_of_torch(storage)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a path in a file system."""
        return "://" not in os.fspath(checkpoint_id)


def _own_number() -> int:
    """The number of this rank in the default process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _numbers(plans: Sequence[SavePlan] | Sequence[LoadPlan]) -> tuple[int, ...] | None:
    """The numbers of the ranks of plans; None for all ranks of the group, or if a planner drops them."""
    numbers = tuple(plan.storage_data for plan in plans)
    is_group = 1 < len(plans) < _world_size()
    return numbers if is_group and None not in numbers else None


def _merged(
    attempt: str, begun: float, world_size: int, metadata: Metadata, files: Sequence[RankFile]
) -> tuple[Manifest, bytes]:
    """The manifest and the index of the files of all ranks. Proves that they hold every tensor once."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    objects: dict[str, Any] = {}
    for file in files:
        if file.attempt != attempt:
            raise StructureError(
                f"rank {file.record.rank} wrote for the attempt {file.attempt}, expected {attempt}; nothing "
                "was committed"
            )
        for key, described in file.tensors.items():
            if tensors.setdefault(key, described) != described:
                raise StructureError(
                    f"{key}: ranks have {tensors[key]} and {described}; nothing was committed", key=key
                )
        for key, value in file.objects.items():
            if objects.setdefault(key, value) != value:
                raise StructureError(f"{key}: ranks wrote different values; nothing was committed", key=key)
    lost = sorted(
        key
        for key, kind in metadata.state_dict_metadata.items()
        if key not in (tensors if isinstance(kind, TensorStorageMetadata) else objects)
    )
    if lost:
        raise StructureError(
            f"no rank wrote {', '.join(lost[:20])}, which the plan has; nothing was committed", keys=lost
        )
    records = tuple(TensorRecord(key, *tensors[key]) for key in sorted(tensors))
    row = {record.key: number for number, record in enumerate(records)}
    ints = np.zeros(0, np.int64)
    boxes = BoxTable.of(
        np.concatenate([ints, *(file.boxes.ndim for file in files)]),
        np.concatenate([ints, *(file.boxes.offsets for file in files)]),
        np.concatenate([ints, *(file.boxes.sizes for file in files)]),
    )
    table = chunk_table(
        np.array([row[key] for file in files for key in file.keys], np.int64),
        np.repeat(np.arange(len(files)), [len(file.keys) for file in files]),
        np.concatenate([ints, *(file.byte_start for file in files)]),
        np.concatenate([ints, *(file.byte_count for file in files)]),
        np.concatenate([np.zeros((0, 2), np.uint64), *(file.digests for file in files)]),
        boxes.start,
        boxes.offsets,
        boxes.sizes,
    )
    prove_chunks(records, table, np.arange(len(records)))
    index = encode_index(table)
    manifest = new_manifest(
        attempt=attempt,
        step=None,
        time=begun,
        world_size=world_size,
        tensors=records,
        objects=objects,
    )
    return with_files(manifest, [file.record for file in files], index), index


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
        """Tells the coordinator the number of this rank."""
        return dataclasses.replace(plan, storage_data=_own_number())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells each rank how many ranks load, and their numbers."""
        together = len(plans), _numbers(plans)
        return [dataclasses.replace(plan, storage_data=together) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and verifies the items of a plan.

        Raises:
            StructureError: a tensor to fill is this rank's part of a model; see `shardproof.load`.
            CorruptChunkError: stored bytes do not match their digest. Tensors may be partly filled.
            FormatError, StorageError, TilingError: the checkpoint is damaged or cannot be read.
        """
        checkpoint = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        flat = planner.state_dict if isinstance(planner, DefaultLoadPlanner) else {}
        filled = {item.dest_index.fqn for item in tensors}
        together = plan.storage_data  # a planner, or a class that derives from this one, may drop it
        world_size, ranks = together if isinstance(together, tuple) else (_world_size(), None)
        refuse_parts({key: flat[key] for key in filled & flat.keys()}, world_size, ranks)
        for batch in _batches(checkpoint, tensors):
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

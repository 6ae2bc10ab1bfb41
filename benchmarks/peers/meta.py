"""Meta's torch_checkpointing: sync, and async by a process of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from peers.subject import Subject
from peers.way import FINISHED, Save, Way

logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)


def gathered(self: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """The peer gathers its metadata in CUDA tensors; this gathers the same over gloo."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


if not torch.cuda.is_available():
    DefaultMetadataManager._all_gather_pickled_data = gathered


class TorchCheckpointing(Way):
    name = "torch_checkpointing"
    package = "torch_checkpointing"
    flushes = "no"
    driven = (
        ""
        if torch.cuda.is_available()
        else "the gather of its metadata, which needs CUDA tensors, replaced with all_gather_object; "
    ) + ("use_direct_io=False, because with O_DIRECT, its default, its unaligned writes fail here (EINVAL)")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        items = {"state": ItemSpec(resharder=DefaultResharder())}
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(items=items, save=self.saver(), storage_config=storage)
        self.manager = CheckpointManager(config)

    def saver(self) -> CheckpointSaverConfig:
        return SyncCheckpointSaverConfig()

    def prepare(self, subject: Subject) -> None:
        self.item = {"state": subject.flat}

    def begin(self, number: int) -> Save:
        self.folder.mkdir(parents=True, exist_ok=True)
        future = self.manager.save(str(self.path(number)), self.item)
        return FINISHED if future is None else Save(future.result, future.done)

    def load(self, number: int) -> None:
        self.manager.load(str(self.path(number)), into=self.item)

    def close(self) -> None:
        self.manager.close()


class TorchCheckpointingProcess(TorchCheckpointing):
    name = "torch_checkpointing, async process"
    driven = (
        TorchCheckpointing.driven
        + ("" if torch.cuda.is_available() else "; no pinned memory, no non-blocking copies")
        + "; a change waits for manager.lock()"
    )
    asynchronous = True

    def saver(self) -> CheckpointSaverConfig:
        on_gpu = torch.cuda.is_available()
        staging = CheckpointStagerConfig(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu)
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)
        return AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)

    def may_change(self) -> None:
        with self.manager.lock():
            pass

"""Checkpoints of Ray Train workers in the storage of the run. Each worker saves its own part.

    from shardproof.frameworks.ray_train import report, restore

    step = restore(state) or 0
    report({"loss": loss}, state, step=step)

Nothing is copied or uploaded: the workers save to the storage of the run, which all of them must see as one
directory.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train
from pyarrow.fs import LocalFileSystem

import shardproof as sp

__all__ = ["report", "restore"]


def report(metrics: dict[str, Any], state: Any, *, step: int) -> sp.SaveResult:
    """Saves a state, and reports it to Ray Train with metrics. All workers call it.

    Ray Train removes older checkpoints by its `CheckpointConfig`. A save that fails is not reported.

    Args:
        metrics: see `ray.train.report`.
        state: see `shardproof.save`.
        step: number of the step. It names the folder, as in ``checkpoint_00000100``.

    Returns:
        The committed checkpoint.

    Raises:
        ShardproofError: see `shardproof.save`.
        ValueError: the storage of the run is not a directory.
    """
    storage = ray.train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, LocalFileSystem):
        kind = type(storage.storage_filesystem).__name__
        raise ValueError(
            f"the storage of this run is a {kind}, and shardproof saves only to directories: set "
            "RunConfig(storage_path=...) to a directory that all workers share"
        )
    folder = os.path.join(storage.experiment_fs_path, f"checkpoint_{step:08d}")
    committed = sp.save(folder, state, step=step, overwrite=True)
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )
    return committed


def restore(state: Any, **options: Any) -> int | None:
    """Loads the checkpoint that Ray Train resumes from, on any number of workers. All workers call it.

    Args:
        state: see `shardproof.load`.
        options: see `shardproof.load`, also for checkpoints of other formats.

    Returns:
        The step of the checkpoint; None if there is no checkpoint.

    Raises:
        ShardproofError: see `shardproof.load`.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    return sp.load(checkpoint.path, state, **options).step

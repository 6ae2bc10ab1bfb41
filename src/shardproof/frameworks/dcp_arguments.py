"""The arguments of DCP's functions: which ones the adapter uses, passes on to torch, or refuses."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import staging

from shardproof.errors import StructureError

__all__ = ["HUGGING_FACE", "check_planner", "given_arguments", "path_of", "stages_in_background"]


def _classes(module: Any, *names: str) -> tuple[type[Any], ...]:
    """The classes that this version of torch has."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


HUGGING_FACE = _classes(
    torch_dcp, "HuggingFaceStorageReader", "HuggingFaceStorageWriter", "QuantizedHuggingFaceStorageReader"
)
"""Storages for model files of Hugging Face. These are not checkpoints, so torch handles them."""
_STAGERS = _classes(staging, "BlockingAsyncStager", "DefaultStager")
"""Stagers that only copy tensors."""


def given_arguments(**arguments: Any) -> dict[str, Any]:
    """The arguments that differ from torch's defaults. Older versions of torch lack some of the parameters.

    >>> given_arguments(planner=None, async_stager=None, use_collectives=True)
    {}
    """
    return {
        name: value
        for name, value in arguments.items()
        if value is not (True if name == "use_collectives" else None)
    }


def path_of(
    verb: str, checkpoint_id: str | os.PathLike[str] | None, storage: Any, own: type[Any]
) -> str | os.PathLike[str]:
    """The path of the checkpoint: `checkpoint_id`, or that of `storage`, which is None or of the class `own`.

    Raises:
        StructureError: there is no path, or one that is not supported.
    """
    if storage is not None and not isinstance(storage, own):
        raise StructureError(
            f"dcp.{verb} of shardproof does not use {type(storage).__name__}: leave it out and give "
            f"checkpoint_id, the folder of the checkpoint. torch.distributed.checkpoint.{verb} uses it"
        )
    path = storage.path if storage is not None and checkpoint_id is None else checkpoint_id
    if path is None:
        raise StructureError(f"dcp.{verb} needs a folder: give checkpoint_id")
    if "://" in os.fsdecode(path):
        raise StructureError(
            f"dcp.{verb} of shardproof needs a path of a file system, not {path}. Give a folder that all "
            "nodes share"
        )
    return path


def check_planner(planner: Any, default: type[Any], verb: str) -> bool:
    """True if a planner allows a partial load. `default` is the supported class of planners.

    Raises:
        StructureError: the planner changes what is saved or loaded.
    """
    if planner is None:
        return False
    name = type(planner).__name__
    helper = (
        "storage_writer=ShardproofWriter(path)" if verb == "save" else "storage_reader=ShardproofReader(path)"
    )
    if type(planner) is not default:
        raise StructureError(
            f"dcp.{verb} of shardproof plans by itself and cannot use {name}: leave planner out, or call "
            f"torch.distributed.checkpoint.{verb} with this planner and {helper}, which runs it"
        )
    if not planner.flatten_state_dict:
        raise StructureError(
            f"dcp.{verb} of shardproof flattens the state dict: leave flatten_state_dict=False of {name} out"
        )
    return bool(getattr(planner, "allow_partial_load", False))


def stages_in_background(stager: Any) -> bool:
    """True if a stager makes torch return an ``AsyncSaveResponse``.

    Raises:
        StructureError: the stager may do more than copy the tensors.
    """
    if stager is None:
        return False
    if type(stager) not in _STAGERS:
        raise StructureError(
            f"dcp.async_save of shardproof copies the tensors by itself and cannot use "
            f"{type(stager).__name__}: leave async_stager out"
        )
    return bool(getattr(getattr(stager, "_config", None), "use_async_staging", False))

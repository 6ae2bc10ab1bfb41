"""The arguments of DCP's functions: which ones the adapter uses, passes on to torch, or refuses."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import format_utils, staging, state_dict_saver

from shardproof.errors import StructureError

R = TypeVar("R")


def _classes(module: Any, *names: str) -> tuple[type[Any], ...]:
    """The classes that this version of torch has."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


OTHER_FILES = (
    *_classes(
        torch_dcp, "HuggingFaceStorageReader", "HuggingFaceStorageWriter", "QuantizedHuggingFaceStorageReader"
    ),
    *_classes(format_utils, "BroadcastingTorchSaveReader"),
)
"""Storages for model files of Hugging Face and for files of `torch.save`. These are not checkpoints, so torch
handles them."""
_STAGERS = _classes(staging, "BlockingAsyncStager", "DefaultStager")
"""Stagers that only copy tensors."""


def given_arguments(**arguments: Any) -> dict[str, Any]:
    """The arguments that differ from torch's defaults. Older versions of torch lack some of the parameters.

    >>> given_arguments(planner=None, async_stager=None, use_collectives=True, no_dist=False)
    {}
    """
    defaults = {"use_collectives": True, "no_dist": False}
    return {name: value for name, value in arguments.items() if value is not defaults.get(name)}


def storage_by_position(name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorates a function that also takes the storage as its second argument, as torch's functions do.

    Args:
        name: the keyword of the storage.

    Example:
        >>> @storage_by_position("storage_reader")
        ... def load(state_dict, *, storage_reader=None):
        ...     return storage_reader
        >>> load({}, "reader")
        'reader'
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if len(args) == 2 and name not in kwargs:
                return function(args[0], **kwargs, **{name: args[1]})
            return function(*args, **kwargs)

        return call

    return decorate


def path_of(
    verb: str, checkpoint_id: str | os.PathLike[str] | None, storage: Any, own: type[Any]
) -> str | os.PathLike[str]:
    """The path of the checkpoint: `checkpoint_id`, or that of `storage`, which is None or of the class `own`.

    A storage gets the path, as torch gives it.
    """
    if storage is not None and type(storage) is not own:
        instead = (
            "ShardproofWriter(path, overwrite=False), which refuses to replace a checkpoint, or "
            "ShardproofWriter(path), which replaces it"
            if verb == "save"
            else "ShardproofReader(path)"
        )
        raise StructureError(
            f"dcp.{verb} of shardproof uses neither {type(storage).__name__} nor its options: give "
            f"{instead}. torch.distributed.checkpoint.{verb} uses {type(storage).__name__}"
        )
    if storage is not None and checkpoint_id is not None:
        storage.reset(checkpoint_id)
    path = checkpoint_id if storage is None else storage.path
    if path is None:
        raise StructureError(f"dcp.{verb} needs a folder: give checkpoint_id")
    if "://" in os.fsdecode(path):
        raise StructureError(
            f"dcp.{verb} of shardproof needs a path of a file system, not {path}. Give a folder that all "
            "nodes share"
        )
    return path


def check_planner(planner: Any, default: type[Any], verb: str) -> bool:
    """True if a planner allows a partial load. `default` is the supported class of planners."""
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
    for option in ("flatten_state_dict", "flatten_sharded_tensors"):
        if not getattr(planner, option):
            raise StructureError(
                f"dcp.{verb} of shardproof flattens the state dict: leave {option}=False of {name} out"
            )
    if getattr(planner, "dedup_save_to_lowest_rank", False):
        warnings.warn(
            f"dcp.{verb} of shardproof spreads replicas over the ranks: dedup_save_to_lowest_rank=True of "
            f"{name} has no effect",
            stacklevel=3,
        )
    return bool(getattr(planner, "allow_partial_load", False))


def check_executor(kind: Any) -> None:
    """Warns if the caller asks for a process that writes."""
    process = getattr(getattr(state_dict_saver, "AsyncCheckpointerType", None), "PROCESS", None)
    if process is not None and kind == process:
        warnings.warn(
            "dcp.async_save of shardproof writes in threads that do not need the interpreter lock for their "
            "work: async_checkpointer_type=PROCESS has no effect",
            stacklevel=2,
        )


def stages_in_background(stager: Any) -> bool:
    """True if a stager makes torch return an ``AsyncSaveResponse``."""
    if stager is None:
        return False
    if type(stager) not in _STAGERS:
        raise StructureError(
            f"dcp.async_save of shardproof copies the tensors by itself and cannot use "
            f"{type(stager).__name__}: leave async_stager out"
        )
    return bool(getattr(getattr(stager, "_config", None), "use_async_staging", False))

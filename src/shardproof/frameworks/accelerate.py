"""Checkpoints of the objects that an `Accelerator` has prepared. Each rank saves its own part.

`save_state` and `load_state` replace the accelerator's methods:

    from shardproof.frameworks.accelerate import load_state, save_state

    save_state(accelerator, "run/checkpoint-100")
    load_state(accelerator, "run/checkpoint-100")

`state_of` returns the state tree, for a `shardproof.Checkpointer`.
"""

from __future__ import annotations

import os
import re
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

import shardproof as sp
from shardproof.frameworks.shared.folder_saves import (
    folders_to_remove,
    is_committed,
    numbered_folders,
    saves_of,
)

__all__ = ["load_state", "save_state", "state_of", "wait"]

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_NAME = re.compile(r"checkpoint_(\d+)")


class _Progress:
    """The counters of the accelerator, and the epoch of each data loader."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "iteration": self._accelerator.project_configuration.iteration,
            "epochs": [getattr(loader, "iteration", 0) for loader in self._accelerator._dataloaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"] + 1
        for loader, epoch in zip(self._accelerator._dataloaders, state["epochs"], strict=False):
            if hasattr(loader, "iteration"):
                loader.iteration = epoch


class _Loaders:
    """The positions and the random orders of this rank's data loaders.

    All ranks draw the order from the generator of rank 0, which Accelerate copies at the start of an epoch.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._loaders = list(accelerator._dataloaders)

    def state_dict(self) -> list[Any]:
        return [
            {
                "position": loader.state_dict() if _is_stateful(loader) else None,
                "generator": None if (source := _generator_of(loader)) is None else source.get_state(),
                "initial_seed": getattr(_sampler_of(loader), "initial_seed", None),
            }
            for loader in self._loaders
        ]

    def load_state_dict(self, state: list[Any]) -> None:
        for loader, stored in zip(self._loaders, state, strict=True):
            generator, sampler = _generator_of(loader), _sampler_of(loader)
            if stored["position"] is not None and _is_stateful(loader):
                loader.load_state_dict(stored["position"])
            if stored["generator"] is not None and generator is not None:
                generator.set_state(stored["generator"])
            if stored["initial_seed"] is not None and hasattr(sampler, "initial_seed"):
                sampler.initial_seed = stored["initial_seed"]


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """The state tree of everything that the accelerator has prepared, or that was registered with it.

    Its keys are `models.<n>`, `optimizers.<n>`, `schedulers.<n>`, `custom.<n>`, `scaler`, `loaders`, `rng`
    and `accelerate`. Numbers follow the order of `prepare`. A load fills the same tree. Hooks of
    `register_save_state_pre_hook` are not called.

    Args:
        accelerator: the accelerator, after `prepare`.

    Raises:
        TypeError: the accelerator trains with DeepSpeed, Megatron-LM or XLA, whose engine has the state.

    Example:
        >>> checkpointer.save(step, state_of(accelerator))  # doctest: +SKIP
    """
    if accelerator.distributed_type in _REFUSED:
        raise TypeError(
            f"this accelerator trains with {accelerator.distributed_type}, whose engine has the state. Use "
            "accelerator.save_state, and `shardproof convert` for what it writes"
        )
    state: dict[str, Any] = {
        # The accelerator has no public list of what it prepared.
        "models": list(accelerator._models),
        "optimizers": [getattr(item, "optimizer", item) for item in accelerator._optimizers],
        "schedulers": [getattr(item, "scheduler", item) for item in accelerator._schedulers],
        "custom": list(accelerator._custom_objects),
        "loaders": sp.PerRank(_Loaders(accelerator)),
        "rng": sp.RandomState(),
        "accelerate": _Progress(accelerator),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def save_state(
    accelerator: Accelerator, folder: str | os.PathLike[str] | None = None, *, background: bool = False
) -> str:
    """Saves what `accelerator.save_state` saves, each rank its own part. All ranks call it.

    Args:
        accelerator: the accelerator, after `prepare`.
        folder: the folder of the checkpoint; a committed checkpoint in it is replaced. None:
            ``<project_dir>/checkpoints/checkpoint_<n>``, if the accelerator has
            `automatic_checkpoint_naming`. Then the oldest checkpoints beyond `total_limit` are removed after
            the commit.
        background: True to return when training may continue. Call `wait` at the end of the training.

    Returns:
        The folder.

    Raises:
        ShardproofError: see `shardproof.save`; or the failure of the previous save.
        ValueError: no folder is given, and automatic naming is off.
    """
    state = state_of(accelerator)
    saves = saves_of(accelerator)
    saves.wait_for_end()
    project = accelerator.project_configuration
    if folder is None:
        folder = os.path.join(_checkpoints(accelerator), f"checkpoint_{project.iteration}")
    # The counter is part of the state, so it moves after the state has been collected.
    saves.save(folder, state, step=accelerator.step)
    project.iteration += 1
    if accelerator.is_main_process and project.automatic_checkpoint_naming and project.total_limit:
        own = _NAME.fullmatch(os.path.basename(folder))
        numbered = numbered_folders(os.path.dirname(folder), _NAME)
        older = [path for number, path in numbered if own and number < int(own[1])]
        whole = [item for item in older if is_committed(item) or _is_theirs(item)]
        for old in folders_to_remove(older, whole, project.total_limit - 1):
            saves.remove(old)
    if not background:
        saves.wait()
    return os.fspath(folder)


def load_state(
    accelerator: Accelerator, folder: str | os.PathLike[str] | None = None, **options: Any
) -> str | None:
    """Loads a checkpoint of `save_state`, or one of `accelerator.save_state`. All ranks call it.

    Rank 0 finds the format for all ranks.

    Args:
        accelerator: the accelerator, after `prepare`.
        folder: the folder. None: the newest committed one, if the accelerator has
            `automatic_checkpoint_naming`.
        options: options of `accelerator.load_state`, for a checkpoint of Accelerate.

    Returns:
        The loaded folder; None if automatic naming finds none.

    Raises:
        ShardproofError: see `shardproof.load`.
        ValueError: no folder is given, and automatic naming is off.
    """
    if folder is None:
        run = _checkpoints(accelerator)

        def newest() -> str | None:
            newest_first = (path for _, path in reversed(numbered_folders(run, _NAME)))
            return next((path for path in newest_first if is_committed(path) or _is_theirs(path)), None)

        folder = saves_of(accelerator).choose(run, newest)
        if folder is None:
            return None
    if saves_of(accelerator).agree(folder, lambda: _is_theirs(folder)):
        accelerator.load_state(os.fspath(folder), **options)
    else:
        saves_of(accelerator).load(folder, state_of(accelerator))
    return os.fspath(folder)


def wait(accelerator: Accelerator) -> None:
    """Waits for a save in the background.

    Args:
        accelerator: the accelerator.

    Raises:
        ShardproofError: the save failed, and no call has raised the failure yet.
    """
    saves_of(accelerator).wait()


def _checkpoints(accelerator: Accelerator) -> str:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "no folder is given: name one, or make the Accelerator with "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
        )
    return os.path.join(accelerator.project_dir, "checkpoints")


def _is_theirs(folder: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(folder, "random_states_0.pkl")) and not is_committed(folder)


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _generator_of(loader: Any) -> Any:
    return getattr(loader, "synchronized_generator", None)


def _sampler_of(loader: Any) -> Any:
    return loader.get_sampler() if hasattr(loader, "get_sampler") else None

"""Checkpoints of a Lightning Fabric program. Each rank saves its own part.

`save` and `load` replace `fabric.save` and `fabric.load`:

    from shardproof.frameworks.fabric import load, save

    save(fabric, "run/step-100", state)
    load(fabric, "run/step-100", state)

A state may also have values that Fabric cannot save, such as `shardproof.RandomState()` and
`shardproof.PerRank`. The result of `unwrapped` is also a state for `shardproof.Checkpointer`.
"""

from __future__ import annotations

import os
from typing import Any

from shardproof.engine.state import without_fabric
from shardproof.frameworks.shared.folder_saves import is_committed, saves_of

__all__ = ["load", "save", "unwrapped", "wait"]


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """The state without Fabric's wrappers of modules, optimizers and data loaders.

    Args:
        state: a dict as `fabric.save` takes it.
    """
    return {name: _inner(value) for name, value in state.items()}


def save(
    fabric: Any, path: str | os.PathLike[str], state: dict[str, Any], *, background: bool = False
) -> None:
    """Saves a state, each rank its own part. All ranks call it.

    Args:
        fabric: the `Fabric`.
        path: the folder of the checkpoint; a committed checkpoint in it is replaced.
        state: a dict as `fabric.save` takes it.
        background: True to return when training may continue. Call `wait` at the end of the training.

    Raises:
        ShardproofError: see `shardproof.save`; or the failure of the previous save.
    """
    saves = saves_of(fabric)
    saves.save(path, unwrapped(state))
    if not background:
        saves.wait()


def load(
    fabric: Any, path: str | os.PathLike[str], state: dict[str, Any], strict: bool = True, **options: Any
) -> dict[str, Any]:
    """Loads a checkpoint of `save`, or one of `fabric.save`, into a state. All ranks call it.

    Rank 0 finds the format for all ranks.

    Args:
        fabric: the `Fabric`.
        path: the checkpoint.
        state: the dict to fill.
        strict: True if a key that only one side has is an error.
        options: options of `fabric.load`, for a checkpoint of Fabric.

    Returns:
        The values of a checkpoint of Fabric that are not in the state; an empty dict for a checkpoint of
        `save`.

    Raises:
        ShardproofError: see `shardproof.load`.
    """
    files = (path, os.path.join(path, "meta.pt"))  # one of them is a file in a checkpoint of Fabric
    if saves_of(fabric).agree(path, lambda: not is_committed(path) and any(map(os.path.isfile, files))):
        rest: dict[str, Any] = fabric.load(path, state, strict, **options)
        return rest
    inner = unwrapped(state)
    saves_of(fabric).load(path, inner, strict=strict)
    for name, value in inner.items():
        if value is not _inner(state[name]):  # a plain value, which the load replaced in the dict
            state[name] = value
    return {}


def wait(fabric: Any) -> None:
    """Waits for a save in the background.

    Args:
        fabric: the `Fabric`.

    Raises:
        ShardproofError: the save failed, and no call has raised the failure yet.
    """
    saves_of(fabric).wait()


def _inner(value: Any) -> Any:
    """The object inside Fabric's wrapper.

    The name of its class identifies the wrapper of a data loader, because Lightning has two packages.
    """
    if any(base.__name__ == "_FabricDataLoader" for base in type(value).__mro__):
        return value._dataloader
    return without_fabric(value)

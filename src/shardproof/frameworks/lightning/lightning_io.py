"""A `CheckpointIO` of Lightning on shardproof, for trainers that use Lightning's own checkpoint callbacks."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import shardproof as sp
from shardproof.frameworks.shared.folder_saves import Value, local_path, remove_folder

LIGHTNING = (
    "pytorch_lightning"
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    else "lightning.pytorch"
)
"""The package that the program uses."""

_plugins: Any = import_module(f"{LIGHTNING}.plugins")
CheckpointIO: Any = _plugins.CheckpointIO
TorchCheckpointIO: Any = _plugins.TorchCheckpointIO


class ShardproofCheckpointIO(CheckpointIO):
    """Writes the state that Lightning collects as a folder of shardproof. Loads verify it.

    Lightning calls it on rank 0 alone, with the state of rank 0, and waits for it. Prefer
    `ShardproofCheckpoint`: each rank saves its part in the background, with its random states and the
    positions of its data loaders.

    `ModelParallelStrategy` and `FSDPStrategy` write sharded checkpoints without a call of a `CheckpointIO`.
    Use `ShardproofCheckpoint` with `ModelParallelStrategy`. It does not support `FSDPStrategy`.

    Example:
        >>> from shardproof.frameworks.lightning import ShardproofCheckpointIO  # doctest: +SKIP
        >>> trainer = Trainer(plugins=[ShardproofCheckpointIO()])  # doctest: +SKIP
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint, and returns when it is committed. A committed one at the path is replaced.

        Args:
            checkpoint: Lightning's checkpoint: tensors and plain data.
            path: the folder.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` is given.
            ValueError: `path` is a URL.
            ShardproofError: see `shardproof.save`. Lightning's other ranks then wait until the timeout of the
                process group.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: shardproof saves to a path. Leave it out")
        rest = dict(checkpoint)
        weights = rest.pop("state_dict")
        sp.save(
            local_path(path),
            {"state_dict": _Weights(weights), "lightning": Value(rest)},
            step=rest.get("global_step"),
            overwrite=True,
            rendezvous=sp.rendezvous.LocalRendezvous(),
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint of shardproof, or a file that Lightning wrote. Each rank reads all of it.

        Args:
            path: the folder or file.
            map_location: the device of the tensors, for example ``"cpu"``, which is the default. A function
                or a mapping is only for files of Lightning.
            weights_only: option of `torch.load`, for a file of Lightning. A checkpoint of shardproof has no
                pickle.

        Returns:
            Lightning's checkpoint.

        Raises:
            TypeError: `map_location` is not a device.
            ShardproofError: see `shardproof.load`.
        """
        if not os.path.isdir(path):
            options = {} if weights_only is None else {"weights_only": weights_only}
            plain: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, **options)
            return plain
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise TypeError(f"map_location={map_location!r}: pass a device, or None for the CPU")
        weights, rest = _Weights(), Value()
        sp.load(
            local_path(path),
            {"state_dict": weights, "lightning": rest},
            rendezvous=sp.rendezvous.LocalRendezvous(),
        )
        checkpoint = {**rest.value, "state_dict": weights.value}
        if map_location is None:
            return checkpoint
        moved: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(map_location), checkpoint
        )
        return moved

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a folder or file, if it exists."""
        remove_folder(local_path(path))


class _Weights(Value):
    """The weights, each under a key of its own, including small ones."""

    def state_dict(self) -> Any:
        """The weights."""
        return self.value

    def load_state_dict(self, value: Any) -> None:
        """Replaces the weights."""
        self.value = value

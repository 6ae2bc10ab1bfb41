"""Strategies of Megatron-Core's ``dist_checkpointing`` that save and load with shardproof.

The common state is the plain data of rank 0 in a checkpoint with sharded entries.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

import shardproof as sp
from shardproof.engine.saving import SaveRequest
from shardproof.engine.state import references
from shardproof.frameworks.megatron.megatron_async import call_of
from shardproof.frameworks.megatron.megatron_plain import to_plain
from shardproof.frameworks.megatron.megatron_tensors import (
    COMMON,
    COMMON_KEY,
    TYPES,
    Load,
    MainReplicas,
    StoredObject,
    add_keys,
    boxes_of,
    save_tree,
)
from shardproof.frameworks.shared.rank_work import on_every_rank, on_rank_0
from shardproof.frameworks.shared.replacements import LastSaver, raised_as

_ITERATION = re.compile(r"iter_(\d+)")
_HAS_COMMON_OBJECT = not hasattr(torch_strategies.TorchDistLoadShardedStrategy, "can_handle_sharded_objects")
"""True if the common state is a ShardedObject: 0.19. Strategies of 0.16 say whether they store these."""
BACKEND = "shardproof"
"""Name of the strategies in Megatron's metadata."""
VERSION = 1
"""Version of the strategies in Megatron's metadata."""
_COMMON_FILE = "common.pt"
as_in_megatron = partial(raised_as, CheckpointingException)
"""A context, and a decorator: errors are also those that Megatron raises, its own and torch's."""


def is_ours(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """True if the folder has a committed checkpoint of shardproof."""
    config = maybe_load_config(str(checkpoint_dir))
    if config is not None:
        return bool(config.sharded_backend == BACKEND)
    return (Path(checkpoint_dir) / "manifest.json").exists()  # the job ended before metadata.json was written


def agree_if_ours(
    checkpoint_dir: str | os.PathLike[str], rendezvous: sp.rendezvous.Rendezvous | None = None
) -> bool:
    """`is_ours` as rank 0 finds it, equal on all ranks. All ranks call it."""

    def find() -> bytes:
        return b"ours" if is_ours(checkpoint_dir) else b""

    rendezvous = rendezvous or sp.rendezvous.connect()
    return on_rank_0(rendezvous, f"load {os.fspath(checkpoint_dir)}", "format", find) == b"ours"


class SaveStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves a sharded state dict with shardproof.

    Use one strategy for the whole run: it reuses the plan while the structure is unchanged on all ranks. The
    class derives from Megatron's ``torch_dist`` strategy only because Megatron-Core 0.19 accepts no other
    class.

    Args:
        replicas: True to let any rank with a replica of a box write it, which balances the bytes. False to
            let only the rank with the main replica write it, as in Megatron.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. None: 300.
        host_memory_budget: see `shardproof.Checkpointer`.

    Example:
        ``dist_checkpointing.save(sharded_state_dict, folder, SaveStrategy())``
    """

    def __init__(
        self,
        *,
        replicas: bool = False,
        deadline: float | None = None,
        host_memory_budget: int | None = None,
    ) -> None:
        super().__init__(backend=BACKEND, version=VERSION)
        self._replicas = replicas
        self._deadline = deadline
        self._last = LastSaver(host_memory_budget)
        self._main_replicas = MainReplicas()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: the strategy stores ShardedObjects, too."""
        return True

    @as_in_megatron()
    def save(self, sharded_state_dict: Mapping[Any, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Saves, and returns once all files are written, `common.pt` too. All ranks call it.

        Raises:
            StructureError: a box has no main replica, or two.
            ShardproofError: see `shardproof.save`.
        """
        self.begin(sharded_state_dict, checkpoint_dir, background=False).result()

    @as_in_megatron()
    def async_save(
        self,
        sharded_state_dict: Mapping[Any, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "mcore",
    ) -> Any:
        """Begins to save. All ranks call it.

        Args:
            sharded_state_dict: it may change when this method returns.
            checkpoint_dir: the folder of the checkpoint.
            async_strategy: "mcore" or "nvrx": the library whose ``AsyncRequest`` to return.

        Returns:
            The request to schedule in Megatron's ``AsyncCallsQueue``. The save runs without the queue too.
            The queue waits for its end, and its finalization raises the error of a failed save on all ranks.
        """
        pending = self.begin(sharded_state_dict, checkpoint_dir)
        return _request_class(async_strategy)(*call_of(pending))

    @as_in_megatron()
    def begin(
        self,
        sharded_state_dict: Mapping[Any, Any],
        checkpoint_dir: str | os.PathLike[str],
        *,
        background: bool = True,
    ) -> sp.PendingSave:
        """Begins to save, without Megatron's queue. All ranks call it.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensors and ShardedObjects.
            checkpoint_dir: the folder of the checkpoint. A committed checkpoint in it stays valid until the
                new one is committed.
            background: True if the state may change before the save is over.

        Raises:
            StructureError: a box has no main replica, or two.
        """
        location = os.fspath(checkpoint_dir)
        rendezvous = sp.rendezvous.connect(deadline=self._deadline)
        saver = self._last.at(rendezvous, location)
        common: list[Common] = []

        def describe() -> list[Any]:
            force_all_tensors_to_non_fp8(sharded_state_dict)
            common[:] = common_of(sharded_state_dict)
            return boxes_of(sharded_state_dict)

        self._main_replicas.prove(rendezvous, location, describe)
        tree = save_tree(sharded_state_dict, replicas=self._replicas)
        for state in common:
            add_keys(tree, state.tree())
        number = _ITERATION.fullmatch(Path(location).name)
        pending = saver.begin(
            sp.storage.LocalStorage(location),
            tree,
            SaveRequest(
                int(number[1]) if number else None,
                overwrite=True,
                on_commit=partial(publish_for_megatron, Path(location), common),
            ),
            stage_all=background,
        )
        pending.set_error_context(as_in_megatron)
        return pending


class LoadStrategy(torch_strategies.TorchDistLoadShardedStrategy):
    """Loads a checkpoint of shardproof into a sharded state dict, and others with Megatron's own strategy.

    Args:
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. None: 300.

    Example:
        ``dist_checkpointing.load(sharded_state_dict, folder, LoadStrategy())``
    """

    def __init__(self, *, deadline: float | None = None) -> None:
        super().__init__()
        self._deadline = deadline
        self.stream_ckpt_dequant = False  # Megatron converts FP8 tensors before the load

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: the strategy stores ShardedObjects, too."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Accepts every backend: other checkpoints are loaded with Megatron's strategy."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accepts every version; the version of the format is in the manifest."""

    @as_in_megatron()
    def load(
        self,
        sharded_state_dict: Mapping[Any, Any],
        checkpoint_dir: str | os.PathLike[str],
        *async_strategy: str,
    ) -> Any:
        """Fills ShardedTensors in place, and returns the state dict of tensors and objects.

        Every byte is verified. Values are converted to the dtype of the ShardedTensor, as Megatron's own
        strategies do. All ranks call it.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensors and ShardedObjects.
            checkpoint_dir: the folder of the checkpoint.
            async_strategy: passed to Megatron's own strategy.

        Raises:
            RankFailure: on a rank, the checkpoint lacks a key or has it with another global shape.
            ShardproofError: see `shardproof.load`.
        """
        rendezvous = sp.rendezvous.connect(deadline=self._deadline)
        if not agree_if_ours(checkpoint_dir, rendezvous):
            return super().load(sharded_state_dict, checkpoint_dir, *async_strategy)
        location = os.fspath(checkpoint_dir)
        request = Load(sharded_state_dict)
        tree: dict[str, Any] = {}

        def match() -> None:
            with sp.open(location) as checkpoint:
                check_common_file(Path(location), checkpoint)
                shapes = {key: shape for key, (_, shape) in checkpoint.catalogue().tensors.items()}
                tree.update(request.tree(shapes | dict.fromkeys(checkpoint.objects, ())))

        on_every_rank(rendezvous, f"match {location}", "match", match)
        sp.load(location, tree, strict=False, cast=True, rendezvous=rendezvous)
        return request.result(tree)

    @as_in_megatron()
    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], *metadata: Any) -> dict[str, Any]:
        """A ShardedTensor without data for each stored tensor, by key."""
        if not is_ours(checkpoint_dir):
            return dict(super().load_tensors_metadata(checkpoint_dir, *metadata))
        with sp.open(os.fspath(checkpoint_dir)) as checkpoint:
            return _tensors_metadata(checkpoint)

    @as_in_megatron()
    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """A ShardedTensor or ShardedObject without data for each stored one, by key.

        As in Megatron's own checkpoints, the common state is a ShardedObject in 0.19, and none in 0.16.
        """
        if not is_ours(checkpoint_dir):
            return dict(super().load_sharded_metadata(checkpoint_dir))
        with sp.open(os.fspath(checkpoint_dir)) as checkpoint:
            objects = [key for key in checkpoint.objects if key not in (COMMON, TYPES)]
            if COMMON in checkpoint.objects and _HAS_COMMON_OBJECT:
                objects.append(f"{COMMON_KEY}/shard_0_1")
            found = {key: ShardedObject.empty_from_unique_key(key) for key in objects}
            return found | _tensors_metadata(checkpoint)

    @as_in_megatron()
    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Removes tensors from a ``torch_dist`` checkpoint. A checkpoint of shardproof is never changed."""
        if is_ours(checkpoint_dir):
            raise sp.FormatError(
                f"{checkpoint_dir} is a checkpoint of shardproof, from which nothing is removed. Write "
                f"another without these keys: shardproof convert {checkpoint_dir} DST --to shardproof "
                f"--exclude '{key_prefix}*' --register shardproof.frameworks.megatron.megatron_plain"
            )
        super().remove_sharded_tensors(checkpoint_dir, key_prefix)


def _tensors_metadata(checkpoint: sp.Checkpoint) -> dict[str, Any]:
    """A ShardedTensor without data for each tensor that no object refers to, by key."""
    inside = {key for data in checkpoint.objects.values() for key, _ in references(data)}
    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        ).without_data()
        for key, (dtype, shape) in checkpoint.catalogue().tensors.items()
        if checkpoint.aliases.get(key, key) not in inside
    }


def _request_class(async_strategy: str) -> Any:
    """The class of requests that the queue takes."""
    if async_strategy == "mcore":
        return async_utils.AsyncRequest
    if async_strategy == "nvrx":
        try:
            return importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core").AsyncRequest
        except ImportError as error:
            raise ImportError(
                "async_strategy='nvrx' needs the package nvidia-resiliency-ext: install it, or pass "
                "async_strategy='mcore'"
            ) from error
    raise ValueError(f"async_strategy is {async_strategy!r}, not 'mcore' or 'nvrx'")


def takes(function: Any, names: Iterable[str]) -> bool:
    """True if a function has parameters of these names."""
    return set(names) <= inspect.signature(function).parameters.keys()


class Common:
    """The common state on the rank that stores it."""

    def __init__(self, value: Any) -> None:
        self.value, self.types = to_plain(value)
        file = io.BytesIO()
        torch.save(value, file)
        self.file = file.getvalue()

    def tree(self) -> dict[str, Any]:
        """The entries that this rank adds to the state tree."""
        digest = xxhash.xxh3_128_hexdigest(self.file)
        types = {"types": self.types, "digest": digest}
        return {COMMON: StoredObject(self.value), TYPES: StoredObject(types)}


def common_of(sharded_state_dict: Mapping[Any, Any]) -> list[Common]:
    """The common state, if this rank stores it. Megatron-Core 0.16 stores it itself."""
    items = dict_utils.nested_values(sharded_state_dict)
    found = [item for item in items if isinstance(item, ShardedObject) and item.key == COMMON_KEY]
    return [Common(item.data) for item in found if item.replica_id == 0]


def publish_for_megatron(folder: Path, common: list[Common]) -> None:
    """Writes the files which Megatron's own functions read, if this rank has the common state."""
    for state in common:
        sp.storage.LocalStorage(folder).publish(_COMMON_FILE, state.file, replace=True)
        save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))


def check_common_file(folder: Path, checkpoint: sp.Checkpoint) -> None:
    """Checks that `common.pt`, which Megatron may have read, belongs to this checkpoint."""
    if TYPES not in checkpoint.objects or not (folder / _COMMON_FILE).exists():
        return
    expected = checkpoint[TYPES]["digest"]
    found = xxhash.xxh3_128_hexdigest((folder / _COMMON_FILE).read_bytes())
    if found != expected:
        raise sp.CorruptChunkError(
            f"{folder / _COMMON_FILE} does not match its digest: expected {expected}, found {found}. Remove "
            "the file, and load with shardproof.frameworks.megatron_core.load, which does not need it",
            file=str(folder / _COMMON_FILE),
        )

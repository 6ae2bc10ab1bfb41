"""The common state: the plain data of rank 0 in a checkpoint with sharded entries."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject

import shardproof as sp
from shardproof.frameworks.megatron.megatron_plain import to_plain
from shardproof.frameworks.megatron.megatron_tensors import COMMON, COMMON_KEY, TYPES, StoredObject
from shardproof.frameworks.shared.replacements import raised_as

BACKEND = "shardproof"
"""Name of the strategies in Megatron's metadata."""
VERSION = 1
"""Version of the strategies in Megatron's metadata."""
_COMMON_FILE = "common.pt"
as_in_megatron = partial(raised_as, CheckpointingException)
"""A context, and a decorator: errors are also those that Megatron raises, its own and torch's."""


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

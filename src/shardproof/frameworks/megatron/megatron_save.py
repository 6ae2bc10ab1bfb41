"""Saves of sharded state dicts, with the arguments of Megatron's ``save``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import NoneType
from typing import Any

import xxhash
from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

import shardproof as sp
from shardproof.engine.state import canonical_json, encode_plain
from shardproof.frameworks.megatron.megatron_plain import to_plain
from shardproof.frameworks.megatron.megatron_strategies import (
    BACKEND,
    VERSION,
    SaveStrategy,
    as_in_megatron,
    takes,
)
from shardproof.frameworks.megatron.megatron_tensors import COMMON_KEY

_log = logging.getLogger("shardproof")
_CONTENT = "content_metadata"
_Preprocess = Callable[[dict[str, Any]], dict[str, Any]]
_DEFAULT = SaveStrategy()
"""The strategy of all saves without one. It reuses its plan, and keeps the order of background saves."""


@as_in_megatron()
def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    *,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: _Preprocess | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str = "mcore",
    verify_integrity: bool = False,
) -> Any:
    """Saves a sharded state dict. All ranks call it.

    Args:
        sharded_state_dict: see Megatron's ``save``.
        checkpoint_dir: the folder of the checkpoint. A committed checkpoint in it is replaced.
        sharded_strategy: a `SaveStrategy`, Megatron's wrapper of one, or ``("shardproof", 1)``. None: the
            `SaveStrategy` of the process. Any other strategy saves as Megatron does.
        validate_access_integrity: False to skip the comparison of the common state between ranks. The proof
            that boxes have one main replica and tile each tensor always runs.
        async_sharded_save: True to return a request for Megatron's ``AsyncCallsQueue``.
        preprocess_common_before_consistancy_check: removes the values from the common state that may differ
            between ranks.
        content_metadata: stored in the common state.
        async_strategy: "mcore" or "nvrx": the library whose request to return.
        verify_integrity: ignored, because shardproof always stores digests.

    Returns:
        None, or the request if `async_sharded_save` is set.

    Raises:
        StructureError: a box has no main replica, or two.
        ShardproofError: see `shardproof.save`.
    """
    strategy = _DEFAULT if sharded_strategy in (None, (BACKEND, VERSION)) else sharded_strategy
    inner = strategy
    while isinstance(inner, FullyParallelSaveStrategyWrapper):
        inner = inner.base_strategy
    if not isinstance(inner, SaveStrategy):
        options = {"async_strategy": async_strategy, "verify_integrity": verify_integrity}
        return mcore.save(
            sharded_state_dict,
            str(checkpoint_dir),
            strategy,
            validate_access_integrity=validate_access_integrity,
            async_sharded_save=async_sharded_save,
            preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
            content_metadata=content_metadata,
            **(options if takes(mcore.save, options) else {}),
        )
    compared = preprocess_common_before_consistancy_check or dict if validate_access_integrity else None
    parts = _parts(sharded_state_dict, checkpoint_dir, content_metadata, compared)
    if not async_sharded_save:
        return strategy.save(parts, checkpoint_dir)
    more = (async_strategy,) if takes(strategy.async_save, ("async_strategy",)) else ()
    return strategy.async_save(parts, checkpoint_dir, *more)


@as_in_megatron()
def begin_save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveStrategy,
    *,
    content_metadata: dict[str, Any] | None = None,
) -> sp.PendingSave:
    """Begins to save in the background, without Megatron's queue. All ranks call it.

    Args:
        sharded_state_dict: see Megatron's ``save``. It may change when this function returns.
        checkpoint_dir: the folder of the checkpoint.
        sharded_strategy: the strategy of the run.
        content_metadata: stored in the common state.

    Raises:
        StructureError: a box has no main replica, or two.
    """
    parts = _parts(sharded_state_dict, checkpoint_dir, content_metadata, dict)
    return sharded_strategy.begin(parts, checkpoint_dir)


def get_default_save_sharded_strategy(backend: str = BACKEND, version: int = VERSION) -> Any:
    """The strategy of a backend: the `SaveStrategy` of the process, or one of Megatron's."""
    if (backend, version) == (BACKEND, VERSION):
        return _DEFAULT
    return mcore.serialization.get_default_save_sharded_strategy(backend)


def _parts(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    content_metadata: dict[str, Any] | None,
    compared: _Preprocess | None,
) -> dict[str, Any]:
    """The ShardedTensors and ShardedObjects to save. The common state is a ShardedObject among them."""
    rendezvous = sp.rendezvous.connect()
    if content_metadata is not None:
        sharded_state_dict[_CONTENT] = content_metadata
    parts, common = state_dict_utils.save_preprocess(sharded_state_dict, validate_access_integrity=False)
    if compared is not None:
        _compare_common(compared(common), os.fspath(checkpoint_dir), rendezvous)
    parts[COMMON_KEY] = ShardedObject(COMMON_KEY, common, (1,), (0,), replica_id=rendezvous.rank)
    return dict(parts)


def _compare_common(common: dict[str, Any], location: str, rendezvous: sp.rendezvous.Rendezvous) -> None:
    """Logs the items of the common state that differ between ranks. The common state of rank 0 is stored."""

    def digests() -> dict[str, bytes]:
        items = {key: to_plain(value) for key, value in common.items()}
        texts = {str(key): canonical_json(encode_plain(item, str(key))) for key, item in items.items()}
        return {key: xxhash.xxh3_64_digest(text) for key, text in texts.items()}

    def compare(posts: list[dict[str, bytes]]) -> None:
        first, *others = posts
        for rank, other in enumerate(others, 1):
            keys = sorted(key for key in first | other if first.get(key) != other.get(key))
            if keys:
                _log.warning(
                    "%s: the common state of rank %d differs from that of rank 0, which is stored: %s",
                    location,
                    rank,
                    ", ".join(keys),
                )

    meetings = sp.rendezvous.MeetingSequence(rendezvous, f"compare the common state of {location}")
    meetings.exchange("common", digests, compare, dict[str, bytes], NoneType)

"""shardproof as a backend of Megatron-Core's ``dist_checkpointing``.

Import this module in the place of Megatron's. Its functions have the same names and arguments:

    from shardproof.frameworks import megatron_core as dist_checkpointing

    dist_checkpointing.save(sharded_state_dict, folder)
    state_dict = dist_checkpointing.load(sharded_state_dict, folder)

`save` writes checkpoints of shardproof. `load` reads them, and every other checkpoint with Megatron's own
functions. No function of this module runs a collective for a checkpoint of shardproof: the ranks meet at its
rendezvous. The import makes the backend ``("shardproof", 1)`` known to Megatron-Core 0.16, whose own
functions then save with it and find it in a checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing import dict_utils, state_dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    adjust_non_strict_load,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
)

import shardproof as sp
from shardproof.frameworks.megatron_optimizer import load_optimizer_state, optimizer_state
from shardproof.frameworks.megatron_plain import from_plain, to_plain
from shardproof.frameworks.megatron_strategies import (
    BACKEND,
    COMMON,
    TYPES,
    VERSION,
    LoadStrategy,
    SaveStrategy,
    is_ours,
)
from shardproof.frameworks.megatron_tensors import COMMON_KEY
from shardproof.maintenance import verify
from shardproof.state import encode_plain

__all__ = [
    "BACKEND",
    "VERSION",
    "LoadStrategy",
    "SaveStrategy",
    "StrictHandling",
    "begin_save",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "live_state",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_live_state",
    "load_optimizer_state",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "optimizer_state",
    "save",
]

_log = logging.getLogger("shardproof")
_CONTENT = "content_metadata"
_Preprocess = Callable[[dict[str, Any]], dict[str, Any]]


def _register() -> None:
    """Makes ``("shardproof", 1)`` known to Megatron-Core 0.16. Newer releases have no names of strategies."""
    try:
        from megatron.core.dist_checkpointing.strategies import base
    except ImportError:
        return
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())


_register()


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
        sharded_state_dict: as for Megatron's ``save``.
        checkpoint_dir: the folder of the checkpoint. A committed checkpoint in it is replaced.
        sharded_strategy: a `SaveStrategy`, Megatron's wrapper of one, or ``("shardproof", 1)``. None: a new
            `SaveStrategy`. Any other strategy saves as Megatron does.
        validate_access_integrity: False leaves out the comparison of the common state between ranks. The
            proof that boxes have one main replica and tile each tensor always runs.
        async_sharded_save: True to return a request for Megatron's ``AsyncCallsQueue``.
        preprocess_common_before_consistancy_check: removes from the common state what differs between ranks.
        content_metadata: stored in the common state.
        async_strategy: "mcore" or "nvrx": whose request to return.
        verify_integrity: changes nothing, since shardproof always stores digests.

    Returns:
        None, or the request if `async_sharded_save` is set.

    Raises:
        StructureError: a box has no main replica, or two.
        ShardproofError: see `shardproof.save`.
    """
    strategy = SaveStrategy() if sharded_strategy in (None, (BACKEND, VERSION)) else sharded_strategy
    if not _saves_with_us(strategy):
        options = {"async_strategy": async_strategy, "verify_integrity": verify_integrity}
        return mcore.save(
            sharded_state_dict,
            str(checkpoint_dir),
            strategy,
            validate_access_integrity=validate_access_integrity,
            async_sharded_save=async_sharded_save,
            preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
            content_metadata=content_metadata,
            **(options if _takes(mcore.save, options) else {}),
        )
    compared = preprocess_common_before_consistancy_check or dict if validate_access_integrity else None
    parts = _parts(sharded_state_dict, checkpoint_dir, content_metadata, compared)
    if not async_sharded_save:
        return strategy.save(parts, checkpoint_dir)
    more = (async_strategy,) if _takes(strategy.async_save, ("async_strategy",)) else ()
    return strategy.async_save(parts, checkpoint_dir, *more)


def begin_save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveStrategy,
    *,
    content_metadata: dict[str, Any] | None = None,
) -> sp.PendingSave:
    """Begins to save in the background, without Megatron's queue. All ranks call it.

    Args:
        sharded_state_dict: as for Megatron's ``save``. It may change when this function returns.
        checkpoint_dir: the folder of the checkpoint.
        sharded_strategy: the strategy of the run.
        content_metadata: stored in the common state.

    Raises:
        StructureError: a box has no main replica, or two.
    """
    parts = _parts(sharded_state_dict, checkpoint_dir, content_metadata, dict)
    return sharded_strategy.begin(parts, checkpoint_dir)


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    *,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
) -> Any:
    """Loads a checkpoint into a sharded state dict. All ranks call it.

    Args:
        sharded_state_dict: as for Megatron's ``load``.
        checkpoint_dir: a checkpoint of shardproof, or any other that Megatron loads.
        sharded_strategy: a `LoadStrategy`, or Megatron's wrapper of one. None: by the checkpoint.
        validate_access_integrity: used for checkpoints of Megatron only.
        strict: what to do with keys of one side only, as in Megatron.
        verify_integrity: True to verify all files before the load. The bytes that it reads are always
            verified.
        process_group: used for checkpoints of Megatron only.

    Returns:
        The state dict; with ``strict="return_all"`` and ``"return_unexpected"`` also the missing and the
        unexpected keys.

    Raises:
        CheckpointingException: keys of one side only, with ``strict="raise_all"`` or ``"raise_unexpected"``.
        ShardproofError: see `shardproof.load`.
    """
    if not is_ours(checkpoint_dir):
        options = {"verify_integrity": verify_integrity, "process_group": process_group}
        return mcore.load(
            sharded_state_dict,
            str(checkpoint_dir),
            None if isinstance(sharded_strategy, LoadStrategy) else sharded_strategy,
            validate_access_integrity=validate_access_integrity,
            strict=strict,
            **(options if _takes(mcore.load, options) else {}),
        )
    strategy = _load_strategy(sharded_strategy)
    if verify_integrity:
        _verify(checkpoint_dir)
    force_all_tensors_to_non_fp8(sharded_state_dict)
    sharded, local, factories = state_dict_utils.load_preprocess(sharded_state_dict)
    state = load_common_state_dict(checkpoint_dir)
    dict_utils.merge(state, local)
    sharded, _ = extract_sharded_base(sharded)
    strict = parse_strict_flag(strict)
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        missing, unexpected = _differences(sharded, checkpoint_dir, strategy, strict)
        sharded = adjust_non_strict_load(sharded, unexpected)
    dict_utils.merge(state, strategy.load(sharded, Path(checkpoint_dir)))
    state = apply_factory_merges(state, factories)
    returns = StrictHandling.requires_returning_mismatch_keys(strict)
    return (state, missing, unexpected) if returns else state


def live_state(
    module: Any, optimizer: Any, *, checkpoint_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The sharded state dict of a module and its distributed optimizer, without a collective.

    Args:
        module: the model, not wrapped by DistributedDataParallel.
        optimizer: see `optimizer_state`.
        checkpoint_dir: for a load, the checkpoint.
    """
    model = module.sharded_state_dict()
    stored = None if checkpoint_dir is None else load_tensors_metadata(checkpoint_dir)
    return {"model": model, "optimizer": optimizer_state(optimizer, model, stored)}


def load_live_state(
    module: Any, optimizer: Any, state: dict[str, Any], checkpoint_dir: str | os.PathLike[str]
) -> dict[str, Any]:
    """Loads a checkpoint into a module and its distributed optimizer. All ranks call it.

    Args:
        module: the model, not wrapped by DistributedDataParallel.
        optimizer: see `optimizer_state`.
        state: the result of `live_state`, with any other entries to load.
        checkpoint_dir: the checkpoint that `live_state` was called with.

    Returns:
        The loaded state dict, with the common state.
    """
    loaded = dict(load(state, checkpoint_dir))
    module.load_state_dict(loaded["model"])
    load_optimizer_state(optimizer, loaded["optimizer"])
    return loaded


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The common state of a checkpoint. Any process may call it alone."""
    if is_ours(checkpoint_dir):
        with sp.open(os.fspath(checkpoint_dir)) as checkpoint:
            if COMMON in checkpoint.objects:
                return dict(from_plain(checkpoint[COMMON], checkpoint[TYPES]["types"]))
    return dict(mcore.load_common_state_dict(str(checkpoint_dir)))


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None, *, preloaded_state_dict: Any = None
) -> Any:
    """The content metadata that `save` stored, or None."""
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("pass checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT)


def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None
) -> dict[str, Any]:
    """A ShardedTensor without data for each stored tensor, by key. Any process may call it alone."""
    if is_ours(checkpoint_dir):
        return dict(_load_strategy(sharded_strategy).load_tensors_metadata(Path(checkpoint_dir)))
    return dict(mcore.load_tensors_metadata(str(checkpoint_dir), sharded_strategy))


def load_sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None
) -> dict[str, Any]:
    """A ShardedTensor or ShardedObject without data for each stored one, by key."""
    if is_ours(checkpoint_dir):
        return dict(_load_strategy(sharded_strategy).load_sharded_metadata(Path(checkpoint_dir)))
    load_metadata = mcore.serialization.load_sharded_metadata
    return dict(load_metadata(str(checkpoint_dir), sharded_strategy))


def load_plain_tensors(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, on every rank. All ranks call it."""
    if is_ours(checkpoint_dir):
        return dict(LoadStrategy().load(load_tensors_metadata(checkpoint_dir), checkpoint_dir))
    return dict(mcore.load_plain_tensors(str(checkpoint_dir)))


def get_default_save_sharded_strategy(backend: str = BACKEND, version: int = VERSION) -> Any:
    """The strategy of a backend: a new `SaveStrategy`, or one of Megatron's."""
    if (backend, version) == (BACKEND, VERSION):
        return SaveStrategy()
    return mcore.serialization.get_default_save_sharded_strategy(backend)


def get_default_load_sharded_strategy(checkpoint_dir: str | os.PathLike[str] | None = None) -> LoadStrategy:
    """A strategy that loads checkpoints of shardproof, and of Megatron's ``torch_dist``."""
    return LoadStrategy()


def _saves_with_us(strategy: Any) -> bool:
    while isinstance(strategy, FullyParallelSaveStrategyWrapper):
        strategy = strategy.base_strategy
    return isinstance(strategy, SaveStrategy)


def _load_strategy(strategy: Any) -> Any:
    inner = strategy
    while isinstance(inner, FullyParallelLoadStrategyWrapper):
        inner = inner.base_strategy
    return strategy if isinstance(inner, LoadStrategy) else LoadStrategy()


def _takes(function: Any, names: Any) -> bool:
    import inspect

    return set(names) <= inspect.signature(function).parameters.keys()


def _parts(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    content_metadata: dict[str, Any] | None,
    compared: _Preprocess | None,
) -> dict[str, Any]:
    """The ShardedTensors and ShardedObjects to save; the common state is one of these."""
    rendezvous = sp.rendezvous.connect()
    if content_metadata is not None:
        sharded_state_dict[_CONTENT] = content_metadata
    parts, common = state_dict_utils.save_preprocess(sharded_state_dict, validate_access_integrity=False)
    if compared is not None:
        _compare_common(compared(common), os.fspath(checkpoint_dir), rendezvous)
    parts[COMMON_KEY] = ShardedObject(COMMON_KEY, common, (1,), (0,), replica_id=rendezvous.rank)
    return dict(parts)


def _compare_common(common: dict[str, Any], location: str, rendezvous: sp.rendezvous.Rendezvous) -> None:
    """Logs which items of the common state differ between ranks; that of rank 0 is stored."""

    def digests() -> bytes:
        items = {key: to_plain(value) for key, value in common.items()}
        texts = {str(key): msgspec.json.encode(encode_plain(item, str(key))) for key, item in items.items()}
        return msgspec.msgpack.encode({key: xxhash.xxh3_64_digest(text) for key, text in texts.items()})

    def compare(posts: list[bytes]) -> bytes:
        first, *others = [msgspec.msgpack.decode(post, type=dict[str, bytes]) for post in posts]
        for rank, other in enumerate(others, 1):
            keys = sorted(key for key in first | other if first.get(key) != other.get(key))
            if keys:
                _log.warning(
                    "%s: the common state of rank %d differs from that of rank 0, which is stored: %s",
                    location,
                    rank,
                    ", ".join(keys),
                )
        return b""

    meetings = sp.rendezvous.MeetingSequence(rendezvous, f"compare the common state of {location}")
    meetings.meet("common", digests, compare)


def _differences(
    sharded: Any, checkpoint_dir: str | os.PathLike[str], strategy: Any, strict: StrictHandling
) -> tuple[set[str], set[str]]:
    """Keys that only the checkpoint has, over all ranks, and keys that only this rank has.

    Raises:
        CheckpointingException: a rank has such keys, and `strict` asks for an error. Raised on all ranks.
    """
    stored = {item.key for item in strategy.load_sharded_metadata(Path(checkpoint_dir)).values()}
    asked = {item.key for item in dict_utils.nested_values(sharded)}

    def unite(posts: list[bytes]) -> bytes:
        keys = [msgspec.msgpack.decode(post, type=set[str]) for post in posts]
        return msgspec.msgpack.encode(set[str]().union(*keys))

    meetings = sp.rendezvous.MeetingSequence(sp.rendezvous.connect(), f"match {checkpoint_dir}")
    answer = meetings.meet("keys", lambda: msgspec.msgpack.encode(asked), unite)
    every = msgspec.msgpack.decode(answer, type=set[str])
    missing = stored - every if StrictHandling.requires_global_app_metadata(strict) else set[str]()
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        maybe_report_missing_and_unexpected_keys(missing, every - stored, True)
    elif strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        maybe_report_missing_and_unexpected_keys(missing, asked - stored, False)
    return missing, asked - stored


def _verify(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Verifies all files on rank 0. The error reaches all ranks."""
    rendezvous = sp.rendezvous.connect()

    def check() -> bytes:
        if rendezvous.rank == 0:
            report = verify(sp.storage.LocalStorage(os.fspath(checkpoint_dir)), rendezvous.progress)
            if report.faults:
                raise report.faults[0]
        return b""

    meetings = sp.rendezvous.MeetingSequence(rendezvous, f"verify {checkpoint_dir}")
    meetings.meet("verify", check, lambda _: b"")

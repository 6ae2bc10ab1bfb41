"""Loads of sharded state dicts, with the arguments of Megatron's ``load``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing import dict_utils, state_dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    adjust_non_strict_load,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
)

import shardproof as sp
from shardproof.engine.state import has_names, with_targets
from shardproof.frameworks.megatron.megatron_optimizer import fit_options
from shardproof.frameworks.megatron.megatron_plain import from_plain
from shardproof.frameworks.megatron.megatron_strategies import (
    LoadStrategy,
    agree_if_ours,
    as_in_megatron,
    is_ours,
    takes,
)
from shardproof.frameworks.megatron.megatron_tensors import COMMON, COMMON_KEY, TYPES
from shardproof.frameworks.shared.rank_work import on_every_rank, on_rank_0
from shardproof.runs.maintenance import verify

_log = logging.getLogger("shardproof")


@as_in_megatron()
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

    If the checkpoint has the options of another number of optimizers, because experts have an optimizer of
    their own only from expert parallel size 2 on, each optimizer of `sharded_state_dict` gets its options.

    Args:
        sharded_state_dict: see Megatron's ``load``.
        checkpoint_dir: a checkpoint of shardproof, or any other that Megatron loads.
        sharded_strategy: a `LoadStrategy`, or Megatron's wrapper of one. None: chosen by the checkpoint.
        validate_access_integrity: used for checkpoints of Megatron only.
        strict: how to handle keys that only one side has, as in Megatron.
        verify_integrity: True to verify all files before the load. The bytes that it reads are always
            verified.
        process_group: used for checkpoints of Megatron only.

    Returns:
        The state dict; with ``strict="return_all"`` and ``"return_unexpected"`` also the missing and the
        unexpected keys.

    Raises:
        CheckpointingException: only one side has a key, with ``strict="raise_all"`` or
            ``"raise_unexpected"``.
        KeyMismatchError: the sharded state dict has another class or function in an optimizer's options than
            the checkpoint, with these values of `strict`. Otherwise a warning names it, and it stays.
        StructureError: the checkpoint has the options of another number of optimizers, and these options
            differ.
        ShardproofError: see `shardproof.load`.
    """
    if not agree_if_ours(checkpoint_dir):
        options = {"verify_integrity": verify_integrity, "process_group": process_group}
        loaded = mcore.load(
            sharded_state_dict,
            str(checkpoint_dir),
            None if isinstance(sharded_strategy, LoadStrategy) else sharded_strategy,
            validate_access_integrity=validate_access_integrity,
            strict=strict,
            **(options if takes(mcore.load, options) else {}),
        )
        fit_options(loaded[0] if isinstance(loaded, tuple) else loaded, sharded_state_dict)
        return loaded
    strategy = _load_strategy(sharded_strategy)
    if verify_integrity:
        _verify(checkpoint_dir)
    force_all_tensors_to_non_fp8(sharded_state_dict)
    sharded, local, factories = state_dict_utils.load_preprocess(sharded_state_dict)
    strict = parse_strict_flag(strict)
    state = _common_state(checkpoint_dir, sharded_state_dict)
    dict_utils.merge(state, local)
    sharded, _ = extract_sharded_base(sharded)
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        missing, unexpected = _differences(sharded, checkpoint_dir, strategy, strict)
        sharded = adjust_non_strict_load(sharded, unexpected)
    dict_utils.merge(state, strategy.load(sharded, Path(checkpoint_dir)))
    state = _with_code(apply_factory_merges(state, factories), sharded_state_dict, checkpoint_dir, strict)
    returns = StrictHandling.requires_returning_mismatch_keys(strict)
    return (state, missing, unexpected) if returns else state


@as_in_megatron()
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
    return preloaded_state_dict.get("content_metadata")


@as_in_megatron()
def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None
) -> dict[str, Any]:
    """A ShardedTensor without data for each stored tensor, by key. Any process may call it alone."""
    if is_ours(checkpoint_dir):
        return dict(_load_strategy(sharded_strategy).load_tensors_metadata(Path(checkpoint_dir)))
    return dict(mcore.load_tensors_metadata(str(checkpoint_dir), sharded_strategy))


@as_in_megatron()
def load_sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None
) -> dict[str, Any]:
    """A ShardedTensor or ShardedObject without data for each stored one, by key."""
    if is_ours(checkpoint_dir):
        return dict(_load_strategy(sharded_strategy).load_sharded_metadata(Path(checkpoint_dir)))
    load_metadata = mcore.serialization.load_sharded_metadata
    return dict(load_metadata(str(checkpoint_dir), sharded_strategy))


@as_in_megatron()
def load_plain_tensors(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, on every rank. All ranks call it."""
    if agree_if_ours(checkpoint_dir):
        return dict(LoadStrategy().load(load_tensors_metadata(checkpoint_dir), checkpoint_dir))
    return dict(mcore.load_plain_tensors(str(checkpoint_dir)))


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """True if the folder has a checkpoint of shardproof or of Megatron. Any process may call it alone."""
    return is_ours(checkpoint_dir) or bool(mcore.check_is_distributed_checkpoint(str(checkpoint_dir)))


@as_in_megatron()
def remove_sharded_tensors(checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
    """Removes the tensors whose keys have a prefix from a checkpoint of Megatron.

    Raises:
        FormatError: the checkpoint is one of shardproof, which never changes. The text has the command that
            writes another without these tensors.
    """
    owner = LoadStrategy() if is_ours(checkpoint_dir) else mcore
    owner.remove_sharded_tensors(str(checkpoint_dir), key_prefix)


def get_default_load_sharded_strategy(checkpoint_dir: str | os.PathLike[str] | None = None) -> LoadStrategy:
    """A strategy that loads checkpoints of shardproof, and of Megatron's ``torch_dist``."""
    return LoadStrategy()


def _load_strategy(strategy: Any) -> Any:
    inner = strategy
    while isinstance(inner, FullyParallelLoadStrategyWrapper):
        inner = inner.base_strategy
    return strategy if isinstance(inner, LoadStrategy) else LoadStrategy()


def _common_state(checkpoint_dir: str | os.PathLike[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The common state on each rank, for the optimizers of a state dict. An error reaches all ranks."""
    state: dict[str, Any] = {}

    def read() -> None:
        state.update(load_common_state_dict(checkpoint_dir))
        fit_options(state, asked)

    on_every_rank(sp.rendezvous.connect(), f"load {checkpoint_dir}", "common", read)
    return state


def _with_code(
    state: dict[str, Any],
    asked: Mapping[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    strict: StrictHandling,
) -> dict[str, Any]:
    """The loaded state with the classes and functions of the sharded state dict in place of their names."""
    if not has_names(state):
        return state

    def differs(path: tuple[Any, ...], here: str, stored: str) -> None:
        message = (
            f"{checkpoint_dir}: {'.'.join(map(str, path))} is {stored} in the checkpoint, and {here} here"
        )
        if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
            raise sp.KeyMismatchError(
                f"{message}. Make the optimizer with the class of the checkpoint, or load with "
                "strict='log_all', which keeps that of this run"
            )
        _log.warning("%s, which stays", message)

    target = dict_utils.dict_list_map_outplace(
        lambda item: item.data if isinstance(item, ShardedObject) else item, asked
    )
    loaded: dict[str, Any] = with_targets(state, target, differs)
    return loaded


def _differences(
    sharded: Any, checkpoint_dir: str | os.PathLike[str], strategy: Any, strict: StrictHandling
) -> tuple[set[str], set[str]]:
    """Keys that only the checkpoint has, over all ranks, and keys that only this rank has.

    Raises:
        CheckpointingException: a rank has such keys, and `strict` asks for an error. Raised on all ranks.
    """
    stored: set[str] = set()
    asked = {item.key for item in dict_utils.nested_values(sharded)}

    def read() -> set[str]:
        stored.update(item.key for item in strategy.load_sharded_metadata(Path(checkpoint_dir)).values())
        return asked

    meetings = sp.rendezvous.MeetingSequence(sp.rendezvous.connect(), f"match {checkpoint_dir}")
    every = meetings.exchange("keys", read, lambda keys: set[str]().union(*keys), set[str], set[str])
    missing = set[str]()
    if StrictHandling.requires_global_app_metadata(strict):
        missing = stored - every - {COMMON_KEY}  # every load has the common state
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        maybe_report_missing_and_unexpected_keys(missing, every - stored, True)
    elif strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        maybe_report_missing_and_unexpected_keys(missing, asked - stored, False)
    return missing, asked - stored


def _verify(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Verifies all files on rank 0. The error reaches all ranks."""
    rendezvous = sp.rendezvous.connect()

    def check() -> bytes:
        report = verify(sp.storage.LocalStorage(os.fspath(checkpoint_dir)), rendezvous.progress)
        if report.faults:
            raise report.faults[0]
        return b""

    on_rank_0(rendezvous, f"verify {checkpoint_dir}", "verify", check)

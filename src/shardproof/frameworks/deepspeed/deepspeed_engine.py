"""Checkpoints of DeepSpeed engines at ZeRO stages 1, 2 and 3.

    engine, *_ = deepspeed.initialize(model=module, ...)
    path, client_state = adapter.load_checkpoint(engine, "runs/example")
    adapter.save_checkpoint(engine, "runs/example", client_state={"epoch": 3})

For saves in the background and retention, use ``sp.Checkpointer("runs/example")`` with `engine_state`.

ZeRO cuts flat buffers into one partition for each rank. The position of every parameter follows from the
sizes of the parameters before it. So nothing is gathered, and a checkpoint loads at another stage and on
another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import shardproof as sp
from shardproof.frameworks.deepspeed.deepspeed_files import is_of_deepspeed, load_files
from shardproof.frameworks.shared.partitions import Partition, PartitionedModule
from shardproof.frameworks.shared.rank_work import on_rank_0
from shardproof.frameworks.shared.zero_blocks import (
    BlockOptimizer,
    flat_blocks,
    frozen_partition,
    sharded_blocks,
)

__all__ = ["engine_state", "load_checkpoint", "save_checkpoint"]

_LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def engine_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The state of an engine, as a state tree. Create it once, and use it for all saves and loads.

    Args:
        engine: the result of `deepspeed.initialize`, with ZeRO at stage 1, 2 or 3.

    Returns:
        ``model`` (parameters and buffers), ``optimizer`` (fp32 masters and the state of each parameter) and
        ``engine`` (counts, learning rate scheduler, loss scaler). Add values of the program under other
        names.

    Raises:
        StructureError: the engine has a layout that is not supported: another optimizer wrapper, parameters
            on NVMe, a mixture of experts, or model or pipeline parallelism.

    Example:
        state = {**engine_state(engine), "epoch": 0}
        checkpointer.restore(state)
    """
    _check_supported(engine)
    zero = engine.optimizer
    is_stage_3 = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
    blocks = list(sharded_blocks(zero) if is_stage_3 else flat_blocks(zero))
    by_parameter = {id(parameter): part for block in blocks for parameter, part, _ in block.parameters}
    module = engine.module
    names: dict[str, Partition] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in by_parameter and hasattr(parameter, "ds_tensor"):
            by_parameter[id(parameter)] = frozen_partition(parameter)
        part = by_parameter.get(id(parameter))
        if part is not None:
            part.name = part.name or name
            names[name] = part
    partitioned = BlockOptimizer(zero, blocks)
    return {
        "model": PartitionedModule(module, names, lambda: _release_gathered(zero)),
        "optimizer": sp.OptimizerState(partitioned, names=partitioned.names),  # type: ignore[arg-type]
        "engine": _Engine(engine),
    }


def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
) -> sp.SaveResult:
    """Saves an engine in place of `engine.save_checkpoint`. All ranks call it.

    A committed checkpoint with the same tag is replaced, as DeepSpeed does: a job that ended before it wrote
    ``latest`` saves the tag again after it resumed.

    Args:
        engine: the engine.
        save_dir: folder of the run.
        tag: name of the checkpoint in the folder. Default: ``global_step<N>``.
        client_state: plain values of the program, equal on all ranks.
        save_latest: write the file ``latest``, which names the tag, when the checkpoint is committed.

    Returns:
        The result of the save. The checkpoint is durable.

    Raises:
        ShardproofError: see `shardproof.save`; or rank 0 could not write ``latest``, after the commit. Raised
            on all ranks.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    state = {**engine_state(engine), "client_state": _Client(dict(client_state or {}))}
    result = sp.save(Path(save_dir) / tag, state, step=engine.global_steps, overwrite=True)

    def publish_latest() -> bytes:
        sp.storage.LocalStorage(save_dir).publish(_LATEST, tag.encode(), replace=True)
        return b""

    if save_latest:
        on_rank_0(sp.rendezvous.connect(), f"save {os.fspath(save_dir)}", "latest", publish_latest)
    return result


def load_checkpoint(
    engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], tag: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Loads a checkpoint in place of `engine.load_checkpoint`, at any stage and on any number of ranks.

    It also loads checkpoints that `engine.save_checkpoint` wrote. Rank 0 finds the tag and its format for all
    ranks.

    Args:
        engine: the engine.
        load_dir: folder of the run.
        tag: name of the checkpoint. Default: the one that the file ``latest`` names.

    Returns:
        The path and the client state; None and an empty dict if there is no file ``latest``.

    Raises:
        ShardproofError: see `shardproof.load`; or rank 0 could not read ``latest``. Raised on all ranks.
    """
    tag, is_foreign = _found(os.fspath(load_dir), tag)
    if tag is None:
        return None, {}
    path = Path(load_dir) / tag
    state = engine_state(engine)
    if is_foreign:
        return str(path), load_files(path, state)
    client = _Client({})
    sp.load(path, {**state, "client_state": client})
    return str(path), client.values


class _Engine:
    """Counts, learning rate scheduler and loss scaler of an engine, as plain values."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """The current values."""
        scheduler, zero = self._engine.lr_scheduler, self._engine.optimizer
        return {
            **{name: getattr(self._engine, name) for name in _COUNTS},
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "loss_scaler": dict(vars(zero.loss_scaler)),
            "overflow": bool(zero.overflow),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the stored values. A scaler or scheduler that this engine does not have is left out."""
        zero = self._engine.optimizer
        for name in _COUNTS:
            setattr(self._engine, name, state[name])
        if self._engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self._engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        own = vars(zero.loss_scaler)
        own.update({name: value for name, value in state["loss_scaler"].items() if name in own})
        zero.overflow = state["overflow"]


class _Client:
    """The program's values, as one object."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        """The values."""
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the stored values for the caller."""
        self.values = state


def _found(load_dir: str, tag: str | None) -> tuple[str | None, bool]:
    """The tag to load, and True if DeepSpeed wrote it. Rank 0 reads both for all ranks."""

    def find() -> bytes:
        found = tag
        if found is None and (Path(load_dir) / _LATEST).exists():
            found = (Path(load_dir) / _LATEST).read_text().strip()
        return msgspec.json.encode((found, found is not None and is_of_deepspeed(Path(load_dir) / found)))

    answer = on_rank_0(sp.rendezvous.connect(), f"load {load_dir}", "format", find)
    return msgspec.json.decode(answer, type=tuple[str | None, bool])


def _release_gathered(zero: Any) -> None:
    """Stage 3: releases gathered parameters, which are gathered again where they are used."""
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        zero.checkpoint_event_prologue()
        zero.invalidate_secondary_tensor()


def _check_supported(engine: DeepSpeedEngine) -> None:
    zero = engine.optimizer
    if not isinstance(zero, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        raise sp.StructureError(
            f"the engine's optimizer is a {type(zero).__name__}, expected ZeRO at stage 1, 2 or 3: set "
            '"zero_optimization": {"stage": 1} in the configuration, or save engine.module and the optimizer'
        )
    for name, found in (
        ("a mixture of experts", engine.has_moe_layers),
        ("model parallelism", engine.mp_world_size > 1),
        ("pipeline parallelism", type(engine).__name__ == "PipelineEngine"),
    ):
        if found:
            raise sp.StructureError(
                f"the engine has {name}, whose layout is not supported: save with engine.save_checkpoint"
            )

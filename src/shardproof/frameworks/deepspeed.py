"""Checkpoints of DeepSpeed engines at ZeRO stages 1, 2 and 3, also loaded from those that DeepSpeed wrote.

    engine, *_ = deepspeed.initialize(model=module, ...)
    path, client_state = adapter.load_checkpoint(engine, "runs/example")
    adapter.save_checkpoint(engine, "runs/example", client_state={"epoch": 3})

For saves in the background and retention, use ``sp.Checkpointer("runs/example")`` with `engine_state`.

ZeRO cuts flat buffers into one partition for each rank. The position of every parameter follows from the
sizes of the parameters before it. So nothing is gathered, and a checkpoint loads at another stage and on
another number of ranks. The reader of `shardproof.formats` describes the files of DeepSpeed with the keys in
docs/migrate.md. Each rank reads its own ranges.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import shardproof as sp
from shardproof.engine.state import MASTER, LocalRange, Receipt, StoredSlot, options_of
from shardproof.frameworks.shared.partitions import Partition, PartitionedModule
from shardproof.frameworks.shared.rank_work import on_every_rank, on_rank_0
from shardproof.frameworks.shared.zero_blocks import (
    BlockOptimizer,
    flat_blocks,
    frozen_partition,
    sharded_blocks,
)

__all__ = ["engine_state", "load_checkpoint", "save_checkpoint"]

_LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_MARK = "ds_version"
_STATE = "optimizer.state."
_OF_ENGINE = ("global_steps", "global_samples", "skipped_steps")
_NO_CLIENT_STATE = (
    *_OF_ENGINE,
    _MARK,
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "dp_world_size",
    "ds_config",
    "fp32",
    "lr_scheduler",
    "module",
    "mp_world_size",
    "optimizer",
    "random_ltd",
)
"""First segments of the keys that DeepSpeed writes. All others are the program's."""
_OF_THE_PROGRAM = ("params", "fused", "foreach", "capturable", "differentiable")


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


def is_of_deepspeed(path: str | os.PathLike[str]) -> bool:
    """True for a tag folder that `engine.save_checkpoint` wrote."""
    with sp.open(path) as checkpoint:
        return _MARK in checkpoint


def load_files(path: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a tag folder of DeepSpeed into the result of `engine_state`. Returns the client state.

    Raises:
        KeyMismatchError: the checkpoint lacks a parameter or a slot, or has another shape.
        RankFailure: a rank cannot open the files or set their state. Raised on all ranks.
    """
    rendezvous, operation = sp.rendezvous.connect(), f"load {os.fspath(path)}"
    with ExitStack() as stack:
        opened: list[Any] = []
        on_every_rank(
            rendezvous, operation, "open", lambda: opened.append(stack.enter_context(sp.open(path)))
        )
        checkpoint = opened[0]
        names = [name for name in state["model"].state_dict() if f"fp32.{name}" not in checkpoint]
        # Stage 1 has frozen parameters in the dtype of training only.
        elsewhere = {f"fp32.{name}": f"module.{name}" for name in names if f"module.{name}" in checkpoint}
        sp.load(path, {"fp32": state["model"]}, include="fp32", rename=elsewhere, cast=True)
        # The masters have the values of the rounded weights now.
        objects: dict[str, Any] = {}
        optimizer = _OptimizerShard(state["optimizer"].optimizer)

        def match() -> None:
            objects.update((key, checkpoint[key]) for key in checkpoint if key in checkpoint.objects)
            optimizer.match(checkpoint)

        on_every_rank(rendezvous, operation, "match", match)
        sp.load(path, optimizer.tree, include=optimizer.include)

        def finish() -> None:
            optimizer.finish(checkpoint)
            _set_engine(state["engine"], objects)

        on_every_rank(rendezvous, operation, "finish", finish)
    own = {key: value for key, value in objects.items() if key.split(".")[0] not in _NO_CLIENT_STATE}
    return {name: _below(own, name) for name in {key.split(".")[0]: None for key in own}}


class _OptimizerShard:
    """The masters and slots of this rank, which a load fills, and the options of the groups.

    Args:
        partitioned: the optimizer, as `shardproof.frameworks.deepspeed.engine_state` describes it.
    """

    def __init__(self, partitioned: Any) -> None:
        self._partitioned = partitioned
        self._slots: dict[str, dict[str, Any]] = {}
        self._receipts: dict[str, Receipt] = {}
        self.tree: dict[str, Any] = {}
        """The state tree to load."""
        self.include: list[str] = []
        """The keys of the checkpoint to load."""

    def match(self, checkpoint: Any) -> None:
        """Allocates memory for the slots of the checkpoint."""
        masters: dict[str, Any] = {}
        stored = _slots_by_parameter(checkpoint, self._partitioned.names)
        for name, parameter in self._partitioned.names.items():
            tensors = {slot: key for slot, key in stored[name].items() if key not in checkpoint.objects}
            kinds = {
                slot: StoredSlot(getattr(torch, checkpoint.dtype(key)), tuple(checkpoint.shape(key)))
                for slot, key in tensors.items()
            }
            receipt = self._receipts[name] = self._partitioned.receive_slots(parameter, kinds)
            self._slots[name] = {
                slot: _place(receipt.tensors[slot], parameter) if slot in tensors else checkpoint[key]
                for slot, key in stored[name].items()
            }
            if MASTER in receipt.tensors:
                masters[name] = _place(receipt.tensors[MASTER], parameter)
        tree = {"fp32": masters, "optimizer": {"state": self._slots}}
        self.tree = {key: value for key, value in tree.items() if value}
        self.include = ["optimizer.state", *(f"fp32.{name}" for name in masters)]

    def finish(self, checkpoint: Any) -> None:
        """Attaches the loaded slots to the optimizer and sets the options of the groups."""
        for name, receipt in self._receipts.items():
            values = {slot: item for slot, item in self._slots[name].items() if slot not in receipt.tensors}
            receipt.attach(values, frozenset(receipt.tensors))
        _set_options(checkpoint, self._partitioned)


def _slots_by_parameter(checkpoint: Any, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name of each parameter to its slots and their keys. A slot may have several segments."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for key in checkpoint:
        if key.startswith(_STATE):
            segments = key.removeprefix(_STATE).split(".")
            heads = (".".join(segments[:size]) for size in range(1, len(segments)))
            name = next((head for head in heads if head in found), None)
            if name is not None:
                found[name][key.removeprefix(f"{_STATE}{name}.")] = key
    return found


def _set_engine(engine: Any, objects: Mapping[str, Any]) -> None:
    """Sets counts, learning rate scheduler and loss scaler."""
    present = engine.state_dict()
    scaler, scheduler = _below(objects, "optimizer.loss_scaler"), _below(objects, "lr_scheduler")
    engine.load_state_dict(
        {
            **present,
            **{name: objects.get(name, present[name]) for name in _OF_ENGINE},
            "lr_scheduler": scheduler if isinstance(scheduler, dict) else None,
            "loss_scaler": scaler or {},
            "overflow": objects.get("optimizer.overflow", False),
        }
    )


def _place(item: torch.Tensor | LocalRange, parameter: torch.Tensor) -> torch.Tensor | sp.FlatShard:
    if isinstance(item, LocalRange):
        return sp.FlatShard(item.buffer, tuple(parameter.shape), item.start, item.stop)
    return item


def _set_options(checkpoint: Any, partitioned: Any) -> None:
    """Sets the options of each group to those of its parameters in the checkpoint."""
    stored: dict[str, int] = {}
    for number in itertools.count():
        if f"optimizer.param_groups.{number}.params" not in checkpoint:
            break
        stored |= dict.fromkeys(checkpoint[f"optimizer.param_groups.{number}.params"], number)
    names = {id(parameter): name for name, parameter in partitioned.names.items()}
    for group in partitioned.param_groups:
        numbers = {stored.get(names[id(parameter)]) for parameter in group["params"]} - {None}
        if len(numbers) != 1:
            continue  # the checkpoint groups these parameters differently: keep the program's options
        prefix = f"optimizer.param_groups.{numbers.pop()}."
        for option in options_of(group, _OF_THE_PROGRAM):
            if f"{prefix}{option}" in checkpoint.objects:
                group[option] = checkpoint[f"{prefix}{option}"]


def _below(objects: Mapping[str, Any], name: str) -> Any:
    """The plain value at a key, as nested dicts if the checkpoint has keys below it; None without any."""
    if name in objects:
        return objects[name]
    nested: dict[str, Any] = {}
    for key, value in objects.items():
        if key.startswith(f"{name}."):
            *path, last = key.removeprefix(f"{name}.").split(".")
            place = nested
            for segment in path:
                place = place.setdefault(segment, {})
            place[last] = value
    return nested or None

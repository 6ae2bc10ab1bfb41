"""Checkpoints of DeepSpeed engines at ZeRO stages 1, 2 and 3.

    engine, *_ = deepspeed.initialize(model=module, ...)
    path, client_state = adapter.load_checkpoint(engine, "runs/example")
    adapter.save_checkpoint(engine, "runs/example", client_state={"epoch": 3})

or, with saves in the background and retention, ``sp.Checkpointer("runs/example")`` and `engine_state`.

ZeRO cuts flat buffers into one partition for each rank. The position of every parameter follows from the
sizes of the parameters before it, so nothing is gathered, and a checkpoint loads at another stage and on
another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import shardproof as sp
from shardproof.frameworks.partitions import Partition, PartitionedModule, PartitionedOptimizer
from shardproof.state import StoredSlot

__all__ = ["engine_state", "load_checkpoint", "save_checkpoint"]

_LATEST = "latest"
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def engine_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The state of an engine, as a state tree. Make it once, and use it for all saves and loads.

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
    blocks = list(_sharded_blocks(zero) if _is_stage_3(zero) else _flat_blocks(zero))
    by_parameter = {id(parameter): part for block in blocks for parameter, part in block.parameters}
    module = engine.module
    names: dict[str, Partition] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in by_parameter and hasattr(parameter, "ds_tensor"):
            by_parameter[id(parameter)] = _frozen(parameter)
        part = by_parameter.get(id(parameter))
        if part is not None:
            part.name = part.name or name
            names[name] = part
    keeper = _Optimizer(zero, blocks)
    return {
        "model": PartitionedModule(module, names, _after_load(zero)),
        "optimizer": sp.OptimizerState(keeper, names=keeper.names),  # type: ignore[arg-type]
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

    Args:
        engine: the engine.
        save_dir: folder of the run.
        tag: name of the checkpoint in the folder. Default: ``global_step<N>``.
        client_state: plain values of the program, equal on all ranks.
        save_latest: write the file ``latest``, which names the tag, when the checkpoint is committed.

    Returns:
        The result of the save. The checkpoint is durable.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    state = {**engine_state(engine), "client_state": _Client(dict(client_state or {}))}
    result = sp.save(Path(save_dir) / tag, state, step=engine.global_steps)
    if save_latest and dist.get_rank() == 0:
        fresh = Path(save_dir) / f"{_LATEST}.{os.getpid()}"
        fresh.write_text(tag)
        os.replace(fresh, Path(save_dir) / _LATEST)
    return result


def load_checkpoint(
    engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], tag: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Loads a checkpoint in place of `engine.load_checkpoint`, at any stage and on any number of ranks.

    Args:
        engine: the engine.
        load_dir: folder of the run.
        tag: name of the checkpoint. Default: the one that the file ``latest`` names.

    Returns:
        The path and the client state; None and an empty dict if there is no file ``latest``.
    """
    if tag is None:
        latest = Path(load_dir) / _LATEST
        if not latest.exists():
            return None, {}
        tag = latest.read_text().strip()
    path = Path(load_dir) / tag
    client = _Client({})
    sp.load(path, {**engine_state(engine), "client_state": client})
    return str(path), client.values


class _Block:
    """A flat fp32 tensor that the base optimizer steps, and the parameters in it."""

    def __init__(self, group: dict[str, Any], stepped: torch.Tensor) -> None:
        self.group = group
        self.stepped = stepped
        self.parameters: list[tuple[torch.Tensor, Partition]] = []
        self.places: dict[int, int] = {}
        """Id of a partition to its first element in the flat tensor."""

    def add(self, parameter: torch.Tensor, place: int, partition: Partition) -> None:
        self.parameters.append((parameter, partition))
        self.places[id(partition)] = place


def _flat_blocks(zero: Any) -> Iterator[_Block]:
    """Stages 1 and 2: the parameters of a group follow each other, and each rank has one part of all."""
    for row, group in enumerate(zero.optimizer.param_groups):
        flat, stepped = zero.bit16_groups_flat[row], zero.single_partition_of_fp32_groups[row].detach()
        begin = zero.partition_size[row] * dist.get_rank(zero.real_dp_process_group[row])
        block = _Block(group, zero.single_partition_of_fp32_groups[row])
        parameters = zero.round_robin_bit16_groups[row]
        for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[row], strict=True):
            numel = parameter.numel()
            start = min(max(begin - offset, 0), numel)
            stop = max(min(begin + len(stepped) - offset, numel), start)
            whole = flat.detach().narrow(0, offset, numel)
            main = stepped.narrow(0, min(max(offset + start - begin, 0), len(stepped)), stop - start)
            block.add(
                parameter,
                offset + start - begin if stop > start else 0,
                _partition(tuple(parameter.shape), start, stop, whole[start:stop], main, [flat], whole),
            )
        yield block


def _sharded_blocks(zero: Any) -> Iterator[_Block]:
    """Stage 3: each rank has one part of every parameter, and its parts of a sub-group follow each other."""
    for row, parameters in enumerate(zero.fp16_groups):
        flat, stepped = zero.fp16_partitioned_groups_flat[row], zero.fp32_partitioned_groups_flat[row]
        if flat is None or len(flat) != len(stepped):
            raise sp.StructureError(
                "parameters or optimizer state are offloaded to NVMe, which is not supported: offload to the "
                "CPU, or save with DeepSpeed's own save_checkpoint"
            )
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[row]]
        block, place = _Block(group, stepped), 0
        for parameter in parameters:
            start, stop, count = _part_of(parameter)
            weight, main = (item.detach().narrow(0, place, stop - start) for item in (flat, stepped))
            block.add(
                parameter,
                place,
                _partition(tuple(parameter.ds_shape), start, stop, weight, main, [flat]),
            )
            place += count
        yield block


def _partition(
    shape: tuple[int, ...],
    start: int,
    stop: int,
    weight: torch.Tensor,
    main: torch.Tensor,
    owners: list[torch.Tensor],
    whole: torch.Tensor | None = None,
) -> Partition:
    """A partition whose name is not known yet.

    Args:
        shape: of the parameter.
        start: first element of this rank's range.
        stop: element after the last.
        weight: memory of the range in the dtype of the model.
        main: memory of the range that the optimizer steps.
        owners: the buffer of the weight.
        whole: memory of the whole weight, if this rank has it.
    """
    if main.dtype != weight.dtype:
        return Partition("", shape, start, stop, weight, main, whole=whole, owners=owners)
    copies = [] if main.data_ptr() == weight.data_ptr() else [main]
    return Partition("", shape, start, stop, weight, whole=whole, copies=copies, owners=owners)


def _part_of(parameter: Any) -> tuple[int, int, int]:
    """First element and element after the last of a parameter at stage 3, and elements with padding."""
    count, numel = int(parameter.partition_numel()), int(parameter.ds_numel)
    start = min(count * dist.get_rank(parameter.ds_process_group), numel)
    return start, min(start + count, numel), count


def _frozen(parameter: Any) -> Partition:
    """The partition of a parameter at stage 3 that no optimizer trains."""
    start, stop, _ = _part_of(parameter)
    weight = parameter.ds_tensor.detach().view(-1).narrow(0, 0, stop - start)
    return Partition("", tuple(parameter.ds_shape), start, stop, weight)


class _Optimizer(PartitionedOptimizer):
    """The base optimizer of ZeRO, whose state is that of flat tensors."""

    def __init__(self, zero: Any, blocks: list[_Block]) -> None:
        self._base = zero.optimizer
        self._blocks = {id(part): block for block in blocks for _, part in block.parameters}
        self._fresh: dict[tuple[int, str], torch.Tensor] = {}
        """New flat tensors by block and slot, until a load attaches them."""
        self._shared: dict[tuple[int, str], tuple[str, Any]] = {}
        """Scalars of a block by slot, with the parameter that they were loaded from."""
        groups = []
        for group in zero.optimizer.param_groups:
            parts = [part for block in blocks if block.group is group for _, part in block.parameters]
            groups.append((group, parts))
        super().__init__(zero.optimizer, groups)

    def state_of(self, partition: Partition) -> Mapping[str, Any]:
        """Ranges of the flat tensors. All parameters of a flat tensor share its scalars."""
        block = self._blocks[id(partition)]
        return {
            slot: self._range(partition, item)
            if _is_flat(item, block)
            else (item.clone() if isinstance(item, torch.Tensor) else item)
            for slot, item in (self._base.state.get(block.stepped) or {}).items()
        }

    def new_slot(self, partition: Partition, slot: str, stored: StoredSlot) -> torch.Tensor:
        """A range of a new flat tensor, or a scalar."""
        new = super().new_slot(partition, slot, stored)
        if not new.dim():
            return new
        block = self._blocks[id(partition)]
        flat = self._fresh.setdefault(
            (id(block), slot), torch.zeros(len(block.stepped), dtype=new.dtype, device=new.device)
        )
        return self._range(partition, flat)

    def set_state(self, partition: Partition, state: dict[str, Any]) -> None:
        """Attaches new flat tensors. Scalars must be equal for all parameters of a flat tensor."""
        block = self._blocks[id(partition)]
        first = partition is block.parameters[0][1]
        if first:
            self._shared = {key: value for key, value in self._shared.items() if key[0] != id(block)}
        if not state:
            if first:
                self._base.state.pop(block.stepped, None)
            return
        present = self._base.state.setdefault(block.stepped, {})
        for slot, item in state.items():
            key = id(block), slot
            if isinstance(item, torch.Tensor) and item.dim():
                if slot not in present:
                    present[slot] = self._fresh.pop(key)
                continue
            name, value = self._shared.setdefault(key, (partition.name, item))
            if value != item:
                raise sp.StructureError(
                    f"the checkpoint has {slot} {value} for {name} and {item} for {partition.name}, but "
                    "DeepSpeed has one for all parameters of a flat tensor. Put them into separate groups",
                    key=partition.name,
                )
            present[slot] = item

    def _range(self, partition: Partition, flat: torch.Tensor) -> torch.Tensor:
        place = self._blocks[id(partition)].places[id(partition)]
        return flat.detach().narrow(0, place, partition.stop - partition.start)


def _is_flat(item: Any, block: _Block) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 1 and len(item) == len(block.stepped)


class _Engine:
    """Counts, learning rate scheduler and loss scaler of an engine, as plain values."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """The present values."""
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


def _is_stage_3(zero: Any) -> bool:
    return isinstance(zero, DeepSpeedZeroOptimizer_Stage3)


def _after_load(zero: Any) -> Callable[[], None]:
    """Stage 3: releases gathered parameters, which are gathered again where they are used."""

    def release() -> None:
        if _is_stage_3(zero):
            zero.checkpoint_event_prologue()
            zero.invalidate_secondary_tensor()

    return release


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

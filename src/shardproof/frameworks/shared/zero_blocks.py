"""Positions of the parameters of a live ZeRO engine: ranges of flat tensors, by arithmetic.

`shardproof.formats` has the same arithmetic for files of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.engine.state import StoredSlot
from shardproof.frameworks.shared.partitions import Partition, PartitionedOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class FlatBlock:
    """A flat fp32 tensor that the base optimizer steps, and the parameters in it."""

    group: dict[str, Any]
    stepped: torch.Tensor
    parameters: list[tuple[torch.Tensor, Partition, int]] = field(default_factory=list)
    """Each parameter with its partition, and the partition's first element in the flat tensor."""


def flat_blocks(zero: Any) -> Iterator[FlatBlock]:
    """Stages 1 and 2: the parameters of a group follow each other. Each rank has one part of the group."""
    for row, group in enumerate(zero.optimizer.param_groups):
        flat, stepped = zero.bit16_groups_flat[row], zero.single_partition_of_fp32_groups[row].detach()
        begin = zero.partition_size[row] * dist.get_rank(zero.real_dp_process_group[row])
        block = FlatBlock(group, zero.single_partition_of_fp32_groups[row])
        parameters = zero.round_robin_bit16_groups[row]
        for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[row], strict=True):
            numel = parameter.numel()
            start = min(max(begin - offset, 0), numel)
            stop = max(min(begin + len(stepped) - offset, numel), start)
            whole = flat.detach().narrow(0, offset, numel)
            place = min(max(offset + start - begin, 0), len(stepped))
            weight, main = whole[start:stop], stepped.narrow(0, place, stop - start)
            partition = _partition(tuple(parameter.shape), start, stop, weight, main, [flat], whole)
            block.parameters.append((parameter, partition, place))
        yield block


def sharded_blocks(zero: Any) -> Iterator[FlatBlock]:
    """Stage 3: each rank has one part of every parameter, and its parts of a sub-group follow each other."""
    for row, parameters in enumerate(zero.fp16_groups):
        flat, stepped = zero.fp16_partitioned_groups_flat[row], zero.fp32_partitioned_groups_flat[row]
        if flat is None or len(flat) != len(stepped):
            raise sp.StructureError(
                "parameters or optimizer state are offloaded to NVMe, which is not supported: offload to the "
                "CPU, or save with DeepSpeed's own save_checkpoint"
            )
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[row]]
        block, place = FlatBlock(group, stepped), 0
        for parameter in parameters:
            start, stop, count = _part_of(parameter)
            weight, main = (item.detach().narrow(0, place, stop - start) for item in (flat, stepped))
            partition = _partition(tuple(parameter.ds_shape), start, stop, weight, main, [flat])
            block.parameters.append((parameter, partition, place))
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
    """A partition whose name is not known yet. `main` is the memory of the range that the optimizer steps."""
    if main.dtype != weight.dtype:
        return Partition("", shape, start, stop, weight, main, whole=whole, owners=owners)
    copies = [] if main.data_ptr() == weight.data_ptr() else [main]
    return Partition("", shape, start, stop, weight, whole=whole, copies=copies, owners=owners)


def _part_of(parameter: Any) -> tuple[int, int, int]:
    """First element and element after the last of a parameter at stage 3, and elements with padding."""
    count, numel = int(parameter.partition_numel()), int(parameter.ds_numel)
    start = min(count * dist.get_rank(parameter.ds_process_group), numel)
    return start, min(start + count, numel), count


def frozen_partition(parameter: Any) -> Partition:
    """The partition of a parameter at stage 3 that no optimizer trains."""
    start, stop, _ = _part_of(parameter)
    weight = parameter.ds_tensor.detach().view(-1).narrow(0, 0, stop - start)
    return Partition("", tuple(parameter.ds_shape), start, stop, weight)


class BlockOptimizer(PartitionedOptimizer):
    """The base optimizer of ZeRO, whose state consists of flat tensors."""

    def __init__(self, zero: Any, blocks: list[FlatBlock]) -> None:
        self._base = zero.optimizer
        self._places = {id(part): (block, at) for block in blocks for _, part, at in block.parameters}
        """Id of a partition to its block, and to its first element there."""
        self._fresh: dict[tuple[int, str], torch.Tensor] = {}
        """New flat tensors by block and slot, until a load attaches them."""
        self._shared: dict[tuple[int, str], tuple[str, Any]] = {}
        """Scalars of a block by slot, with the parameter that they were loaded from."""
        groups = []
        for group in zero.optimizer.param_groups:
            parts = [part for block in blocks if block.group is group for _, part, _ in block.parameters]
            groups.append((group, parts))
        super().__init__(zero.optimizer, groups)

    def state_of(self, partition: Partition) -> Mapping[str, Any]:
        """Ranges of the flat tensors. All parameters of a flat tensor share its scalars."""
        block, _ = self._places[id(partition)]
        found: dict[str, Any] = {}
        for slot, item in (self._base.state.get(block.stepped) or {}).items():
            if not isinstance(item, torch.Tensor):
                found[slot] = item
            elif item.dim() == 1 and len(item) == len(block.stepped):
                found[slot] = self._range(partition, item)
            else:
                found[slot] = item.clone()
        return found

    def new_slot(self, partition: Partition, slot: str, stored: StoredSlot) -> torch.Tensor:
        """A range of a new flat tensor, or a scalar."""
        new = super().new_slot(partition, slot, stored)
        if not new.dim():
            return new
        block, _ = self._places[id(partition)]
        key = id(block), slot
        if key not in self._fresh:
            self._fresh[key] = torch.zeros(len(block.stepped), dtype=new.dtype, device=new.device)
        return self._range(partition, self._fresh[key])

    def set_state(self, partition: Partition, state: dict[str, Any]) -> None:
        """Attaches new flat tensors. Scalars must be equal for all parameters of a flat tensor."""
        block, _ = self._places[id(partition)]
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
                    "DeepSpeed has one value for all parameters of a flat tensor. Put the parameters into "
                    "separate groups",
                    key=partition.name,
                )
            present[slot] = item

    def _range(self, partition: Partition, flat: torch.Tensor) -> torch.Tensor:
        _, place = self._places[id(partition)]
        return flat.detach().narrow(0, place, partition.stop - partition.start)

"""Checkpoints of Megatron-FSDP, without its collectives.

    model, optimizer = megatron_fsdp.fully_shard(module, optimizer, ...)
    state = {
        "model": adapter.module_state(model),  # adapter: shardproof.frameworks.megatron_fsdp
        "optimizer": adapter.optimizer_state(optimizer, model),
    }
    checkpointer = sp.Checkpointer("runs/example")
    checkpointer.restore(state)

Megatron-FSDP packs parameters into buffers and cuts each buffer into equal parts, so a rank has some rows of
a parameter, or none. The position of every range follows from the buffer. Megatron-FSDP's own `state_dict`
gathers the positions instead, with a collective for each tensor.

Keys are the names of the module inside. A weight has the dtype of the model, even if the optimizer steps main
weights of another dtype. The main weights are the slot ``master`` of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from megatron_fsdp import MegatronFSDP
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.frameworks.partitions import Partition, PartitionedModule, PartitionedOptimizer
from shardproof.geometry import IndexMap
from shardproof.state import LOCAL, dtensor_index_map, is_dtensor, local_tensor

__all__ = ["module_state", "optimizer_state"]

_PARTITIONS = "_shardproof_partitions"
"""Attribute of a model: its partitions. All states of the model share them."""


def module_state(model: MegatronFSDP) -> torch.nn.Module:
    """The parameters and buffers of a model, as a value of a state tree.

    Create it once, after `fully_shard` or `fully_shard_model`. A load fills the model's own memory, on any
    number of ranks and at any ZeRO stage. It also updates the main weights.

    Args:
        model: the model.

    Returns:
        A module for `sp.save`, `sp.load` and `sp.Checkpointer`. It shares the memory of `model`.

    Raises:
        StructureError: a parameter has a layout that is not supported: fp8, Megatron-Core's tensor
            parallelism, expert parallelism.
    """
    partitions = _partitions_of(model)
    by_parameter = {id(model.raw_param[name]): part for name, part in partitions.items()}
    by_parameter |= {
        id(parameter): partitions[name]
        for name, parameter in model.param_and_grad_buffer.optimizer_named_parameters
    }
    names = {
        name: by_parameter[id(parameter)]
        for name, parameter in model.module.named_parameters(remove_duplicate=False)
    }
    return PartitionedModule(model.module, names, model.synchronize_param_gather)


def optimizer_state(optimizer: torch.optim.Optimizer, model: MegatronFSDP) -> sp.OptimizerState:
    """The state of an optimizer of a model, as a value of a state tree.

    Args:
        optimizer: the result of `fully_shard` or `fully_shard_optimizer`.
        model: the model that it trains.

    Returns:
        A value for `sp.save`, `sp.load` and `sp.Checkpointer`, with the keys ``<name>.<slot>``.

    Raises:
        StructureError: the optimizer trains a parameter that is not one of the model's distributed
            parameters.
    """
    partitioned = _FsdpOptimizer(optimizer, model)
    return sp.OptimizerState(partitioned, names=partitioned.names)  # type: ignore[arg-type]


class _FsdpOptimizer(PartitionedOptimizer):
    """An optimizer whose parameters are the DTensors of Megatron-FSDP."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: MegatronFSDP) -> None:
        partitions = _partitions_of(model)
        named = model.param_and_grad_buffer.optimizer_named_parameters
        found = {id(parameter): partitions[name] for name, parameter in named}
        self._state = optimizer.state
        self._distributed = {id(partitions[name]): parameter for name, parameter in named}
        groups = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in found:
                    raise sp.StructureError(
                        f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not a "
                        "distributed parameter of the model. Make it from model.parameters() after "
                        "fully_shard_model, or use fully_shard for both"
                    )
            groups.append((group, [found[id(parameter)] for parameter in group["params"]]))
        super().__init__(optimizer, groups)

    def state_of(self, partition: Partition) -> Mapping[str, Any]:
        """The local ranges of the optimizer's DTensors."""
        parameter = self._distributed[id(partition)]
        return {
            slot: _flat(item) if is_dtensor(item) else item
            for slot, item in (self._state.get(parameter) or {}).items()
        }

    def set_state(self, partition: Partition, state: dict[str, Any]) -> None:
        """Existing DTensors stay; new ranges become DTensors like the parameter."""
        parameter = self._distributed[id(partition)]
        if partition.is_elsewhere or not state:
            self._state.pop(parameter, None)  # Megatron-FSDP has no entry then
            return
        present = self._state.get(parameter) or {}
        self._state[parameter] = {
            slot: present[slot]
            if is_dtensor(present.get(slot)) and isinstance(item, torch.Tensor)
            else _like(parameter, item)
            for slot, item in state.items()
        }


def _partitions_of(model: MegatronFSDP) -> dict[str, Partition]:
    """The partition of each parameter by name; tied parameters have one."""
    if not isinstance(model, MegatronFSDP):
        raise sp.StructureError(
            f"expected a model of Megatron-FSDP, found {type(model).__name__}. Pass the result of "
            "megatron_fsdp.fully_shard, not the module inside"
        )
    partitions: dict[str, Partition] | None = model.__dict__.get(_PARTITIONS)
    if partitions is None:
        buffer = model.param_and_grad_buffer
        distributed = dict(buffer.optimizer_named_parameters)
        partitions = {}
        for group in buffer.parameter_groups:
            for number, raw in enumerate(group.params):
                name = buffer.param_to_name[raw]
                _check_supported(name, raw, distributed[name], group, model)
                partitions[name] = _partition(name, raw, distributed[name], group, number)
        model.__dict__[_PARTITIONS] = partitions
    return partitions


def _partition(name: str, raw: torch.Tensor, parameter: torch.Tensor, group: Any, number: int) -> Partition:
    """The partition of parameter `number` of a group that shares buffers.

    `raw` is the module's parameter, and `parameter` the optimizer's.
    """
    shape = tuple(local_tensor(raw).shape)
    local: slice = getattr(parameter, "megatron_fsdp_slice", slice(0, prod(shape)))
    main, weights = group.main_weight_buffer, group.model_weight_buffer
    stepped = _flat(parameter)
    start, stop = (local.start, local.stop) if stepped.numel() else (0, 0)
    owners = [buffer.data for buffer in (main, weights) if buffer is not None]
    weight, master, copies = stepped, None, []
    if main is not None:
        own = _flat(raw) if weights is None else weights.get_item(number, only_shard=True)
        if own.dtype == stepped.dtype:
            copies = [own]
        else:
            weight, master = own, stepped
    index_map = dtensor_index_map(raw, name) if is_dtensor(raw) else None
    return Partition(
        name,
        shape,
        start,
        stop,
        weight,
        master,
        copies=copies,
        owners=owners,
        description=_description(raw, weight.dtype, index_map),
        index_map=index_map,
        is_gathered_in_place=(main is None or master is not None)
        and weights is not None
        and not weights.is_data_distributed,
    )


def _description(raw: Any, dtype: torch.dtype, index_map: IndexMap | None) -> torch.Tensor | None:
    """The parameter without memory, if it is a tensor parallel DTensor."""
    if index_map is None:
        return None
    described = _distributed(torch.empty(local_tensor(raw).shape, dtype=dtype, device="meta"), raw)
    setattr(described, LOCAL, index_map)
    return described


def _check_supported(
    name: str, raw: torch.Tensor, parameter: torch.Tensor, group: Any, model: MegatronFSDP
) -> None:
    if group.dtype == "float8":
        raise sp.StructureError(
            f"{name} is stored in fp8, which is not supported: save with Megatron-FSDP's own state_dict, or "
            "train without fp8 parameters"
        )
    if not is_dtensor(raw) and tuple(parameter.shape) != tuple(raw.shape):
        raise sp.StructureError(
            f"{name} has shape {list(raw.shape)} on this rank and {list(parameter.shape)} over the tensor "
            "parallel ranks of Megatron-Core, whose fused weights (gate and up, query, key and value) cannot "
            "be distinguished from others. Use tensor parallelism by DTensor, or tensor parallel size 1"
        )
    if group.is_expert_param and model.dist_index.expt_device_mesh is not None:
        raise sp.StructureError(
            f"{name} is an expert under expert parallelism, which is not supported: ranks number their own "
            "experts from 0, so different experts have one key"
        )


@torch.no_grad()
def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements in row-major order, as 1-D view."""
    return local_tensor(tensor).detach().view(-1)


def _like(parameter: Any, item: Any) -> Any:
    """A new slot as a DTensor with the rows of the parameter; scalars and plain values as they are."""
    if not (isinstance(item, torch.Tensor) and item.dim()):
        return item
    return _distributed(item.view(local_tensor(parameter).shape), parameter)


def _distributed(local: torch.Tensor, like: Any) -> DTensor:
    """A DTensor with the layout of another, whose local tensor is `local`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )

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

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

import shardproof as sp
from shardproof.engine.geometry import IndexMap
from shardproof.engine.state import (
    LOCAL,
    MASTER,
    Layout,
    LocalRange,
    ParameterSlots,
    Receipt,
    SlotProvider,
    StoredSlot,
    declared,
    dtensor_index_map,
    is_dtensor,
    local_tensor,
)
from shardproof.frameworks.megatron.uneven_dtensors import (
    UnevenDTensor,
    attach_chunk_metadata,
    distributed_like,
    megatron_fsdp_of,
    uneven_dtensors,
)
from shardproof.frameworks.shared.partitions import Partition, PartitionedModule, PartitionedOptimizer

__all__ = [
    "attach_chunk_metadata",
    "enable_optimizer_offload",
    "hybrid_device_optimizer",
    "module_state",
    "optimizer_state",
]

_PARTITIONS = "_shardproof_partitions"
"""Attribute of a model: its partitions. All states of the model share them."""


def module_state(model: torch.nn.Module) -> torch.nn.Module:
    """The parameters and buffers of a model, as a value of a state tree.

    Create it once, after `fully_shard` or `fully_shard_model`. A load fills the model's own memory, on any
    number of ranks and at any ZeRO stage. It also updates the main weights.

    Args:
        model: the model.

    Returns:
        A module for `sp.save`, `sp.load` and `sp.Checkpointer`. It shares the memory of `model`.

    Raises:
        StructureError: a parameter is fp8; or it belongs to a tensor or expert parallel rank of Megatron-Core
            and has no declared layout (`shardproof.layouts`).
    """
    inner = megatron_fsdp_of(model)
    partitions = _partitions_of(inner)
    names = {name: partitions[item.name] for name, item in uneven_dtensors(inner).items()}
    return PartitionedModule(inner.module, names, inner.synchronize_param_gather)


def optimizer_state(optimizer: Any, model: torch.nn.Module) -> sp.OptimizerState:
    """The state of an optimizer of a model, as a value of a state tree.

    Args:
        optimizer: the result of `fully_shard` or `fully_shard_optimizer`, or an optimizer that Megatron-Core
            made for the model (`DistributedOptimizer`).
        model: the model that it trains.

    Returns:
        A value for `sp.save`, `sp.load` and `sp.Checkpointer`, with the keys ``<name>.<slot>``.

    Raises:
        StructureError: the optimizer trains a parameter that is not one of the model's distributed
            parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of Megatron-Core's
    kind = _DescribedOptimizer if isinstance(optimizer, SlotProvider) else _FsdpOptimizer
    return sp.OptimizerState(kind(optimizer, model), module_state(model))  # type: ignore[arg-type]


def hybrid_device_optimizer(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Make Megatron-Core's `HybridDeviceOptimizer` for the parameters of a model. Needs megatron-core.

    The released class cannot step the DTensors of Megatron-FSDP. This one steps their local tensors, on the
    CPU and on the device as the options say. Pass it to `fully_shard_optimizer`, as any other optimizer:

        model = fully_shard_model(module, ...)
        optimizer = megatron_fsdp.hybrid_device_optimizer(
            model.parameters(),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            lr=1e-4,
        )
        optimizer = fully_shard_optimizer(optimizer)

    Args:
        params: parameters of the model, or groups of them.
        options: arguments of Megatron-Core's class.

    Returns:
        An instance of a subclass of Megatron-Core's class. Its `state_dict` has DTensors with their positions
        for `torch.distributed.checkpoint`, and gathers nothing.
    """
    from shardproof.frameworks.megatron.megatron_offload import MegatronHybridOptimizer  # needs megatron-core

    return MegatronHybridOptimizer(params, **options)


def enable_optimizer_offload() -> None:
    """Make Megatron-Core's ``optimizer_cpu_offload`` work with Megatron-FSDP.

    Call it before `get_megatron_optimizer`, which then makes a `HybridDeviceOptimizer` as
    `hybrid_device_optimizer` does. The released class fails in its first step:

        megatron_fsdp.enable_optimizer_offload()
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer_cpu_offload=True, ...), [model])

    It replaces the name ``HybridDeviceOptimizer`` in the module ``megatron.core.optimizer`` of this process.
    """
    from megatron.core import optimizer as factory

    from shardproof.frameworks.megatron.megatron_offload import MegatronHybridOptimizer

    factory.HybridDeviceOptimizer = MegatronHybridOptimizer


class _FsdpOptimizer(PartitionedOptimizer):
    """An optimizer whose parameters are the DTensors of Megatron-FSDP."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        inner = megatron_fsdp_of(model)
        partitions = _partitions_of(inner)
        named = inner.param_and_grad_buffer.optimizer_named_parameters
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


class _DescribedOptimizer(_FsdpOptimizer):
    """An optimizer that describes its slots, as the hybrid ones do: their sub-optimizers have the state."""

    def __init__(self, optimizer: Any, model: torch.nn.Module) -> None:
        super().__init__(optimizer, model)
        self._provider: SlotProvider = optimizer
        self._part_of = {id(self._distributed[id(part)]): part for part in self._by_parameter.values()}

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """The optimizer's slots. A master is that of Megatron-FSDP, or else of the optimizer."""
        for slots in self._provider.describe_slots():
            part = self._part_of[id(slots.parameter)]
            if part.is_elsewhere:
                continue
            tensors = _ranges(part, slots.tensors)
            if part.master is not None:
                tensors[MASTER] = part.range_of(part.master)
            yield replace(slots, parameter=part.parameter, tensors=tensors, weights=part.stepped)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """The optimizer's destinations. Its copies follow the loaded parameter."""
        part = self._by_parameter[id(parameter)]
        trained = self._distributed[id(part)]
        shape = tuple(local_tensor(trained).shape)
        masters, finish = part.receive_master(stored)
        local = {
            slot: replace(like, shape=shape if like.shape else ())
            for slot, like in stored.items()
            if slot not in masters
        }
        receipt = self._provider.receive_slots(trained, local)

        def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
            finish(filled)
            receipt.attach(values, filled - masters.keys())

        return Receipt(receipt.kind, _ranges(part, receipt.tensors) | masters, attach)


def _ranges(part: Partition, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor | LocalRange]:
    """The local tensors of slots as ranges of a partition."""
    return {slot: part.range_of(local_tensor(item).detach()) for slot, item in tensors.items()}


def _partitions_of(model: Any) -> dict[str, Partition]:
    """The partition of each parameter by name; tied parameters have one."""
    partitions: dict[str, Partition] | None = model.__dict__.get(_PARTITIONS)
    if partitions is None:
        buffer = model.param_and_grad_buffer
        described, layouts = uneven_dtensors(model), declared(model.module.named_modules())
        partitions = {}
        for group in buffer.parameter_groups:
            for number, raw in enumerate(group.params):
                name = buffer.param_to_name[raw]
                _check_supported(name, raw, described[name].parameter, group, model, layouts)
                partitions[name] = _partition(described[name], raw, group, number)
        model.__dict__[_PARTITIONS] = partitions
    return partitions


def _partition(described: UnevenDTensor, raw: torch.Tensor, group: Any, number: int) -> Partition:
    """The partition of parameter `number` of a group that shares buffers. `raw` is the module's parameter."""
    main, weights = group.main_weight_buffer, group.model_weight_buffer
    stepped = _flat(described.parameter)
    owners = [buffer.data for buffer in (main, weights) if buffer is not None]
    weight, master, copies = stepped, None, []
    if main is not None:
        own = _flat(raw) if weights is None else weights.get_item(number, only_shard=True)
        if own.dtype == stepped.dtype:
            copies = [own]
        else:
            weight, master = own, stepped
    index_map = dtensor_index_map(raw, described.name) if is_dtensor(raw) else None
    return Partition(
        described.name,
        described.shape,
        described.start,
        described.stop,
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
    described = distributed_like(torch.empty(local_tensor(raw).shape, dtype=dtype, device="meta"), raw)
    setattr(described, LOCAL, index_map)
    return described


def _check_supported(
    name: str,
    raw: torch.Tensor,
    parameter: torch.Tensor,
    group: Any,
    model: Any,
    layouts: Mapping[str, Layout],
) -> None:
    if group.dtype == "float8":
        raise sp.StructureError(
            f"{name} is stored in fp8, which is not supported: save with Megatron-FSDP's own state_dict, or "
            "train without fp8 parameters"
        )
    if not is_dtensor(raw) and tuple(parameter.shape) != tuple(raw.shape) and name not in layouts:
        raise sp.StructureError(
            f"{name} has shape {list(raw.shape)} on this rank and {list(parameter.shape)} over the tensor "
            "parallel ranks of Megatron-Core, whose fused weights (gate and up) cannot be distinguished from "
            "others. Before fully_shard, declare the part of this rank: shardproof.layouts.swiglu(MODULE, "
            "NAME, SIZE, rank=RANK, ranks=RANKS) for gate and up, and shardproof.layouts.fused(MODULE, NAME, "
            "[SIZE], rank=RANK, ranks=RANKS, dim=DIM) for a weight that is divided along one dimension"
        )
    if group.is_expert_param and name not in layouts and _is_expert_parallel(model.dist_index):
        raise sp.StructureError(
            f"{name} is an expert under expert parallelism. Ranks number their own experts from 0, so "
            "different experts have one key. Before fully_shard, declare the numbers of this rank's experts: "
            "shardproof.layouts.experts.sequential(EXPERTS, first=FIRST, total=TOTAL)"
        )


def _is_expert_parallel(index: Any) -> bool:
    """True if the ranks of a `FSDPDistributedIndex` have different experts."""
    if index.expt_device_mesh is None:
        return False
    experts, dense = (
        index.get_dp_group(is_expert).size() * index.get_submesh(index.tp_dim, is_expert).size()
        for is_expert in (True, False)
    )
    return bool(experts != dense)


@torch.no_grad()
def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements in row-major order, as 1-D view."""
    return local_tensor(tensor).detach().view(-1)


def _like(parameter: Any, item: Any) -> Any:
    """A new slot as a DTensor with the rows of the parameter; scalars and plain values as they are."""
    if not (isinstance(item, torch.Tensor) and item.dim()):
        return item
    return distributed_like(item.view(local_tensor(parameter).shape), parameter)

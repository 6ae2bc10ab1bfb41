"""Describes a Megatron-FSDP state dict for `torch.distributed.checkpoint`, without communication.

DCP asks the local tensor of a DTensor for its chunk (``__create_chunk_list__``) and for its write items
(``__create_write_items__``). Megatron-FSDP gathers the chunk of each tensor. This module computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import shardproof as sp
from shardproof.engine.state import is_dtensor, local_tensor
from shardproof.frameworks.megatron.uneven_dtensors import (
    UnevenDTensor,
    gated_weights,
    megatron_fsdp_of,
    uneven_dtensors,
)


def attach_chunk_metadata(
    state_dict: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    fused: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Describe the DTensors of a state dict for `torch.distributed.checkpoint`, without communication.

    Replaces ``preprocess_state_dict_for_uneven_dtensor`` of Megatron-FSDP, and
    ``handle_swiglu_in_state_dict`` of Megatron-Core. These run several collectives for each tensor, and wait
    for a rank that has fewer tensors. ``state_dict()`` of a model and of an optimizer runs them too, unless
    both were made with ``preproc_state_dict_for_dcp_ckpt=False``:

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        described = megatron_fsdp.attach_chunk_metadata(state, model, optimizer)
        dcp.save(described, checkpoint_id=path)  # or dcp.load, which fills the tensors of `state`

    Args:
        state_dict: nested dicts and lists with the state dict of the model, of the optimizer, or both. Names
            of parameters may begin with ``module.``.
        model: the model, of megatron-fsdp or of Megatron-Core.
        optimizer: the optimizer, if its state dict has numbers of parameters (every torch optimizer) or names
            of experts in the whole model (`DistributedOptimizer` of Megatron-Core).
        fused: for each fused weight, the suffixes and rows of its parts on this tensor parallel rank, in
            order. Each part gets an entry of its own. None: gate and up of Megatron-Core's gated layers, as
            ``_w`` and ``_v``.

    Returns:
        The described state dict. A dict that has a fused weight, and each dict around it, is a new dict. All
        other values are those of `state_dict`, and parts share the memory of their weight: a load into
        the result also fills the tensors of `state_dict`.

    Raises:
        StructureError: a DTensor belongs to no parameter of the model, or has another shape; the parts do not
            have the rows of their weight; the model is not of Megatron-FSDP; a key has the number that this
            rank gives to an expert, and `optimizer` has its number in the whole model.
    """
    inner = megatron_fsdp_of(model)
    parameters = uneven_dtensors(inner)
    parts = gated_weights(inner.module) if fused is None else fused
    unknown = sorted(set(parts) - set(parameters))
    if unknown:
        raise sp.StructureError(
            f"the fused weights {unknown} are no parameters of the model. Give names of "
            "model.module.named_parameters()"
        )
    state = _StateDict(parameters, parts)
    state.name_by(optimizer)
    described = state.described(state_dict, "")
    assert isinstance(described, dict)
    return described


class _StateDict:
    """Finds the parameter of each value in a state dict, by the keys on its path."""

    def __init__(
        self, parameters: Mapping[str, UnevenDTensor], parts: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._by_name = dict(parameters)
        self._by_number: list[UnevenDTensor | None] = []
        self._rows = {id(parameters[name]): rows for name, rows in parts.items()}
        self._renamed: dict[str, str] = {}
        """Names of experts on this rank, to their names in the whole model where these differ."""

    def name_by(self, optimizer: Any) -> None:
        """Adds the numbers and names that an optimizer gives to its parameters."""
        found = {id(item.parameter): item for item in self._by_name.values()}
        for member in _members(optimizer):
            name_of: Callable[[torch.Tensor], str] | None = getattr(member, "_param_name", None)
            tensors = {id(tensor): tensor for group in member.param_groups for tensor in group["params"]}
            self._by_number = [found.get(identity) for identity in tensors]
            for identity, tensor in tensors.items():
                if name_of is not None and identity in found:
                    whole = _without_prefix(name_of(tensor))
                    self._by_name[whole] = found[identity]
                    if whole != found[identity].name:
                        self._renamed[found[identity].name] = whole

    def described(self, value: Any, key: str, owner: UnevenDTensor | None = None) -> Any:
        """`value` with positions and with parts. The same object if nothing below it is fused."""
        if is_dtensor(value):
            if owner is None:
                raise sp.StructureError(
                    f"{key}: this DTensor belongs to no parameter of the model. Pass the state dicts of the "
                    "model and of its optimizer, and optimizer=OPTIMIZER if the keys are numbers or "
                    "Megatron-Core's names of experts",
                    key=key,
                )
            attach_chunk(value, owner.chunk_of(value, key))
            return value
        if isinstance(value, list):
            items = [self.described(item, f"{key}.{at}", owner) for at, item in enumerate(value)]
            return value if all(map(_is, items, value)) else items
        if not isinstance(value, Mapping):
            return value
        result = {}
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            found = owner or self._named(name, key)
            if owner is None and found is not None:
                self._check_expert(name, path)
            rows = self._rows.get(id(found)) if owner is None else None
            if rows is None:
                result[name] = self.described(item, path, found)
            else:
                assert found is not None
                for suffix in rows:
                    result[f"{name}{suffix}"] = _part(item, path, found, suffix, rows)
        same = result.keys() == value.keys() and all(map(_is, result.values(), value.values()))
        return value if same and isinstance(value, dict) else result

    def _check_expert(self, name: Any, key: str) -> None:
        """Refuses the name of an expert on this rank. Other ranks give it to other experts."""
        whole = self._renamed.get(_without_prefix(name)) if isinstance(name, str) else None
        if whole is not None:
            raise sp.StructureError(
                f"{key} is a name that each expert parallel rank gives to another expert: all but one would "
                f"be lost. In the whole model it is {whole}. Pass the model's state dict through "
                "megatron.core.transformer.fsdp_dtensor_checkpoint.handle_experts_in_state_dict(STATE_DICT, "
                "NUM_EXPERTS) first",
                key=key,
            )

    def _named(self, name: Any, key: str) -> UnevenDTensor | None:
        if isinstance(name, int) and key.rpartition(".")[2] == "state":
            return self._by_number[name] if name < len(self._by_number) else None
        while isinstance(name, str):
            if name in self._by_name:
                return self._by_name[name]
            prefix, _, rest = name.partition(".")
            name = rest if prefix == "module" else None
        return None


def _without_prefix(name: str) -> str:
    """A name without the ``module.`` of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _part(value: Any, key: str, owner: UnevenDTensor, suffix: str, rows: Mapping[str, int]) -> Any:
    """One part of every DTensor in `value`. Other values belong to each part."""
    if is_dtensor(value):
        part, chunk = owner.parts_of(value, key, rows)[suffix]
        attach_chunk(part, chunk)
        return part
    if isinstance(value, Mapping):
        return {name: _part(item, f"{key}.{name}", owner, suffix, rows) for name, item in value.items()}
    return value


def attach_chunk(tensor: Any, chunk: ChunkStorageMetadata) -> None:
    """Describes one DTensor: its local tensor has the elements of `chunk`."""

    def write_items(key: str, written: Any) -> list[WriteItem]:
        local = local_tensor(written)
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), written.size())
        return [WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    local = cast(Any, local_tensor(tensor))
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items


def _members(optimizer: Any) -> Iterator[Any]:
    """The optimizer, or those that Megatron-Core chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for member in chained:
            yield from _members(member)
    elif optimizer is not None:
        yield optimizer


def _is(one: object, other: object) -> bool:
    return one is other

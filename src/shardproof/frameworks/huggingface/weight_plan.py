"""Maps each tensor of the files to boxes of a model's tensors, by the conversions of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

import shardproof as sp
from shardproof._utils.humanize import listed
from shardproof.engine.state import flat_tensors, local_layout, local_tensor
from shardproof.frameworks.shared.traced_tensor import TracedBox, TracedTensor, inverse, local_parts

_Shape: TypeAlias = "tuple[int, ...]"
FileTensors: TypeAlias = "dict[str, tuple[_Shape, list[tuple[str, TracedBox]]]]"
"""By key in the files: the shape, and for each part of the tensor the name and the box of the model's tensor.
The source of the box is the tensor of the files."""


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers by name, tied ones under each of their names.

    A parameter of FSDP1 is on the meta device.
    """
    return {name: tensor for name, (tensor, _) in _tensors(model).items()}


def _tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, sp.LocalShards | None]]:
    """The tensors of `tensors_of`, each with its part on this rank if it does not have the memory itself."""
    if flat := flat_tensors(model):
        return flat
    state = model.state_dict(keep_vars=True)
    return {name: (value, None) for name, value in state.items() if isinstance(value, torch.Tensor)}


def state_of(model: torch.nn.Module, plan: FileTensors) -> dict[str, sp.LocalShards]:
    """This rank's memory of a model under the keys of the files."""
    local = {
        name: local_layout(tensor, None, name).pieces(local_tensor(tensor)) if part is None else part
        for name, (tensor, part) in _tensors(model).items()
    }
    return {
        key: sp.LocalShards(
            shape,
            [piece for name, box in boxes for piece in local_parts(box, local[name])],
            dtype=local[boxes[0][0]].dtype,
        )
        for key, (shape, boxes) in plan.items()
    }


def plan_load(model: PreTrainedModel, shapes: Mapping[str, _Shape], location: str) -> FileTensors:
    """Finds the boxes of the model that each stored tensor fills, from the shapes of the stored tensors.

    Raises:
        KeyMismatchError: the keys or shapes of the model and the files do not match.
        StructureError: a conversion is not supported, or a tie of the model is broken.
    """
    tensors = tensors_of(model)
    _check_ties(model, tensors)
    converted, unexpected = _converted(model, tensors, shapes)
    mismatched = [
        f"{name}: expected shape {list(tensors[name].shape)}, found {list(value.shape)}"
        for name, value in converted.items()
        if tuple(tensors[name].shape) != value.shape
    ]
    names: dict[int, list[str]] = {}
    for name in converted:
        names.setdefault(id(tensors[name]), []).append(name)
    twice = [f"{' and '.join(tied)}: one tensor in the model" for tied in names.values() if len(tied) > 1]
    optional = model._keys_to_ignore_on_load_missing
    missing = [
        name
        for name, tensor in tensors.items()
        if id(tensor) not in names
        and (isinstance(tensor, torch.nn.Parameter) or not _matches(name, optional))
    ]
    _check_fit(location, missing, _unexpected(model, unexpected), mismatched, twice)
    plan: FileTensors = {}
    for name, value in converted.items():
        for box in value.boxes:
            plan.setdefault(box.source, (shapes[box.source], []))[1].append((name, box))
    return plan


def plan_save(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> FileTensors:
    """Finds the tensors that `save_pretrained` of transformers stores, and the boxes that they consist of."""
    _check_ties(model, tensors)
    left_out = {*(model._keys_to_ignore_on_save or ()), *(model.all_tied_weights_keys or ())}
    traced = {
        name: TracedTensor.of(name, tensor.shape) for name, tensor in tensors.items() if name not in left_out
    }
    try:
        stored: dict[str, TracedTensor] = revert_weight_conversion(model, traced)
    except Exception as error:  # conversions of transformers raise exceptions of any class
        raise sp.StructureError(
            f"the tensors of {type(model).__name__} do not convert to those of its files: {error}. Save the "
            "model with shardproof.save, and export it with save_pretrained of transformers on one rank"
        ) from error
    return {
        key: (value.shape, [(box.source, inverse(key, box)) for box in value.boxes])
        for key, value in stored.items()
    }


def _converted(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, _Shape]
) -> tuple[dict[str, TracedTensor], list[str]]:
    """The tensors of the model as boxes of the stored ones, and the stored keys that it has no place for."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    found: dict[str, TracedTensor] = {}
    groups: dict[str, Any] = {}
    stored: dict[str, list[TracedTensor]] = {}
    unexpected = []
    prefix = model.base_model_prefix
    for key in sorted(shapes, key=dot_natural_key):  # experts in the order of their numbers
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:
            name, pattern = key, None
        traced = TracedTensor.of(key, shapes[key])
        if name not in tensors:
            unexpected.append(key)
        elif pattern is None:
            found[name] = traced
        else:
            group = groups.setdefault(name, deepcopy(by_pattern[pattern]))
            group.add_tensor(name, key, pattern, traced)
            stored.setdefault(name, []).append(traced)
    for name, group in groups.items():
        try:
            result = group.convert(name, model=model, config=model.config)
        except Exception as error:  # conversions of transformers raise exceptions of any class
            keys = [box.source for parts in stored[name] for box in parts.boxes]
            raise sp.StructureError(
                f"the stored tensors {listed(keys)} do not convert to {name} of {type(model).__name__}: "
                f"{error}. If none of them is missing, shardproof does not support the conversion: load with "
                "from_pretrained, before the model is sharded",
                key=name,
            ) from error
        found |= {key: value[0] if isinstance(value, list) else value for key, value in result.items()}
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # for the next save
    return found, unexpected


def _check_ties(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    for target, source in (model.all_tied_weights_keys or {}).items():
        if tensors.get(target) is not tensors.get(source):
            raise sp.StructureError(
                f"the configuration of {type(model).__name__} ties {target} to {source}, but they are two "
                "tensors in the model. Call model.tie_weights() after tensor parallelism is applied, and put "
                "both in one group of fully_shard",
                key=target,
            )


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _unexpected(model: PreTrainedModel, keys: Iterable[str]) -> list[str]:
    """The keys without those that `from_pretrained` ignores, such as buffers in old files."""
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ())}
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        ignored.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        ignored.add(r"(^|\.)position_ids$")
    return [key for key in keys if not _matches(key, ignored)]


def _check_fit(
    location: str,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Sequence[str],
    twice: Sequence[str],
) -> None:
    lines = [f"{location} does not fit the model; nothing was changed."]
    for title, items in (
        ("tensors of the model that are not stored", missing),
        ("stored, but not in the model (exclude= ignores them)", unexpected),
        ("different", mismatched),
        ("stored twice (exclude= one, or untie them: tie_word_embeddings=False)", twice),
    ):
        if items:
            lines.append(f"  {title} ({len(items)}):")
            lines.extend(f"    {item}" for item in items[:20])
            if len(items) > 20:
                lines.append(f"    ... and {len(items) - 20} more")
    if len(lines) > 1:
        raise sp.KeyMismatchError(
            "\n".join(lines), missing=list(missing), unexpected=list(unexpected), mismatched=list(mismatched)
        )

"""Rules that join the weights of Megatron's GPT and Llama over tensor- and pipeline-parallel ranks.

Keys and shapes are those of Megatron's sharded state dict. For example, the weights
``decoder.layers.<n>.mlp.linear_fc2.weight`` of all layers are one tensor
``decoder.layers.mlp.linear_fc2.weight`` with the layers as its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardproof.engine.foreign import StoredBox, StoredView, TensorDescription
from shardproof.engine.geometry import row_major_strides


@dataclass(frozen=True, slots=True)
class StageTensor:
    """The part of a weight that one rank holds."""

    dtype: str
    shape: tuple[int, ...]
    view: StoredView


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names in models without Transformer Engine to the names in the sharded state dict."""
_GATED = "mlp.linear_fc1"
_SPLIT: Mapping[str, int | None] = {
    "embedding.word_embeddings.weight": 0,
    "embedding.position_embeddings.weight": None,
    "output_layer.weight": 0,
    "decoder.final_layernorm.weight": None,
    "decoder.final_layernorm.bias": None,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_qkv.layer_norm_weight": None,
    "self_attention.linear_qkv.layer_norm_bias": None,
    "self_attention.q_layernorm.weight": None,
    "self_attention.q_layernorm.bias": None,
    "self_attention.k_layernorm.weight": None,
    "self_attention.k_layernorm.bias": None,
    "self_attention.linear_proj.weight": 1,
    "self_attention.linear_proj.bias": None,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc1.bias": 0,
    "mlp.linear_fc1.layer_norm_weight": None,
    "mlp.linear_fc1.layer_norm_bias": None,
    "mlp.linear_fc2.weight": 1,
    "mlp.linear_fc2.bias": None,
}
"""The dimension that tensor parallelism splits; None if each rank has the whole weight."""


def merged_model(
    stages: Sequence[Sequence[Mapping[str, StageTensor]]], width: int
) -> dict[str, TensorDescription]:
    """Joins the weights of all ranks.

    Args:
        stages: for each pipeline stage, in the order of layers, and each tensor-parallel rank, the weights by
            their keys in the model.
        width: number of tensor-parallel ranks.

    Returns:
        The weights by their keys in the sharded state dict.

    Raises:
        ValueError: a key has no rule, or ranks or layers do not fit together.
    """
    found: dict[str, list[list[StageTensor]]] = {}
    layers = 0
    for stage in stages:
        if any(rank.keys() != stage[0].keys() for rank in stage):
            raise ValueError("tensor-parallel ranks have different keys")
        numbers = {int(match[1]) for key in stage[0] if (match := _LAYER.fullmatch(key))}
        if numbers != set(range(len(numbers))):
            raise ValueError(f"the layers of a stage are {sorted(numbers)}, expected 0 to {len(numbers) - 1}")
        for key in sorted(stage[0], key=_order):
            name, is_layer = _renamed(key)
            parts = [rank[key] for rank in stage]
            if is_layer:
                found.setdefault(name, []).append(parts)
            else:
                found.setdefault(name, [parts])  # the first and the last stage both have a tied embedding
        layers += len(numbers)
    return {name: _joined(name, parts, found, layers) for name, parts in found.items()}


def _order(key: str) -> tuple[int, str]:
    match = _LAYER.fullmatch(key)
    return (int(match[1]), match[2]) if match else (-1, key)


def _renamed(key: str) -> tuple[str, bool]:
    match = _LAYER.fullmatch(key)
    name = match[2] if match else key
    for old, new in _RENAMED.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    if name not in _SPLIT or (match is None) != name.startswith(("embedding.", "output_layer.", "decoder.")):
        raise ValueError(f"there is no rule for {key}")
    return (f"decoder.layers.{name}", True) if match else (name, False)


def _joined(
    key: str, layers: list[list[StageTensor]], found: Mapping[str, list[list[StageTensor]]], count: int
) -> TensorDescription:
    is_layer = key.startswith("decoder.layers.")
    if is_layer and len(layers) != count:
        raise ValueError(f"{len(layers)} of {count} layers have {key}")
    name = key.removeprefix("decoder.layers.")
    axis = _SPLIT[name]
    first = layers[0][0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for parts in layers for part in parts):
        raise ValueError(f"ranks or layers have different dtypes or shapes of {key}")
    ranks = len(layers[0]) if axis is not None else 1
    halves = 2 if name.startswith(_GATED) and axis == 0 and _is_gated(first, found) else 1
    shape = list(first.shape)
    if axis is not None:
        if axis >= len(shape) or shape[axis] % halves:
            raise ValueError(f"{key} of shape {tuple(shape)} cannot be split in dimension {axis}")
        shape[axis] *= ranks
    boxes = []
    for layer, parts in enumerate(layers):
        for rank, part in enumerate(parts[:ranks]):
            for half in range(halves):
                offsets, sizes = [0] * len(shape), list(part.shape)
                start = part.view.offset
                if axis is not None:
                    size = sizes[axis] = part.shape[axis] // halves
                    offsets[axis] = (half * ranks + rank) * size
                    start += half * size * part.view.stride[axis]
                stride = part.view.stride
                if is_layer:
                    offsets, sizes = [layer, *offsets], [1, *sizes]
                    dense = tuple(row_major_strides(sizes))
                    stride = dense if dense[1:] == stride else (0, *stride)
                if prod(sizes):
                    boxes.append(StoredBox.of(offsets, sizes, StoredView(part.view.extent, start, stride)))
    whole = (count, *shape) if is_layer else tuple(shape)
    return TensorDescription(first.dtype, whole, sorted(boxes, key=lambda box: box.offsets))


def _is_gated(part: StageTensor, found: Mapping[str, list[list[StageTensor]]]) -> bool:
    """True if the first layer of the MLP has the rows of a gate and of an up projection, as in SwiGLU."""
    second = found.get("decoder.layers.mlp.linear_fc2.weight")
    if second is None or len(second[0][0].shape) != 2:
        raise ValueError("mlp.linear_fc1 has no mlp.linear_fc2.weight")
    inner = second[0][0].shape[1]
    if part.shape[0] not in (inner, 2 * inner):
        raise ValueError(f"mlp.linear_fc1 has {part.shape[0]} rows, expected {inner} or {2 * inner}")
    return part.shape[0] == 2 * inner

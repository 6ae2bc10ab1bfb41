"""Reads Megatron-LM's checkpoints of the format ``torch``: one folder for each model-parallel rank.

The folder of a rank is ``mp_rank_TT``, with pipeline or expert parallelism ``mp_rank_TT_PPP`` and
``mp_rank_TT_PPP_EEE``. Each has ``model_optim_rng.pt``, and ``distrib_optim.pt`` for the distributed
optimizer. The buckets of that optimizer are flat, and the format does not store the position of a parameter
in its bucket. It does not store either how parallelism splits a weight. So each rank has keys of its own:
``mp_rank_00/model_optim_rng/model.decoder.final_layernorm.weight``.

The format "megatron_legacy_merged" joins the weights of Megatron's GPT and Llama over tensor- and
pipeline-parallel ranks. Its keys and shapes are those of Megatron's sharded state dict. For example, the
weights ``decoder.layers.<n>.mlp.linear_fc2.weight`` of all layers are one tensor
``decoder.layers.mlp.linear_fc2.weight`` with the layers as its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardproof.engine.foreign import Foreign, StoredBox, StoredView, TensorDescription
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, NotCommittedError
from shardproof.formats.megatron.megatron_run import latest_iteration
from shardproof.formats.torch.torch_file import TorchFile, TorchTensor
from shardproof.formats.torch.torch_save import TorchFilesReader


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


def merged_model(stages: Sequence[Sequence[Mapping[str, StageTensor]]]) -> dict[str, TensorDescription]:
    """Joins the weights of all ranks.

    Args:
        stages: for each pipeline stage, in the order of layers, and each tensor-parallel rank, the weights by
            their keys in the model.

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


_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_FILES = (*_MODEL_FILES, "distrib_optim.pt", "optim.pt")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""Arguments of the run that give the number of ranks."""


class MegatronLegacyReader(TorchFilesReader):
    """A run folder, or the folder of an iteration, open for reading; see `FormatReader`.

    Example:
        >>> import os, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> os.mkdir(f"{folder}/mp_rank_00")
        >>> state = {"iteration": 7, "model": {"weight": torch.zeros(3, 2)}}
        >>> torch.save(state, f"{folder}/mp_rank_00/model_optim_rng.pt")
        >>> reader = MegatronLegacyReader(Foreign(LocalStorage(folder)))
        >>> reader.step, list(reader.tensors)
        (7, ['mp_rank_00/model_optim_rng/model.weight'])
    """

    name = "megatron_legacy"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(latest_iteration(foreign))
        ranks = _rank_folders(self.storage)
        if not ranks:
            raise NotCommittedError(
                f"{self.location} has no mp_rank_00/{_MODEL_FILES[0]}: its save did not finish",
                file=self.location,
            )
        self.models: dict[tuple[int, ...], TorchFile] = {}
        """File of the model by the numbers in the name of its rank's folder."""
        for rank in ranks:
            match = _RANK.fullmatch(rank)
            assert match is not None
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            self._add_rank(rank, numbers)
        first = next(iter(self.models.values())).value
        iteration = first.get("iteration")
        self.step = iteration if type(iteration) is int else None
        arguments = first.get("args")
        self.arguments: Mapping[str, Any] = arguments if isinstance(arguments, Mapping) else {}
        """Arguments of the run, as plain data."""
        self.world_size = _count(self.arguments.get("world_size")) or len(ranks)
        self._check_ranks(ranks)
        self.conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a run folder or the folder of an iteration, if it has the folder of a rank."""
        return foreign.file is None and bool(_rank_folders(latest_iteration(foreign).storage))

    def _add_rank(self, rank: str, numbers: tuple[int, ...]) -> None:
        for name in _FILES:
            path = f"{rank}/{name}"
            if self.storage.size(path) is None:
                continue
            file = self.add_torch_file(path, f"{rank}/{name.removesuffix('.pt')}/")
            if name in _MODEL_FILES:
                self.models[numbers] = file
                if not isinstance(file.value, dict):
                    raise self.fault(path, "it does not hold a dict")
        if numbers not in self.models:
            raise self.fault(
                f"{rank}/{_MODEL_FILES[0]}",
                "it is missing, but the folder of its rank is there: restore it from a copy",
            )

    def _check_ranks(self, ranks: list[str]) -> None:
        """Checks that the ranks form a full grid of the size that the arguments give."""
        widths = {len(numbers) for numbers in self.models}
        count = 1
        for column in zip(*self.models, strict=False):
            count *= max(column) + 1
        if len(widths) > 1 or count != len(self.models):
            raise FormatError(
                f"{self.location}: the folders {', '.join(ranks[:9])} are not those of one set of ranks: "
                "some are missing, or left from another run",
                file=self.location,
            )
        sizes = [_count(self.arguments.get(name)) for name in _SIZES]
        if not sizes[0] or not sizes[1]:
            self.notes.append("It does not store the number of ranks: a missing last rank is not found.")
        elif len(self.models) not in (sizes[0] * sizes[1], sizes[0] * sizes[1] * (sizes[2] or 1)):
            raise FormatError(
                f"{self.location} has {len(self.models)} folders of ranks, expected {sizes[0] * sizes[1]}, "
                "as the arguments of the run say: restore the missing ones",
                file=self.location,
            )


class MegatronLegacyMergedReader(MegatronLegacyReader):
    """`MegatronLegacyReader` with the weights of all tensor- and pipeline-parallel ranks joined.

    It never recognizes a path, so the caller has to name the format. Its rules are those of Megatron's GPT
    and Llama models, and a checkpoint does not tell whether they apply. Weights have the keys of Megatron's
    sharded state dict, with the layers as the first dimension. All other values have the keys of their rank.
    """

    name = "megatron_legacy_merged"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        rank, name = next(iter(self.models.values())).path.rsplit("/", 2)[1:]
        version = self._objects.get(f"{rank}/{name.removesuffix('.pt')}/checkpoint_version")
        if version is None or type(version.value) not in (int, float) or version.value < 3:
            raise self._refused(
                "its checkpoint_version is below 3, which orders query, key and value in another way"
            )
        stages = self._stages()
        try:
            merged = merged_model(stages)
        except ValueError as error:
            raise self._refused(str(error)) from error
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if not _is_model(key)}
        self.aliases = {key: other for key, other in self.aliases.items() if not _is_model(key)}
        if lost := [alias for alias, key in self.aliases.items() if key not in self.tensors]:
            raise self._refused(f"{min(lost)} is tied to a weight")
        self._objects = {
            key: found
            for key, found in self._objects.items()
            if not _is_model(key) or found.value is not None
        }
        self.tensors |= merged
        self.notes.append(
            "The weights of ranks are joined by the rules of GPT and Llama. The checkpoint does not store "
            "whether these rules apply."
        )

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """Never true: the caller has to name the format."""
        return False

    def _stages(self) -> list[list[dict[str, StageTensor]]]:
        """For each pipeline stage in the order of layers, the weights of each tensor-parallel rank."""
        if (
            any(len(numbers) > 2 for numbers in self.models)
            or (_count(self.arguments.get(_SIZES[2])) or 1) > 1
        ):
            raise self._refused("it has expert parallelism")
        width = max(numbers[0] for numbers in self.models) + 1
        depth = max((numbers[1] for numbers in self.models if len(numbers) > 1), default=0) + 1
        names = sorted(
            {name for file in self.models.values() for name in file.value if re.fullmatch(r"model\d*", name)},
            key=lambda name: int(name[5:] or 0),
        )
        stages = []
        for name in names:
            for stage in range(depth):
                ranks = [
                    (rank, stage) if depth > 1 or (rank,) not in self.models else (rank,)
                    for rank in range(width)
                ]
                stages.append([_weights(self.models[numbers], name) for numbers in ranks])
        return stages

    def _refused(self, text: str) -> FormatError:
        return FormatError(
            f'{self.location} cannot be merged: {text}. format="megatron_legacy" reads each rank by itself',
            file=self.location,
        )


def _weights(file: TorchFile, name: str) -> dict[str, StageTensor]:
    found = file.value.get(name)
    if not isinstance(found, Mapping):
        return {}
    return {
        str(key): StageTensor(item.dtype, item.shape, file.view(item))
        for key, item in found.items()
        if isinstance(item, TorchTensor)
    }


def _is_model(key: str) -> bool:
    return re.match(r"[^/]*/model(_optim)?_rng/model\d*\.", key) is not None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _rank_folders(storage: Storage) -> list[str]:
    found = [name for name in storage.folders() if _RANK.fullmatch(name)]
    known = any(storage.size(f"{name}/{file}") is not None for name in found for file in _MODEL_FILES)
    return found if known else []

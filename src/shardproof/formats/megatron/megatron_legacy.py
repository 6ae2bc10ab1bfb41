"""Reads Megatron-LM's checkpoints of the format ``torch``: one folder for each model-parallel rank.

The folder of a rank is ``mp_rank_TT``, with pipeline or expert parallelism ``mp_rank_TT_PPP`` and
``mp_rank_TT_PPP_EEE``. Each has ``model_optim_rng.pt``, and ``distrib_optim.pt`` for the distributed
optimizer. The buckets of that optimizer are flat, and the format does not store the position of a parameter
in its bucket. It does not store either how parallelism splits a weight. So each rank has keys of its own:
``mp_rank_00/model_optim_rng/model.decoder.final_layernorm.weight``.

The format "megatron_legacy_merged" joins the weights of ranks by the rules of `megatron_merge`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardproof.engine.foreign import Foreign
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, NotCommittedError
from shardproof.formats.megatron.megatron_merge import StageTensor, merged_model
from shardproof.formats.megatron.megatron_run import latest_iteration
from shardproof.formats.torch.torch_file import TorchFile, TorchTensor
from shardproof.formats.torch.torch_save import TorchFilesReader

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
        stages, width = self._stages()
        try:
            merged = merged_model(stages, width)
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

    def _stages(self) -> tuple[list[list[dict[str, StageTensor]]], int]:
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
        return stages, width

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

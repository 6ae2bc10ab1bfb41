"""Reads checkpoints of DeepSpeed with ZeRO stages 0 to 3, and the universal checkpoints made of them.

A run folder has a file ``latest`` that names the tag folder of the newest save. In a tag folder,
``*_model_states.pt`` has weights, shapes and the state of the engine. Each data-parallel rank has a file
``*_optim_states.pt`` with its partition of the fp32 weights and of the optimizer's state.

``ds_to_universal.py`` makes a universal checkpoint. The file ``latest_universal`` names its tag folder, which
has the files of model states. For each parameter, it has a folder ``zero/<name>`` with the files ``fp32.pt``,
``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``. Files of stage 3 hold flat tensors, and the model states
have the shapes. After model parallelism, these files hold whole parameters, but each file of model states
holds only a part of the model. The keys ``module.<name>`` are then left out.

Keys of both:

- ``module.<name>``: weights and buffers as the file of model states has them, in the dtype of training. At
  stage 3 the file has buffers only.
- ``fp32.<name>``: the whole model: trainable parameters from the partitions, frozen parameters, buffers and
  shared parameters.
- ``optimizer.state.<name>.exp_avg`` and others: the optimizer's state of each parameter, in its shape.
- ``optimizer.param_groups`` and others: values of the optimizer, from rank 0, with parameters by name.
- All other entries of the model states have their own names. Among them is the user's client state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign, Opaque, StoredBox, StoredView, TensorDescription, shape_of
from shardproof.errors import StorageError
from shardproof.formats.deepspeed_states import (
    FIRST_MODEL_STATES,
    DeepSpeedStates,
    PartitionPart,
    cut_pieces,
    joined_pieces,
    mapped_pieces,
    tag_folder,
)
from shardproof.formats.torch.torch_tensors import TorchTensor

_OPTIMIZERS = (
    "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
)
_MARKERS = (*FIRST_MODEL_STATES, *(name.format(0) for name in _OPTIMIZERS))
_STATE = "optimizer_state_dict"
_BASES = ("base_optimizer_state", _STATE)
"""Names of the wrapped optimizer's state dict at stages 1 and 2, and at stage 3."""
_GROUPS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
"""Names of the fp32 weights at stages 1 and 2, and at stage 3."""
_FOLDER, _SUFFIX = "zero/", ".pt"
_OPTIMIZER = "zero/optimizer_state.pt"
_WEIGHTS = "fp32"


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The optimizer states of a rank."""

    name: str
    state: Mapping[str, Any]
    weights: list[Any]
    """Flat fp32 weights of each group."""
    moments: list[Mapping[str, Any]]
    """The optimizer's state of each group."""
    path: tuple[Any, ...]
    """Keys that lead to the state dict of the wrapped optimizer."""
    states_path: tuple[Any, ...]
    """Keys that lead to `moments`."""


class DeepSpeedReader(DeepSpeedStates):
    """A checkpoint of DeepSpeed, open for reading; see `FormatReader`."""

    name = "deepspeed"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(tag_folder(foreign, "latest") or foreign)
        parallel = self.parallelism()
        if parallel is not None:
            name, kind = parallel
            raise self.fault(
                name,
                f"the checkpoint was saved with {kind}, which is not supported: how the parts of a parameter "
                "fit together is not stored for every model. Make a universal checkpoint, and open that: "
                f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {self.location} "
                f"--output_folder {self.location}-universal",
            )
        first = self.first_model_states
        states = self.opened_dict(first)
        shapes = self.shapes(first, states)
        every = {name: shape for group in shapes for name, shape in group.items()}
        try:
            frozen = {
                str(key): shape_of(shape) for key, shape in (states.get("frozen_param_shapes") or {}).items()
            }
            self.add_module(first, states, every | frozen)
            self.add_engine_values(first, states)
            ranks = self._rank_files(states)
            pieces = self._pieces(first, ranks, shapes) if ranks else {}
            self._add_parameters(ranks, every, pieces)
            self.add_frozen(first, frozen)
        except ValueError as error:
            raise self.fault(
                first, f"{error}: it does not fit the optimizer states, or is damaged"
            ) from error
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise self.fault(
                first, f"the checkpoint does not have the structure that DeepSpeed writes ({brief(error)})"
            ) from error
        if ranks:
            self.add_buffers(states)
            self.add_shared(first, states)
            names: list[dict[str, None]] = [
                {} for _ in ranks[0].weights
            ]  # of the parameters in each flat tensor
            for name, parts in pieces.items():
                for part in parts:
                    names[part.group][name] = None
            base = ranks[0].state.get(ranks[0].path[-1])
            groups = base.get("param_groups") if isinstance(base, dict) else None
            self.add_optimizer_values(ranks[0].name, (_STATE,), ranks[0].state)
            self.add_param_groups(ranks[0].name, (*ranks[0].path, "param_groups"), groups, names)
        self._ranks = ranks
        self.conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a tag folder with the files of rank 0, or a run folder whose ``latest`` names one."""
        if any(map(foreign.has, _MARKERS)):
            return True
        tag = tag_folder(foreign, "latest")
        return tag is not None and any(map(tag.has, _MARKERS))

    def verify_extra(self) -> int:
        """Verifies objects, and that all ranks saved the same step of the optimizer."""
        steps: list[dict[int, float]] = []
        for rank in self._ranks:
            found = {}
            for group, state in enumerate(rank.moments):
                step = state.get("step")
                if isinstance(step, TorchTensor) and not step.shape:
                    found[group] = float(self.open_file(rank.name).read(step))
            steps.append(found)
            if found != steps[0]:
                raise self.fault(
                    rank.name,
                    f"the optimizer's steps are {found}, expected {steps[0]} as in {self._ranks[0].name}: "
                    "the file is of another save",
                )
        return super().verify_extra()

    def _rank_files(self, states: Mapping[str, Any]) -> list[_RankFile]:
        """Opens the optimizer states of all ranks; none for a checkpoint without ZeRO.

        Raises:
            StorageError: the file of a rank is missing.
            FormatError: there are files of more ranks, or a file is of another run.
        """
        found = [name for name in self.names if name.endswith("_optim_states.pt")]
        if not found:
            stage = ((states.get("ds_config") or {}).get("zero_optimization") or {}).get("stage", 0)
            if not stage:
                return []
        begins = {name: name.partition("{")[0] for name in _OPTIMIZERS}
        pattern = next(
            (name for name in _OPTIMIZERS if any(item.startswith(begins[name]) for item in found)),
            _OPTIMIZERS[0],
        )
        expected = self.rank_names(pattern)
        for name in found:
            if name not in expected:
                raise self.fault(
                    name,
                    f"{self.world_size} ranks saved the checkpoint, and this file belongs to none of them: "
                    "an older save left it, or files of two checkpoints are in one folder. Remove it if it "
                    "is stale",
                )
        return [self._rank_file(name) for name in expected]

    def _rank_file(self, name: str) -> _RankFile:
        state = self.opened_dict(name).get(_STATE)
        if not isinstance(state, dict):
            raise self.fault(name, "it has no optimizer_state_dict, so ZeRO did not write it")
        counts = state.get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if count != self.world_size:
                raise self.fault(
                    name,
                    f"the optimizer is cut into {brief(count)} partitions, expected {self.world_size}, the "
                    "data-parallel ranks: the file is of another run, or groups are cut over fewer ranks, as "
                    "for a mixture of experts, which is not supported",
                )
        weights = next((state[key] for key in _GROUPS if key in state), None)
        if not isinstance(weights, list):
            raise self.fault(name, "it has no flat fp32 weights")
        path: tuple[Any, ...] = (_STATE, next((key for key in _BASES if key in state), _BASES[0]))
        base = state.get(path[-1]) or {}
        if isinstance(base, list):  # stages 1 and 2 with "elastic_checkpoint"
            moments, states_path = base, path
        else:
            by_group, states_path = base.get("state", {}), (*path, "state")
            moments = [by_group.get(row, {}) for row in range(len(weights))]
        if len(moments) != len(weights):
            raise self.fault(
                name, f"the optimizer has states of {len(moments)} groups, expected {len(weights)}"
            )
        if not all(isinstance(value, TorchTensor) for value in weights):
            raise self.fault(name, "its flat fp32 weights are not tensors")
        return _RankFile(name, state, weights, moments, path, states_path)

    def _pieces(
        self, first: str, ranks: Sequence[_RankFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> dict[str, list[PartitionPart]]:
        """The pieces of each parameter by name."""
        for rank in ranks:
            if len(rank.weights) != len(ranks[0].weights):
                raise self.fault(
                    rank.name,
                    f"it has {len(rank.weights)} groups, expected {len(ranks[0].weights)} as on rank 0",
                )
        if "fp32_flat_groups" in ranks[0].state:
            sizes = [tensor.shape[0] for tensor in ranks[0].weights]
            for rank in ranks:
                if [tensor.shape[0] for tensor in rank.weights] != sizes:
                    raise self.fault(rank.name, f"its flat tensors are not of {sizes} elements, as on rank 0")
            return cut_pieces(dict(chain.from_iterable(group.items() for group in shapes)), sizes, len(ranks))
        if len(shapes) != len(ranks[0].weights):
            raise self.fault(
                first,
                f"it has the shapes of {len(shapes)} groups, expected {len(ranks[0].weights)} as in "
                f"{ranks[0].name}",
            )
        pieces: dict[str, list[PartitionPart]] = {}
        for row, group in enumerate(shapes):
            pieces |= self._group_pieces(ranks, row, group)
        return pieces

    def _group_pieces(
        self, ranks: Sequence[_RankFile], row: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[PartitionPart]]:
        """The pieces of a group at stages 1 and 2: as ranks record them, else in the order of `shapes`."""
        recorded = [rank.state.get("param_slice_mappings") for rank in ranks]
        mapped = mapped_pieces(shapes, row, [_slices(item[row]) for item in recorded if item is not None])
        if shapes.keys() <= mapped.keys():
            return mapped
        paddings = ranks[0].state.get("param_alignment_paddings")
        partition = ranks[0].weights[row].shape[0]  # without padding only if rank 0 holds the whole group
        gaps = paddings[row] if paddings else [0] * len(shapes)
        return joined_pieces(shapes, row, partition, gaps, len(ranks)) | mapped

    def _add_parameters(
        self,
        ranks: Sequence[_RankFile],
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Mapping[str, Sequence[PartitionPart]],
    ) -> None:
        for name, found in pieces.items():
            self.add_flat(f"fp32.{name}", shapes[name], found, [(rank.name, rank.weights) for rank in ranks])
            for key, value in ranks[0].moments[found[0].group].items():
                where = f"optimizer.state.{name}.{key}"
                if not isinstance(value, TorchTensor) or not value.shape:
                    path = (*ranks[0].states_path, found[0].group, key)
                    self.add_leaves(where, ranks[0].name, path, value)
                else:
                    states = [(rank.name, [moments.get(key) for moments in rank.moments]) for rank in ranks]
                    self.add_flat(where, shapes[name], found, states)


def _slices(mapping: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """First element and elements of each parameter, from records of the class ``fragment_address``."""
    slices = {}
    for name, address in mapping.items():
        if not isinstance(address, Opaque):
            raise TypeError(f"the slice of {name} is {brief(address)}")
        state = address.state or dict(zip(("numel", "start"), address.args or (), strict=False))
        slices[str(name)] = (state["start"], state["numel"])
    return slices


class DeepSpeedUniversalReader(DeepSpeedStates):
    """A universal checkpoint of DeepSpeed, open for reading; see `FormatReader`."""

    name = "deepspeed_universal"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(tag_folder(foreign, "latest_universal") or foreign)
        first = self.first_model_states
        states = self.opened_dict(first)
        groups = [] if self.parallelism() else self.shapes(first, states)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        try:
            self.add_engine_values(first, states)
            if self.parallelism():  # each file of model states holds only a part of the model
                self._add_parameters({})
            else:
                self._add_model(first, states, shapes)
            if self.storage.size(_OPTIMIZER) is not None:
                optimizer = self.opened_dict(_OPTIMIZER)
                self.add_optimizer_values(_OPTIMIZER, (), optimizer)
                groups_path = ("param_groups",)
                self.add_param_groups(_OPTIMIZER, groups_path, optimizer.get("param_groups"), groups)
        except ValueError as error:
            raise self.fault(first, f"{error}: it is damaged") from error
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise self.fault(
                first, f"the checkpoint does not have the structure that DeepSpeed writes ({brief(error)})"
            ) from error
        self.conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a tag folder with the folder ``zero``, or a run folder that has universal tags only."""
        tag = None if foreign.has("latest") else tag_folder(foreign, "latest_universal")
        folder = tag or foreign
        return folder.has(_OPTIMIZER) and any(map(folder.has, FIRST_MODEL_STATES))

    def _add_model(
        self, first: str, states: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Describes the model of a checkpoint without model parallelism, where each rank has all of it."""
        frozen = {
            str(key): shape_of(shape) for key, shape in (states.get("frozen_param_shapes") or {}).items()
        }
        described = {**shapes, **frozen}
        self.add_module(first, states, described)
        self._add_parameters(described)
        self._check_complete(shapes)
        self.add_frozen(first, {key: frozen[key] for key in frozen if f"fp32.{key}" not in self.tensors})
        self.add_buffers(states)
        self.add_shared(first, states)

    def _add_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Describes the files of all parameters. It opens each file for its shape."""
        for path in self.storage.list(_FOLDER.rstrip("/")):
            name, _, entry = path.removeprefix(_FOLDER).rpartition("/")
            if not name or not entry.endswith(_SUFFIX):
                continue
            kind = entry.removesuffix(_SUFFIX)
            key = f"fp32.{name}" if kind == _WEIGHTS else f"optimizer.state.{name}.{kind}"
            value = self.open_file(path).value
            if isinstance(value, dict):
                value = value.get("param", value)
            tensor = value
            if not isinstance(tensor, TorchTensor):
                self.add_leaves(key, path, (), value)
            elif not tensor.shape:
                self.add_tensor(key, path, tensor)
            else:
                self._add_shaped(key, path, tensor, shapes.get(name, tensor.shape))

    def _add_shaped(self, key: str, path: str, tensor: TorchTensor, shape: tuple[int, ...]) -> None:
        """Describes a tensor that is stored in its shape or as a flat tensor."""
        if tensor.shape == shape:
            self.add_tensor(key, path, tensor)
            return
        if prod(tensor.shape) != prod(shape):
            raise self.fault(
                path,
                f"{key} has the shape {list(tensor.shape)}, expected {list(shape)} as in the model states",
                key=key,
            )
        view = self.flat_view(path, tensor, key)
        boxes = StoredBox.whole(shape, StoredView.dense(shape, view.extent, view.offset))
        self.check_new(key, path)
        self.tensors[key] = TensorDescription(tensor.dtype, shape, boxes)

    def _check_complete(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that each trainable parameter has weights, and all or none of the optimizer's states."""
        begin = "optimizer.state."
        found = {
            key.removeprefix(begin) for key in (*self.tensors, *self.object_keys()) if key.startswith(begin)
        }
        kinds = sorted({key.rpartition(".")[2] for key in found})
        for name in shapes:
            missing = [kind for kind in kinds if f"{name}.{kind}" not in found]
            if f"fp32.{name}" not in self.tensors:
                missing.insert(0, _WEIGHTS)
            elif len(missing) == len(kinds):
                continue  # a parameter that never had a gradient
            for kind in missing:
                path = f"{self.location}/{_FOLDER}{name}/{kind}{_SUFFIX}"
                raise StorageError(
                    f"{path} is missing: the model has the parameter {name}. Restore it from a copy",
                    file=path,
                    missing=True,
                )

"""Reads checkpoints of DeepSpeed with ZeRO stages 0 to 3.

A run folder has a file ``latest`` that names the tag folder of the newest save. In a tag folder,
``*_model_states.pt`` has weights, shapes and the state of the engine. Each data-parallel rank has a file
``*_optim_states.pt`` with its partition of the fp32 weights and of the optimizer's state.

Keys:

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
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign, Opaque, shape_of
from shardproof.formats.deepspeed.deepspeed_states import FIRST_MODEL_STATES, DeepSpeedStates, tag_folder
from shardproof.formats.deepspeed.zero_partitions import (
    PartitionPart,
    cut_pieces,
    joined_pieces,
    mapped_pieces,
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

"""Reads universal checkpoints of DeepSpeed, which ``ds_to_universal.py`` makes of ZeRO checkpoints.

A run folder has a file ``latest_universal`` that names the tag folder. The tag folder has the files of model
states of the ZeRO checkpoint. For each parameter, it has a folder ``zero/<name>`` with the files ``fp32.pt``,
``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``. Files of stage 3 hold flat tensors, and the model states
have the shapes. After model parallelism, these files hold whole parameters, but each file of model states
holds only a part of the model. The keys ``module.<name>`` are then left out.

Keys are those of the reader of ZeRO checkpoints, `shardproof.formats.deepspeed.deepspeed_reader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign, StoredBox, StoredView, TensorDescription, shape_of
from shardproof.errors import StorageError
from shardproof.formats.deepspeed.deepspeed_states import FIRST_MODEL_STATES, DeepSpeedStates, tag_folder
from shardproof.formats.torch.torch_tensors import TorchTensor

_FOLDER, _SUFFIX = "zero/", ".pt"
_OPTIMIZER = "zero/optimizer_state.pt"
_WEIGHTS = "fp32"


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
        """Checks that each trainable parameter has weights, and all or none of the optimizer's states.

        Raises:
            StorageError: a file is missing.
        """
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

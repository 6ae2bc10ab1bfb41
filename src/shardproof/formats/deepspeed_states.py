"""Files of model states and flat partitions, which ZeRO and universal checkpoints of DeepSpeed share.

Stages 1 and 2 join the parameters of a group and cut the result into one partition for each rank. Stage 3
cuts each parameter into one part for each rank, and joins the parts of a rank. Both add padding, which has no
elements of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from shardproof.engine.foreign import Foreign, Opaque, StoredBox, TensorDescription, flat_boxes, shape_of
from shardproof.engine.storage import check_name
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.formats.torch.torch_save import TorchFilesReader
from shardproof.formats.torch.torch_tensors import TorchTensor

_MODEL, _SHARDED_MODEL = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
FIRST_MODEL_STATES = (_MODEL, _SHARDED_MODEL.format(0))
"""Names of the file that rank 0 writes: at stages 0 to 2, and at stage 3."""

_MOST_TAG_BYTES = 4096
_PARALLEL = (
    (re.compile(r"mp_rank_0*[1-9][0-9]*"), "model parallelism"),
    (re.compile(r"layer_.*expert_"), "experts of a mixture of experts"),
    (re.compile(r"expp_rank_"), "expert parallelism"),
    (re.compile(r"layer_[0-9]+-"), "pipeline parallelism"),
)
"""Patterns of file names, and the kind of parallelism that saves such files."""
_CONSUMED = (
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
)
"""Entries of the model states that describe tensors. All others are objects."""
_FLAT = (
    "base_optimizer_state",
    "fp32_flat_groups",
    "group_paddings",
    "optimizer_state_dict",
    "param_alignment_paddings",
    "param_groups",
    "param_slice_mappings",
    "partition_count",
    "single_partition_of_fp32_groups",
)
"""Entries of the optimizer states that describe tensors. All others are objects."""
_SCALERS = ("LossScaler", "DynamicLossScaler")
_Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each parameter of a group, in the order in which they lie in the flat tensor."""


def tag_folder(foreign: Foreign, pointer: str) -> Foreign | None:
    """The tag folder that a file of the run folder names; None if the run folder has no such file.

    Raises:
        FormatError: the file names no folder in the run folder.
        StorageError: the file is unreadable.
    """
    size = foreign.storage.size(pointer) if foreign.file is None else None
    if size is None:
        return None
    raw = foreign.storage.read(pointer, 0, min(size, _MOST_TAG_BYTES))
    tag = raw.decode("utf-8", "surrogateescape").strip()
    path = f"{foreign.location}/{pointer}"
    try:
        check_name(tag, foreign.location)
    except StorageError as error:
        raise FormatError(
            f"{path}: the tag names no folder of the run: {error.message}", file=path
        ) from error
    return Foreign(foreign.storage.within(tag))


class DeepSpeedStates(TorchFilesReader):
    """A tag folder of DeepSpeed; see `TorchFilesReader`. A subclass adds the optimizer's tensors."""

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self.names = [name for name in self.storage.list() if "/" not in name]
        """Names of the files directly in the folder."""
        if not any(name.endswith("model_states.pt") for name in self.names):
            raise NotCommittedError(
                f"{self.location} has no file whose name ends in model_states.pt: it is not a checkpoint of "
                "DeepSpeed, or its save did not finish",
                file=self.location,
            )

    def parallelism(self) -> tuple[str, str] | None:
        """A file that proves parallelism other than data parallelism, and the kind; None if there is none."""
        for name in self.names:
            for pattern, kind in _PARALLEL:
                if name.endswith("_states.pt") and pattern.search(name):
                    return name, kind
        return None

    @property
    def first_model_states(self) -> str:
        """Name of the model states of rank 0."""
        return next((name for name in FIRST_MODEL_STATES if name in self.names), FIRST_MODEL_STATES[1])

    def shapes(self, name: str, states: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of trainable parameters, for each group of the optimizer.

        Raises:
            FormatError: the shapes are missing or damaged.
        """
        groups = states.get("param_shapes")
        try:
            if isinstance(groups, Mapping):
                groups = [groups]
            return [{str(key): shape_of(shape) for key, shape in group.items()} for group in groups or ()]
        except (AttributeError, TypeError, ValueError) as error:
            raise self.fault(
                name, f"param_shapes does not have the structure that DeepSpeed writes ({error})"
            ) from error

    def add_module(
        self, name: str, states: Mapping[str, Any], described: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Adds the weights as stored.

        Args:
            name: name of the file.
            states: the object of the file.
            described: shapes of parameters. Stage 3 stores empty tensors instead of them.
        """
        module = states.get("module")
        if not isinstance(module, Mapping):
            raise self.fault(name, "it has no weights under the name module")
        first: dict[TorchTensor, str] = {}
        for key, value in module.items():
            tensor = value
            if not isinstance(tensor, TorchTensor):
                self.add_leaves(f"module.{key}", name, ("module", key), value)
            elif 0 in tensor.shape and 0 not in described.get(key, (0,)):
                continue  # the empty tensor that ZeRO stage 3 stores instead of the parameter
            elif tensor in first and 0 not in tensor.shape:
                self.aliases[f"module.{key}"] = first[tensor]
            else:
                first[tensor] = f"module.{key}"
                self.add_tensor(f"module.{key}", name, tensor)

    def add_engine_values(self, name: str, states: Mapping[str, Any]) -> None:
        """Adds the values of the engine and those of the user; see `add_module`."""
        for key, value in states.items():
            if key not in _CONSUMED and not (key == "optimizer" and value is None):
                self.add_leaves(str(key), name, (key,), value)
        self.step = _count(states.get("global_steps"))
        self.world_size = _count(states.get("dp_world_size")) or 1

    def rank_names(self, pattern: str) -> list[str]:
        """The files of all ranks.

        Args:
            pattern: format string of the names, with ``{}`` for the rank.
        """
        present = set(self.names)
        names: list[str] = []
        for rank in range(self.world_size):
            names.append(pattern.format(rank))
            if names[-1] not in present:
                raise StorageError(
                    f"{self.location}/{names[-1]} is missing: {self.world_size} ranks saved the checkpoint, "
                    "and it needs the files of all. Restore it from a copy",
                    file=f"{self.location}/{names[-1]}",
                    missing=True,
                )
        return names

    def add_flat(
        self,
        key: str,
        shape: tuple[int, ...],
        pieces: Sequence[PartitionPart],
        ranks: Sequence[tuple[str, Sequence[Any]]],
    ) -> None:
        """Describes a tensor whose pieces lie in flat tensors of ranks."""
        boxes: list[StoredBox] = []
        dtypes = set()
        for piece in pieces:
            name, groups = ranks[piece.rank]
            tensor = groups[piece.group]
            view = self.flat_view(name, tensor, f"group {piece.group} of {key}")
            if piece.start < 0 or piece.numel < 0 or piece.start + piece.numel > prod(tensor.shape):
                raise self.fault(
                    name,
                    f"the flat tensor of group {piece.group} has {prod(tensor.shape)} elements, and "
                    f"{key} needs {piece.numel} from element {piece.start} on",
                    key=key,
                )
            dtypes.add(tensor.dtype)
            end = piece.at + piece.numel
            boxes += flat_boxes(shape, piece.at, end, view.extent, view.offset + piece.start)
        if len(dtypes) > 1:
            raise self.fault(ranks[0][0], f"{key} has several dtypes: {', '.join(sorted(dtypes))}", key=key)
        dtype = dtypes.pop() if dtypes else ranks[0][1][0].dtype
        self.check_new(key, ranks[0][0])
        self.tensors[key] = TensorDescription(dtype, shape, boxes)

    def add_frozen(self, first: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Adds frozen parameters: whole in one file, or cut over the files of all ranks.

        Raises:
            StorageError: the file of a rank is missing.
            FormatError: the part of a parameter is missing or too small.
        """
        if not shapes:
            return
        files = self.rank_names(_SHARDED_MODEL) if first != _MODEL else [first]
        fragments = []
        for name in files:
            found = self.opened_dict(name).get("frozen_param_fragments")
            if not isinstance(found, Mapping):
                raise self.fault(name, "the parts of frozen parameters are missing")
            fragments.append(found)
        for key, shape in shapes.items():
            for name, found in zip(files, fragments, strict=True):
                if key not in found:
                    raise self.fault(name, f"the part of the frozen parameter {key} is missing", key=key)
            stored = self.tensors.get(f"module.{key}")
            if len(files) == 1 and stored is not None and stored.shape == shape:
                self.aliases[f"fp32.{key}"] = f"module.{key}"
                continue
            parts = [(name, [found[key]]) for name, found in zip(files, fragments, strict=True)]
            pieces = cut_pieces({key: shape}, [-(-prod(shape) // len(files))], len(files))[key]
            self.add_flat(f"fp32.{key}", shape, pieces, parts)

    def add_buffers(self, states: Mapping[str, Any]) -> None:
        """Adds an alias ``fp32.<name>`` for each stored buffer."""
        for key in states.get("buffer_names") or ():
            stored = self.aliases.get(f"module.{key}", f"module.{key}")
            if stored in self.tensors and f"fp32.{key}" not in self.tensors:
                self.aliases[f"fp32.{key}"] = stored

    def add_shared(self, name: str, states: Mapping[str, Any]) -> None:
        """Adds an alias for each shared parameter, to the name that has the values."""
        shared = states.get("shared_params") or {}
        if not isinstance(shared, Mapping):
            raise self.fault(name, "shared_params is not a dict")
        for key, other in shared.items():
            target = self.aliases.get(f"fp32.{other}", f"fp32.{other}")
            if target not in self.tensors:
                raise self.fault(name, f"{key} is shared with {other}, which is missing", key=str(key))
            if f"fp32.{key}" not in self.tensors:
                self.aliases[f"fp32.{key}"] = target

    def add_optimizer_values(self, name: str, path: tuple[Any, ...], state: Mapping[str, Any]) -> None:
        """Adds the values of DeepSpeed's optimizer that describe no tensors of parameters."""
        for key, value in state.items():
            if key not in _FLAT:
                self.add_leaves(f"optimizer.{key}", name, (*path, key), _plain(value))

    def add_param_groups(
        self, name: str, path: tuple[Any, ...], groups: Any, names: Sequence[Iterable[str]]
    ) -> None:
        """Adds the parameter groups of the wrapped optimizer, with parameters by name.

        Args:
            name: name of the file.
            path: keys that lead to `groups` in the file.
            groups: the groups, whose parameters are numbers of flat tensors.
            names: names of the parameters in each flat tensor.
        """
        named = []
        for group in groups if isinstance(groups, list) else ():
            numbers = group.get("params") if isinstance(group, dict) else None
            if isinstance(numbers, list) and all(
                type(number) is int and 0 <= number < len(names) for number in numbers
            ):
                group = {**group, "params": [key for number in numbers for key in names[number]]}
            named.append(group)
        if named:
            self.add_leaves("optimizer.param_groups", name, path, named)


def _plain(value: Any) -> Any:
    """A value of a class of DeepSpeed as plain data; others as they are."""
    if isinstance(value, Opaque) and value.name.startswith("deepspeed."):
        if value.name.endswith(".ZeroStageEnum") and value.args:
            return value.args[0]
        if value.name.rpartition(".")[2] in _SCALERS and isinstance(value.state, dict):
            return value.state
    return value


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


@dataclass(frozen=True, slots=True)
class PartitionPart:
    """A part of a parameter in the flat tensor of a group on a rank.

    It is empty only if the parameter is empty.
    """

    rank: int
    group: int
    start: int
    """First element in the flat tensor."""
    numel: int
    at: int
    """First element in the row-major order of the parameter."""


def cut_pieces(shapes: _Shapes, groups: Sequence[int], world_size: int) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stage 3.

    Args:
        shapes: shapes of all parameters, in order.
        groups: number of elements of each flat tensor of a rank, equal on all ranks.
        world_size: data-parallel ranks.

    Raises:
        ValueError: the parameters have more or fewer elements than the flat tensors.

    Example:
        >>> cut_pieces({"weight": (5,)}, [3], 2)["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    wanted = sum(-(-prod(shape) // world_size) for shape in shapes.values())
    if wanted != sum(groups):
        raise ValueError(
            f"each rank has {sum(groups)} elements in its flat tensors, expected {wanted} by the shapes of "
            f"the parameters and {world_size} ranks"
        )
    pieces: dict[str, list[PartitionPart]] = {}
    group = start = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        count = -(-numel // world_size)
        spans: list[tuple[int, int, int, int]] = []
        """Group, start in its flat tensor, elements, start in the part."""
        done = 0
        while done < count:
            if start == groups[group]:
                group, start = group + 1, 0
                continue
            taken = min(count - done, groups[group] - start)
            spans.append((group, start, taken, done))
            done, start = done + taken, start + taken
        pieces[name] = [
            PartitionPart(rank, at_group, begin, stored, rank * count + skipped)
            for rank in range(world_size)
            for at_group, begin, taken, skipped in spans
            if (stored := min(taken, numel - rank * count - skipped)) > 0
        ]
        if not numel:
            pieces[name] = [PartitionPart(0, min(group, len(groups) - 1), 0, 0, 0)]
    return pieces


def mapped_pieces(
    shapes: _Shapes, group: int, slices: Sequence[Mapping[str, tuple[int, int]]]
) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stages 1 and 2, where each rank records them.

    Args:
        shapes: shapes of the parameters of the group, in order.
        group: number of the group.
        slices: for each rank, the first element and the number of elements of each parameter in the
            partition.

    Raises:
        ValueError: two parameters overlap, a slice has no parameter, or the slices of a parameter have more
            or fewer elements than the parameter.

    Example:
        >>> mapped_pieces({"weight": (5,)}, 0, [{"weight": (0, 3)}, {"weight": (0, 2)}])["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    found: dict[str, list[PartitionPart]] = {}
    for rank, mapping in enumerate(slices):
        for (name, (start, numel)), (other, (begin, _)) in pairwise(
            sorted(mapping.items(), key=lambda item: item[1])
        ):
            if start + numel > begin:
                raise ValueError(f"{name} and {other} overlap in the partition of rank {rank}")
        for name, (start, numel) in mapping.items():
            if name not in shapes:
                raise ValueError(f"rank {rank} has a slice of {name}, which has no shape")
            before = found.setdefault(name, [])
            at = before[-1].at + before[-1].numel if before else 0
            before.append(PartitionPart(rank, group, start, numel, at))
    for name, pieces in found.items():
        numel = sum(piece.numel for piece in pieces)
        if numel != prod(shapes[name]):
            raise ValueError(
                f"{name} has {numel} elements in the partitions of all ranks, expected {prod(shapes[name])}"
            )
    return found


def joined_pieces(
    shapes: _Shapes, group: int, partition: int, paddings: Sequence[int], world_size: int
) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stages 1 and 2, where no rank records them: parameters follow each other.

    Args:
        shapes: shapes of the parameters of the group, in order.
        group: number of the group.
        partition: number of elements of a rank's partition, including padding.
        paddings: unused elements after each parameter.
        world_size: data-parallel ranks.

    Raises:
        ValueError: the parameters do not fit into the partitions.

    Example:
        >>> joined_pieces({"weight": (5,)}, 0, 3, [0], 2)["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    pieces: dict[str, list[PartitionPart]] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel, at = prod(shape), 0
        pieces[name] = [] if numel else [PartitionPart(0, group, 0, 0, 0)]
        while at < numel:
            rank, start = divmod(begin + at, partition) if partition else (world_size, 0)
            if rank >= world_size:
                raise ValueError(
                    f"{name} ends past the partitions of {world_size} ranks with {partition} elements each"
                )
            taken = min(numel - at, partition - start)
            pieces[name].append(PartitionPart(rank, group, start, taken, at))
            at += taken
        begin += numel + padding
    return pieces

"""Reads the distributed checkpoints of Megatron-Core: ``torch_dist`` from 0.6 on, Zarr up to 0.11.

``torch_dist`` checkpoints are DCP checkpoints with three additions:

- The common state, a dict that all ranks share, is the file ``common.pt`` (up to 0.16) or the entry
  ``common_state/shard_0_1`` (newer).
- An object of a rank is an entry or a file ``<key>/shard_<offset>_<shape>``, which holds a list with the
  object.
- Flat ranges of the distributed optimizer (``fully_sharded_model_space``) are stored under a shape of
  fragments. Its last number is the number of elements of a part. The numbers before it give the parts into
  which each dimension is cut. ``mcore_data`` has the true shape. The reader gives boxes of the true shape.

In Zarr checkpoints, each tensor is a folder with the name of its key. The folder holds a Zarr array of format
2, whose chunks are the parts of ranks. Objects are files of ``torch.save``: ``common.pt``, and
``<key>/shard_<offset>_<shape>.pt`` for objects of ranks. ``metadata.json``, written last, names the format.
Megatron writes flat ranges of the distributed optimizer into the chunks of their parameter, so this reader
does not merge them. Megatron writes every chunk. Zarr's own readers give zeros for a chunk whose file was
lost; this reader raises an error. Folders that end in ``.sync``, which the writer's locks leave behind, are
not read.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import (
    Foreign,
    FormatReader,
    StoredBox,
    StoredView,
    TensorDescription,
    ZeroRule,
    opaque_names,
    shape_of,
)
from shardproof.engine.geometry import flat_range_boxes, row_major_strides
from shardproof.errors import CorruptChunkError, NotCommittedError, ShardproofError, StorageError
from shardproof.formats.dcp_reader import DcpReader, inner_name
from shardproof.formats.json_values import read_json
from shardproof.formats.megatron.megatron_run import (
    BACKEND_FILE,
    iteration_of,
    latest_iteration,
    sharded_backend,
)
from shardproof.formats.torch.archive_bytes import FileWindow
from shardproof.formats.torch.torch_file import TorchFile, unpickled, with_tensors
from shardproof.formats.zarr.zarr import ZarrArrays

_DCP_METADATA = ".metadata"
_INTEGRITY = "integrity.json"
_COMMON = "common"
_COMMON_FILE = "common.pt"
_COMMON_ENTRY = "common_state/shard_0_1"
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"
_SHARD = re.compile(r".+/shard_[0-9.]+(_[0-9.]+)?")
"""Key of an object of a rank."""
_BUCKET = re.compile(r"optimizer\..*\.bucket_idx_[0-9]+\.[a-z_]+")
"""Key of a flat bucket of the distributed optimizer."""
_BUCKETS = (
    "The optimizer state is stored in flat buckets (dp_reshardable). The position of a parameter in its "
    "bucket is not stored, so the buckets are read as they are. Padding between parameters is memory that "
    "was never set: do not compare it."
)
_SHARD_FILE = re.compile(r"(.+)/shard_([0-9]+(?:\.[0-9]+)*)_([0-9]+(?:\.[0-9]+)*)")
"""Key of an object, its offset and the shape of the grid of objects."""
_OPTIMIZER = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.)(fp32_param|param|exp_avg_sq)\.(.+)")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_TINY = 2.0**-126
"""Smallest normal number of float32. A step with underflow loses less of a square."""
_ROUNDING = 16.0
"""Factor for the rounding errors of both moments, in many steps. They are below 1 % of a moment."""


class MegatronDistReader(DcpReader):
    """A ``torch_dist`` checkpoint of Megatron-Core, open for reading; see `FormatReader`.

    The path is the folder of an iteration, or a run folder. Of a run folder, the latest iteration is read.

    The common state is the object ``common``. If it holds objects of unknown classes, each of its items is an
    object ``common.<name>`` instead. Then an item of an unknown class does not hide the others.
    """

    name = "torch_dist"

    def __init__(self, foreign: Foreign) -> None:
        self._objects: dict[str, str | None] = {}
        """Key of each object to the name of its file, or None for an entry."""
        super().__init__(foreign)

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if ``metadata.json`` names the format, in the folder or in that of the latest iteration."""
        return foreign.file is None and sharded_backend(latest_iteration(foreign).storage) == "torch_dist"

    def read_metadata(self) -> None:
        """Describes ``.metadata``, the common state and the files of objects."""
        state = self.add_folder()
        plans = state.get("all_local_plans")
        if isinstance(plans, list):
            self.world_size = len(plans)
        self._common: TorchFile | ShardproofError
        """The file of the common state, or the error of reading it."""
        common: Any = None
        entry = self.entries.pop(_COMMON_ENTRY, None)
        try:
            self._common = TorchFile(self.storage, _COMMON_FILE) if entry is None else self.open_entry(entry)
        except ShardproofError as error:  # tensors can be read without the common state
            self._common = error
        else:
            common = _unwrapped(self._common.value)
        keys = [_COMMON]
        if isinstance(common, dict) and opaque_names(common):
            keys = [f"{_COMMON}.{name}" for name in common if isinstance(name, str)]
        self._objects = dict.fromkeys([*keys, *self.entries])
        for name in self.storage.list():
            key = name.removesuffix(".pt")
            if key != name and _SHARD.fullmatch(key):
                self._objects.setdefault(key, name)
        if self.step is None:
            found = common.get("iteration") if isinstance(common, dict) else None
            self.step = found if type(found) is int else None
        for key, tensor in self.tensors.items():
            if (shape := self._true_shape(key, state)) is not None:
                self.tensors[key] = self._of_fragments(key, tensor, shape)
            elif _BUCKET.fullmatch(key):
                self.tensors[key] = replace(tensor, notes=(_BUCKETS,))
        if any(tensor.notes for tensor in self.tensors.values()):
            self.notes.append(_BUCKETS)

    def object_keys(self) -> Iterable[str]:
        """``common`` or its items, and ``<key>/shard_<offset>_<shape>`` for the objects of ranks."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """An object as plain data; see `FormatReader.object`."""
        name = self._objects[key]
        if name is not None:
            return self.value_of(TorchFile(self.storage, name), key, trust_pickle)
        if key in self.entries:
            return _unwrapped(super().object(key, trust_pickle=trust_pickle))
        file = self._common_file()
        part = self._common_part(file.value, key)
        if trust_pickle and opaque_names(part):
            return self._common_part(self.value_of(file, key, trust_pickle), key)
        return with_tensors(file, part)

    def files(self) -> Mapping[str, int | None]:
        """Files of metadata, tensors and objects."""
        return dict(super().files()) | dict.fromkeys([BACKEND_FILE, *filter(None, self._objects.values())])

    def verify_extra(self) -> int:
        """Verifies all objects, and the digests of ``integrity.json`` if there is one."""
        proved = super().verify_extra() + self._common_file().verify()
        for name in filter(None, self._objects.values()):
            proved += TorchFile(self.storage, name).verify()
        tensors = {(box.file, box.start): box.nbytes for item in self.tensors.values() for box in item.boxes}
        return max(proved, self._verify_digests() - sum(tensors.values()))

    def zero_rules(self) -> list[ZeroRule]:
        """Rules for ranges of the distributed optimizer; see `_rules_of_megatron`."""
        common = None if isinstance(self._common, ShardproofError) else _unwrapped(self._common.value)
        return _rules_of_megatron(self.tensors, common)

    def _common_file(self) -> TorchFile:
        if isinstance(self._common, ShardproofError):
            raise self._common
        return self._common

    def _common_part(self, value: Any, key: str) -> Any:
        whole = _unwrapped(value)
        return whole if key == _COMMON else whole[key.removeprefix(f"{_COMMON}.")]

    def _true_shape(self, key: str, state: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The true shape of a tensor that is stored under a shape of fragments; None for others."""
        data = state.get("mcore_data")
        extra = data.get(key) if isinstance(data, dict) else None
        shape = extra.get(_TRUE_SHAPE) if isinstance(extra, dict) else None
        try:
            return None if shape is None else shape_of(shape)
        except (TypeError, ValueError) as error:
            raise self.fault(_DCP_METADATA, f"the true shape of {key} is {brief(shape)}", key=key) from error

    def _of_fragments(self, key: str, stored: TensorDescription, shape: tuple[int, ...]) -> TensorDescription:
        """Describes a tensor of flat ranges in its true shape."""
        *cuts, last = stored.shape or (0,)
        fits = len(cuts) == len(shape) and all(cuts)
        fragment = tuple(size // cut for size, cut in zip(shape, cuts, strict=True)) if fits else ()
        if not fits or math.prod(fragment) != last or math.prod(shape) != math.prod(stored.shape):
            raise self.fault(
                _DCP_METADATA, f"{key} of shape {shape} cannot be stored as fragments {stored.shape}", key=key
            )
        boxes = []
        for box in stored.boxes:
            *index, start = box.offsets
            *ones, count = box.sizes
            if ones != [1] * len(ones) or start + count > last:
                raise self.fault(
                    _DCP_METADATA,
                    f"a chunk of {key} at {box.offsets} of shape {box.sizes} is not a flat range of a "
                    f"fragment of {last} elements",
                    key=key,
                )
            parts, firsts = flat_range_boxes(fragment, start, start + count)
            base = [at * size for at, size in zip(index, fragment, strict=True)]
            for offsets, sizes, first in zip(
                parts.offsets.tolist(), parts.sizes.tolist(), firsts.tolist(), strict=True
            ):
                view = partial(_part_of_range, box, tuple(sizes), first)
                at = tuple(map(operator.add, base, offsets))
                boxes.append(StoredBox(at, tuple(sizes), box.file, box.start, box.nbytes, view))
        boxes.sort(key=operator.attrgetter("offsets"))
        return TensorDescription(stored.dtype, shape, boxes)

    def _verify_digests(self) -> int:
        """Compares files with their digests. Returns the bytes of the files; 0 if there are no digests."""
        if self.storage.size(_INTEGRITY) is None:
            return 0
        _, found = read_json(self.storage, _INTEGRITY)
        if found.get("algorithm") != "sha256":
            raise self.fault(_INTEGRITY, "its algorithm is unknown; only sha256 is known")
        digests = found.get("files")
        if not isinstance(digests, dict) or not all(isinstance(item, str) for item in digests.values()):
            raise self.fault(_INTEGRITY, 'its "files" do not map names to digests')
        if missing := sorted(self.files().keys() - digests.keys()):
            raise self.fault(_INTEGRITY, f"it has no digest of {', '.join(missing[:5])}")
        return sum(self._verify_digest(name, digest) for name, digest in digests.items())

    def _verify_digest(self, name: str, expected: str) -> int:
        path = f"{self.storage.location}/{name}"
        if inner_name(name) != name:
            raise self.fault(_INTEGRITY, f"the file name {brief(name)} leads out of the checkpoint")
        size = self.storage.size(name)
        if size is None:
            raise StorageError(
                f"{path} is missing, but {_INTEGRITY} has its digest: restore it from a copy",
                file=path,
                missing=True,
            )
        digest = hashlib.file_digest(FileWindow(self.storage, name, 0, size), "sha256").hexdigest()
        if digest != expected.lower():
            raise CorruptChunkError(
                f"{path} does not match its digest in {_INTEGRITY}: expected {expected[:64]}, found "
                f"{digest}. The file changed after it was written: restore it from a copy",
                file=path,
            )
        return size


def _part_of_range(box: StoredBox, sizes: tuple[int, ...], first: int) -> StoredView:
    """A view of a box of the true shape, in the chunk of the flat range that holds the box."""
    view = box.located()
    step = view.stride[-1]
    strides = tuple(step * stride for stride in row_major_strides(sizes))
    return StoredView(view.extent, view.offset + first * step, strides)


def _unwrapped(value: Any) -> Any:
    """The object of an entry, which stores it in a list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class MegatronZarrReader(FormatReader):
    """A Zarr checkpoint of Megatron-Core, open for reading; see `FormatReader`.

    The path is the folder of an iteration, or a run folder. Of a run folder, the latest iteration is read.

    Example:
        >>> import json, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> array = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "bfloat16", "compressor": None,
        ...          "fill_value": None, "filters": None, "order": "C"}
        >>> storage.publish("bias/.zarray", json.dumps(array).encode())
        >>> storage.publish("bias/0", bytes(4))
        >>> torch.save({"iteration": 3}, f"{storage.location}/common.pt")
        >>> storage.publish("metadata.json", b'{"sharded_backend": "zarr", "sharded_backend_version": 1}')
        >>> reader = MegatronZarrReader(Foreign(storage))
        >>> reader.tensors["bias"].dtype, list(reader.object_keys()), reader.step
        ('bfloat16', ['common'], 3)
        >>> reader.tensors["bias"].boxes[1].located()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        shardproof.errors.StorageError: ...bias/1 is missing: it holds the part of bias that begins at (2,)...
    """

    name = "megatron_zarr"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self.storage = latest_iteration(foreign).storage
        self.location = self.storage.location
        if sharded_backend(self.storage) != "zarr":
            raise NotCommittedError(
                f"{self.location} has no {BACKEND_FILE} that names Megatron's Zarr format: it is not such a "
                "checkpoint, or its save did not finish",
                file=f"{self.location}/{BACKEND_FILE}",
            )
        arrays = ZarrArrays(self.storage, _is_leftover)
        for key in arrays.metadata:
            self.add(key, arrays.describe(key, key, every_chunk=lambda _: True))
        self._objects = {
            name.removesuffix(".pt"): name
            for name in sorted(arrays.names)
            if name.endswith(".pt") and not _is_leftover(name.rpartition("/")[0])
        }
        self._files = arrays.files | dict.fromkeys([BACKEND_FILE, _COMMON_FILE, *self._objects.values()])
        self.identity = arrays.identity
        self.step = iteration_of(self.storage.folder) or self._common_iteration()
        self.notes.append(
            "Megatron's Zarr format has neither checksums of tensors nor a list of keys: changed bytes and a "
            "missing folder of a tensor are not noticed. A range that the writers of one chunk lost reads as "
            "zeros. `shardproof verify` names it in main weights and in second moments of Adam, and not in "
            "other tensors"
        )

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if ``metadata.json`` names the format, in the folder or in that of the latest iteration."""
        return foreign.file is None and sharded_backend(latest_iteration(foreign).storage) == "zarr"

    def object_keys(self) -> Iterable[str]:
        """``common``, and ``<key>/shard_<offset>_<shape>`` for the objects of ranks."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """An object as plain data; see `FormatReader.object`."""
        file = TorchFile(self.storage, self._objects[key])
        return unpickled(file) if trust_pickle else with_tensors(file, file.value)

    def files(self) -> Mapping[str, int | None]:
        """Files of metadata, chunks and objects; see `FormatReader.files`."""
        return self._files

    def verify_extra(self) -> int:
        """Verifies the files of all objects, and that no file is missing; see `FormatReader.verify_extra`."""
        proved = sum(TorchFile(self.storage, name).verify() for name in self._objects.values())
        self._check_objects()
        return proved

    def zero_rules(self) -> list[ZeroRule]:
        """Rules for ranges of the distributed optimizer; see `_rules_of_megatron`."""
        try:
            common = TorchFile(self.storage, _COMMON_FILE).value
        except ShardproofError:
            common = None  # the rules that need it do not apply
        return _rules_of_megatron(self.tensors, common)

    def _common_iteration(self) -> int | None:
        """The iteration in ``common.pt``; None without one, or if the file is damaged.

        The error of a damaged file is raised when the object is read.
        """
        try:
            value = TorchFile(self.storage, _COMMON_FILE).value
        except ShardproofError:
            return None
        found = value.get("iteration") if isinstance(value, dict) else None
        return found if type(found) is int else None

    def _check_objects(self) -> None:
        """Checks that every index of each grid of objects has a file. The file names give the grid."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for key in self._objects:
            if (match := _SHARD_FILE.fullmatch(key)) is not None:
                found[match[1], match[3]].add(match[2])
        for (key, grid), offsets in found.items():
            shape = [int(size) for size in grid.split(".")]
            if all(offset.count(".") == grid.count(".") for offset in offsets):
                missing = math.prod(shape) - len(offsets)
                if missing:
                    raise StorageError(
                        f"{self.location}/{key} has {len(offsets)} files shard_*_{grid}.pt, expected "
                        f"{math.prod(shape)}: restore the others from a copy",
                        file=f"{self.location}/{key}",
                        key=key,
                        missing=True,
                    )


def _is_leftover(folder: str) -> bool:
    return any(part.endswith(".sync") for part in folder.split("/"))


def _rules_of_megatron(tensors: Mapping[str, TensorDescription], common: Any) -> list[ZeroRule]:
    """Rules that name lost ranges of the distributed optimizer, where a format gives zeros, by its keys.

    A zero is a value as any other. But a checkpoint has tensors that follow from each other, so that some
    zeros contradict another tensor. These rules hold for every state that training can reach:

    - Main weights: a weight is its main weight, rounded. The rounded value of 0 is 0, in every dtype.
    - Second moments of Adam: with the same gradients, ``exp_avg ** 2 <= c * exp_avg_sq``, by the
      Cauchy-Schwarz inequality, if ``beta1 ** 2 < beta2``. So where ``exp_avg_sq`` is 0, ``exp_avg`` is not
      larger than what an underflow of squares explains. The rule needs the betas, and moments that are
      trained in float32.

    First moments have no such rule. They are 0 beside a second moment after some hundred steps without a
    gradient, as in the rows of rare tokens. The same is true for weights without main weights.

    Args:
        tensors: of the checkpoint.
        common: the common state. The rule of second moments applies if it has the betas of all groups, and
            the arguments of the run say ``use_precision_aware_optimizer=False``.

    >>> tensors = {key: TensorDescription("float32", (4,), ()) for key in ("w", "optimizer.state.param.w")}
    >>> [(rule.key, rule.other) for rule in _rules_of_megatron(tensors, None)]
    [('optimizer.state.param.w', 'w')]
    """
    rules = []
    bound = _bound(common) if isinstance(common, Mapping) else None
    for key, tensor in tensors.items():
        match = _OPTIMIZER.fullmatch(key)
        if match is None:
            continue
        is_main = match[2] != "exp_avg_sq"
        other = match[3] if is_main else f"{match[1]}exp_avg.{match[3]}"
        found = tensors.get(other)
        if found is None or found.shape != tensor.shape or not {tensor.dtype, found.dtype} <= {*_FLOATS}:
            continue
        if is_main:
            rules.append(ZeroRule(key, other, 0.0, "a weight is its main weight, rounded"))
        elif bound is not None and tensor.dtype == found.dtype == "float32":
            reason = f"Adam makes both of the same gradients, and 0 bounds exp_avg by {bound:.0e}"
            rules.append(ZeroRule(key, other, bound, reason))
    return rules


def _bound(common: Mapping[Any, Any]) -> float | None:
    """The largest `exp_avg` beside a second moment of 0; None if the common state does not say."""
    arguments = common.get("args")
    if not isinstance(arguments, Mapping) or arguments.get("use_precision_aware_optimizer") is not False:
        return None
    bounds = []
    for group in _groups(common.get("optimizer")):
        betas = group.get("betas")
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            return None
        if not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            return None
        first, second = betas
        if first**2 >= second:
            return None
        constant = (1 - first) ** 2 / ((1 - first**2 / second) * (1 - second))
        bounds.append(math.sqrt(_ROUNDING * constant * _TINY / (1 - second)))
    return max(bounds, default=None)


def _groups(state: Any) -> Iterator[Mapping[str, Any]]:
    """The parameter groups in the state of one optimizer or of several."""
    if not isinstance(state, Mapping):
        return
    for name, value in state.items():
        if name == "param_groups" and isinstance(value, list):
            yield from (group for group in value if isinstance(group, Mapping))
        else:
            yield from _groups(value)

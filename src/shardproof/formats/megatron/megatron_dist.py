"""Reads the ``torch_dist`` checkpoints of Megatron-Core, of 0.6 and newer.

They are DCP checkpoints with three additions:

- The common state, a dict that all ranks share, is the file ``common.pt`` (up to 0.16) or the entry
  ``common_state/shard_0_1`` (newer).
- An object of a rank is an entry or a file ``<key>/shard_<offset>_<shape>``, which holds a list with the
  object.
- Flat ranges of the distributed optimizer (``fully_sharded_model_space``) are stored under a shape of
  fragments. Its last number is the number of elements of a part. The numbers before it give the parts into
  which each dimension is cut. ``mcore_data`` has the true shape. The reader gives boxes of the true shape.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import (
    Foreign,
    StoredBox,
    StoredView,
    TensorDescription,
    ZeroRule,
    opaque_names,
    shape_of,
)
from shardproof.engine.geometry import flat_range_boxes, row_major_strides
from shardproof.errors import CorruptChunkError, ShardproofError, StorageError
from shardproof.formats.dcp.dcp_reader import DcpReader, inner_name
from shardproof.formats.json_files import read_json
from shardproof.formats.megatron.megatron_run import BACKEND_FILE, latest_iteration, sharded_backend
from shardproof.formats.megatron.megatron_zeros import rules_of_megatron
from shardproof.formats.torch.archive_bytes import FileWindow
from shardproof.formats.torch.torch_file import TorchFile, with_tensors

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
        """Rules for ranges of the distributed optimizer; see `megatron_zeros`."""
        common = None if isinstance(self._common, ShardproofError) else _unwrapped(self._common.value)
        return rules_of_megatron(self.tensors, common)

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

"""Reads checkpoints of ByteCheckpoint: one of the model, one of the optimizer, and a file of each rank.

The folders ``model`` and ``optimizer`` have a ``.metadata`` of ByteCheckpoint's own classes, with the fields
of DCP. The entry of a tensor holds only its raw bytes. ``all_tensor_metadata`` has the pickle that torch.save
would store beside them. There are no checksums of tensors.

A key is the key in the folder, prefixed with the name of the folder: ``model.layer.weight``. The file
``extra_state/extra_state_rank_<r>.pt`` is the object ``extra_state.<r>``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from shardproof._utils.humanize import brief
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import FileRange, Foreign, Opaque, StoredView, Unreadable
from shardproof.errors import FormatError
from shardproof.formats.dcp_reader import DcpEntry, DcpReader
from shardproof.formats.torch.torch_file import TorchFile
from shardproof.formats.torch.torch_tensors import TorchTensor, read_torch_pickle, torch_storage

_FOLDERS = ("model", "optimizer")
_EXTRA = re.compile(r"extra_state/extra_state_rank_([0-9]+)\.pt")


class ByteCheckpointReader(DcpReader):
    """A checkpoint of ByteCheckpoint, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from shardproof.storage import LocalStorage
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp.save({"weight": torch.zeros(2, 3)}, checkpoint_id=f"{path}/model")
        >>> reader = ByteCheckpointReader(Foreign(LocalStorage(path)))
        >>> list(reader.tensors)
        ['model.weight']
    """

    name = "bytecheckpoint"

    def __init__(self, foreign: Foreign) -> None:
        self._extra: dict[str, str] = {}
        """Files of extra states, by key."""
        self._described: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        """By folder, key and offsets of a chunk, the pickle of the tensor that the chunk holds."""
        super().__init__(foreign)

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder ``model`` is a DCP checkpoint, and the folder above it is not one."""
        return foreign.has("model/.metadata") and not foreign.has(".metadata")

    def read_metadata(self) -> None:
        """Describes the folders that exist, and the files of ranks."""
        for folder in _FOLDERS:
            if folder == "model" or self.storage.size(f"{folder}/.metadata") is not None:
                pickles = self.add_folder(f"{folder}/", f"{folder}.").get("all_tensor_metadata")
                for index, pickled in (pickles or {}).items() if isinstance(pickles, dict | None) else ():
                    match index:
                        case Opaque(state={"fqn": str(key), "offset": tuple(offsets)}):
                            if isinstance(pickled, bytes):
                                self._described[folder, key, offsets] = pickled
        self.notes.append("The format has no checksums of tensors: their changed bytes are not found.")
        ranks = sorted(
            (int(match[1]), match[0])
            for match in map(_EXTRA.fullmatch, self.storage.list("extra_state"))
            if match
        )
        self._extra = {f"extra_state.{rank}": name for rank, name in ranks}
        if ranks:
            self.world_size = ranks[-1][0] + 1
            if len(ranks) != self.world_size:
                self.notes.append(
                    f"extra_state has files of {len(ranks)} ranks, expected {self.world_size}: the others "
                    "are lost."
                )

    def chunk(
        self, key: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], entry: DcpEntry
    ) -> StoredView:
        """The bytes of a chunk, with the strides in the pickle of its tensor; see `DcpReader.chunk`."""
        path = f"{self.storage.location}/{entry.file}"
        extent = FileRange(self.storage, entry.file, entry.offset, entry.nbytes)
        pickled = self._described.get((entry.file.partition("/")[0], key, offsets))
        if pickled is None or entry.transforms:
            raise FormatError(f"{path}: no tensor is described for {key} at {offsets}", file=path, key=key)
        found = read_torch_pickle(pickled, partial(torch_storage, path), file=path).value
        expected = math.prod(sizes) * DTYPES[dtype].itemsize
        match found:
            case TorchTensor(dtype=kind, shape=shape, is_conjugated=False, is_negated=False) if (
                kind,
                shape,
            ) == (dtype, sizes) and expected == entry.nbytes:
                last = sum((size - 1) * step for size, step in zip(shape, found.stride, strict=True))
                if (found.offset + last + 1) * DTYPES[dtype].itemsize <= expected:
                    return StoredView(extent, found.offset, found.stride)
        kind = found.kind if isinstance(found, Unreadable) else brief(found)
        raise FormatError(
            f"{path}: the entry of {key} at {offsets} has {entry.nbytes} bytes and is {kind}, "
            f"expected a tensor of dtype {dtype} and shape {sizes} with {expected} bytes",
            file=path,
            key=key,
        )

    def object_keys(self) -> Iterable[str]:
        """Objects of the folders, and ``extra_state.<rank>``."""
        return [*self.entries, *self._extra]

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """An object as plain data; see `FormatReader.object`."""
        if key in self._extra:
            return self.value_of(TorchFile(self.storage, self._extra[key]), key, trust_pickle)
        return super().object(key, trust_pickle=trust_pickle)

    def files(self) -> Mapping[str, int | None]:
        """Files of entries, and of the extra states."""
        return dict(super().files()) | dict.fromkeys(self._extra.values())

    def verify_extra(self) -> int:
        """Verifies the entries of all objects, and the extra states."""
        extra = sum(TorchFile(self.storage, name).verify() for name in self._extra.values())
        return super().verify_extra() + extra

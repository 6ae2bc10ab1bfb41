"""Reads the Zarr checkpoints of Megatron-Core, which its releases up to 0.11 write.

Each tensor is a folder with the name of its key. The folder holds a Zarr array of format 2, whose chunks are
the parts of ranks. Objects are files of ``torch.save``: ``common.pt``, and
``<key>/shard_<offset>_<shape>.pt`` for objects of ranks. ``metadata.json``, written last, names the format.
Megatron writes flat ranges of the distributed optimizer into the chunks of their parameter, so this reader
does not merge them.

Megatron writes every chunk. Zarr's own readers give zeros for a chunk whose file was lost; this reader raises
an error. Folders that end in ``.sync``, which the writer's locks leave behind, are not read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from shardproof.engine.foreign import Foreign, FormatReader, ZeroRule
from shardproof.errors import NotCommittedError, ShardproofError, StorageError
from shardproof.formats.megatron.megatron_run import (
    BACKEND_FILE,
    iteration_of,
    latest_iteration,
    sharded_backend,
)
from shardproof.formats.megatron.megatron_zeros import rules_of_megatron
from shardproof.formats.torch.torch_file import TorchFile, unpickled, with_tensors
from shardproof.formats.zarr.zarr import ZarrArrays

_COMMON = "common.pt"
_SHARD = re.compile(r"(.+)/shard_([0-9]+(?:\.[0-9]+)*)_([0-9]+(?:\.[0-9]+)*)")
"""Key of an object, its offset and the shape of the grid of objects."""


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
        self._files = arrays.files | dict.fromkeys([BACKEND_FILE, _COMMON, *self._objects.values()])
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
        """Rules for ranges of the distributed optimizer; see `megatron_zeros`."""
        try:
            common = TorchFile(self.storage, _COMMON).value
        except ShardproofError:
            common = None  # the rules that need it do not apply
        return rules_of_megatron(self.tensors, common)

    def _common_iteration(self) -> int | None:
        """The iteration in ``common.pt``; None without one, or if the file is damaged.

        The error of a damaged file is raised when the object is read.
        """
        try:
            value = TorchFile(self.storage, _COMMON).value
        except ShardproofError:
            return None
        found = value.get("iteration") if isinstance(value, dict) else None
        return found if type(found) is int else None

    def _check_objects(self) -> None:
        """Checks that every index of each grid of objects has a file. The file names give the grid."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for key in self._objects:
            if (match := _SHARD.fullmatch(key)) is not None:
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

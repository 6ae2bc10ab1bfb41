"""The manifest: what a checkpoint holds, and what its records must fulfil. Its presence is the commit."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError
from shardproof.format.header import MAX_NDIM
from shardproof.format.names import index_name, parse_shard_name, shard_name

__all__ = [
    "FORMAT_VERSION",
    "REFERENCES_VERSION",
    "FileRecord",
    "Manifest",
    "TensorRecord",
    "check_manifest",
    "is_folder_name",
    "manifest_version",
]

FORMAT_VERSION = 1
REFERENCES_VERSION = 2
"""Of a manifest that names files of other steps, so that a reader which knows nothing of them refuses it."""

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_FOLDER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,254}")
_HEX = re.compile(r"[0-9a-f]{32}")


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One tensor: its key, torch's name of its dtype and its global shape."""

    key: str
    dtype: str
    shape: tuple[_Size, ...]


class FileRecord(msgspec.Struct, frozen=True, gc=False):
    """One file: its name in the checkpoint's folder, its bytes and what they must hash to.

    >>> FileRecord("shards/00000-a.safetensors", 9, 32 * "0", 8, 0, "step-00000100").place
    'step-00000100/shards/00000-a.safetensors'
    """

    name: str
    size: _Size
    digest: str
    """Of a shard file: `file_digest`. Of the index: XXH3-128 of all its bytes. 32 hexadecimal digits."""
    data_start: _Size = 0
    """Bytes before the data, which are the header."""
    rank: int = -1
    """Who wrote it; -1 for the index."""
    folder: str = ""
    """The folder beside the checkpoint's own that holds the file; empty for a file of its own."""

    @property
    def place(self) -> str:
        """The name, after the folder if it is another's: what it is called in messages."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds."""

    version: int = FORMAT_VERSION
    writer: str
    """Name and version of the program that wrote it."""
    attempt: str
    """Names the save, in the names of its files."""
    step: int | None
    time: float
    """Seconds since 1970, UTC."""
    world_size: int
    """Ranks that saved."""
    repaired: bool = False
    """Whether it was rebuilt from the shard files."""
    metadata: dict[str, Any]
    """The user's own, plain JSON."""
    tensors: tuple[TensorRecord, ...]
    """Sorted by key."""
    aliases: dict[str, str]
    """Other keys of tied tensors, to the key under which each is stored."""
    objects: dict[str, Any]
    """Key to value, as the JSON of plain data."""
    files: tuple[FileRecord, ...]
    """The shard files."""
    index: FileRecord
    """The file of the chunk table."""

    @property
    def own_files(self) -> tuple[FileRecord, ...]:
        """The shard files that this save wrote."""
        return tuple(record for record in self.files if not record.folder)

    @property
    def borrowed_files(self) -> tuple[FileRecord, ...]:
        """Shard files of other steps that hold chunks of this one."""
        return tuple(record for record in self.files if record.folder)


def manifest_version(files: Iterable[FileRecord]) -> int:
    """The version of a manifest with these files: without references it is what every reader knows."""
    return REFERENCES_VERSION if any(record.folder for record in files) else FORMAT_VERSION


def is_folder_name(name: str) -> bool:
    """Whether a file record may name this folder: one name, which cannot lead anywhere else.

    >>> [is_folder_name(name) for name in ("step-00000100", "..", "a/b", "")]
    [True, False, False, False]
    """
    return _FOLDER.fullmatch(name) is not None


def check_manifest(manifest: Manifest, file: str) -> None:
    """Raise FormatError unless the records of `manifest` fit each other and every number is in its range."""
    fault = _head_fault(manifest) or _tensor_fault(manifest) or _key_fault(manifest) or _file_fault(manifest)
    if fault is not None:
        raise FormatError(f"{file}: {fault}.", file=file)


def _head_fault(manifest: Manifest) -> str | None:
    if not _ATTEMPT.fullmatch(manifest.attempt):
        return f"the attempt {manifest.attempt!r} is not made of letters, digits, '.', '_' and '-'"
    if manifest.step is not None and not 0 <= manifest.step < 2**63:
        return f"the step is {manifest.step}, expected 0 or more"
    if not 1 <= manifest.world_size < 2**31:
        return f"the world size is {manifest.world_size}, expected 1 or more"
    return None


def _tensor_fault(manifest: Manifest) -> str | None:
    kinds = {(record.dtype, record.shape) for record in manifest.tensors}  # few: most tensors are alike
    faults = {kind: fault for kind in kinds if (fault := _kind_fault(*kind)) is not None}
    if faults:
        record = next(one for one in manifest.tensors if (one.dtype, one.shape) in faults)
        return f"tensor {record.key!r} has {faults[record.dtype, record.shape]}"
    keys = [record.key for record in manifest.tensors]
    if any(map(operator.ge, keys, keys[1:])):
        one, two = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
        return f"tensor {two!r} {'is there twice' if one == two else 'stands out of order'}"
    return None


def _kind_fault(dtype: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with tensors of a dtype and shape."""
    if dtype not in DTYPES:
        return f"the unknown dtype {dtype!r}"
    if len(shape) > MAX_NDIM:
        return f"{len(shape)} dimensions, at most {MAX_NDIM} are allowed"
    # Dimensions of 0 count as 1: then every product of a box inside the shape is in range.
    if math.prod([size or 1 for size in shape]) > (2**63 - 1) // DTYPES[dtype].itemsize:
        return f"the impossible shape {list(shape)}"
    return None


def _key_fault(manifest: Manifest) -> str | None:
    keys = {record.key for record in manifest.tensors}
    for alias, target in manifest.aliases.items():
        if alias in keys:
            return f"{alias!r} is both a tensor and another name of {target!r}"
        if target not in keys:
            return f"{alias!r} is another name of {target!r}, which is no tensor"
    for both in keys & manifest.objects.keys() or manifest.aliases.keys() & manifest.objects.keys():
        return f"{both!r} is both a tensor and an object"
    return None


def _file_fault(manifest: Manifest) -> str | None:
    """Names are those that a save gives, so that no manifest makes us read or remove another's file."""
    places: set[str] = set()
    ranks: set[int] = set()
    for record in manifest.files:
        fault = _borrowed_fault(record) if record.folder else _own_fault(record, manifest)
        if fault is not None:
            return fault
        if record.place in places or (not record.folder and record.rank in ranks):
            return f"the file {record.place!r} is there twice"
        places.add(record.place)
        if not record.folder:
            ranks.add(record.rank)
    has_references = len(ranks) < len(manifest.files)
    if has_references != (manifest.version > 1):
        return f"it is of version {manifest.version}, but {'has' if has_references else 'has no'} references"
    return _record_fault(manifest.index, index_name(manifest.attempt))


def _own_fault(record: FileRecord, manifest: Manifest) -> str | None:
    if not 0 <= record.rank < manifest.world_size:
        return f"the file {record.name!r} is of rank {record.rank} of {manifest.world_size}"
    return _record_fault(record, shard_name(record.rank, manifest.attempt))


def _borrowed_fault(record: FileRecord) -> str | None:
    """A reference leads to a shard file in a folder beside the checkpoint's own, and nowhere else."""
    if not is_folder_name(record.folder):
        return f"it refers to a file in {record.folder!r:.200}, which is no name of a step's folder"
    found = parse_shard_name(record.name)
    if found is None or found[0] != record.rank:
        return f"it refers to {record.place!r:.400}, which is no shard file of rank {record.rank}"
    return _record_fault(record, record.name)


def _record_fault(record: FileRecord, name: str) -> str | None:
    if record.name != name:
        return f"it names the file {record.name!r:.200}, but that file is called {name!r}"
    if not _HEX.fullmatch(record.digest):
        return f"the digest {record.digest!r:.200} of {name!r} is not 32 hexadecimal digits"
    if record.data_start > record.size:
        return f"the data of {name!r} begin at byte {record.data_start} of {record.size}"
    return None

"""The manifest: the contents of a checkpoint, and the rules for its records.

A checkpoint is committed if and only if its manifest exists.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardproof._utils.json_objects import objects_with
from shardproof.dtypes import DTYPES
from shardproof.engine.format.file_names import index_name, parse_shard_name, shard_name
from shardproof.engine.format.header import MAX_NDIM
from shardproof.errors import FormatError

FORMAT_VERSION = 1
REFERENCES_VERSION = 2
"""The version of a manifest that refers to files of other steps; readers that know only version 1 refuse
it."""

PROVENANCE = "@provenance"
"""The key of the metadata that belongs to shardproof, an object."""

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_FOLDER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,254}")
_HEX = re.compile(r"[0-9a-f]{32}")


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A tensor: its key, torch's name of its dtype, and its global shape."""

    key: str
    dtype: str
    shape: tuple[_Size, ...]


def tensor_bytes(record: TensorRecord) -> int:
    """Bytes of a stored tensor's elements."""
    return math.prod(record.shape) * DTYPES[record.dtype].itemsize


class FileRecord(msgspec.Struct, frozen=True, gc=False):
    """A file: its name in its folder, its size and its digest.

    >>> FileRecord("shards/00000-a.safetensors", 9, 32 * "0", 8, 0, "step-00000100").place
    'step-00000100/shards/00000-a.safetensors'
    """

    name: str
    size: _Size
    digest: str
    """32 hexadecimal digits: `file_digest` of a shard file, `bytes_digest` of the index."""
    data_start: _Size = 0
    """Bytes of the header, which the data follow; 0 for the index."""
    rank: int = -1
    """Rank that wrote the file; -1 for the index."""
    folder: str = ""
    """The sibling folder with the file; empty for the checkpoint's own folder."""

    @property
    def place(self) -> str:
        """The name for messages: with the folder if the file is another step's."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a checkpoint. One object is one `manifest.json`."""

    version: int = FORMAT_VERSION
    writer: str
    """Name and version of the program that wrote the checkpoint."""
    attempt: str
    """Name of the save, which is part of the names of its files."""
    step: int | None
    time: float
    """Seconds since 1970, UTC."""
    world_size: int
    """Number of ranks that saved."""
    repaired: bool = False
    """True if `shardproof repair` rebuilt the manifest from the shard files."""
    metadata: dict[str, Any]
    """The user's metadata, plain JSON."""
    provenance: dict[str, Any] = {}
    """The origin of the save, plain JSON; empty: not recorded. `manifest.json` has it below `PROVENANCE` of
    the metadata."""
    tensors: tuple[TensorRecord, ...]
    """All stored tensors, sorted by key."""
    aliases: dict[str, str]
    """Other keys of tied tensors: key to the key that is stored."""
    objects: dict[str, Any]
    """Plain values: key to value, as JSON."""
    files: tuple[FileRecord, ...]
    """The shard files, own and referred to."""
    index: FileRecord
    """The index, the file of the chunk table."""

    @property
    def own_files(self) -> tuple[FileRecord, ...]:
        """Shard files that this save wrote."""
        return tuple(record for record in self.files if not record.folder)

    @property
    def referenced_files(self) -> tuple[FileRecord, ...]:
        """Shard files of other steps with chunks of this checkpoint."""
        return tuple(record for record in self.files if record.folder)


def manifest_version(files: Iterable[FileRecord]) -> int:
    """The version of a manifest with these files: 2 if one is another step's, else 1."""
    return REFERENCES_VERSION if any(record.folder for record in files) else FORMAT_VERSION


def is_folder_name(name: str) -> bool:
    """True if a file record may name this folder: one path component that leads nowhere else.

    >>> [is_folder_name(name) for name in ("step-00000100", "..", "a/b", "")]
    [True, False, False, False]
    """
    return _FOLDER.fullmatch(name) is not None


def check_manifest(manifest: Manifest, file: str) -> None:
    """Checks that the records of a manifest fit each other and that every number is in range.

    Raises:
        FormatError: a rule is broken. `file` is the name in its message.
    """
    fault = _head_fault(manifest) or _tensor_fault(manifest) or _key_fault(manifest) or _file_fault(manifest)
    if fault is not None:
        raise FormatError(f"{file}: {fault}.", file=file)


def _head_fault(manifest: Manifest) -> str | None:
    if not _ATTEMPT.fullmatch(manifest.attempt):
        return f"the attempt {manifest.attempt!r} must have only letters, digits, '.', '_' and '-'"
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
        return f"tensor {two!r} {'is listed twice' if one == two else 'is out of order'}"
    return None


def _kind_fault(dtype: str, shape: tuple[int, ...]) -> str | None:
    """The fault of tensors of a dtype and shape."""
    if dtype not in DTYPES:
        return f"the unknown dtype {dtype!r}"
    if len(shape) > MAX_NDIM:
        return f"{len(shape)} dimensions, at most {MAX_NDIM} are allowed"
    # Dimensions of 0 count as 1, so that the volume of every box inside the shape is in range.
    if math.prod([size or 1 for size in shape]) > (2**63 - 1) // DTYPES[dtype].itemsize:
        return f"the impossible shape {list(shape)}"
    return None


def _key_fault(manifest: Manifest) -> str | None:
    keys = {record.key for record in manifest.tensors}
    for alias, target in manifest.aliases.items():
        if alias in keys:
            return f"{alias!r} is both a tensor and an alias of {target!r}"
        if target not in keys:
            return f"{alias!r} is an alias of {target!r}, which is not a tensor"
    for both in keys & manifest.objects.keys() or manifest.aliases.keys() & manifest.objects.keys():
        return f"{both!r} is both a tensor and an object"
    return None


def _file_fault(manifest: Manifest) -> str | None:
    """Only names that a save gives are allowed: no manifest makes a reader read or remove other files."""
    places: set[str] = set()
    ranks: set[int] = set()
    for record in manifest.files:
        fault = _place_fault(record, manifest)
        if fault is not None:
            return fault
        if record.place in places or (not record.folder and record.rank in ranks):
            return f"the file {record.place!r} is listed twice"
        places.add(record.place)
        if not record.folder:
            ranks.add(record.rank)
    has_references = len(ranks) < len(manifest.files)
    if has_references != (manifest.version > 1):
        return f"version {manifest.version} {'with' if has_references else 'without'} references is invalid"
    return _record_fault(manifest.index, index_name(manifest.attempt))


def _place_fault(record: FileRecord, manifest: Manifest) -> str | None:
    """The fault of a record that names no shard file of this save, nor one in a sibling folder."""
    if not record.folder:
        if not 0 <= record.rank < manifest.world_size:
            return f"the file {record.name!r} is of rank {record.rank} of {manifest.world_size}"
        return _record_fault(record, shard_name(record.rank, manifest.attempt))
    if not is_folder_name(record.folder):
        return f"it refers to a file in {record.folder!r:.200}, which cannot be the folder of a step"
    found = parse_shard_name(record.name)
    if found is None or found[0] != record.rank:
        return f"it refers to {record.place!r:.400}, which is not a shard file of rank {record.rank}"
    return _record_fault(record, record.name)


def _record_fault(record: FileRecord, name: str) -> str | None:
    if record.name != name:
        return f"it names the file {record.name!r:.200}, expected {name!r}"
    if not _HEX.fullmatch(record.digest):
        return f"the digest {record.digest!r:.200} of {name!r} is not 32 hexadecimal digits"
    if record.data_start > record.size:
        return f"the data of {name!r} begin at byte {record.data_start} of {record.size}"
    return None


def inner_tensors(objects: Mapping[str, Any], keys: Iterable[str]) -> set[str]:
    """Of the keys of tensors, those that hold an array, bytes, a text or a long list of a plain value.

    A tensor inside a plain value is not one of them: it has a key of its own. A value that
    is a tensor as a whole, such as the state of a generator, has only the key of the value.

    Args:
        objects: encoded plain values by key.
        keys: keys of tensors. Only values whose key is above one of them are read.

    >>> objects = {"a": {"$tensor": "a.@data", "kind": "array"}, "b": {"w": {"$tensor": "b.w"}}}
    >>> inner_tensors(objects, ["a.@data", "b.w", "c"])
    {'a.@data'}
    """
    inner: dict[str, set[str]] = {}
    found = set()
    for key in keys:
        above = key
        while "." in above:
            above = above.rpartition(".")[0]
            if above not in objects:
                continue
            if above not in inner:
                parts = objects_with(objects[above], "$tensor")
                inner[above] = {
                    part["$tensor"]
                    for part in parts
                    if part.get("kind", "tensor") != "tensor" or part["$tensor"] == f"{above}.@data"
                }
            if key in inner[above]:
                found.add(key)
                break
    return found

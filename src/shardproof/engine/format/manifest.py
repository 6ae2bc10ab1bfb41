"""The manifest: the contents of a checkpoint, the rules for its records, and the text of `manifest.json`.

A checkpoint is committed if and only if its manifest exists. The JSON ends with the digest of the text before
it (the seal).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from shardproof._utils.mappings import objects_with
from shardproof.dtypes import DTYPES
from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.file_names import MANIFEST_NAME, index_name, parse_shard_name, shard_name
from shardproof.engine.format.header import MAX_NDIM, decode_strictly
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
"""A folder that a file record may name: one path component that leads nowhere else."""
_HEX = re.compile(r"[0-9a-f]{32}")

MAX_MANIFEST = 4 << 30
"""Bytes of a manifest, at most."""

_DIGEST = b',"digest":"'
_SEAL = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
SEAL_LENGTH = len(_DIGEST) + 32 + 3
"""Bytes of the seal, the end of a manifest that holds its digest."""

USUAL_BEGINNING = b'{"format":"shardproof","version":1,'
"""The first bytes of every manifest without references that `encode_manifest` wrote."""


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


def _check_manifest(manifest: Manifest, file: str) -> None:
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
    if _FOLDER.fullmatch(record.folder) is None:
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


class _File(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A file record of version 1; in all versions the record of the index."""

    name: str
    size: _Size
    digest: str
    data_start: _Size = 0
    rank: int = -1


class _Placed(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A file record of version 2, which adds the folder."""

    name: str
    size: _Size
    digest: str
    data_start: _Size
    rank: int
    folder: str


_FileForm = TypeVar("_FileForm", _File, _Placed)


class _ManifestText(msgspec.Struct, Generic[_FileForm], frozen=True, forbid_unknown_fields=True):
    """The JSON of the manifest: all members are required, in this order."""

    format: str
    version: int
    writer: str
    attempt: str
    step: int | None
    time: float
    world_size: int
    repaired: bool
    metadata: dict[str, Any]
    tensors: tuple[TensorRecord, ...]
    aliases: dict[str, str]
    objects: dict[str, Any]
    files: tuple[_FileForm, ...]
    index: _File


class _Format(msgspec.Struct):
    format: str


class _Version(msgspec.Struct):
    format: str
    version: int


_DECODERS: dict[int, msgspec.json.Decoder[Any]] = {
    FORMAT_VERSION: msgspec.json.Decoder(_ManifestText[_File]),
    REFERENCES_VERSION: msgspec.json.Decoder(_ManifestText[_Placed]),
}
_FIELDS = tuple(name for name in _ManifestText.__struct_fields__ if name not in ("format", "files", "index"))


def _formed(record: FileRecord, form: type[_File] | type[_Placed]) -> Any:
    return form(*(getattr(record, name) for name in form.__struct_fields__))


def _record(form: _File | _Placed) -> FileRecord:
    return FileRecord(*msgspec.structs.astuple(form))


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes the text of `manifest.json`.

    Decodes the text again before returning it, and refuses values that would change.

    Raises:
        FormatError: JSON would change a value (NaN, a tuple, a key that is not a string), or
            `decode_manifest` would refuse a record.

    >>> index = FileRecord("index-a.safetensors", 0, 32 * "0")
    >>> manifest = Manifest(writer="shardproof 0.1.0", attempt="a", step=3, time=1.5, world_size=1,
    ...     metadata={}, tensors=(TensorRecord("w", "float32", (2,)),), aliases={},
    ...     objects={}, files=(), index=index)
    >>> decode_manifest(encode_manifest(manifest), "manifest.json") == manifest
    True
    """
    form = _Placed if manifest.version == REFERENCES_VERSION else _File
    files = tuple(_formed(record, form) for record in manifest.files)
    values = {name: getattr(manifest, name) for name in _FIELDS}
    if manifest.provenance:
        values["metadata"] = {**manifest.metadata, PROVENANCE: manifest.provenance}
    index = _formed(manifest.index, _File)
    try:
        body = msgspec.json.encode(_ManifestText(format="shardproof", **values, files=files, index=index))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"the manifest cannot be written as JSON: {error}.", file=MANIFEST_NAME) from error
    data = b"".join((body[:-1], _DIGEST, bytes_digest(body[:-1]).encode(), b'"}\n'))
    again = decode_manifest(data, MANIFEST_NAME)
    if again != manifest:
        where = _first_difference(msgspec.structs.asdict(manifest), msgspec.structs.asdict(again))
        raise FormatError(f"the manifest would change when it is read: {where}.", file=MANIFEST_NAME)
    return data


def decode_manifest(data: bytes, file: str) -> Manifest:
    """Decodes and checks the text of a manifest; `file` is its name in error messages.

    Memory and time are in proportion to the length of `data`, whatever it claims.

    Raises:
        FormatError: the text is damaged, of another version, or breaks a rule of the format.
    """
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"{file}: {len(data)} bytes, a manifest has at most {MAX_MANIFEST}.", file=file)
    expected = check_end(data, file)
    found = bytes_digest(memoryview(data)[:-SEAL_LENGTH])
    if found != expected:
        raise FormatError(
            f"{file}: its bytes hash to {found}, expected {expected}. The file is damaged or "
            "was edited. If all shard files of a save without references are there, `shardproof repair` "
            "writes it again.",
            file=file,
        )
    body = data[:-SEAL_LENGTH] + b"}"
    wire = decode_strictly(_DECODERS[_version(body, file)], body, file)
    values = {name: getattr(wire, name) for name in _FIELDS}
    # Before shardproof had the key, users may have stored another value there.
    is_recorded = isinstance(wire.metadata.get(PROVENANCE), dict)
    manifest = Manifest(
        **values,
        provenance=wire.metadata.pop(PROVENANCE) if is_recorded else {},
        files=tuple(map(_record, wire.files)),
        index=_record(wire.index),
    )
    _check_manifest(manifest, file)
    return manifest


def check_end(data: bytes, file: str) -> str:
    """The digest in the last bytes of a manifest.

    Raises:
        FormatError: they are not the end of a manifest.
    """
    seal = _SEAL.fullmatch(data, max(0, len(data) - SEAL_LENGTH))
    if seal is None:
        raise FormatError(
            f"{file}: the end is not that of a manifest. The file was cut short or edited. If all shard "
            "files of a save without references are there, `shardproof repair` writes it again.",
            file=file,
        )
    return seal[1].decode()


def is_foreign(data: bytes) -> bool:
    """True if a file called `manifest.json` is another program's: valid JSON of another format.

    >>> is_foreign(b'{"name": "web app"}'), is_foreign(b'{"format":"shardproof","ver')
    (True, False)
    """
    try:
        return msgspec.json.decode(data, type=_Format).format != "shardproof"
    except msgspec.ValidationError:
        return True
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def _version(body: bytes, file: str) -> int:
    """The version of the text, if this program reads it."""
    if body.startswith(USUAL_BEGINNING):
        return FORMAT_VERSION
    try:
        found = msgspec.json.decode(body, type=_Version)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return FORMAT_VERSION  # the strict decoder reports the fault
    if found.format != "shardproof" or found.version not in _DECODERS:
        raise FormatError(
            f"{file}: format {found.format!r} version {found.version}, but this program reads "
            f"'shardproof' version {FORMAT_VERSION} and {REFERENCES_VERSION}. Use the version of "
            "shardproof that wrote it, or a newer one.",
            file=file,
        )
    return found.version


def _first_difference(written: Any, read: Any, path: str = "") -> str:
    """The first difference of two values, in words.

    >>> _first_difference({"metadata": {"loss": float("nan")}}, {"metadata": {"loss": None}})
    'metadata.loss is nan and would be read as None'
    """
    if type(written) is type(read):
        inner: Any = ()
        if isinstance(written, dict) and written.keys() == read.keys():
            inner = [(key, written[key], read[key]) for key in written]
        elif isinstance(written, list | tuple) and len(written) == len(read):
            inner = [(i, one, two) for i, (one, two) in enumerate(zip(written, read, strict=True))]
        for key, one, two in inner:
            if one != two:
                return _first_difference(one, two, f"{path}.{key}" if path else str(key))
    return f"{path or 'it'} is {written!r:.200} and would be read as {read!r:.200}"

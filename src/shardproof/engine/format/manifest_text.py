"""Encodes and decodes `manifest.json`, whose JSON ends with the digest of the text before it (the seal)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.file_names import MANIFEST_NAME
from shardproof.engine.format.json import decode_strictly
from shardproof.engine.format.manifest import (
    FORMAT_VERSION,
    PROVENANCE,
    REFERENCES_VERSION,
    FileRecord,
    Manifest,
    TensorRecord,
    check_manifest,
)
from shardproof.errors import FormatError

MAX_MANIFEST = 4 << 30
"""Bytes of a manifest, at most."""

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_DIGEST = b',"digest":"'
_SEAL = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
SEAL_LENGTH = len(_DIGEST) + 32 + 3
"""Bytes of the seal, the end of a manifest that holds its digest."""

USUAL_BEGINNING = b'{"format":"shardproof","version":1,'
"""The first bytes of every manifest without references that `encode_manifest` wrote."""


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
    check_manifest(manifest, file)
    return manifest


def check_end(data: bytes, file: str) -> str:
    """The digest in the last bytes of a manifest.

    Args:
        data: the manifest, or its last `SEAL_LENGTH` bytes.
        file: its name in error messages.

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

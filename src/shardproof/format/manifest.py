"""The manifest: what a checkpoint holds. Its presence is the commit."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardproof.errors import FormatError
from shardproof.format.checking import check_manifest, first_difference
from shardproof.format.digests import bytes_digest
from shardproof.format.jsontext import decode_strictly
from shardproof.format.names import MANIFEST_NAME

__all__ = ["FORMAT_VERSION", "FileRecord", "Manifest", "TensorRecord", "decode_manifest", "encode_manifest"]

FORMAT_VERSION = 1
MAX_MANIFEST = 4 << 30
"""Bytes that a manifest may have."""

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_DIGEST = b',"digest":"'
_SEAL = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
_SEAL_LENGTH = len(_DIGEST) + 32 + 3


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One tensor: its key, torch's name of its dtype and its global shape."""

    key: str
    dtype: str
    shape: tuple[_Size, ...]


class FileRecord(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One file: its name in the checkpoint's folder, its bytes and what they must hash to."""

    name: str
    size: _Size
    digest: str
    """Of a shard file: `file_digest`. Of the index: XXH3-128 of all its bytes. 32 hexadecimal digits."""
    data_start: _Size = 0
    """Bytes before the data, which are the header."""
    rank: int = -1
    """Who wrote it; -1 for the index."""


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


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's JSON: every member required, in this order."""

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
    files: tuple[FileRecord, ...]
    index: FileRecord


class _Version(msgspec.Struct):
    format: str
    version: int


_DECODER = msgspec.json.Decoder(_Wire)
_FIELDS = tuple(name for name in _Wire.__struct_fields__ if name != "format")


def encode_manifest(manifest: Manifest) -> bytes:
    """The text of `manifest.json`, which ends with the digest of what comes before it.

    The text is read back before it is given out: what cannot be read again as the same values is refused.

    Raises:
        FormatError: a value that JSON would change (NaN, a tuple, a key that is no string), or a record
            that `decode_manifest` would refuse.

    >>> index = FileRecord("index-a.safetensors", 0, 32 * "0")
    >>> manifest = Manifest(writer="shardproof 0.1.0", attempt="a", step=3, time=1.5, world_size=1,
    ...     metadata={}, tensors=(TensorRecord("w", "float32", (2,)),), aliases={},
    ...     objects={}, files=(), index=index)
    >>> decode_manifest(encode_manifest(manifest), "manifest.json") == manifest
    True
    """
    wire = _Wire("shardproof", *(getattr(manifest, name) for name in _FIELDS))
    try:
        body = msgspec.json.encode(wire)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"the manifest cannot be written as JSON: {error}.", file=MANIFEST_NAME) from error
    data = b"".join((body[:-1], _DIGEST, bytes_digest(body[:-1]).encode(), b'"}\n'))
    again = decode_manifest(data, MANIFEST_NAME)
    if again != manifest:
        where = first_difference(msgspec.structs.asdict(manifest), msgspec.structs.asdict(again))
        raise FormatError(f"the manifest would not read back as it is: {where}.", file=MANIFEST_NAME)
    return data


def decode_manifest(data: bytes, file: str) -> Manifest:
    """The manifest that `data` is the text of, wholly checked.

    Args:
        data: all bytes of the file.
        file: for the messages.

    Raises:
        FormatError: damaged, of another version, or not what the format says. Memory and time stay in
            proportion to the length of `data`, whatever it says.
    """
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"{file}: {len(data)} bytes, a manifest has at most {MAX_MANIFEST}.", file=file)
    seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_LENGTH))
    if seal is None:
        raise FormatError(
            f"{file}: it does not end as a manifest does. It was cut short or edited; `shardproof repair` "
            "can write it again from the shard files.",
            file=file,
        )
    found = bytes_digest(memoryview(data)[:-_SEAL_LENGTH])
    if found != seal[1].decode():
        raise FormatError(
            f"{file}: its bytes hash to {found}, but it says {seal[1].decode()}. It is damaged or was "
            "edited; `shardproof repair` can write it again from the shard files.",
            file=file,
        )
    body = data[:-_SEAL_LENGTH] + b"}"
    try:
        wire = decode_strictly(_DECODER, body, file)
    except FormatError:
        _check_version(body, file)
        raise
    if wire.format != "shardproof" or wire.version != FORMAT_VERSION:
        _check_version(body, file)
    manifest = Manifest(**{name: getattr(wire, name) for name in _FIELDS})
    check_manifest(manifest, file)
    return manifest


def _check_version(body: bytes, file: str) -> None:
    try:
        version = msgspec.json.decode(body, type=_Version)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if version.format != "shardproof" or version.version != FORMAT_VERSION:
        raise FormatError(
            f"{file}: format {version.format!r} version {version.version}, but this program reads "
            f"'shardproof' version {FORMAT_VERSION}. Use the version of "
            "shardproof that wrote it, or a newer one.",
            file=file,
        )

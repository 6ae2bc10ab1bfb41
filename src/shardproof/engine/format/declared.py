"""The declaration in a shard file about itself and its save, from which a lost manifest can be rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.header import decode_strictly
from shardproof.engine.format.manifest import FORMAT_VERSION, Manifest, TensorRecord
from shardproof.engine.format.shards import Entries, chunk_entries, shard_header
from shardproof.errors import FormatError

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Declared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The declaration in a shard file about itself and its save."""

    version: int
    attempt: str
    step: _Size | None
    time: float
    rank: _Size
    world_size: _Size
    files: _Size
    """Number of shard files of the attempt, if all its chunks were written."""
    tensors: dict[str, tuple[str, tuple[_Size, ...]]]
    """Key to dtype and global shape, of the file's tensors; in the first file also of tensors without
    elements."""
    aliases: dict[str, str]
    objects: dict[str, Any]
    """Plain values that this file stores, as JSON values by key."""
    metadata: dict[str, Any]
    base: str = ""
    """Folder of the step that the save refers to for unchanged chunks; empty: none."""

    @property
    def save(self) -> tuple[Any, ...]:
        """The values that are equal in all shards of one save."""
        alike = (self.version, self.step, self.time, self.world_size, self.files, self.aliases, self.metadata)
        return *alike, self.base


_DECODER = msgspec.json.Decoder(Declared)


def declared_header(declared: Declared, entries: Entries, *, size: int = 0) -> bytes:
    """All bytes of a shard file before its data.

    Values of `declared` may be `msgspec.Raw`, encoded before. A header shorter than `size` is padded to it.

    Raises:
        FormatError: the header is longer than safetensors readers accept.
    """
    text = msgspec.json.encode(declared)
    metadata = {"shardproof": text.decode(), "digest": bytes_digest(text + entries.encoded)}
    return shard_header(entries.encoded, metadata, in_page=entries.in_page, size=size)


def header_of_chunks(
    manifest: Manifest,
    tensors: Sequence[TensorRecord],
    boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    byte_count: NDArray[np.int64],
    objects: Iterable[str],
    *,
    rank: int,
    files: int,
    is_first: bool,
) -> tuple[bytes, int]:
    """The header of a shard file that stores chunks of the tensors of a manifest.

    Returns also the bytes of padding after the chunks.

    Args:
        manifest: manifest of the new checkpoint; its files and its index do not count.
        tensors: the tensor of each chunk, in the order of the file.
        boxes: offsets and sizes of each.
        byte_count: (n,) bytes of each.
        objects: keys of the plain values that the file stores.
        rank: rank of the file.
        files: number of files of the checkpoint.
        is_first: True for the file that also declares the tensors without elements.
    """
    chunks = [(record.key, record.dtype, *box) for record, box in zip(tensors, boxes, strict=True)]
    entries = chunk_entries(chunks, byte_count)
    empty = [record for record in manifest.tensors if 0 in record.shape] if is_first else []
    declared = Declared(
        version=FORMAT_VERSION,
        attempt=manifest.attempt,
        step=manifest.step,
        time=manifest.time,
        rank=rank,
        world_size=manifest.world_size,
        files=files,
        tensors={record.key: (record.dtype, record.shape) for record in (*tensors, *empty)},
        aliases=manifest.aliases,
        objects={key: manifest.objects[key] for key in objects},
        metadata=manifest.metadata,
    )
    return declared_header(declared, entries), entries.padding


def declaration_of(metadata: dict[str, str], entries: bytes, file: str) -> Declared:
    """Decodes the declaration of a shard file from its ``__metadata__`` and its entries, which are encoded.

    Raises:
        FormatError: the file is no shard file, or its header is damaged.
    """
    text = metadata.get("shardproof")
    if text is None:
        raise FormatError(f"{file}: a safetensors file, but no shard: it says nothing of its save", file=file)
    if metadata.get("digest") != bytes_digest(text.encode() + entries):
        raise FormatError(f"{file}: its header is damaged: it does not match the digest in it", file=file)
    return decode_strictly(_DECODER, text.encode(), file)

"""The files of a checkpoint, format version 1: manifest, chunk index and shard files. See docs/format.md."""

from __future__ import annotations

from shardproof.format.digests import bytes_digest, file_digest
from shardproof.format.header import ShardHeader, parse_header, read_shard_header
from shardproof.format.index import decode_index, encode_index
from shardproof.format.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
)
from shardproof.format.names import MANIFEST_NAME, chunk_name, index_name, parse_chunk_name, shard_name
from shardproof.format.reading import lost_files, read_index, read_manifest
from shardproof.format.shards import (
    DATA_ALIGNMENT,
    DIGESTS,
    PADDING,
    encode_entries,
    read_chunk_digests,
    shard_header,
)

__all__ = [
    "DATA_ALIGNMENT",
    "DIGESTS",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "PADDING",
    "FileRecord",
    "Manifest",
    "ShardHeader",
    "TensorRecord",
    "bytes_digest",
    "chunk_name",
    "decode_index",
    "decode_manifest",
    "encode_entries",
    "encode_index",
    "encode_manifest",
    "file_digest",
    "index_name",
    "lost_files",
    "parse_chunk_name",
    "parse_header",
    "read_chunk_digests",
    "read_index",
    "read_manifest",
    "read_shard_header",
    "shard_header",
    "shard_name",
]

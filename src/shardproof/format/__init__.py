"""The files of a checkpoint, format version 1: manifest, chunk index and shard files. See docs/format.md."""

from __future__ import annotations

from shardproof.format.blocks import (
    BLOCK_BYTES,
    ChunkHasher,
    block_counts,
    digest_of_blocks,
)
from shardproof.format.digests import (
    bytes_digest,
    digests_as_bytes,
    digests_as_table,
    digests_from_bytes,
    digests_from_table,
    file_digest,
)
from shardproof.format.header import ShardHeader, parse_header, read_shard_header
from shardproof.format.index import decode_index, encode_index
from shardproof.format.manifest import (
    FORMAT_VERSION,
    REFERENCES_VERSION,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    manifest_version,
)
from shardproof.format.names import (
    MANIFEST_NAME,
    STEP_FOLDER,
    box_name,
    chunk_name,
    index_name,
    parse_chunk_name,
    parse_shard_name,
    shard_name,
)
from shardproof.format.reading import files_of, lost_files, read_index, read_manifest, seal_of
from shardproof.format.references import (
    References,
    named_files,
    referred_beside,
    referred_in,
    unneeded,
    why_kept,
)
from shardproof.format.shards import (
    BLOCKS,
    DIGESTS,
    PADDING,
    PAGE_BYTES,
    encode_entries,
    read_chunk_digests,
    shard_header,
    shard_tail,
)

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "DIGESTS",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "PADDING",
    "PAGE_BYTES",
    "REFERENCES_VERSION",
    "SEAL_LENGTH",
    "STEP_FOLDER",
    "ChunkHasher",
    "FileRecord",
    "Manifest",
    "References",
    "ShardHeader",
    "TensorRecord",
    "block_counts",
    "box_name",
    "bytes_digest",
    "chunk_name",
    "decode_index",
    "decode_manifest",
    "digest_of_blocks",
    "digests_as_bytes",
    "digests_as_table",
    "digests_from_bytes",
    "digests_from_table",
    "encode_entries",
    "encode_index",
    "encode_manifest",
    "file_digest",
    "files_of",
    "index_name",
    "lost_files",
    "manifest_version",
    "named_files",
    "parse_chunk_name",
    "parse_header",
    "parse_shard_name",
    "read_chunk_digests",
    "read_index",
    "read_manifest",
    "read_shard_header",
    "referred_beside",
    "referred_in",
    "seal_of",
    "shard_header",
    "shard_name",
    "shard_tail",
    "unneeded",
    "why_kept",
]

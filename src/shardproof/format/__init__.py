"""The files of a checkpoint: manifest, chunk index and shard files. See docs/format.md.

The manifest has version 1 if all shard files are the step's own, and version 2 if it refers to shard files of
other steps. Index and shard files are the same in both.
"""

from __future__ import annotations

from shardproof.format.blocks import (
    BLOCK_BYTES,
    ChunkHasher,
    block_counts,
    digest_of_blocks,
)
from shardproof.format.checkpoint_files import (
    locate_files,
    lost_files,
    metadata_files,
    read_index,
    read_manifest,
    read_seal,
)
from shardproof.format.chunk_verifier import ChunkVerifier, block_digests, read_pieces
from shardproof.format.declared import Declared, declaration_of, declared_header, header_of_chunks
from shardproof.format.digests import (
    bytes_digest,
    digests_as_bytes,
    digests_as_table,
    digests_from_bytes,
    digests_from_table,
    file_digest,
)
from shardproof.format.file_names import (
    MANIFEST_NAME,
    STEP_FOLDER,
    box_name,
    chain_attempt,
    chain_length,
    chunk_name,
    index_name,
    is_overwrite,
    overwrite_attempt,
    parse_chunk_name,
    parse_shard_name,
    shard_name,
)
from shardproof.format.header import HeaderEntry, ShardHeader, parse_header, read_shard_header
from shardproof.format.index import decode_index, encode_index
from shardproof.format.json import decode_strictly
from shardproof.format.manifest import (
    FORMAT_VERSION,
    REFERENCES_VERSION,
    FileRecord,
    Manifest,
    TensorRecord,
    manifest_version,
    tensor_bytes,
)
from shardproof.format.manifest_text import SEAL_LENGTH, decode_manifest, encode_manifest
from shardproof.format.references import (
    References,
    flush_manifests_in,
    flush_manifests_of_siblings,
    has_no_references,
    named_files,
    references_in,
    references_of_siblings,
    unreadable_manifests_message,
    unreferenced_files,
)
from shardproof.format.shard_entries import (
    LARGE_IN_PAGE,
    Entries,
    chunk_entries,
    encode_chunks,
    start_in_page,
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
from shardproof.format.size_check import check_size, size_error, size_fault

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "DIGESTS",
    "FORMAT_VERSION",
    "LARGE_IN_PAGE",
    "MANIFEST_NAME",
    "PADDING",
    "PAGE_BYTES",
    "REFERENCES_VERSION",
    "SEAL_LENGTH",
    "STEP_FOLDER",
    "ChunkHasher",
    "ChunkVerifier",
    "Declared",
    "Entries",
    "FileRecord",
    "HeaderEntry",
    "Manifest",
    "References",
    "ShardHeader",
    "TensorRecord",
    "block_counts",
    "block_digests",
    "box_name",
    "bytes_digest",
    "chain_attempt",
    "chain_length",
    "check_size",
    "chunk_entries",
    "chunk_name",
    "declaration_of",
    "declared_header",
    "decode_index",
    "decode_manifest",
    "decode_strictly",
    "digest_of_blocks",
    "digests_as_bytes",
    "digests_as_table",
    "digests_from_bytes",
    "digests_from_table",
    "encode_chunks",
    "encode_entries",
    "encode_index",
    "encode_manifest",
    "file_digest",
    "flush_manifests_in",
    "flush_manifests_of_siblings",
    "has_no_references",
    "header_of_chunks",
    "index_name",
    "is_overwrite",
    "locate_files",
    "lost_files",
    "manifest_version",
    "metadata_files",
    "named_files",
    "overwrite_attempt",
    "parse_chunk_name",
    "parse_header",
    "parse_shard_name",
    "read_chunk_digests",
    "read_index",
    "read_manifest",
    "read_pieces",
    "read_seal",
    "read_shard_header",
    "references_in",
    "references_of_siblings",
    "shard_header",
    "shard_name",
    "shard_tail",
    "size_error",
    "size_fault",
    "start_in_page",
    "tensor_bytes",
    "unreadable_manifests_message",
    "unreferenced_files",
]

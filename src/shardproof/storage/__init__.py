"""Storages: create, read, list, delete and publish files; `LocalStorage` does so in a folder.

These are the public names of `shardproof.engine.storage`.
"""

from __future__ import annotations

from shardproof.engine.storage import (
    ALIGNMENT,
    CacheChoice,
    FreeSpace,
    FsspecStorage,
    LocalSink,
    LocalStorage,
    Location,
    MemoryStorage,
    ObjectStorage,
    Sink,
    Storage,
    StrOrBytesPath,
    UncachedStorage,
    Upload,
    aligned_buffer,
    check_name,
    choose_cache,
    is_url,
    storage_at,
)

__all__ = [
    "ALIGNMENT",
    "CacheChoice",
    "FreeSpace",
    "FsspecStorage",
    "LocalSink",
    "LocalStorage",
    "Location",
    "MemoryStorage",
    "ObjectStorage",
    "Sink",
    "Storage",
    "StrOrBytesPath",
    "UncachedStorage",
    "Upload",
    "aligned_buffer",
    "check_name",
    "choose_cache",
    "is_url",
    "storage_at",
]

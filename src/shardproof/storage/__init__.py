"""Storages: create, read, list, delete and publish files; `LocalStorage` does so in a folder."""

from __future__ import annotations

from shardproof.storage.base import CachedStorage, CopiedStorage, Sink, Storage, check_name
from shardproof.storage.direct_io import ALIGNMENT, aligned_buffer, memory_for
from shardproof.storage.durable import flush_folders as flush_folders  # not listed in __all__: internal
from shardproof.storage.durable import rename_exclusively as rename_exclusively
from shardproof.storage.file_writer import FileWriter as FileWriter  # not listed in __all__: internal
from shardproof.storage.local import LocalStorage
from shardproof.storage.locations import Location, is_url, storage_at
from shardproof.storage.object_store import ObjectStorage
from shardproof.storage.paths import StrOrBytesPath
from shardproof.storage.sink import LocalSink
from shardproof.storage.uncached import UncachedStorage

__all__ = [
    "ALIGNMENT",
    "CachedStorage",
    "CopiedStorage",
    "LocalSink",
    "LocalStorage",
    "Location",
    "ObjectStorage",
    "Sink",
    "Storage",
    "StrOrBytesPath",
    "UncachedStorage",
    "aligned_buffer",
    "check_name",
    "is_url",
    "memory_for",
    "storage_at",
]

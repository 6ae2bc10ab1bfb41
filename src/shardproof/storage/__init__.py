"""Where bytes are kept: create, read a range, list, delete and publish, on a local directory."""

from __future__ import annotations

from shardproof.storage.buffers import ALIGNMENT, address, aligned_buffer
from shardproof.storage.failures import printable
from shardproof.storage.interface import CachedStorage, Sink, Storage
from shardproof.storage.local import LocalStorage
from shardproof.storage.names import check_name
from shardproof.storage.past_cache import UncachedStorage
from shardproof.storage.paths import StrOrBytesPath, absolute
from shardproof.storage.priority import lower_io_priority
from shardproof.storage.sink import LocalSink
from shardproof.storage.uncached import memory_for

__all__ = [
    "ALIGNMENT",
    "CachedStorage",
    "LocalSink",
    "LocalStorage",
    "Sink",
    "Storage",
    "StrOrBytesPath",
    "UncachedStorage",
    "absolute",
    "address",
    "aligned_buffer",
    "check_name",
    "lower_io_priority",
    "memory_for",
    "printable",
]

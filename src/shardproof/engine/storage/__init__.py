"""Storages: create, read, list, delete and publish files; `LocalStorage` does so in a folder."""

from __future__ import annotations

from shardproof.engine.storage.base import (
    FreeSpace,
    Sink,
    Storage,
    check_name,
)
from shardproof.engine.storage.base import check_folder as check_folder  # not listed in __all__: internal
from shardproof.engine.storage.base import too_large as too_large  # not listed in __all__: internal
from shardproof.engine.storage.base import write_file as write_file  # not listed in __all__: internal
from shardproof.engine.storage.cache_rule import CacheChoice, choose_cache
from shardproof.engine.storage.cache_rule import fits_cache as fits_cache  # not listed in __all__: internal
from shardproof.engine.storage.direct_io import ALIGNMENT, aligned_buffer
from shardproof.engine.storage.durable import publish_path as publish_path  # not listed in __all__: internal
from shardproof.engine.storage.free_space import file_system_number as file_system_number  # internal
from shardproof.engine.storage.fsspec_storage import FsspecStorage
from shardproof.engine.storage.local import LocalStorage, UncachedStorage
from shardproof.engine.storage.locations import Location, is_url, storage_at
from shardproof.engine.storage.locations import (
    check_location as check_location,  # not listed in __all__: internal
)
from shardproof.engine.storage.locations import (
    is_bucket_url as is_bucket_url,  # not listed in __all__: internal
)
from shardproof.engine.storage.locations import (
    is_same_place as is_same_place,  # not listed in __all__: internal
)
from shardproof.engine.storage.memory_store import MemoryRun as MemoryRun  # not listed in __all__: internal
from shardproof.engine.storage.memory_store import MemoryStorage
from shardproof.engine.storage.memory_store import (
    memory_runs as memory_runs,  # not listed in __all__: internal
)
from shardproof.engine.storage.multipart_uploads import Upload
from shardproof.engine.storage.object_store import ObjectStorage
from shardproof.engine.storage.paths import StrOrBytesPath
from shardproof.engine.storage.paths import (
    make_folders as make_folders,  # not listed in __all__: internal
)
from shardproof.engine.storage.paths import storage_error as storage_error  # not listed in __all__: internal
from shardproof.engine.storage.remote_requests import (
    file_sizes as file_sizes,  # not listed in __all__: internal
)
from shardproof.engine.storage.remote_requests import (
    map_requests as map_requests,  # not listed in __all__: internal
)
from shardproof.engine.storage.remote_requests import time_at as time_at  # not listed in __all__: internal
from shardproof.engine.storage.sink import FileWriter as FileWriter  # not listed in __all__: internal
from shardproof.engine.storage.sink import LocalSink

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

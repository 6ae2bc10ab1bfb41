"""Finds the storage that a path or URL names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from shardproof.errors import StorageError
from shardproof.storage.base import Storage
from shardproof.storage.local import LocalStorage
from shardproof.storage.object_store import SCHEMES, ObjectStorage
from shardproof.storage.paths import StrOrBytesPath

__all__ = ["Location", "is_url", "storage_at"]

Location: TypeAlias = StrOrBytesPath | Storage
"""A folder, the URL of a prefix of an object store, or a storage."""


def is_url(location: object) -> bool:
    """True for the URL of an object store.

    >>> is_url("s3://bucket/run"), is_url("/runs/gpt")
    (True, False)
    """
    return isinstance(location, str) and location.partition("://")[0] in SCHEMES and "://" in location


def storage_at(location: Location, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage that a path or URL names. A storage is returned as it is.

    Args:
        location: a folder, a URL such as ``s3://bucket/run``, or a storage.
        options: settings of an object store; see `ObjectStorage`.

    Raises:
        StorageError: the location is not valid, or a folder was given options.

    >>> import tempfile
    >>> storage_at(tempfile.gettempdir()).location == tempfile.gettempdir()
    True
    """
    if isinstance(location, str) and is_url(location):
        return ObjectStorage(location, options)
    if options:
        raise StorageError(f"storage_options are for object stores, and {location!r} is none")
    if isinstance(location, (str, bytes, os.PathLike)):
        return LocalStorage(location)
    return location

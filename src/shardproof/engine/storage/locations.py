"""Finds the storage that a path or URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from shardproof._utils.arguments import check_mapping, wrong_type
from shardproof._utils.humanize import without_credentials
from shardproof.engine.storage.base import Storage
from shardproof.engine.storage.local import LocalStorage
from shardproof.engine.storage.memory_store import MEMORY_SCHEME, MemoryStorage
from shardproof.engine.storage.object_store import SCHEMES, ObjectStorage
from shardproof.engine.storage.paths import StrOrBytesPath
from shardproof.errors import StorageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL, also after `pathlib` has joined its slashes."""

Location: TypeAlias = StrOrBytesPath | Storage
"""A folder, the URL of a prefix of an object store or of a run in memory, or a storage."""


def is_url(location: object) -> bool:
    """True for the URL of an object store, or of a run in memory.

    >>> is_url("s3://bucket/run"), is_url("memory://gpt"), is_url("/runs/gpt")
    (True, True, False)
    """
    return is_bucket_url(location) or (isinstance(location, str) and _scheme(location) == MEMORY_SCHEME)


def is_bucket_url(location: object) -> bool:
    """True for the URL of an object store. Only object stores have `storage_options`.

    >>> is_bucket_url("s3://bucket/run"), is_bucket_url("memory://gpt")
    (True, False)
    """
    return isinstance(location, str) and _scheme(location) in SCHEMES


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


def check_location(name: str, location: object) -> None:
    """Refuses an argument that is no location.

    Raises:
        TypeError: naming the argument.
    """
    if isinstance(location, (str, bytes, os.PathLike, Storage)):
        return
    if hasattr(location, "within"):
        kind = type(location).__qualname__
        raise TypeError(
            f"{name} has the methods of a storage and not its base class: write "
            f"`class {kind}(shardproof.storage.Storage)`. The base class has the optional methods and "
            "attributes with their defaults: set `is_remote` and `bounds_reads` where they apply"
        )
    raise wrong_type(name, location, "a path, a URL or a storage")


def storage_at(location: Location, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage that a path or URL names. A storage is returned as it is.

    Args:
        location: a folder, a URL such as ``s3://bucket/run`` or ``memory://run``, or a storage.
        options: settings of an object store; see `ObjectStorage`.

    Raises:
        TypeError: an argument has a wrong type.
        StorageError: the location is not valid, or is a URL of an unknown scheme; or a folder has options.

    >>> import tempfile
    >>> storage_at(tempfile.gettempdir()).location == tempfile.gettempdir()
    True
    """
    check_location("location", location)
    check_mapping("storage_options", options, "a dict of settings, or None", secret=True)
    if isinstance(location, str) and is_bucket_url(location):
        return ObjectStorage(location, options)
    if options:
        shown = without_credentials(location) if isinstance(location, str) else location
        raise StorageError(f"storage_options are for object stores, and {shown!r} is none")
    if not isinstance(location, (str, bytes, os.PathLike)):
        return location
    text = os.fsdecode(location)
    if is_url(location):
        return MemoryStorage(text)
    if _SCHEME.match(text):
        raise StorageError(
            f"{without_credentials(text)!r} is no folder, and no URL of a known store. Give a folder, "
            f"or as a text one of {', '.join(f'{scheme}://' for scheme in (*SCHEMES, MEMORY_SCHEME))}; or "
            "shardproof.storage.FsspecStorage for a file system of fsspec",
            file=without_credentials(text),
        )
    return LocalStorage(location)


def is_same_place(one: Storage, other: Storage) -> bool:
    """True if two storages have one place: without symbolic links, and with one name for the schemes of S3.

    >>> is_same_place(LocalStorage("run"), LocalStorage("run/../run"))
    True
    """
    return _place(one) == _place(other)


def _place(storage: Storage) -> str:
    if storage.path is not None:
        return os.path.realpath(storage.path)
    return re.sub("^s3a://", "s3://", storage.location)

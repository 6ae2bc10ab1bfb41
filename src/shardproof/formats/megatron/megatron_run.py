"""Run folders of Megatron: a folder for each iteration, and files that name the latest and the format."""

from __future__ import annotations

import re

from shardproof.engine.foreign import Foreign
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, ShardproofError
from shardproof.formats.json_values import read_json

BACKEND_FILE = "metadata.json"
"""The file in which Megatron-Core names the format of a checkpoint."""
_TRACKER = "latest_checkpointed_iteration.txt"
_MOST_BYTES = 64
_MOST_BACKEND_BYTES = 1 << 20


def latest_iteration(foreign: Foreign) -> Foreign:
    """The folder that a run folder names as its latest; `foreign` itself if it is not a run folder.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> storage.publish("latest_checkpointed_iteration.txt", b"20")
        >>> latest_iteration(Foreign(storage)).storage.folder
        'iter_0000020'
    """
    if not foreign.has(_TRACKER):
        return foreign
    data = foreign.storage.read(_TRACKER, 0, min(foreign.storage.size(_TRACKER) or 0, _MOST_BYTES))
    text = data.decode("ascii", "replace").strip()
    if text == "release":
        return Foreign(foreign.storage.within(text))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        path = f"{foreign.location}/{_TRACKER}"
        raise FormatError(f'{path} has {text!r}, expected the number of an iteration or "release"', file=path)
    return Foreign(foreign.storage.within(f"iter_{int(text):07d}"))


def iteration_of(folder: str) -> int | None:
    """The iteration in the name of a folder; None if the name has none.

    >>> iteration_of("iter_0000020"), iteration_of("release")
    (20, None)
    """
    found = re.fullmatch(r"iter_([0-9]{7,18})", folder)
    return int(found[1]) if found else None


def sharded_backend(storage: Storage) -> str | None:
    """The format that ``metadata.json`` of Megatron-Core names; None if it cannot be read."""
    try:
        _, found = read_json(storage, BACKEND_FILE, _MOST_BACKEND_BYTES)
    except ShardproofError:
        return None
    backend = found.get("sharded_backend")
    return backend if isinstance(backend, str) else None

"""The names of a checkpoint's files, and of the chunks in a shard file."""

from __future__ import annotations

import re
from collections.abc import Sequence

MANIFEST_NAME = "manifest.json"

STEP_FOLDER = re.compile(r"(step|suspect)-([0-9]{8,18})")
"""Matches names of a run's folders that hold a step or a suspect."""

_ATTEMPT = r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}"
_SHARD = re.compile(rf"shards/([0-9]{{5,10}})-({_ATTEMPT})\.safetensors")
_CHAIN = re.compile(r".*\.([1-9][0-9]{0,17})")
_OVERWRITE = "-overwrite"
_CHUNK = re.compile(r"(.*)\[((?:[0-9]+:[0-9]+)(?:,[0-9]+:[0-9]+)*)?\]", re.DOTALL)


def chain_attempt(name: str, length: int) -> str:
    """The name of the attempt of an incremental save, the saves since the last full one included.

    >>> chain_attempt("5f0c", 3), chain_length("5f0c.3"), chain_length("5f0c")
    ('5f0c.3', 3, None)
    """
    return f"{name}.{length}"


def chain_length(attempt: str) -> int | None:
    """Number of saves since the last full one; None if the name of the attempt has none."""
    found = _CHAIN.fullmatch(attempt)
    return int(found[1]) if found is not None else None


def overwrite_attempt(name: str) -> str:
    """The attempt name of a save that may replace earlier saves of its step on other tiers.

    The name is committed with the manifest, so the permission outlives the process that saved.

    >>> overwrite_attempt("5f0c"), is_overwrite("5f0c-overwrite"), is_overwrite("5f0c")
    ('5f0c-overwrite', True, False)
    >>> is_overwrite(chain_attempt(overwrite_attempt("5f0c"), 3))
    True
    """
    return f"{name}{_OVERWRITE}"


def is_overwrite(attempt: str) -> bool:
    """True if the name of an attempt is from `overwrite_attempt`."""
    return attempt.partition(".")[0].endswith(_OVERWRITE)


def index_name(attempt: str) -> str:
    """The name of the index, the file of the chunk table.

    It holds the attempt, so that a save over a committed checkpoint does not replace the index in use.
    """
    return f"index-{attempt}.safetensors"


def shard_name(rank: int, attempt: str) -> str:
    """The name of the shard file that a rank writes.

    >>> shard_name(3, "5f0c")
    'shards/00003-5f0c.safetensors'
    """
    return f"shards/{rank:05d}-{attempt}.safetensors"


def parse_shard_name(name: str) -> tuple[int, str] | None:
    """Rank and attempt of the shard file of this name; None if it is no name that `shard_name` gives.

    >>> parse_shard_name("shards/00003-5f0c.safetensors"), parse_shard_name("shards/3-5f0c.safetensors")
    ((3, '5f0c'), None)
    """
    found = _SHARD.fullmatch(name)
    if found is None or shard_name(int(found[1]), found[2]) != name:
        return None
    return int(found[1]), found[2]


def chunk_name(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of the entry that holds a box of a tensor: the key, and a half-open range for each dimension.

    >>> chunk_name("model.w", (0, 4), (16, 4)), chunk_name("step", (), ())
    ('model.w[0:16,4:8]', 'step[]')
    """
    return key + box_name(offsets, sizes)


def box_name(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The part of a chunk's name that names its box.

    >>> box_name((0, 4), (16, 4))
    '[0:16,4:8]'
    """
    return f"[{','.join([f'{start}:{start + size}' for start, size in zip(offsets, sizes, strict=True)])}]"


def parse_chunk_name(name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key, offsets and sizes from the name of a chunk: the inverse of `chunk_name`.

    Raises:
        ValueError: `chunk_name` gives no such name.

    >>> parse_chunk_name("model.w[0:16,4:8]")
    ('model.w', (0, 4), (16, 4))
    """
    found = _CHUNK.fullmatch(name)
    if found is not None and len(found[2] or "") < 4096:
        key, box = found[1], found[2]
        ranges = [part.split(":") for part in box.split(",")] if box else []
        offsets = tuple(int(start) for start, _ in ranges)
        sizes = tuple(int(stop) - int(start) for start, stop in ranges)
        if all(size >= 0 for size in sizes) and chunk_name(key, offsets, sizes) == name:
            return key, offsets, sizes
    raise ValueError(f"{name!r} does not name a chunk: expected KEY[START:STOP,...]")

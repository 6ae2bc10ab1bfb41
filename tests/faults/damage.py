"""Small checkpoints of known values, ways to damage their files, and checks of what readers return."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardproof as sp
from shardproof.engine.format import (
    MANIFEST_NAME,
    Manifest,
    bytes_digest,
    encode_entries,
    parse_header,
    read_index,
    read_manifest,
)
from shardproof.engine.saving import Saver
from shardproof.errors import FormatError, ShardproofError
from shardproof.maintenance import verify
from shardproof.rendezvous import Rendezvous
from shardproof.storage import LocalStorage

__all__ = [
    "ROWS",
    "LoadResult",
    "Region",
    "damaged",
    "faults_of",
    "flipped",
    "load_and_judge",
    "open_and_judge",
    "regions",
    "resealed",
    "sample",
    "save",
    "target_like",
    "values_of",
]

ROWS = 8
BEFORE = -99
"""Plain values of a target before a load; its tensors are all ones."""


def sample(salt: int, rank: int = 0, world_size: int = 1, *, of_rank: bool = False) -> dict[str, Any]:
    """A state of many kinds of values, all of which depend on `salt`.

    Args:
        of_rank: True if the tensor "w" is the shard of `rank`, False if it is the whole tensor.
    """
    whole = torch.arange(ROWS * 5, dtype=torch.float32).reshape(ROWS, 5) + 100 * salt
    height = ROWS // world_size
    mine: Any = whole
    if of_rank:
        piece = whole[rank * height : (rank + 1) * height].clone()
        mine = sp.LocalShards((ROWS, 5), [(piece, (rank * height, 0))], dtype=torch.float32)
    half = torch.arange(7, dtype=torch.bfloat16) * 2 + salt
    return {
        "w": mine,
        "half": half,
        "tied": half,
        "complex": torch.full((3,), complex(salt, 5)),
        "flags": torch.tensor([[True, False], [False, bool(salt % 2)]]),
        "nothing": torch.zeros(0, 3, dtype=torch.int32),
        "count": torch.tensor(salt, dtype=torch.int64),
        "plain": {"epoch": salt, "pair": (salt, {"x": [salt]})},
        "blob": bytes([salt]) * 100,
        "own": sp.PerRank(10 * salt + rank),
    }


def target_like(state: dict[str, Any]) -> dict[str, Any]:
    """The same tree with other values everywhere; tied tensors stay tied."""
    made: dict[int, torch.Tensor] = {}

    def blank(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return made.setdefault(id(value), torch.ones_like(value))
        if isinstance(value, sp.LocalShards):
            pieces = [(torch.ones_like(view), offsets) for view, offsets in value.pieces]
            return sp.LocalShards(value.shape, pieces, dtype=value.dtype)
        if isinstance(value, sp.PerRank):
            return sp.PerRank(BEFORE)
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        return BEFORE

    return {key: blank(value) for key, value in state.items()}


def values_of(state: Any) -> Any:
    """A state as values that `==` compares: tensors by dtype, shape and bytes."""
    if isinstance(state, torch.Tensor):
        raw = state.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(state.dtype), tuple(state.shape), bytes(raw.tolist()))
    if isinstance(state, sp.LocalShards):
        return [values_of(view) for view, _ in state.pieces]
    if isinstance(state, sp.PerRank):
        return ("own", state.value)
    if isinstance(state, dict):
        return {key: values_of(value) for key, value in state.items()}
    return state


def save(
    folder: Path | str, state: Any, step: int, rendezvous: Rendezvous, *, chunk_bytes: int = 48, **more: Any
) -> None:
    """A save in chunks of few bytes, so that a small state has many."""
    saver = Saver(rendezvous, chunk_bytes=chunk_bytes)
    saver.save(LocalStorage(folder), state, step=step, metadata={"run": f"run {step}"}, **more)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a file: of the chunk of a tensor, or of something else."""

    file: str
    start: int
    stop: int
    key: str | None


def regions(folder: Path) -> tuple[Manifest, list[Region]]:
    """The manifest, and every file of the checkpoint cut into regions that fill it."""
    storage = LocalStorage(folder)
    manifest = read_manifest(storage)
    table = read_index(storage, manifest)
    found = [
        Region(MANIFEST_NAME, 0, (folder / MANIFEST_NAME).stat().st_size, None),
        Region(manifest.index.name, 0, manifest.index.size, None),
    ]
    for number, record in enumerate(manifest.files):
        at = 0
        rows = [row for row in range(len(table)) if table.file[row] == number]
        for row in sorted(rows, key=lambda row: int(table.byte_start[row])):
            start, count = int(table.byte_start[row]), int(table.byte_count[row])
            if start > at:
                found.append(Region(record.name, at, start, None))
            at = start + count
            found.append(Region(record.name, start, at, manifest.tensors[int(table.tensor[row])].key))
        found.append(Region(record.name, at, record.size, None))
    return manifest, found


def resealed(shard: bytes) -> bytes:
    """A shard file with a changed header, and the digest in it computed again."""
    try:
        header = parse_header(shard, len(shard), "shard")
    except FormatError:
        return shard  # no reader comes as far as the digest
    text, digest = (header.metadata.get(name, "") for name in ("shardproof", "digest"))
    if not digest:
        return shard
    names, codes, shapes, starts, stops = ([entry[at] for entry in header.entries] for at in range(5))
    first = np.array(starts, np.int64)
    entries = encode_entries(names, codes, shapes, first - header.data_start, np.array(stops) - first)  # type: ignore[arg-type]
    return shard.replace(digest.encode(), bytes_digest(text.encode() + entries).encode(), 1)


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    """Within it, one bit of a file is flipped."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
        file.flush()
        try:
            yield
        finally:
            file.seek(at)
            file.write(bytes([byte]))


@contextmanager
def damaged(path: Path, damage: Callable[[Path], object]) -> Iterator[None]:
    """Within it, a file is damaged."""
    backup = path.with_name(path.name + ".kept")
    shutil.copy2(path, backup)
    try:
        damage(path)
        yield
    finally:
        if path.is_symlink() or path.is_fifo():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        backup.replace(path)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of loading a damaged checkpoint: the right values, or an error."""

    error: ShardproofError | None
    touched: bool = False
    """Whether a tensor of the target has other bytes than before."""


def load_and_judge(folder: Path, wanted: dict[str, Any]) -> LoadResult:
    """Loads, and asserts that the target has exactly the right values, or that the error describes it."""
    target = target_like(wanted)
    before = values_of(target)
    failure = None
    try:
        sp.load(folder, target)
    except ShardproofError as error:
        failure = error
    after = values_of(target)
    if failure is None:
        assert after == values_of(wanted), "a wrong value in silence"
        return LoadResult(None)
    changed = {key for key, value in after.items() if value != before[key]}
    tensors = {key for key, value in target.items() if isinstance(value, torch.Tensor)}
    assert changed <= tensors, "plain values and objects stay as they were"
    assert not changed or "partly overwritten" in failure.message
    return LoadResult(failure, bool(changed))


def open_and_judge(folder: Path, wanted: dict[str, Any]) -> dict[str, ShardproofError]:
    """Reads every tensor whole; asserts that each is right or raises. Returns the errors by key."""
    found: dict[str, ShardproofError] = {}
    try:
        opened = sp.open(folder)
    except ShardproofError as error:
        return {"": error}
    with opened as checkpoint:
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                try:
                    read = checkpoint[key].read()
                except ShardproofError as error:
                    found[key] = error
                else:
                    assert values_of(read) == values_of(value), "a wrong value in silence"
    return found


def faults_of(folder: Path) -> list[ShardproofError]:
    """The faults that `verify` reports, or the error that it raises."""
    try:
        return verify(LocalStorage(folder)).faults
    except ShardproofError as error:
        return [error]

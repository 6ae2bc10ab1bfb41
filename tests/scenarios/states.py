"""States of known values for tests of saves, results of calls, and checks of a checkpoint's files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.engine.rendezvous.protocol import Decide
from shardproof.errors import ShardproofError
from shardproof.maintenance import verify
from shardproof.rendezvous import Rendezvous
from shardproof.storage import LocalStorage

__all__ = [
    "CallResult",
    "Phases",
    "assert_one_attempt",
    "attempt",
    "blanked",
    "differences",
    "files_below",
    "plain_state",
    "rows",
    "same_on_all_ranks",
    "whole",
    "whole_state",
]


def whole(shape: tuple[int, ...], salt: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A global tensor whose elements encode their position and the salt."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float64) + 1000 * salt + 1).reshape(shape).to(dtype)


def rows(tensor: torch.Tensor, first: int, last: int) -> sp.LocalShards:
    """The rows [first, last) of a global tensor, as one rank's shard."""
    offsets = (first, *(0,) * (tensor.dim() - 1))
    pieces = [(tensor[first:last].clone(), offsets)] if last > first else []
    return sp.LocalShards(tuple(tensor.shape), pieces, dtype=tensor.dtype)


def plain_state(rank: int, world_size: int, salt: int) -> dict[str, Any]:
    """Values of every kind: sharded over the ranks, replicated, on rank 0 alone, per rank, and plain."""
    height = 4 * world_size
    return {
        "model": {
            "weight": rows(whole((height, 3), salt), 4 * rank, 4 * rank + 4),
            "bias": whole((5,), salt + 1),
        },
        "alone": rows(whole((2, 2), salt + 2, torch.int64), 0, 2 if rank == 0 else 0),
        "own": sp.PerRank(100 * salt + rank),
        "epoch": salt,
    }


def whole_state(world_size: int, salt: int) -> dict[str, Any]:
    """`plain_state` as one process may hold it: the tensors whole, without the values of single ranks."""
    return {
        "model": {"weight": whole((4 * world_size, 3), salt), "bias": whole((5,), salt + 1)},
        "alone": whole((2, 2), salt + 2, torch.int64),
        "epoch": salt,
    }


def blanked(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with other values everywhere: a target for a load."""
    for _, put, value in list(_leaves(state, "")):
        if isinstance(value, torch.Tensor):
            value.zero_()
        else:
            put(None)
    return state


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Paths at which two states are not bit for bit the same."""
    left = {path: value for path, _, value in _leaves(found, "")}
    right = {path: value for path, _, value in _leaves(wanted, "")}
    wrong = sorted(left.keys() ^ right.keys())
    for path in sorted(left.keys() & right.keys()):
        a, b = left[path], right[path]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and torch.equal(a, b)
        else:
            same = type(a) is type(b) and a == b
        if not same:
            wrong.append(path)
    return wrong


def _leaves(tree: dict[str, Any], path: str) -> Iterator[tuple[str, Callable[[Any], None], Any]]:
    """Path, setter and value of every tensor and plain value."""
    for key, value in tree.items():
        at = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, at)
        elif isinstance(value, sp.PerRank):
            yield at, partial(setattr, value, "value"), value.value
        elif isinstance(value, sp.LocalShards):
            for view, offsets in value.pieces:
                yield f"{at}{list(offsets)}", partial(tree.__setitem__, key), view
        else:
            yield at, partial(tree.__setitem__, key), value


class Phases:
    """A rendezvous that records the phases of its meetings."""

    def __init__(self, inner: Rendezvous) -> None:
        self._inner = inner
        self.met: list[str] = []

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        self.met.append(phase)
        return self._inner.meet(operation, phase, post, decide)

    def new_rendezvous(self, name: str) -> Phases:
        """Another rendezvous, whose phases are recorded in the same list."""
        other = Phases(self._inner.new_rendezvous(name))
        other.met = self.met
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class CallResult:
    """How a call on one rank ended."""

    kind: str
    """Name of the error's class; empty for none."""
    text: str
    details: dict[str, Any]
    seconds: float
    value: Any = None
    after: dict[str, Any] = field(default_factory=dict)
    """What a test observes afterwards."""

    @property
    def error(self) -> tuple[str, str, dict[str, Any]]:
        """The parts that must be the same on all ranks."""
        return self.kind, self.text, self.details


def attempt(call: Callable[[], Any]) -> CallResult:
    """Calls, and returns an error of the package instead of raising it."""
    began = time.monotonic()
    try:
        value = call()
    except ShardproofError as error:
        seconds = time.monotonic() - began
        return CallResult(type(error).__name__, error.message, error.details, seconds)
    return CallResult("", "", {}, time.monotonic() - began, value)


def same_on_all_ranks(results: list[CallResult]) -> CallResult:
    """Asserts that all ranks got the same error or none. Returns the first rank's result."""
    assert all(one.error == results[0].error for one in results), [one.error for one in results]
    return results[0]


def files_below(folder: str | Path) -> list[str]:
    """Relative names of all files, sorted."""
    found = []
    for top, _, files in os.walk(folder):
        found += [os.path.relpath(os.path.join(top, file), folder) for file in files]
    return sorted(found)


def assert_one_attempt(folder: str | Path, *, leftovers: bool = False) -> str:
    """Asserts that a committed checkpoint is whole and made of one attempt's files; returns the attempt.

    Args:
        folder: of the checkpoint.
        leftovers: whether other files, which the manifest does not name, are allowed.
    """
    storage = LocalStorage(folder)
    manifest = read_manifest(storage)
    named = [manifest.index.name, *(record.name for record in manifest.files)]
    assert all(manifest.attempt in name for name in named), (manifest.attempt, named)
    if not leftovers:
        assert files_below(folder) == sorted([MANIFEST_NAME, *named])
    report = verify(storage)
    storage.close()
    assert report.ok, report.faults
    return manifest.attempt

"""Helpers of the tests of incremental saves: a state, and how to save, load and damage its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage

MODEL_BYTES = 4 * 300 * 70


def state(model: float, optimizer: float) -> dict[str, Any]:
    """A model of two tensors, an optimizer of one, a plain value."""
    return {
        "model": {
            "a": torch.arange(300.0 * 40).reshape(300, 40) + model,
            "b": torch.arange(300.0 * 30).reshape(300, 30) - model,
        },
        "optimizer": torch.full((7000,), float(optimizer)),
        "epoch": int(optimizer),
    }


def loaded(root: Path, step: int) -> dict[str, Any]:
    target = state(-1, -1)
    sp.load(root / step_name(step), target)
    return target


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saver(root: Path, **options: Any) -> sp.Checkpointer:
    return sp.Checkpointer(root, incremental=True, **options)


def save(checkpointer: sp.Checkpointer, step: int, what: Any, **options: Any) -> sp.SaveResult:
    return checkpointer.save(step, what, **options).result()


def files(root: Path, step: int) -> list[str]:
    folder = root / step_name(step)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_whole(root: Path, step: int, expected: Any) -> None:
    report = verify(LocalStorage(root / step_name(step)))
    assert report.ok, report.faults
    assert same(loaded(root, step), expected)


def spoil(path: Path, at: int = 20_000) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def shard_of(root: Path, step: int) -> Path:
    (path,) = (root / step_name(step) / "shards").iterdir()
    return path

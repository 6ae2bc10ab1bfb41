"""Runs on local disks: each node is a folder, which only its own ranks open.

A folder is deleted, emptied, replaced by an older one, or damaged. Ranks are renumbered, and their number
changes. What is restored has to be the saved state, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.format import MANIFEST_NAME, read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import blanked, differences, rows, whole

HEIGHT = 12


def part(salt: int) -> dict[str, Any]:
    """This rank's rows of a state that does not depend on the number of ranks."""
    first, last = HEIGHT * rank() // world_size(), HEIGHT * (rank() + 1) // world_size()
    return {
        "model": {
            "weight": rows(whole((HEIGHT, 3), salt), first, last),
            "bias": whole((5,), salt + 1),
        },
        "alone": whole((2, 2), salt + 2, torch.int64),
        "epoch": salt,
    }


def run_on(root: str, places: Sequence[str], **options: Any) -> sp.Checkpointer:
    """The run of a rank whose node is the folder ``places[rank]``."""
    return sp.Checkpointer(
        Path(root) / places[rank()],
        node_local=True,
        rendezvous=rendezvous(deadline=options.pop("deadline", 60.0)),
        cache="none",
        **options,
    )


@dataclass
class Restored:
    """What a rank got."""

    step: int | None
    wrong: list[str]
    tier: str
    passed_over: list[tuple[int, str, str, bool]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def restored_by(run: sp.Checkpointer) -> Restored:
    target = blanked(part(0))
    found = run.restore(target)
    if found is None:
        return Restored(None, [], "", [], run.steps())
    passed = [(item.step, item.tier, item.reason, item.damaged) for item in found.passed_over]
    return Restored(int(found), differences(target, part(int(found))), found.tier, passed)


def save(root: str, places: Sequence[str], steps: Sequence[int], options: dict[str, Any]) -> list[int]:
    run = run_on(root, places, **options)
    for step in steps:
        run.save(step, part(step)).result()
    run.wait_for_uploads(60)
    return list(steps)


def restore(root: str, places: Sequence[str], options: dict[str, Any]) -> Restored:
    return restored_by(run_on(root, places, **options))


def saved(root: Path, places: Sequence[str], steps: Sequence[int], **options: Any) -> None:
    for outcome in run_ranks(len(places), save, str(root), places, steps, options, timeout=120):
        assert outcome.value == list(steps)


def found(root: Path, places: Sequence[str], **options: Any) -> Restored:
    """The same on all ranks."""
    values = [one.value for one in run_ranks(len(places), restore, str(root), places, options, timeout=120)]
    assert all(value == values[0] for value in values), values
    assert isinstance(values[0], Restored) and values[0].wrong == []
    return values[0]


def shards_of(root: Path, node: str, step: int) -> set[int]:
    """Ranks whose files a node has."""
    return {int(path.name[:5]) for path in (root / node / f"step-{step:08d}" / "shards").glob("*")}


def test_each_node_has_its_own_files_and_any_ranks_restore_them(tmp_path: Path) -> None:
    saved(tmp_path, ["a", "a", "b"], [1, 2])
    assert shards_of(tmp_path, "a", 2) == {0, 1} and shards_of(tmp_path, "b", 2) == {2}
    for node in ("a", "b"):
        assert (tmp_path / node / "step-00000002" / MANIFEST_NAME).exists()
    same = found(tmp_path, ["a", "a", "b"])
    assert (same.step, same.passed_over, same.tier) == (2, [], str(tmp_path / "a"))
    renumbered = found(tmp_path, ["b", "a", "b", "a"])
    assert (renumbered.step, renumbered.passed_over) == (2, [])

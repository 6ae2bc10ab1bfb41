"""A process dies at any operation of its retention, the run goes on, and then the machine loses power.

A removal that was not flushed may then be undone. No step that comes back may lack a file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.checkpointer import plan_prune, prune
from shardproof.errors import ShardproofError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.soak.disk import Disk


def state(step: int) -> dict[str, Any]:
    """A tensor that never changes, so that later steps refer to it, and one that does."""
    return {"frozen": torch.ones(600), "w": torch.full((600,), float(step))}


def save(root: Path, *steps: int, full_every: int | None = None, incremental: bool = True) -> None:
    checkpointer = sp.Checkpointer(
        root,
        keep=sp.KeepLatest(1),
        incremental=incremental,
        full_every=full_every,
        cache="none",
        rendezvous=LocalRendezvous(),
    )
    for step in steps:
        checkpointer.save(step, state(step)).result()
    checkpointer.wait_for_scrub(60)


def go_on(root: Path) -> None:
    """Saves a step without references. Its retention removes the files that only older steps refer to."""
    save(root, 5, incremental=False)


def clean_up(root: Path) -> None:
    """Removes what the dead save left."""
    storage = LocalStorage(root)
    prune(storage, plan_prune(storage, lambda name: 0.0, older_than=0.0, now=time.time(), keep=None))


@pytest.mark.parametrize(
    ("full_every", "then", "power_after"),
    [(None, go_on, [1000] * 3), pytest.param(3, clean_up, range(4, 12), marks=pytest.mark.slow)],
)
def test_no_step_comes_back_without_its_files(
    tmp_path: Path,
    full_every: int | None,
    then: Callable[[Path], None],
    power_after: Sequence[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "shardproof")
    killed_after, ended = 24, False  # retention begins later
    while not ended:
        for chance, operations in enumerate(power_after):
            with Disk(_new(tmp_path)) as disk:
                root = disk.folder / "run"
                save(root, 1, 2, 3, full_every=full_every)
                disk.fail(killed_after, "kill")
                with suppress(ShardproofError):
                    save(root, 4, full_every=full_every)
                ended = disk.failed is None
                disk.restart("kill", Random(0))
                disk.fail(operations, "power")
                with suppress(ShardproofError):
                    then(root)
                disk.restart("power", Random(chance))
                _check(root)
        killed_after += 1
    assert killed_after > 30


def _check(root: Path) -> None:
    """Every committed step can be read, and one is there."""
    found = sp.Checkpointer(root, rendezvous=LocalRendezvous()).steps()
    assert found[-1] >= 3
    for step in found:
        target = {"frozen": torch.zeros(600), "w": torch.zeros(600)}
        sp.load(root / f"step-{step:08d}", target, rendezvous=LocalRendezvous())
        assert torch.equal(target["w"], state(step)["w"])


def _new(tmp_path: Path) -> Path:
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder

"""A process dies at any operation of a save or its retention, the run goes on, and the machine loses power.

A removal or a replacement that was not flushed may then be undone. No step that comes back may lack a file.
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
    """Removes the files of the dead save."""
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


def retain_two(root: Path) -> None:
    """Saves a third step. Its retention removes the first."""
    later = sp.Checkpointer(root, keep=sp.KeepLatest(2), cache="none", rendezvous=LocalRendezvous())
    later.save(3, state(3)).result()


def prune_to_one(root: Path) -> None:
    """Removes the first step."""
    storage = LocalStorage(root)
    prune(storage, plan_prune(storage, lambda name: None, older_than=0.0, now=time.time(), keep=1))


@pytest.mark.parametrize("then", [retain_two, pytest.param(prune_to_one, marks=pytest.mark.slow)])
def test_no_replaced_manifest_comes_back_without_its_files(
    tmp_path: Path, then: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 refers to a file of step 1, and is then saved again, without references."""
    caplog.set_level(logging.CRITICAL, "shardproof")
    killed_after, ended = 0, False
    while not ended:
        for chance in range(4):
            with Disk(_new(tmp_path)) as disk:
                root = disk.folder / "run"
                options: dict[str, Any] = {"cache": "none", "rendezvous": LocalRendezvous()}
                first = sp.Checkpointer(root, incremental=True, **options)
                for step in (1, 2):
                    first.save(step, state(step)).result()
                disk.fail(killed_after, "kill")
                with suppress(ShardproofError):
                    sp.Checkpointer(root, **options).save(2, state(2), overwrite=True).result()
                ended = disk.failed is None
                disk.restart("kill", Random(0))
                then(root)
                disk.restart("power", Random(chance))
                _check(root, least=2)
        killed_after += 1
    assert killed_after > 10


def _check(root: Path, least: int = 3) -> None:
    """Every committed step can be read, and one is there."""
    found = sp.Checkpointer(root, rendezvous=LocalRendezvous()).steps()
    assert found[-1] >= least
    for step in found:
        target = {"frozen": torch.zeros(600), "w": torch.zeros(600)}
        sp.load(root / f"step-{step:08d}", target, rendezvous=LocalRendezvous())
        assert torch.equal(target["w"], state(step)["w"])


def _new(tmp_path: Path) -> Path:
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder

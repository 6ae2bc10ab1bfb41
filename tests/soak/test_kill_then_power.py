"""A process dies at any operation of a save or its retention, the run goes on, and the machine loses power.

A removal or a replacement that was not flushed may then be undone. No step that comes back may lack a file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import ShardproofError
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer import plan_prune, prune
from shardproof.storage import LocalStorage
from tests.soak.disk import Disk


def state(step: int) -> dict[str, Any]:
    """A tensor that never changes, so that later steps refer to it, and one that does."""
    return {"frozen": torch.ones(600), "w": torch.full((600,), float(step))}


def save(root: Path, *steps: int, full_every: int | None = None, incremental: bool = True) -> None:
    checkpointer = sp.Checkpointer(
        root,
        keep=sp.KeepLatest(1),
        incremental=incremental and sp.Incremental(full_every=full_every),
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
    plan = plan_prune(storage, lambda name: 0.0, older_than=0.0, now=time.time(), keep=None, complete=True)
    prune(storage, plan)


@pytest.mark.parametrize(
    ("full_every", "then", "power_after", "every"),
    [
        (None, go_on, [1000] * 2, 2),
        pytest.param(None, go_on, [1000] * 3, 1, marks=pytest.mark.slow),
        pytest.param(3, clean_up, range(4, 12), 1, marks=pytest.mark.slow),
    ],
)
def test_no_step_comes_back_without_its_files(
    tmp_path: Path,
    full_every: int | None,
    then: Callable[[Path], None],
    power_after: Sequence[int],
    every: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each n-th operation kills a process of its own."""
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
                _check(root, 3)
        killed_after += every
    assert killed_after > 30


def retain_one(root: Path) -> None:
    """Saves a third step. Its retention removes the other steps."""
    _save_third(root, keep=1)


def retain_two(root: Path) -> None:
    """Saves a third step. Its retention removes the first."""
    _save_third(root, keep=2)


def _save_third(root: Path, keep: int) -> None:
    later = sp.Checkpointer(root, keep=sp.KeepLatest(keep), cache="none", rendezvous=LocalRendezvous())
    later.save(3, state(3)).result()


def prune_to_one(root: Path) -> None:
    """Removes the first step."""
    storage = LocalStorage(root)
    prune(storage, plan_prune(storage, lambda name: None, older_than=0.0, now=time.time(), keep=1))


def overwrite_the_first(root: Path) -> None:
    """Saves the first step again, and so removes the files of the first save."""
    sp.save(root / "step-00000001", state(1), overwrite=True, rendezvous=LocalRendezvous())


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("step-00000002", retain_two),
        ("step-00000002", overwrite_the_first),
        pytest.param("step-00000002", prune_to_one, marks=pytest.mark.slow),
        pytest.param("best", retain_one, marks=pytest.mark.slow),
    ],
)
def test_no_replaced_manifest_comes_back_without_its_files(
    tmp_path: Path, name: str, then: Callable[[Path], None], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 refers to a file of step 1, and is then saved again, without references."""
    caplog.set_level(logging.CRITICAL, "shardproof")
    killed_after, ended = 0, False
    while not ended:
        for chance in range(2):
            with Disk(_new(tmp_path)) as disk:
                root = disk.folder / "run"
                options: dict[str, Any] = {"cache": "none", "rendezvous": LocalRendezvous()}
                first = sp.Checkpointer(root, incremental=True, **options)
                for step in (1, 2):
                    first.save(step, state(step)).result()
                if name != "step-00000002":
                    (root / "step-00000002").rename(root / name)
                    LocalStorage(root).flush_names()
                disk.fail(killed_after, "kill")
                with suppress(ShardproofError):
                    sp.save(root / name, state(2), overwrite=True, rendezvous=LocalRendezvous())
                ended = disk.failed is None
                disk.restart("kill", Random(0))
                then(root)
                disk.restart("power", Random(chance))
                _check(root, 1, {name: 2} if name == "best" else None)
        killed_after += every
    assert killed_after > 10


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_manifest_that_was_replaced_and_not_flushed_is_flushed_by_the_next_retention(
    tmp_path: Path, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The retention of step 4 has flushed all folders. One error of the disk then meets a save of step 3."""
    caplog.set_level(logging.CRITICAL, "shardproof")
    failed_after, ended = 0, False
    while not ended:
        with Disk(_new(tmp_path)) as disk:
            root = disk.folder / "run"
            checkpointer = sp.Checkpointer(
                root,
                keep=sp.KeepLatest(2) | sp.KeepEvery(steps=3),
                incremental=True,
                cache="none",
                rendezvous=LocalRendezvous(),
            )
            for step in (1, 2, 3, 4):
                checkpointer.save(step, state(step)).result()
            disk.fail(failed_after, "error")
            with suppress(ShardproofError):
                changed = {**state(3), "frozen": torch.zeros(600)}
                checkpointer.save(3, changed, overwrite=True).result()
            ended = disk.failed is None
            disk.heal()
            for step in (5, 6):
                changed = {**state(step), "frozen": torch.zeros(600)}
                checkpointer.save(step, changed).result()
            checkpointer.wait_for_scrub(60)
            disk.restart("power", Random(failed_after))
            for step in (3, 5, 6):
                sp.load(root / f"step-{step:08d}", state(0), rendezvous=LocalRendezvous())
        failed_after += every
    assert failed_after > 10


def _check(root: Path, least: int, renamed: Mapping[str, int] | None = None) -> None:
    """Every committed step can be read, and one from `least` on is there. So can folders of other names."""
    found = sp.Checkpointer(root, rendezvous=LocalRendezvous()).steps()
    assert found[-1] >= least
    for folder, step in {**{f"step-{step:08d}": step for step in found}, **(renamed or {})}.items():
        target = {"frozen": torch.zeros(600), "w": torch.zeros(600)}
        sp.load(root / folder, target, rendezvous=LocalRendezvous())
        assert torch.equal(target["w"], state(step)["w"])


def _new(tmp_path: Path) -> Path:
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder

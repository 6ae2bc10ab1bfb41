"""When a save is refused for lack of space, and when it is not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.saving import coordinator
from shardproof.engine.saving.coordinator import check_space
from shardproof.storage import FreeSpace, LocalStorage

SMALL = FreeSpace(1, 10, 10)
BYTES = np.array([8, 8])


class Limited(LocalStorage):
    """A folder whose file system takes no more bytes."""

    def free_space(self) -> FreeSpace | None:
        return FreeSpace(1, 0, 0)

    def within(self, prefix: str) -> Limited:
        return Limited(self._path(prefix))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(coordinator, "_WAIT_SECONDS", 0.2)


def test_bytes_that_appear_while_the_check_waits_are_enough() -> None:
    later: Iterator[FreeSpace | None] = iter([SMALL, SMALL, FreeSpace(1, 16, 16)])
    check_space("run", [SMALL, SMALL], BYTES, lambda: next(later))
    assert next(later, None) is None, "the check waited for them"


def test_bytes_that_do_not_appear_are_an_error() -> None:
    with pytest.raises(sp.NoSpaceError, match="6 B is missing") as caught:
        check_space("run", [SMALL, SMALL], BYTES, lambda: SMALL)
    assert caught.value.details["needed"] == 16
    assert isinstance(caught.value, sp.StorageError)


def test_a_rank_that_writes_nothing_needs_no_space() -> None:
    full = FreeSpace(2, 0, 0)
    check_space("run", [SMALL, full], np.array([8, 0]), lambda: SMALL)


def test_a_rank_that_does_not_know_its_space_is_not_counted() -> None:
    check_space("run", [SMALL, None], BYTES, lambda: SMALL)


def test_a_save_with_a_base_is_not_refused(tmp_path: Path) -> None:
    state = {"weight": torch.ones(1000)}
    sp.Checkpointer(tmp_path, incremental=True).save(1, state).result()
    full = sp.Checkpointer(Limited(tmp_path), incremental=True)
    assert full.save(2, state).result().reused == 4000, "nothing had to be written"
    with pytest.raises(sp.NoSpaceError):
        sp.Checkpointer(Limited(tmp_path)).save(3, state).result()


class Disk(LocalStorage):
    """A folder on a file system of 100 kB."""

    top = Path()

    def free_space(self) -> FreeSpace:
        used = sum(file.stat().st_size for file in self.top.rglob("*") if file.is_file())
        return FreeSpace(1, 100_000 - used, 100_000 - used)

    def within(self, prefix: str) -> Disk:
        return Disk(self._path(prefix))


def test_the_advised_command_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart with a smaller keep= fails again, because retention runs after a commit."""
    monkeypatch.setattr(Disk, "top", tmp_path)
    run = Disk(tmp_path / "a run")
    state = {"w": torch.ones(1000)}
    for step in (1, 2, 3):
        sp.Checkpointer(run).save(step, state).result()
    (tmp_path / "other").write_bytes(bytes(Disk(tmp_path).free_space().free - 3000))
    for keep in (None, sp.KeepLatest(1)):
        with pytest.raises(sp.NoSpaceError) as caught:
            sp.Checkpointer(run, keep=keep).save(6, state).result()
    command = caught.value.message.partition("`")[2].partition("`")[0]
    words = shlex.split(command)
    assert words[0] == "shardproof" and run_cli(words[1:]) == 0
    sp.Checkpointer(run).save(6, state).result()
    assert sp.Checkpointer(run).restore(state) == 6

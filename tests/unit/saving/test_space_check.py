"""When a save is refused for lack of space, and when it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.saving import space_check
from shardproof.saving.space_check import check_space
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
    monkeypatch.setattr(space_check, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(space_check, "_WAIT_SECONDS", 0.2)


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

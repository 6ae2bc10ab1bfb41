"""Ranks that save to file systems with too little space: all are refused, and nothing is written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.storage import FreeSpace, LocalStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.small_disk import small_disk

PART = 1 << 20
"""Bytes that each of two ranks writes."""
ALONE = PART + PART // 2
"""Bytes into which the file of one rank fits, and those of both do not."""


class Limited(LocalStorage):
    """A folder on a file system whose free space a test sets."""

    def __init__(self, root: Any, spaces: list[FreeSpace | None]) -> None:
        super().__init__(root)
        self._spaces = spaces

    def free_space(self) -> FreeSpace | None:
        """The space that the test gave last."""
        return self._spaces[-1]

    def within(self, prefix: str) -> Limited:
        """The part below a folder, on the same file system."""
        return Limited(self._path(prefix), self._spaces)


def state() -> dict[str, Any]:
    """Two tensors, of which each rank writes one."""
    return {"a": torch.ones(PART // 4), "b": torch.zeros(PART // 4)}


def refused(checkpointer: sp.Checkpointer, step: int, **how: Any) -> dict[str, Any]:
    """The details and the text of the error of a save."""
    with pytest.raises(sp.NoSpaceError) as caught:
        checkpointer.save(step, state(), **how).result()
    return {**caught.value.details, "text": str(caught.value)}


def save_to_full_systems(root: str) -> dict[str, Any]:
    spaces: list[FreeSpace | None] = [None]
    run = Limited(root, spaces)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardproof").addHandler(handler)
    checkpointer = sp.Checkpointer(run, rendezvous=rendezvous(deadline=30.0))
    seen: dict[str, Any] = {}

    spaces.append(FreeSpace(7, ALONE, ALONE))
    seen["shared"] = refused(checkpointer, 1)
    spaces.append(FreeSpace(7 + rank(), ALONE, ALONE) if rank() == 0 else FreeSpace(8, 10, PART // 2))
    seen["one full"] = refused(checkpointer, 1)
    seen["folders after refusals"] = run.folders()

    spaces.append(FreeSpace(7 + rank(), ALONE, ALONE))
    seen["apart"] = checkpointer.save(1, state()).result().step
    spaces.append(FreeSpace(7, ALONE, ALONE))
    seen["with a cached plan"] = refused(checkpointer, 2)
    seen["folders"] = run.folders()

    seen["warnings before"] = [text for text in warnings if "may fail" in text]
    spaces.append(FreeSpace(7, ALONE, None))  # the file system may compress, so nothing is certain
    seen["uncertain"] = checkpointer.save(3, state()).result().step
    seen["warnings"] = [text for text in warnings if "may fail" in text]
    return seen


def test_ranks_are_refused_together_if_their_files_do_not_fit_together(tmp_path: Path) -> None:
    first, second = (outcome.value for outcome in run_ranks(2, save_to_full_systems, str(tmp_path)))
    for seen in (first, second):
        shared = seen["shared"]
        assert (shared["needed"], shared["free"], shared["ranks"]) == (2 * PART, ALONE, [0, 1])
        assert shared["errno"] == "ENOSPC"
        assert "needs 2.10 MB on the file system of ranks 0, 1, and 1.57 MB is free there" in shared["text"]
        one = seen["one full"]
        assert (one["needed"], one["free"], one["ranks"]) == (PART, PART // 2, [1])
        assert seen["folders after refusals"] == [], "nothing is written"
        assert seen["apart"] == 1, "each file fits into a file system of its own"
        assert seen["with a cached plan"]["ranks"] == [0, 1]
        assert seen["folders"] == ["step-00000001"]
        assert seen["uncertain"] == 3, "the save goes on where nothing is certain"
        assert seen["warnings before"] == []
    assert len(first["warnings"]) == 1, "the coordinator warns"
    assert second["warnings"] == []


def save_to_a_small_disk(run: str) -> dict[str, Any]:
    meet = rendezvous(deadline=30.0)
    fits = sp.Checkpointer(run, rendezvous=meet).save(1, big(3)).result()
    with pytest.raises(sp.NoSpaceError) as caught:
        sp.Checkpointer(run, rendezvous=meet).save(2, big(6)).result()
    free = caught.value.details["free"]
    return {
        "fits": fits.step,
        "each fits": big(6)["a"].nbytes < free,
        "ranks": caught.value.details["ranks"],
        "folders": LocalStorage(run).folders(),
    }


def big(mebibytes: int) -> dict[str, Any]:
    """A state of so many bytes, of which each of two ranks writes one half."""
    return {name: torch.ones(mebibytes << 17) for name in "ab"}


def test_a_real_file_system_that_is_too_small_refuses_the_save(tmp_path: Path) -> None:
    expected = {"fits": 1, "each fits": True, "ranks": [0, 1], "folders": ["step-00000001"]}
    with small_disk(tmp_path / "disk", 8 << 20):
        outcomes = run_ranks(2, save_to_a_small_disk, str(tmp_path / "disk" / "run"))
    for outcome in outcomes:
        assert outcome.value == expected

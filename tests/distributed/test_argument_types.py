"""An argument of a wrong type on one rank fails the operation on all ranks, and the next one succeeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

DEADLINE = 60.0


def _fail(root: str) -> tuple[list[str], float]:
    meetings = rendezvous(deadline=DEADLINE)
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    state = {"w": torch.ones(8)}
    checkpointer.save(1, state).result()
    wrong = rank() == 1
    calls: list[Callable[[], Any]] = [
        lambda: checkpointer.save(2, state, metadata="loss" if wrong else {"loss": 1}).result(),  # type: ignore[arg-type]
        lambda: checkpointer.save(2, state, overwrite="no" if wrong else False).result(),  # type: ignore[arg-type]
        lambda: checkpointer.restore(state, strict="no" if wrong else True),  # type: ignore[arg-type]
        lambda: sp.load(f"{root}/step-00000001", state, rename=3 if wrong else None, rendezvous=meetings),  # type: ignore[arg-type]
    ]
    begun, errors = time.monotonic(), []
    for call in calls:
        with pytest.raises((TypeError, sp.RankFailure)) as caught:
            call()
        errors.append(str(caught.value))
    seconds = time.monotonic() - begun
    checkpointer.save(2, state).result()
    assert checkpointer.restore(state) == 2
    return errors, seconds


def test_all_ranks_fail_at_once_if_one_has_a_wrong_argument(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _fail, str(tmp_path)):
        errors, seconds = outcome.value
        for error, name in zip(errors, ("metadata", "overwrite", "strict", "rename"), strict=True):
            assert f"{name} is " in error
        assert seconds < DEADLINE / 2

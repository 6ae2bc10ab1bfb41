"""An interrupt at any line of a save or a restore, on one rank or on both: the next save is one of all ranks.

Ranks are threads here, so that many points are quick to try. Each has its own checkpointer and its own
connections to the store.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.errors import RankFailure, RankSilent, ShardproofError
from shardproof.rendezvous import Operation, StoreRendezvous

LIMIT = 60.0
"""Seconds. An operation that waits for it ends in `RankSilent`, which no test expects."""
SOURCE = str(Path(sp.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt in this thread, at a line of the package after an operation was entered.

    Args:
        at: lines to pass before; None: none is raised, and lines are counted.
    """

    def __init__(self, at: int | None) -> None:
        self.passed = 0
        self.place = ""
        self._at = at
        self._begun = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        if self._begun and event == "line" and not self.place:
            if self.passed == self._at:
                self.place = f"{code.co_filename[len(SOURCE) :]}:{frame.f_lineno} in {code.co_qualname}"
                raise KeyboardInterrupt
            self.passed += 1
        if event == "return" and code is Operation.__enter__.__code__:
            self._begun = True
        return self

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Counts, and raises, within."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def on_two_ranks(work: Callable[[StoreRendezvous], Any]) -> list[Any]:
    """What `work` returns on each of two ranks."""
    store = HashStore()
    meetings = [StoreRendezvous(store, rank, 2, deadline=LIMIT) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(work, one) for one in meetings]
        found = [end.result(LIMIT) for end in ends]
    for one in meetings:
        one.close()
    return found


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64,), value), "bias": torch.full((3,), value)}


def save(checkpointer: sp.Checkpointer) -> None:
    checkpointer.save(2, state_of(2)).result()


def restore(checkpointer: sp.Checkpointer) -> None:
    assert checkpointer.restore(state_of(0)) == 1


def save_at_once(checkpointer: sp.Checkpointer) -> None:
    sp.save(f"{checkpointer.root}/apart", state_of(2), rendezvous=checkpointer._rendezvous)


def interrupted(
    root: Path, action: Callable[[sp.Checkpointer], None], points: tuple[int | None, int | None]
) -> list[tuple[str, int]]:
    """Each rank saves, then acts and is interrupted, then saves again. Place of the interrupt, and lines."""

    def work(meetings: StoreRendezvous) -> tuple[str, int]:
        checkpointer = sp.Checkpointer(root, rendezvous=meetings)
        checkpointer.save(1, state_of(1)).result()
        interrupt = Interrupt(points[meetings.rank])
        try:
            with interrupt.armed():
                action(checkpointer)
        except KeyboardInterrupt:
            assert interrupt.place
        except RankSilent as error:
            raise AssertionError(f"a deadline passed: {error}") from error
        except ShardproofError as error:
            assert isinstance(error, RankFailure), interrupt.place
            assert any(points)
        done = checkpointer.save(3, state_of(3)).result()
        assert done.step == 3, interrupt.place
        return interrupt.place, interrupt.passed

    found = on_two_ranks(work)
    assert sp.Checkpointer(root, rendezvous=None).steps()[-1] == 3
    return found

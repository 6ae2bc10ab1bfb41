"""After an interrupt at any line of a save or a restore, on one rank or both, all ranks make the next save.

Ranks are threads here, so that many points are quick to try. Each has its own checkpointer and its own
connections to the store.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.engine.rendezvous.protocol import Turns
from shardproof.engine.saving.background import unfinished
from shardproof.errors import RankFailure
from shardproof.rendezvous import Operation, StoreRendezvous
from shardproof.storage import LocalStorage

LIMIT = 60.0
"""Seconds. An operation that waits for it ends in `RankSilent`, which no test expects."""
SOURCE = str(Path(sp.__file__).parent)


@cache
def exits_of_blocks(code: CodeType) -> frozenset[int]:
    """Offsets in a function at which it is about to call the `__exit__` of a block that ended well."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "PRECALL"]
    found = set[int]()
    for number, step in enumerate(steps):
        begin = number + (step.opname == "SWAP")  # of a value that the block returns
        arguments = [(one.opname, one.argval) for one in steps[begin : begin + 3]]
        if arguments == [("LOAD_CONST", None)] * 3 and steps[begin + 3].opname == "CALL":
            found.add(step.offset)
    return frozenset(found)


class Interrupt:
    """Raises KeyboardInterrupt in this thread, at a line of the package after an operation was entered.

    A trace function can raise where no signal can: between a block and the `__exit__` of its `with`. The
    interpreter looks for signals after calls and in loops only. So such a line does not count.

    Args:
        at: number of lines before the interrupt; None: lines are only counted.
        within: function whose lines count; None: all of the package.
    """

    def __init__(self, at: int | None, within: Callable[..., Any] | None = None) -> None:
        self.passed = 0
        self.place = ""
        self._at = at
        self._within = None if within is None else within.__code__
        self._begun = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        is_step = event == "line" and frame.f_lasti not in exits_of_blocks(code)
        if self._begun and is_step and not self.place and self._within in (None, code):
            if self.passed == self._at:
                self.place = f"{code.co_filename[len(SOURCE) :]}:{frame.f_lineno} in {code.co_qualname}"
                raise KeyboardInterrupt
            self.passed += 1
        if event == "return" and code is Operation.__enter__.__code__:
            self._begun = True
        return self

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Counts lines and raises, inside this context."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def on_two_ranks(work: Callable[[StoreRendezvous], Any]) -> list[Any]:
    """Runs `work` on two ranks, and returns both results."""
    store = HashStore()
    rendezvous = [StoreRendezvous(store, rank, 2, deadline=LIMIT) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(work, one) for one in rendezvous]
        found = [end.result(LIMIT) for end in ends]
    for one in rendezvous:
        one.close()
    return found


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64,), value), "bias": torch.full((3,), value)}


def save(checkpointer: sp.Checkpointer) -> None:
    checkpointer.save(2, state_of(2)).result()


def restore(checkpointer: sp.Checkpointer) -> None:
    assert checkpointer.restore(state_of(0)) == 1


def sp_save(checkpointer: sp.Checkpointer) -> None:
    sp.save(f"{checkpointer.root}/apart", state_of(2), rendezvous=checkpointer._rendezvous)


def interrupted(
    root: Path,
    action: Callable[[sp.Checkpointer], None],
    points: tuple[int | None, int | None],
    within: Callable[..., Any] | None = None,
) -> list[tuple[str, int]]:
    """Each rank saves, runs the action with its interrupt, and saves again.

    Returns:
        For each rank, where the interrupt was raised, and how many lines ran before it.
    """

    def work(rendezvous: StoreRendezvous) -> tuple[str, int]:
        checkpointer = sp.Checkpointer(root, rendezvous=rendezvous)
        checkpointer.save(1, state_of(1)).result()
        interrupt = Interrupt(points[rendezvous.rank], within)
        try:
            with interrupt.armed():
                action(checkpointer)
        except KeyboardInterrupt:
            assert interrupt.place
        except RankFailure:
            assert points != (None, None)
        with suppress(RankFailure):  # the other rank's interrupt, if this rank has not raised it yet
            checkpointer.wait()
        done = checkpointer.save(3, state_of(3)).result()
        assert done.step == 3, interrupt.place
        return interrupt.place, interrupt.passed

    found = on_two_ranks(work)
    assert sp.Checkpointer(root, rendezvous=None).steps()[-1] == 3
    return found


ACTIONS = [save, sp_save, restore]
INTERRUPTED_RANKS = [(0,), (1,), (0, 1)]


def lines_of(
    root: Path, action: Callable[[sp.Checkpointer], None], within: Callable[..., Any] | None = None
) -> int:
    """Lines of an action that is not interrupted, on the rank with more of them."""
    return max(passed for _, passed in interrupted(root, action, (None, None), within))


def points_of(ranks: tuple[int, ...], at: int) -> tuple[int | None, int | None]:
    return (at if 0 in ranks else None), (at if 1 in ranks else None)


@pytest.mark.parametrize("ranks", INTERRUPTED_RANKS)
@pytest.mark.parametrize("action", ACTIONS)
def test_all_ranks_make_the_next_save_after_an_interrupt(
    action: Callable[[sp.Checkpointer], None], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    lines = lines_of(tmp_path / "whole", action)
    for number, part in enumerate((0.0, 0.3, 0.6, 0.9)):
        places = interrupted(tmp_path / str(number), action, points_of(ranks, int(part * lines)))
        assert part > 0.5 or any(place for place, _ in places)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", INTERRUPTED_RANKS)
@pytest.mark.parametrize("action", ACTIONS)
def test_all_ranks_make_the_next_save_after_an_interrupt_at_any_line(
    action: Callable[[sp.Checkpointer], None], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    lines = lines_of(tmp_path / "whole", action)
    for at in range(0, lines, lines // 40):
        interrupted(tmp_path / str(at), action, points_of(ranks, at))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Objects in reference cycles stay alive."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("within", [Turns.reserve, Operation.__enter__, Operation.__exit__])
@pytest.mark.parametrize("action", [save, sp_save])
def test_an_interrupt_while_an_operation_passes_to_the_thread_of_saves(
    action: Callable[[sp.Checkpointer], None], within: Callable[..., Any], tmp_path: Path
) -> None:
    """The caller's thread hands its turn and its operation to the thread of saves."""
    lines = lines_of(tmp_path / "whole", action, within)
    for rank in (0, 1):
        for at in range(lines):
            places = interrupted(tmp_path / f"{rank} {at}", action, points_of((rank,), at), within)
            assert places[rank][0], at


def test_sp_save_does_not_read_the_state_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes after the caller's part, when the thread of saves is about to write."""
    changed, create = threading.Event(), LocalStorage.create

    def held(storage: LocalStorage, name: str) -> Any:
        assert changed.wait(LIMIT)
        return create(storage, name)

    monkeypatch.setattr(LocalStorage, "create", held)
    state = state_of(2)
    with pytest.raises(KeyboardInterrupt), Interrupt(0, Operation.__exit__).armed():
        sp.save(tmp_path / "apart", state)
    state["weight"].fill_(-1)
    changed.set()
    unfinished.wait()
    sp.save(tmp_path / "apart", state)  # refused if the interrupted save was committed


def failed_on_one(rendezvous: StoreRendezvous) -> tuple[str, str]:
    """Rank 1 fails between two rendezvous of an operation. Returns the error, and the next answer."""
    try:
        with rendezvous.operation("convert"):
            rendezvous.meet("convert", "first", b"", lambda posts: b"")
            if rendezvous.rank == 1:
                raise OSError("no space left")
            rendezvous.meet("convert", "second", b"", lambda posts: b"")
    except (OSError, RankFailure) as error:
        error_text = str(error)
    return error_text, rendezvous.meet("save", "collect", b"%d" % rendezvous.rank, b"".join).decode()


def test_a_failure_between_two_meetings_is_reported_to_the_other_rank() -> None:
    (error_text, after), (own, same) = on_two_ranks(failed_on_one)
    assert "convert, phase first: rank 1 of 2 failed" in error_text and "OSError: no space left" in error_text
    assert (own, after, same) == ("no space left", "01", "01")


def entered_by_one(rendezvous: StoreRendezvous) -> str:
    """Rank 1 leaves an operation that rank 0 never called."""
    if rendezvous.rank == 1:
        with pytest.raises(KeyboardInterrupt), rendezvous.operation("save 2"):
            raise KeyboardInterrupt
    return rendezvous.meet("save 3", "collect", b"%d" % rendezvous.rank, b"".join).decode()


def test_a_rank_skips_an_operation_that_only_the_other_rank_entered() -> None:
    assert on_two_ranks(entered_by_one) == ["01", "01"]

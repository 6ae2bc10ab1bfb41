"""An interrupt at any line of a save or a restore, on one rank or on both: the next save is one of all ranks.

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
from shardproof.errors import RankFailure
from shardproof.rendezvous import Operation, StoreRendezvous
from shardproof.rendezvous.ordering import Turns
from shardproof.saving.background import unfinished
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
        at: lines to pass before; None: none is raised, and lines are counted.
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
    root: Path,
    action: Callable[[sp.Checkpointer], None],
    points: tuple[int | None, int | None],
    within: Callable[..., Any] | None = None,
) -> list[tuple[str, int]]:
    """Each rank saves, then acts and is interrupted, then saves again. Place of the interrupt, and lines."""

    def work(meetings: StoreRendezvous) -> tuple[str, int]:
        checkpointer = sp.Checkpointer(root, rendezvous=meetings)
        checkpointer.save(1, state_of(1)).result()
        interrupt = Interrupt(points[meetings.rank], within)
        try:
            with interrupt.armed():
                action(checkpointer)
        except KeyboardInterrupt:
            assert interrupt.place
        except RankFailure:
            assert points != (None, None)
        with suppress(RankFailure):  # the other rank's interrupt, where this one's came before it was told
            checkpointer.wait()
        done = checkpointer.save(3, state_of(3)).result()
        assert done.step == 3, interrupt.place
        return interrupt.place, interrupt.passed

    found = on_two_ranks(work)
    assert sp.Checkpointer(root, rendezvous=None).steps()[-1] == 3
    return found


ACTIONS = [save, save_at_once, restore]
WHO = [(0,), (1,), (0, 1)]


def lines_of(
    root: Path, action: Callable[[sp.Checkpointer], None], within: Callable[..., Any] | None = None
) -> int:
    """Lines of an action that is not interrupted, on the rank with more of them."""
    return max(passed for _, passed in interrupted(root, action, (None, None), within))


def both(who: tuple[int, ...], at: int) -> tuple[int | None, int | None]:
    return (at if 0 in who else None), (at if 1 in who else None)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("action", ACTIONS)
def test_the_next_save_after_an_interrupt_is_one_of_all_ranks(
    action: Callable[[sp.Checkpointer], None], who: tuple[int, ...], tmp_path: Path
) -> None:
    lines = lines_of(tmp_path / "whole", action)
    for number, part in enumerate((0.0, 0.3, 0.6, 0.9)):
        places = interrupted(tmp_path / str(number), action, both(who, int(part * lines)))
        assert part > 0.5 or any(place for place, _ in places)


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_at_any_line(
    action: Callable[[sp.Checkpointer], None], who: tuple[int, ...], tmp_path: Path
) -> None:
    lines = lines_of(tmp_path / "whole", action)
    for at in range(0, lines, lines // 40):
        interrupted(tmp_path / str(at), action, both(who, at))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What only a cycle of references keeps stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("within", [Turns.reserve, Operation.__enter__, Operation.__exit__])
@pytest.mark.parametrize("action", [save, save_at_once])
def test_an_interrupt_between_the_thread_of_the_caller_and_that_of_saves(
    action: Callable[[sp.Checkpointer], None], within: Callable[..., Any], tmp_path: Path
) -> None:
    """A place in the order of meetings, and an operation, pass from one to the other."""
    lines = lines_of(tmp_path / "whole", action, within)
    for who in (0, 1):
        for at in range(lines):
            places = interrupted(tmp_path / f"{who} {at}", action, both((who,), at), within)
            assert places[who][0], at


def test_nothing_is_read_of_a_state_after_the_interrupt_of_a_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the caller's part is over, and the thread of saves is about to write."""
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
    sp.save(tmp_path / "apart", state)  # which a committed checkpoint would be in the way of


def failed_on_one(meetings: StoreRendezvous) -> tuple[str, str]:
    """Rank 1 fails between two meetings of an operation; what rank 0 is told, and the meeting after that."""
    try:
        with meetings.operation("convert"):
            meetings.meet("convert", "first", b"", lambda posts: b"")
            if meetings.rank == 1:
                raise OSError("no space left")
            meetings.meet("convert", "second", b"", lambda posts: b"")
    except (OSError, RankFailure) as error:
        told = str(error)
    return told, meetings.meet("save", "collect", b"%d" % meetings.rank, b"".join).decode()


def test_a_rank_that_fails_between_two_meetings_tells_the_others() -> None:
    (told, after), (own, same) = on_two_ranks(failed_on_one)
    assert "convert, phase first: rank 1 of 2 failed" in told and "OSError: no space left" in told
    assert (own, after, same) == ("no space left", "01", "01")


def left_behind(meetings: StoreRendezvous) -> str:
    """Rank 1 leaves an operation that rank 0 never called."""
    if meetings.rank == 1:
        with pytest.raises(KeyboardInterrupt), meetings.operation("save 2"):
            raise KeyboardInterrupt
    return meetings.meet("save 3", "collect", b"%d" % meetings.rank, b"".join).decode()


def test_an_operation_that_one_rank_left_is_passed_over_by_a_rank_that_did_not_call_it() -> None:
    assert on_two_ranks(left_behind) == ["01", "01"]

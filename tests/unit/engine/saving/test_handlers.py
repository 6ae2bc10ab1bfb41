"""A call from a signal handler is refused at once while the main thread is inside shardproof."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.saving.background import wait_while_moving
from shardproof.errors import ReentrantCallError
from shardproof.storage import LocalStorage

LIMIT = 60.0


class Signalled:
    """An object of the state in whose `state_dict` the process gets a signal."""

    def state_dict(self) -> dict[str, Any]:
        signal.raise_signal(signal.SIGUSR1)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], Any]], list[BaseException | None]]]:
    """Installs a handler of SIGUSR1 that makes a call, and returns the list of what its calls raise."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_handler(call: Callable[[], Any]) -> list[BaseException | None]:
        raised: list[BaseException | None] = []

        def handle(*_: Any) -> None:
            try:
                call()
                raised.append(None)
            except sp.ShardproofError as error:
                raised.append(error)

        signal.signal(signal.SIGUSR1, handle)
        return raised

    yield set_handler
    signal.signal(signal.SIGUSR1, before)


def calls_of(checkpointer: sp.Checkpointer, apart: Path) -> dict[str, Callable[[], Any]]:
    """Calls that a handler may make, by name."""
    state = {"weight": torch.ones(3)}
    return {
        "save": lambda: checkpointer.save(9, state),
        "sp.save": lambda: sp.save(apart, state),
        "load": lambda: sp.load(apart, state),
        "restore": lambda: checkpointer.restore(state),
        "wait": checkpointer.wait,
        "fence": checkpointer.fence,
    }


@pytest.mark.parametrize("call", ["save", "sp.save", "load", "restore", "wait", "fence"])
@pytest.mark.parametrize("inside", ["save", "restore"])
def test_a_handler_inside_a_save_or_a_restore_is_refused(
    call: str, inside: str, tmp_path: Path, on_signal: Any
) -> None:
    checkpointer = sp.Checkpointer(tmp_path / "run")
    state = {"weight": torch.ones(3), "object": Signalled()}
    raised = on_signal(lambda: None)
    checkpointer.save(1, state).result(LIMIT)
    raised = on_signal(calls_of(checkpointer, tmp_path / "apart")[call])
    if inside == "save":
        checkpointer.save(2, state).result(LIMIT)
    else:
        assert checkpointer.restore(state) == 1
    assert raised and all(isinstance(error, ReentrantCallError) for error in raised)
    assert raised[0].details["inside"] in (inside, "load")  # type: ignore[union-attr]
    assert "at the next step boundary" in str(raised[0])
    checkpointer.save(3, {"weight": torch.ones(3)}).result(LIMIT)


def test_a_handler_is_refused_while_a_save_waits_for_the_previous_save(
    tmp_path: Path, on_signal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    publish = LocalStorage.publish

    def held(storage: LocalStorage, name: str, data: bytes, **options: Any) -> Any:
        assert gate.wait(LIMIT)
        return publish(storage, name, data, **options)

    monkeypatch.setattr(LocalStorage, "publish", held)
    checkpointer = sp.Checkpointer(tmp_path)
    state = {"weight": torch.ones(3)}
    first = checkpointer.save(1, state)
    raised = on_signal(lambda: checkpointer.save(9, state))
    main = threading.get_ident()

    def signal_while_it_waits() -> None:
        while not is_inside(main, wait_while_moving):
            gate.wait(0.01)
        signal.pthread_kill(main, signal.SIGUSR1)
        while not raised:
            gate.wait(0.01)
        gate.set()

    other = threading.Thread(target=signal_while_it_waits, daemon=True)
    other.start()
    checkpointer.save(2, state).result(LIMIT)
    other.join(LIMIT)
    assert first.result(LIMIT).step == 1
    assert isinstance(raised[0], ReentrantCallError)
    assert checkpointer.steps() == [1, 2]


def test_a_handler_outside_of_any_call_may_save_while_a_save_runs_in_the_background(
    tmp_path: Path, on_signal: Any
) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    pending = checkpointer.save(1, {"weight": torch.ones(1 << 20)})
    raised = on_signal(lambda: checkpointer.save(2, {"weight": torch.ones(3)}).result(LIMIT))
    signal.raise_signal(signal.SIGUSR1)
    assert raised == [None]
    assert pending.result(LIMIT).step == 1
    assert checkpointer.steps() == [1, 2]


def is_inside(thread: int, function: Callable[..., Any]) -> bool:
    """True if a thread runs a function."""
    import sys

    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False

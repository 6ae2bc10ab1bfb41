"""The deadline of one call, and the default deadline of the rendezvous."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous, check_deadline, connect, connected

DEFAULT = 300.0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rank_0_of_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of two, which serves the store on a free port. The other rank never comes."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield
    connect().close()


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_is_a_positive_number(alone: None, tmp_path: Path, deadline: float) -> None:
    state = {"w": torch.ones(2)}
    calls: list[Any] = [
        lambda: check_deadline(None, deadline),
        lambda: connected(None, deadline).__enter__(),
        lambda: sp.save(tmp_path / "step", state, deadline=deadline),
        lambda: sp.load(tmp_path / "step", state, deadline=deadline),
        lambda: sp.Checkpointer(tmp_path / "run", deadline=deadline),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="positive number of seconds"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_deadline_beside_a_rendezvous_is_refused(tmp_path: Path) -> None:
    given, state = LocalRendezvous(deadline=20.0), {"w": torch.ones(2)}
    calls: list[Any] = [
        lambda: check_deadline(given, 5.0),
        lambda: connected(given, 5.0).__enter__(),
        lambda: sp.save(tmp_path / "step", state, rendezvous=given, deadline=5.0),
        lambda: sp.load(tmp_path / "step", state, rendezvous=given, deadline=5.0),
        lambda: sp.Checkpointer(tmp_path / "run", rendezvous=given, deadline=5.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="both rendezvous= and deadline=5.0 are given"):
            call()
    assert given.deadline == 20.0
    assert list(tmp_path.iterdir()) == []


def test_a_given_rendezvous_is_used_as_it_is() -> None:
    given = LocalRendezvous(deadline=20.0)
    with connected(given, None) as found:
        assert found is given
    assert given.deadline == 20.0


def test_one_process_has_the_deadline_of_the_call(alone: None, tmp_path: Path) -> None:
    with connected(None, 5.0) as found:
        assert isinstance(found, LocalRendezvous)
        assert found.deadline == 5.0
    with connected(None, None) as found:
        assert found.deadline == DEFAULT
    state = {"w": torch.ones(2)}
    sp.save(tmp_path / "step", state, deadline=5.0)
    sp.load(tmp_path / "step", state, deadline=5.0)


def test_the_deadline_of_a_call_ends_with_it(rank_0_of_2: None) -> None:
    with connected(None, 5.0) as found:  # makes the rendezvous
        assert isinstance(found, StoreRendezvous)
        assert found.deadline == 5.0
    assert found.deadline == DEFAULT
    with suppress(KeyError), connected(None, 6.0):
        assert found.deadline == 6.0
        raise KeyError
    assert found.deadline == DEFAULT
    with connected(None, None) as again:
        assert again is found
        assert found.deadline == DEFAULT


def test_the_deadline_of_connect_lasts(rank_0_of_2: None) -> None:
    found = connect(deadline=40.0)
    assert connect() is found
    assert found.deadline == 40.0
    with connected(None, 5.0):
        assert found.deadline == 5.0
    assert found.deadline == 40.0
    connect(deadline=50.0)
    assert found.deadline == 50.0


def test_a_lasting_deadline_that_is_set_in_a_call_holds_after_it(rank_0_of_2: None) -> None:
    with connected(None, 5.0) as found:
        connect(deadline=40.0)
        with connected(None, 6.0):
            connect(deadline=41.0)
    assert found.deadline == 41.0


def test_nested_calls_restore_the_outer_deadline(rank_0_of_2: None) -> None:
    with connected(None, 5.0) as found:
        with connected(None, 6.0):
            with connected(None, 6.0):
                assert found.deadline == 6.0
            assert found.deadline == 6.0
        assert found.deadline == 5.0
    assert found.deadline == DEFAULT


def test_the_deadline_is_that_of_the_call_that_began_last_in_any_thread(rank_0_of_2: None) -> None:
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with connected(None, 7.0):
            begun.set()
            end.wait(30)

    thread = threading.Thread(target=other)
    with connected(None, 5.0) as found:
        thread.start()
        assert begun.wait(30)
        assert found.deadline == 7.0
    assert found.deadline == 7.0  # of the call under way
    end.set()
    thread.join(30)
    assert found.deadline == DEFAULT


def test_a_checkpointer_keeps_its_deadline(rank_0_of_2: None, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path, deadline=40.0)
    with connected(None, 5.0) as found:
        assert found.deadline == 5.0
    assert found.deadline == 40.0

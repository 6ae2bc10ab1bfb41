"""Saves of one process that agree in the background: what training waits for, and what is copied at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.engine.saving.background import Workers
from shardproof.engine.saving.snapshot import Capture
from shardproof.errors import AlreadyCommittedError, StorageError
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous
from shardproof.state import Fence, Stepped, collect
from shardproof.storage import LocalStorage

LIMIT = 60.0


def trained() -> dict[str, Any]:
    """A model and its optimizer, after a step."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes `LocalStorage.size`, which looks for the manifest, wait until the event is set."""
    size, answers = LocalStorage.size, threading.Event()

    def hanging(storage: LocalStorage, name: str) -> int | None:
        assert answers.wait(LIMIT)
        return size(storage, name)

    monkeypatch.setattr(LocalStorage, "size", hanging)
    return answers


def test_training_continues_if_the_storage_hangs_while_the_ranks_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    alone = LocalRendezvous(deadline=LIMIT)
    checkpointer = sp.Checkpointer(tmp_path, rendezvous=alone)
    checkpointer.save(1, state).result(LIMIT)
    alone.deadline = 0.1
    answers = hang(monkeypatch)
    pending = checkpointer.save(2, state)
    state["optimizer"].step()
    answers.set()
    assert not wait([pending.future()], LIMIT).not_done
    with pytest.raises(StorageError, match="have not agreed for 0 s while training waited"):
        checkpointer.wait(LIMIT)
    assert checkpointer.steps() == [1]


def test_a_step_that_is_committed_already_is_refused_in_the_background(tmp_path: Path) -> None:
    state = trained()
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state).result(LIMIT)
    with pytest.raises(AlreadyCommittedError):
        checkpointer.save(1, state).result(LIMIT)
    assert checkpointer.save(1, state, overwrite=True).result(LIMIT).step == 1


def capture(state: dict[str, Any], stepped: tuple[Stepped, ...] | None = None, **options: Any) -> Capture:
    collected = collect(state)
    return Capture.of(
        collected,
        collected.stepped if stepped is None else stepped,
        **{"guarded": True, "goes_ahead": True} | options,
    )


def test_a_capture_copies_small_tensors_that_no_step_writes_and_no_others() -> None:
    running, strided = torch.arange(6.0), torch.arange(6.0).view(2, 3).t()
    state = trained() | {"running": running, "strided": strided}
    taken = capture(state)
    assert taken.goes_ahead
    running.zero_()
    strided.zero_()
    views = dict(zip(taken.names, (piece.view for piece in taken.pieces), strict=True))
    assert views["running"].tolist() == [0, 1, 2, 3, 4, 5]
    assert views["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert views["model.weight"].data_ptr() == state["model"].weight.data_ptr()


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1])
def test_a_capture_copies_at_most_1_mib_of_tensors_that_no_step_writes(nbytes: int) -> None:
    loose = torch.zeros(nbytes, dtype=torch.uint8)
    taken = capture(trained() | {"loose": loose})
    assert taken.goes_ahead is (nbytes == 1 << 20)
    view = taken.pieces[taken.names.index("loose")].view
    assert (view.data_ptr() == loose.data_ptr()) is (nbytes > 1 << 20)


def test_a_capture_without_device_memory_for_a_copy_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    state = trained() | {"loose": torch.ones(3)}
    monkeypatch.setattr(torch.Tensor, "clone", full)
    taken = capture(state)
    assert not taken.goes_ahead
    assert taken.pieces[taken.names.index("loose")].view.data_ptr() == state["loose"].data_ptr()


def test_a_capture_that_was_not_requested_or_not_fenced_is_incomplete() -> None:
    state = trained()
    assert capture(state).goes_ahead
    assert not capture(state, goes_ahead=False).goes_ahead
    assert not capture(state, guarded=False).goes_ahead
    assert not capture(state, stepped=()).goes_ahead


def test_a_save_waits_for_its_turn_while_the_operation_before_it_makes_progress(tmp_path: Path) -> None:
    """It waits longer than a step waits for ranks that have not agreed."""
    state = trained()
    alone = StoreRendezvous(HashStore(), 0, 1, deadline=LIMIT)
    checkpointer = sp.Checkpointer(tmp_path, rendezvous=alone)
    checkpointer.save(1, state).result(LIMIT)
    alone.deadline = 1.0
    held, pause = alone.reserve(), threading.Event()
    pending = checkpointer.save(2, state)
    stepping = threading.Thread(target=state["optimizer"].step)
    stepping.start()
    for _ in range(130):  # longer than the step would wait otherwise
        alone.report_waiting()
        pause.wait(0.02)
    assert stepping.is_alive()
    held.release()
    assert pending.result(LIMIT).step == 2
    stepping.join(LIMIT)
    alone.close()


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where",
    [(StoreRendezvous, "store_server"), (Workers, "submit"), (Fence, "__init__")],
    ids=lambda one: one[1],
)
def test_an_interrupted_save_blocks_neither_the_next_step_nor_the_next_save(
    where: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes before the ranks have agreed."""
    state = trained()
    alone = StoreRendezvous(HashStore(), 0, 1, deadline=LIMIT)
    checkpointer = sp.Checkpointer(tmp_path, rendezvous=alone)
    checkpointer.save(1, state).result(LIMIT)
    with monkeypatch.context() as broken:
        broken.setattr(*where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(2, state)
    begun = time.monotonic()
    state["optimizer"].step()
    checkpointer.save(3, state).result(LIMIT)
    assert time.monotonic() - begun < LIMIT
    assert checkpointer.steps() == [1, 3]
    alone.close()


def test_the_next_save_reports_a_committed_step_if_the_caller_did_not_wait(tmp_path: Path) -> None:
    state = trained()
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state).result(LIMIT)
    checkpointer.save(1, state)
    with pytest.raises(AlreadyCommittedError, match="step-00000001"):
        checkpointer.save(2, state)
    assert checkpointer.save(2, state).result(LIMIT).step == 2

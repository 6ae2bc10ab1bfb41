"""The error of a failed save: its class and facts, the calls that led to it, and what it keeps in memory."""

from __future__ import annotations

import copy
import gc
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.engine.saving import Saver
from shardproof.engine.saving.save_protocol import Save
from shardproof.errors import PlainDataError, ShardproofError, StorageError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.gate import LIMIT, Gate

STATE = {"w": torch.ones(4)}


class QuotaError(StorageError):
    """An error of a program's own storage, whose constructor takes no text."""

    def __init__(self, user: str, quota: int) -> None:
        super().__init__(f"{user} has used {quota} bytes", user=user)
        self.quota = quota


def fail_with_a_cause(operation: str, name: str) -> None:
    try:
        raise OSError("the server is gone")
    except OSError as error:
        raise StorageError("the disk is gone", file=name) from error


def failing(path: Path, fault: Any) -> FaultyStorage:
    return FaultyStorage(LocalStorage(path), 0, fault, only=("finish",))


def test_the_error_of_a_storage_keeps_its_class_and_all_its_facts(tmp_path: Path) -> None:
    raised = QuotaError("ada", 7)
    raised.add_note("ask for more")
    raised.__cause__ = OSError("the server refused")
    raised.__context__ = KeyError("ada")
    pending = Saver(LocalRendezvous()).begin(failing(tmp_path, raised), STATE)
    with pytest.raises(QuotaError) as caught:
        pending.result(LIMIT)
    error = caught.value
    assert (str(error), error.quota, error.details) == ("ada has used 7 bytes", 7, {"user": "ada"})
    assert "ask for more" in error.__notes__
    assert error.__cause__ is raised.__cause__ and error.__context__ is raised.__context__
    error.add_note("of the caller")
    assert "of the caller" not in raised.__notes__


def test_an_error_with_other_arguments_passes_to_another_rank() -> None:
    for again in (
        copy.copy(QuotaError("ada", 7)),
        ShardproofError.from_wire(QuotaError("ada", 7).to_wire()),
    ):
        assert type(again) is QuotaError
        assert (str(again), again.details) == ("ada has used 7 bytes", {"user": "ada"})


def test_the_error_tells_the_calls_that_led_to_it_once(tmp_path: Path) -> None:
    saver = Saver(LocalRendezvous())
    pending = saver.begin(failing(tmp_path, fail_with_a_cause), STATE)
    for _ in range(2):
        with pytest.raises(StorageError, match="the disk is gone") as caught:
            pending.result(LIMIT)
        text = "".join(traceback.format_exception(caught.value))
        assert text.count('raise OSError("the server is gone")') == 1
        assert text.count('raise StorageError("the disk is gone", file=name) from error') == 1
        assert len(caught.value.__notes__) == 1


def test_a_failed_save_with_a_cause_ends_with_its_last_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[weakref.ref[Any]] = []
    start = Save.start

    def watched(save: Save, *args: Any, **options: Any) -> None:
        saves.append(weakref.ref(save._shared))
        start(save, *args, **options)

    monkeypatch.setattr(Save, "start", watched)
    saver = Saver(LocalRendezvous())
    gc.disable()
    try:
        failed = saver.begin(failing(tmp_path / "a", fail_with_a_cause), STATE)
        with pytest.raises(StorageError, match="the disk is gone"):
            failed.result(LIMIT)
        saver.save(LocalStorage(tmp_path / "b"), STATE)
        assert saves[0]() is None
        assert failed.done()  # still referred to
    finally:
        gc.enable()


def test_an_interrupt_of_the_caller_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the frames of the caller while the save thread ends the save."""

    gate, saver, start = Gate(monkeypatch), Saver(LocalRendezvous()), Save.start

    def started(save: Save, state: Any, operation: Any, submit: Any, **options: Any) -> None:
        def interrupted(work: Any) -> None:
            submit(work)
            assert gate.reached.wait(LIMIT)
            raise KeyboardInterrupt

        start(save, state, operation, interrupted, **options)

    monkeypatch.setattr(Save, "start", started)
    with pytest.raises(KeyboardInterrupt) as caught:
        saver.begin(LocalStorage(tmp_path), STATE)
    gate.open()
    saver.wait_for_end()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "interrupted"
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("refused", [[], [object()]], ids=["failed", "refused"])
def test_a_failed_save_keeps_no_state_for_as_long_as_the_saver_lives(
    refused: list[object], tmp_path: Path
) -> None:
    saver = Saver(LocalRendezvous())
    model = torch.nn.Linear(2, 2)
    kept = weakref.ref(model)
    gc.disable()
    try:
        with suppress(StorageError, PlainDataError):
            saver.save(failing(tmp_path, fail_with_a_cause), {"model": model, "refused": refused})
        del model
        assert kept() is None
    finally:
        gc.enable()

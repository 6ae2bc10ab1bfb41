"""A reader that restores while training goes on in the run, and retention removes the step that is read.

A listener makes the next save at a chosen moment of the load. A storage wrapper makes it at every operation
of the choice of a step.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.report import scan_run
from shardproof.runs.checkpointer.step_folders import StepFolder
from shardproof.runs.checkpointer.step_selection import MOST_TRIES, StepSelection
from shardproof.storage import LocalStorage, Storage
from tests.faulty_storage import FaultyStorage

LIMIT = 60.0
_MOMENTS = ("match", "read")
"""Phases of a load: the step is removed before its manifest is opened, or before its bytes are read."""


@pytest.fixture
def files_stay_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load opens no file before it reads: as in a remote storage, and beyond the bound of open files."""
    monkeypatch.setattr(NativeCheckpoint, "open_files", lambda checkpoint, rows: None)


class Training:
    """Another process's run: each step has a tensor that changes and one that does not."""

    def __init__(self, root: Path, *, incremental: bool = False, keep: int = 1) -> None:
        # Without a scrub: a step that the scrub proves in time stays beside the newest one, and is restored.
        self.checkpointer = sp.Checkpointer(
            root, keep=sp.KeepLatest(keep), incremental=incremental and sp.Incremental(scrub=None)
        )
        self.step = 0

    def save(self, *, overwrite: bool = False) -> None:
        self.step += not overwrite
        state = {"step": torch.full((1000,), float(self.step)), "frozen": torch.ones(1000)}
        self.checkpointer.save(self.step, state, overwrite=overwrite).result()


def at(moment: str, act: Callable[[], Any], *, times: int = 1) -> events.Subscription:
    """Calls `act` when a load begins the phase of that name, in the first `times` loads."""
    left = [times]

    def listen(event: events.Event) -> None:
        if event.operation.startswith("load ") and (event.kind, event.phase) == ("begin", moment) and left[0]:
            left[0] -= 1
            other = threading.Thread(target=act)  # as another process: a load makes no save on its own thread
            other.start()
            other.join(LIMIT)
            assert not other.is_alive()

    return events.subscribe(listen)


def target() -> dict[str, torch.Tensor]:
    return {"step": torch.zeros(1000), "frozen": torch.zeros(1000)}


def check(state: dict[str, torch.Tensor], step: int) -> None:
    assert torch.equal(state["step"], torch.full((1000,), float(step)))
    assert torch.equal(state["frozen"], torch.ones(1000))


@pytest.mark.usefixtures("files_stay_closed")
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("incremental", [False, True])
def test_a_newer_step_is_restored_if_the_step_is_removed_while_it_is_read(
    tmp_path: Path, moment: str, incremental: bool
) -> None:
    training = Training(tmp_path, incremental=incremental)
    training.save()
    training.save()
    reader, state = sp.Checkpointer(tmp_path), target()
    with at(moment, training.save, times=3):
        assert reader.restore(state) == 5
    check(state, 5)
    assert reader.passed_over == ()


@pytest.mark.usefixtures("files_stay_closed")
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("step", [None, 1])
def test_the_replacement_is_restored_if_the_step_is_replaced_while_it_is_read(
    tmp_path: Path, moment: str, step: int | None
) -> None:
    training = Training(tmp_path)
    training.save()
    reader, state = sp.Checkpointer(tmp_path), target()
    with at(moment, lambda: training.save(overwrite=True)):
        assert reader.restore(state, step=step) == 1
    check(state, 1)
    assert reader.passed_over == ()


def test_a_step_whose_files_are_open_is_restored_although_it_is_removed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()
    reader, state = sp.Checkpointer(tmp_path), target()
    with at("read", training.save):
        assert reader.restore(state) == 1
    check(state, 1)
    assert not (tmp_path / "step-00000001").exists() and reader.passed_over == ()


@pytest.mark.usefixtures("files_stay_closed")
def test_a_reader_that_is_always_too_late_gets_an_error_with_advice(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()
    with (
        at("read", training.save, times=10**6),
        pytest.raises(sp.StorageError, match=r"KeepLatest\(2\)") as caught,
    ):
        sp.Checkpointer(tmp_path).restore(target())
    assert f"{MOST_TRIES} chosen steps in a row" in str(caught.value) and f"step {MOST_TRIES}" in str(
        caught.value
    )
    assert not caught.value.details["damaged"] and isinstance(caught.value.__cause__, sp.ShardproofError)


@pytest.mark.usefixtures("files_stay_closed")
def test_the_removal_of_a_step_that_is_restored_by_its_number_is_an_error(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()
    match = "another process removed it during the load"
    with at("read", training.save), pytest.raises(sp.NotCommittedError, match=match):
        sp.Checkpointer(tmp_path).restore(target(), step=1)


@pytest.mark.usefixtures("files_stay_closed")
@pytest.mark.parametrize("moment", _MOMENTS)
def test_an_older_step_is_restored_with_a_warning(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, keep=2)
    training.save()
    training.save()
    reader, state = sp.Checkpointer(tmp_path), target()
    with at(moment, lambda: shutil.rmtree(tmp_path / "step-00000002")):
        assert reader.restore(state) == 1
    check(state, 1)
    (passed,) = reader.passed_over
    assert passed.step == 2 and not passed.damaged and "removed" in passed.reason
    assert "step 2 is passed over" in caplog.text


@pytest.mark.usefixtures("files_stay_closed")
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("lost", ["the run", "the step"])
def test_a_run_that_is_lost_while_it_is_read_is_not_taken_for_an_empty_run(
    tmp_path: Path, moment: str, lost: str
) -> None:
    run = tmp_path / "run"
    Training(run).save()
    folder = run if lost == "the run" else run / "step-00000001"
    with (
        at(moment, lambda: shutil.rmtree(folder)),
        pytest.raises(sp.NotCommittedError, match="was committed when"),
    ):
        sp.Checkpointer(run).restore(target())


def runs_with_a_save(tmp_path: Path, incremental: bool, look: Callable[[Storage], Any]) -> Iterator[Any]:
    """What `look` finds in a run of two steps, if training saves a third before any one of its operations."""
    first = Training(tmp_path / "first", incremental=incremental, keep=2)
    first.save()
    first.save()
    counted = FaultyStorage(LocalStorage(tmp_path / "first"))
    look(counted)
    assert len(counted.operations) >= 5
    for number in range(len(counted.operations)):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", root)
        training = Training(root, incremental=incremental)
        training.step = 2
        yield look(FaultyStorage(LocalStorage(root), number, lambda _operation, _name: training.save()))  # noqa: B023
        assert training.step == 3


@pytest.mark.parametrize("incremental", [False, True])
def test_a_save_at_any_operation_of_the_choice_does_not_fail_it(tmp_path: Path, incremental: bool) -> None:
    found = set()
    for chosen in runs_with_a_save(
        tmp_path, incremental, lambda run: StepSelection(run, suspect=False).choose(())
    ):
        assert chosen.folder in (StepFolder(2), StepFolder(3)) and chosen.passed == []
        found.add(chosen.folder)
    assert StepFolder(3) in found


@pytest.mark.parametrize("incremental", [False, True])
def test_a_save_at_any_operation_of_a_listing_does_not_fail_it(tmp_path: Path, incremental: bool) -> None:
    for infos in runs_with_a_save(tmp_path, incremental, lambda run: scan_run(run)):
        assert {info.status for info in infos} <= {"committed", "leftover", "referenced"}, infos


def test_a_choice_that_never_ends_is_given_up(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()

    class Removing(LocalStorage):
        """Training removes every step between the read of its manifest and the look at its index."""

        def within(self, prefix: str) -> LocalStorage:
            return Removing(tmp_path / prefix)

        def size(self, name: str) -> int | None:
            if name.startswith("index-"):
                training.save()
            return super().size(name)

    with pytest.raises(sp.StorageError, match=rf"{MOST_TRIES} chosen steps in a row.*KeepLatest\(2\)"):
        StepSelection(Removing(tmp_path), suspect=False).choose(())
    assert training.step == MOST_TRIES + 1

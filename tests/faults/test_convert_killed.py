"""A killed conversion continues where it stopped, and publishes all tensors."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import ShardproofError
from shardproof.formats.conversion.work_folder import WorkFolder
from shardproof.rendezvous import LocalRendezvous
from tests.harness import rendezvous, run_ranks

TENSORS = {f"layer.{number}.weight": torch.arange(number, number + 64.0) for number in range(6)}
FILE_BYTES = 600
"""Two tensors a file: three units."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sp.save(tmp_path / "source", dict(TENSORS))
    return tmp_path / "source"


def _convert(source: str, there: str, units: int | None, workers: int = 1) -> tuple[int, int]:
    """Converts; kills its own process when `units` units are written."""
    add, written = WorkFolder.add, []

    def counted(folder: WorkFolder, record: Any) -> None:
        add(folder, record)
        written.append(record.name)
        if len(written) == units:
            os.kill(os.getpid(), 9)

    WorkFolder.add = counted  # type: ignore[method-assign]
    report = sp.convert(
        source,
        there,
        to="safetensors",
        max_file_bytes=FILE_BYTES,
        workers=workers,
        rendezvous=rendezvous(deadline=30.0),
    )
    return report.units, report.resumed


@pytest.mark.parametrize("units", [1, 2, 3])
def test_a_killed_conversion_continues_where_it_stopped(source: Path, tmp_path: Path, units: int) -> None:
    there = tmp_path / "there"
    (killed,) = run_ranks(1, _convert, str(source), str(there), units)
    assert killed.exit_code == -9
    assert not there.exists()
    (again,) = run_ranks(1, _convert, str(source), str(there), None)
    assert again.value == (3, units)
    with sp.open(there) as checkpoint:
        assert {key: checkpoint[key].read().tolist() for key in checkpoint} == {
            key: value.tolist() for key, value in TENSORS.items()
        }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]


def test_a_unit_that_was_half_written_is_written_again(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (killed,) = run_ranks(1, _convert, str(source), str(there), 1)
    assert killed.exit_code == -9
    files = tmp_path / "there.converting" / "files"
    written = {path.name for path in files.iterdir()}
    for number in (1, 2, 3):
        name = f"model-{number:05d}-of-00003.safetensors"
        if name not in written:
            (files / name).write_bytes(b"half")
    (again,) = run_ranks(1, _convert, str(source), str(there), None)
    assert again.value == (3, 1)
    with sp.open(there) as checkpoint:
        assert set(checkpoint) == set(TENSORS)


def test_ranks_share_the_units(source: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(2, _convert, str(source), str(tmp_path / "there"), None)
    assert [outcome.value for outcome in outcomes] == [(3, 0), (3, 0)]
    with sp.open(tmp_path / "there") as checkpoint:
        assert set(checkpoint) == set(TENSORS)


def test_a_rank_that_dies_is_named_and_the_others_end(source: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(2, _convert_and_kill_rank_1, str(source), str(tmp_path / "there"), timeout=60)
    assert outcomes[1].exit_code == -9
    assert "1" in outcomes[0].value
    assert not (tmp_path / "there").exists()
    outcomes = run_ranks(2, _convert, str(source), str(tmp_path / "there"), None)
    assert outcomes[0].value[1] >= 1


def _convert_and_kill_rank_1(source: str, there: str) -> str:
    meeting = rendezvous(deadline=3.0)
    if meeting.rank == 1:
        WorkFolder.add = lambda folder, record: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    try:
        sp.convert(source, there, to="safetensors", max_file_bytes=FILE_BYTES, rendezvous=meeting)
    except sp.RankSilent as error:
        return str(error.details["ranks"])
    return "no error"


def _with_workers(source: str, there: str, kills: bool) -> str:
    from multiprocessing import active_children

    def kill(done: int, total: int) -> None:
        for child in active_children():
            os.kill(child.pid or 0, 9)

    try:
        sp.convert(
            source,
            there,
            to="safetensors",
            max_file_bytes=FILE_BYTES,
            workers=2,
            on_progress=kill if kills else None,
        )
    except ShardproofError as error:
        return error.message
    return "converted"


def test_workers_write_and_a_dead_worker_is_an_error(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert "ended with exit code -9" in _with_workers(str(source), str(there), True)
    assert not there.exists()
    assert _with_workers(str(source), str(there), False) == "converted"
    with sp.open(there) as checkpoint:
        assert set(checkpoint) == set(TENSORS)


def test_workers_that_stop_are_given_up_after_the_deadline(source: Path, tmp_path: Path) -> None:
    from multiprocessing import active_children

    def stop(done: int, total: int) -> None:
        for child in active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)

    with pytest.raises(ShardproofError, match="for 3 s, the deadline"):
        sp.convert(
            source,
            tmp_path / "there",
            to="safetensors",
            max_file_bytes=FILE_BYTES,
            workers=2,
            on_progress=stop,
            rendezvous=LocalRendezvous(deadline=3.0),
        )
    assert not active_children(), "stopped workers end, too"
    assert not (tmp_path / "there").exists()


def _peak_memory_of(source: str, there: str, memory: int) -> int:
    """Bytes by which the conversion raises the peak memory of this process."""
    sp.save(f"{there}-small", {"w": torch.ones(8)})
    sp.convert(f"{there}-small", f"{there}-first", to="safetensors", rendezvous=rendezvous(deadline=30.0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sp.convert(source, there, to="safetensors", memory_bytes=memory, rendezvous=rendezvous(deadline=30.0))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def test_a_conversion_takes_less_memory_than_the_checkpoint_has(tmp_path: Path) -> None:
    large = torch.arange(96 << 20, dtype=torch.int32)  # 384 MiB
    sp.save(tmp_path / "source", {"large": large.reshape(-1, 1024), "flat": large[: 8 << 20]})
    del large
    (outcome,) = run_ranks(1, _peak_memory_of, str(tmp_path / "source"), str(tmp_path / "there"), 64 << 20)
    assert outcome.value < 96 << 20

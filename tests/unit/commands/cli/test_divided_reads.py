"""Reads that workers share: the division of the boxes, and results that do not depend on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from shardproof.commands.cli.group import run
from shardproof.commands.report import divided_reads
from shardproof.commands.report.divided_reads import (
    CheckpointSource,
    OpenBits,
    ReadBox,
    Readers,
    boxes_of,
    divided,
)
from shardproof.engine.foreign import Foreign
from shardproof.engine.format import TensorRecord
from shardproof.errors import StorageError, StructureError
from shardproof.report import Stored, describe, diff, measure_tensors
from shardproof.storage import FsspecStorage, LocalStorage, ObjectStorage
from shardproof.workers import InlineExecutor, Job, Task, WorkerContext
from tests.unit.commands.cli.samples import Sample, rows_cut, write

RANDOM = np.random.default_rng(3)
STATE: dict[str, np.ndarray[Any, Any]] = {
    **{f"w{at}": RANDOM.standard_normal((40, 30)) * 10.0 ** RANDOM.integers(-9, 9) for at in range(5)},
    "empty": np.zeros((0, 3), np.float32),
    "step": np.array(7),
}
OTHER = {key: array * (1 + 1e-3) if array.dtype == np.float64 else array for key, array in STATE.items()}


class Backwards(InlineExecutor):
    """As workers that end in the worst order: the last task first."""

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        return super().run(tasks[::-1], on_bytes)


def start_backwards(
    job: Job, on: str, workers: int, *, make_context: Callable[[], WorkerContext], **_others: object
) -> Backwards:
    """In place of `start_workers`: opens the checkpoints as a worker of another process does."""
    assert workers > 1
    return Backwards(make_context())


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStorage, LocalStorage]:
    """Two checkpoints with other cuts, which are read in many boxes."""
    for module in ("difference", "tensor_statistics"):
        monkeypatch.setattr(f"shardproof.commands.report.{module}.MOST_NUMBERS", 64)
    for name, state, parts in (("a", STATE, 3), ("b", OTHER, 4)):
        cuts = {key: rows_cut(array.shape, parts, 1) for key, array in state.items() if key[0] == "w"}
        write(tmp_path / name, Sample(state, cuts=cuts, world_size=parts))
    return LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")


def test_groups_are_the_boxes_in_their_order() -> None:
    boxes = boxes_of(TensorRecord("w", "float32", (64, 8)), ("w", "model.w"), 64)
    assert [box.offsets for box in boxes] == [(row, 0) for row in range(0, 64, 8)]
    assert {(box.keys, box.sizes, box.elements, box.nbytes) for box in boxes} == {
        (("w", "model.w"), (8, 8), 64, 512)
    }
    for workers, groups in ((1, 4), (2, 8), (9, 8)):
        found = divided(boxes, workers)
        assert len(found) == groups
        assert [box for group in found for box in group] == boxes
    assert boxes_of(TensorRecord("w", "float32", (64, 0)), ("w",), 64) == []
    large = [ReadBox(("w",), "uint8", (at << 26,), (1 << 26,)) for at in range(64)]
    assert [len(group) for group in divided(large, 1)] == 16 * [4], "a task has at most 256 MiB"


def test_results_are_the_same_to_the_digit_in_any_order(
    places: tuple[LocalStorage, LocalStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    difference = diff(*places, measure=True).to_json()
    measures = [measure.to_json() for _, measure in measure_tensors(places[0])]
    assert len(difference["values"]) == 5
    monkeypatch.setattr(divided_reads, "start_workers", start_backwards)
    assert diff(*places, measure=True, workers=3).to_json() == difference
    assert [measure.to_json() for _, measure in measure_tensors(places[0], workers=3)] == measures


@pytest.mark.processes
def test_worker_processes_print_what_one_process_prints(
    places: tuple[LocalStorage, LocalStorage],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = (place.location for place in places)
    for command in (["diff", a, b, "--measure", "--json"], ["stats", a, "--json"]):
        code = run(command)
        printed = json.loads(capsys.readouterr().out)
        with monkeypatch.context() as patched:
            patched.setattr(divided_reads, "open_bits", None)  # this process reads no tensor
            assert run([*command, "--workers", "2"]) == code
        assert json.loads(capsys.readouterr().out) == printed


def test_without_ray_the_error_says_what_to_install(
    places: tuple[LocalStorage, LocalStorage], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (place.location for place in places)
    for command, job in ((["diff", a, b], "comparison"), (["stats", a], "measurement")):
        assert run([*command, "--on", "ray"]) == 3
        error = capsys.readouterr().err
        assert f"the {job} on Ray needs the package ray: pip install 'shardproof[ray]'" in error


def test_a_worker_opens_only_the_checkpoint_that_was_described(
    places: tuple[LocalStorage, LocalStorage],
) -> None:
    a, _ = places
    source = CheckpointSource.of(a, describe(a))
    OpenBits.opened([source])
    shutil.rmtree(a.path)
    with pytest.raises(StorageError, match="cannot open .*All nodes need the same file system"):
        OpenBits.opened([source])
    write(a, Sample(STATE, attempt="another"))
    with pytest.raises(
        StorageError, match="found another checkpoint.*attempt another, expected a1"
    ) as caught:
        OpenBits.opened([source])
    assert caught.value.details["damaged"] is False


def test_workers_need_a_path(tmp_path: Path) -> None:
    storage = FsspecStorage(fsspec.filesystem("memory"), f"{tmp_path}/step")
    write(storage, Sample(STATE))
    assert len(measure_tensors(storage)) == len(STATE)
    with pytest.raises(StructureError, match=r"no path or URL.*workers=1, on=\"processes\""):
        measure_tensors(storage, workers=2)


def test_options_of_a_bucket_do_not_reach_workers(
    places: tuple[LocalStorage, LocalStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    stored = describe(places[0])
    options = {"endpoint": "https://127.0.0.1:1", "access_key_id": "a", "secret_access_key": "b"}
    bucket = ObjectStorage("s3://bucket/runs", options)
    for storage in (bucket, bucket.within("gpt"), bucket.with_one_wait()):
        with pytest.raises(StructureError, match=r"has options.*environment of the workers.*workers=1"):
            CheckpointSource.of(storage, stored)
    for name, value in options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    assert CheckpointSource.of(ObjectStorage("s3://bucket/runs"), stored).path == "s3://bucket/runs"


def test_a_worker_that_cannot_open_a_bucket_asks_for_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")

    def refused(place: Foreign, **_options: object) -> Stored:
        """In place of a store that refuses the request."""
        raise StorageError(f"cannot read {place.storage.location}: access denied")

    monkeypatch.setenv("AWS_REGION", "region")
    monkeypatch.setattr(divided_reads, "describe", refused)
    source = CheckpointSource("s3://bucket/runs", "shardproof", "a1")
    with pytest.raises(
        StorageError, match=r"access denied\. All nodes need the same storage and credentials"
    ):
        source.open()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"workers": 0}, ValueError, "workers is at least 1"),
        ({"workers": "2"}, TypeError, "workers is a whole number"),
        ({"on": "rays"}, ValueError, "on is 'processes' or 'ray', not 'rays'"),
        ({"deadline": 0}, ValueError, "a deadline is a positive number"),
        ({"deadline": None}, TypeError, "deadline is a number of seconds"),
    ],
)
def test_arguments_of_workers(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Readers(**options)

"""Scanning runs and summing up checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardproof.commands.report.detail import ObjectDetail, spelled
from shardproof.engine.format import MANIFEST_NAME, read_index, read_manifest
from shardproof.report import Summary, TensorDetail, detail, scan_run, summarise
from shardproof.runs.checkpointer import plan_prune
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, cut, model, rows_cut, write

STATE = model(3)
SPREAD = Sample(
    STATE,
    cuts={key: rows_cut(array.shape, 2) for key, array in STATE.items()},
    world_size=2,
    step=7,
    objects={"lr": 0.1, "data.seed": 3},
    aliases={"model.head.weight": "model.embed.weight"},
)


def summary_of(folder: Path, prefix: str | None = None, depth: int = 2) -> Summary:
    storage = LocalStorage(folder)
    manifest = read_manifest(storage)
    return summarise("here", manifest, read_index(storage, manifest), prefix=prefix, depth=depth)


def test_a_run_lists_committed_steps_and_why_others_are_not_committed(tmp_path: Path) -> None:
    write(tmp_path / "step-00000020", Sample(STATE, step=20))
    write(tmp_path / "step-00000020", Sample(STATE, attempt="dead"), commit=False)
    write(tmp_path / "step-00000003", Sample(STATE, step=3))
    write(tmp_path / "step-00000030", Sample(STATE), commit=False)
    write(tmp_path / "step-00000040", Sample(STATE))
    (tmp_path / "step-00000040" / MANIFEST_NAME).write_bytes(b"{")
    write(tmp_path / "step-00000050", Sample(STATE))
    (tmp_path / "step-00000050" / "shards" / "00000-a1.safetensors").unlink()
    write(tmp_path / "final", Sample(STATE, step=60))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text("")
    (tmp_path / "step-00000060").mkdir()
    infos = scan_run(LocalStorage(tmp_path))
    assert [(info.name, info.step, info.status) for info in infos] == [
        ("step-00000003", 3, "committed"),
        ("step-00000020", 20, "committed"),
        ("step-00000030", 30, "writing"),
        ("step-00000040", 40, "repairable"),
        ("step-00000050", 50, "damaged"),
        ("final", 60, "committed"),
    ]
    first, second, leftover, unreadable, incomplete, _ = infos
    assert first.reason is None
    assert first.bytes == sum(array.nbytes for array in STATE.values())
    assert (first.save.tensors, first.save.world_size, first.save.attempt, first.unnamed) == (
        len(STATE),
        1,
        "a1",
        0,
    )
    assert second.unnamed == 2
    assert "no manifest" in str(leftover.reason)
    assert leftover.bytes == leftover.file_bytes > first.bytes
    files = sum(file.stat().st_size for file in (tmp_path / "step-00000040").rglob("*.*"))
    assert unreadable.file_bytes == files, "a damaged manifest does not hide the files"
    assert "shards/00000-a1.safetensors" in str(incomplete.reason)
    assert "cannot be repaired" in str(incomplete.reason)
    assert MANIFEST_NAME in str(unreadable.reason)
    assert json.loads(json.dumps(first.to_json()))["committed"] is True


def test_the_folder_of_a_checkpoint_lists_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, Sample(STATE, step=3))
    assert [(info.name, info.step, info.status) for info in scan_run(LocalStorage(tmp_path))] == [
        (".", 3, "committed")
    ]


def test_a_summary_adds_up(tmp_path: Path) -> None:
    write(tmp_path, SPREAD)
    summary = summary_of(tmp_path)
    total = sum(array.nbytes for array in STATE.values())
    assert summary.bytes == total
    assert summary.tensors == sum(row.count for row in summary.rows) == len(STATE)
    assert sum(row.bytes for row in summary.rows) == sum(part.bytes for part in summary.parts) == total
    assert sum(writer.bytes for writer in summary.writers) == total
    assert [(writer.rank, writer.chunks, writer.tensors) for writer in summary.writers] == [
        (0, len(STATE), len(STATE)),
        (1, len(STATE), len(STATE)),
    ]
    assert "model.layers.{0..2}.wq" in [row.key for row in summary.rows]
    assert [part.part for part in summary.parts] == [
        "model.embed",
        "model.layers",
        "optimizer.embed",
        "optimizer.layers",
    ]
    assert (summary.step, summary.world_size, summary.chunks) == (7, 2, 2 * len(STATE))
    assert summary.aliases == {"model.head.weight": "model.embed.weight"}
    assert set(summary.objects) == {"lr", "data.seed"}
    json.dumps(summary.to_json())


def test_depth_sets_how_fine_the_parts_are(tmp_path: Path) -> None:
    write(tmp_path, SPREAD)
    assert [part.part for part in summary_of(tmp_path, depth=1).parts] == ["model", "optimizer"]
    parts = summary_of(tmp_path, depth=3).parts
    assert [part.part for part in parts][:3] == ["model.embed", "model.layers.0", "model.layers.1"]


def test_a_part_of_the_tree_is_summed_up_alone(tmp_path: Path) -> None:
    write(tmp_path, SPREAD)
    summary = summary_of(tmp_path, "model.layers")
    assert summary.tensors == 6
    assert [part.part for part in summary.parts] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert summary.objects == ()
    assert summary_of(tmp_path, "model.lay").tensors == 0


def test_an_empty_checkpoint_has_a_summary(tmp_path: Path) -> None:
    write(tmp_path, Sample({}))
    summary = summary_of(tmp_path)
    assert (summary.tensors, summary.bytes, summary.rows, len(summary.writers)) == (0, 0, (), 1)


def test_a_key_shows_where_its_bytes_lie(tmp_path: Path) -> None:
    write(tmp_path, SPREAD)
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    found = detail(manifest, read_index(storage, manifest), "model.head.weight")
    assert isinstance(found, TensorDetail)
    assert (found.stored_as, found.tied) == ("model.embed.weight", ("model.embed.weight",))
    array = STATE["model.embed.weight"]
    assert (found.dtype, found.shape, found.bytes) == ("float32", array.shape, array.nbytes)
    for chunk in found.chunks:
        data = np.frombuffer(storage.read(chunk.file, chunk.byte_start, chunk.byte_stop), np.float32)
        rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        assert np.array_equal(data.reshape(chunk.sizes), array[rows])
    assert [chunk.rank for chunk in found.chunks] == [0, 1]


def test_a_key_shows_its_value(tmp_path: Path) -> None:
    write(tmp_path, SPREAD)
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    table = read_index(storage, manifest)
    assert detail(manifest, table, "lr") == ObjectDetail("lr", 0.1)
    assert detail(manifest, table, "model") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ({"$tuple": [1]}, "(1,)"),
        ({"$float": "nan"}, "nan"),
        ({"$int": "18446744073709551616"}, "18446744073709551616"),
        ([{"a": "b"}], "[{'a': 'b'}]"),
        ({"$bytes": "AA=="}, "{'$bytes': 'AA=='}"),
        ({"$tuple": 3}, "{'$tuple': 3}"),
    ],
)
def test_values_are_spelled(value: object, text: str) -> None:
    assert spelled(value) == text


def test_a_step_that_is_being_replaced_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step:08d}", Sample(STATE, step=step))
    write(tmp_path / "step-00000001", Sample(STATE, attempt="going"), commit=False)
    plan = plan_prune(LocalStorage(tmp_path), lambda _: 990.0, older_than=60, now=1000.0, keep=1)
    assert plan.folders["steps"] == ("step-00000002",)


def test_a_plan_keeps_the_newest_and_the_young(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step:08d}", Sample(STATE, step=step))
    write(tmp_path / "step-00000004", Sample(STATE, attempt="dead"), commit=False)
    cut(tmp_path / "step-00000004")
    write(tmp_path / "step-00000005", Sample(STATE, attempt="going"), commit=False)
    write(tmp_path / "step-00000006", Sample(STATE))
    (tmp_path / "step-00000006" / MANIFEST_NAME).write_bytes(b"{")
    write(tmp_path / "step-1", Sample(STATE, step=0))

    def modified(name: str) -> float:
        return 990.0 if "00000005" in name else 0.0

    plan = plan_prune(LocalStorage(tmp_path), modified, older_than=60, now=1000.0, keep=2)
    assert plan.folders["steps"] == ("step-00000001",)
    assert [leftover.attempt for leftover in plan.leftovers] == ["dead"]
    assert [leftover.attempt for leftover in plan.writing] == ["going"]
    assert plan.folders["repairable"] == ("step-00000006",)
    assert plan_prune(LocalStorage(tmp_path), modified, older_than=60, now=1000.0).folders["steps"] == ()
    json.dumps(plan.to_json())

"""Conversions select, rename and cast what is stored; wrong requests change nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import foreign_of
from shardproof.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    PlainDataError,
    StorageError,
    StructureError,
)
from shardproof.formats import WRITERS
from shardproof.formats.conversion import ConversionReport
from shardproof.rendezvous import Decide, LocalRendezvous
from shardproof.report import diff
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import bits

STATE: dict[str, Any] = {
    "model": {
        "weight": torch.arange(35.0).reshape(7, 5),
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "counts": torch.arange(4),
        "empty": torch.zeros(0, 3),
    },
    "step": 7,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sp.save(tmp_path / "source", STATE, step=7)
    return tmp_path / "source"


def tensors_of(path: Path) -> dict[str, Any]:
    with sp.open(path) as checkpoint:
        return {
            key: bits(item.read())
            for key in checkpoint
            if isinstance(item := checkpoint[key], sp.StoredTensor)
        }


@pytest.mark.parametrize("to", sorted(WRITERS))
def test_every_format_keeps_every_bit_there_and_back(source: Path, to: str, tmp_path: Path) -> None:
    exclude = ["model.empty"] if to == "torch_dist" else []  # Megatron-Core holds no empty tensors
    exclude += ["step"] if to in ("hf", "safetensors") else []
    report = sp.convert(source, tmp_path / "there", to=to, exclude=exclude)
    assert report.tensors == 6 - exclude.count("model.empty")
    assert report.verified == report.bytes == sum(t.nbytes for t in STATE["model"].values())
    expected = {key: value for key, value in tensors_of(source).items() if key not in exclude}
    assert tensors_of(tmp_path / "there") == expected
    assert not (tmp_path / "there.converting").exists()
    sp.convert(tmp_path / "there", tmp_path / "back", to="shardproof")
    found = diff(LocalStorage(source), LocalStorage(tmp_path / "back"))
    assert (found.changed, found.values) == ((), ())
    in_common = ["step"] if to == "torch_dist" else []  # the object "common" has them
    assert [*found.only_a] == sorted([*exclude, *in_common])
    assert [*found.only_b] == ["common"] * len(in_common)


@pytest.mark.parametrize("to", sorted(WRITERS))
def test_a_value_that_is_stored_as_a_tensor_is_written_once(to: str, tmp_path: Path) -> None:
    """A long list is a tensor in shardproof's own format, and part of a value in others."""
    steps = list(range(5000))
    sp.save(tmp_path / "source", {"w": torch.ones(2), "seen": {"steps": steps}})
    with sp.open(tmp_path / "source") as source:
        assert len(source.tensors) == 2
    report = sp.convert(source.location, tmp_path / "there", to=to, dtype="float64")
    assert (report.tensors, report.left_out) == (1, ())
    assert report.objects == 1
    with sp.open(tmp_path / "there") as there:
        assert len(there.tensors) == (2 if to == "shardproof" else 1)
        if to != "hf":  # hf stores no values
            values = there["common"] if to == "torch_dist" else there
            assert values["seen.steps"] == steps


class Loader:
    """An object whose state is one plain value, with an array and a tensor in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"order": np.arange(50), "weights": torch.ones(5), "inner": {"seen": [0.5] * 1500}, "n": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


@pytest.mark.parametrize("to", ["shardproof", "dcp", "torch", "zarr", "safetensors"])
def test_values_with_large_parts_are_the_same_state_after_a_conversion(to: str, tmp_path: Path) -> None:
    """Shardproof's format stores the large parts as tensors, the others inside of the values."""
    values = {
        "ids": list(range(2000)),
        "blob": bytes(500),
        "text": "x" * 70_000,
        "names": np.array(["ab"] * 90),
    }
    sp.save(tmp_path / "source", {"w": torch.ones(4), "loader": Loader(), **values})
    there, back = tmp_path / "there", tmp_path / "back"
    sp.convert(tmp_path / "source", there, to=to)
    report = sp.convert(there, back, to="shardproof")
    assert diff(foreign_of(tmp_path / "source"), foreign_of(there)).same
    assert diff(foreign_of(there), foreign_of(back)).same
    with sp.open(back) as checkpoint:
        stored = sum(math.prod(item.shape) * DTYPES[item.dtype].itemsize for item in checkpoint.tensors)
        assert report.verified == report.bytes == stored > 80_000


def test_keys_are_selected_renamed_and_cast(source: Path, tmp_path: Path) -> None:
    report = sp.convert(
        source,
        tmp_path / "there",
        to="shardproof",
        include="model",
        exclude=["*.empty", "*.flags"],
        rename={"model": "", "model.half": "encoder.half"},
        dtype="float16",
    )
    assert report.left_out == ("model.empty", "model.flags", "step")
    with sp.open(tmp_path / "there") as checkpoint:
        assert checkpoint.keys() == ["counts", "encoder.half", "scalar", "weight"]
        assert [checkpoint.dtype(key) for key in checkpoint] == ["int64", "float16", "float16", "float16"]
        assert torch.equal(checkpoint["weight"].read(), STATE["model"]["weight"].half())


def refused(source: Path, there: Path, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        sp.convert(source, there, **{"to": "shardproof", **options})
    assert not there.exists()
    assert not there.with_name(f"{there.name}.converting").exists()


def test_wrong_requests_are_named_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    refused(source, there, StructureError, r"include.*nothing", include="nothing")
    refused(source, there, StructureError, r"no key matches \['nothing'\]", rename={"nothing": "else"})
    refused(source, there, StructureError, "would both be", rename={"model.flags": "model.counts"})
    refused(source, there, StructureError, "empty name", rename={"step": ""})
    refused(source, there, ValueError, "dtype is one of", dtype="int8")
    refused(source, there, ValueError, "written as one of", to="parchment")
    refused(source, there, ValueError, "format is one of", format="parchment")
    refused(source, there, ValueError, "bytes of memory are too few", memory_bytes=1000)


def test_files_at_the_destination_are_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(AlreadyCommittedError, match="was not touched"):
        sp.convert(source, tmp_path / "there", to="shardproof")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    report = sp.convert(source, tmp_path / "there", to="shardproof", dry_run=True)
    assert report.dry_run
    assert report.bytes == sum(t.nbytes for t in STATE["model"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_file_name_gets_one_file(source: Path, tmp_path: Path) -> None:
    sp.convert(source, tmp_path / "model.safetensors", to="safetensors", include="model")
    assert (tmp_path / "model.safetensors").is_file()
    assert tensors_of(tmp_path / "model.safetensors") == tensors_of(source)
    with pytest.raises(StructureError, match="names a file"):
        sp.convert(
            source, tmp_path / "two.safetensors", to="safetensors", include="model", max_file_bytes=100
        )
    assert not (tmp_path / "two.safetensors.converting").exists(), "it is refused before it writes"


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("x.pt", "safetensors"),
        ("x.pth", "shardproof"),
        ("x.bin", "hf"),
        ("x.ckpt", "hf"),
        ("x.safetensors", "torch"),
        ("x.safetensors", "dcp"),
        ("x.safetensors", "zarr"),
    ],
)
def test_a_file_name_of_another_format_is_refused_before_any_work(
    tmp_path: Path, name: str, to: str, dry_run: bool
) -> None:
    """The source does not exist, and is not asked for."""
    with pytest.raises(StructureError, match=f"names a file of the format .* to write is {to}"):
        sp.convert(tmp_path / "missing", tmp_path / name, to=to, dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["o.gguf", "o.GGUF"])
@pytest.mark.parametrize("to", ["safetensors", "shardproof"])
def test_a_file_name_of_a_format_that_is_not_written_makes_no_folder(
    tmp_path: Path, name: str, to: str
) -> None:
    with pytest.raises(StructureError, match=f"{name} names a file of a format that is not written"):
        sp.convert(tmp_path / "missing", tmp_path / name, to=to)
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_lacks_space_leaves_nothing_in_the_way_of_the_next(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(StorageError, match="0 bytes are free"):
            sp.convert(source, tmp_path / "there", to="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    own = tmp_path / "there.converting"
    own.mkdir(0o700)
    (own / "mine.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(StorageError, match="0 bytes are free"):
            sp.convert(source, tmp_path / "there", to="torch")
    assert (own / "mine.txt").read_text() == "mine", "a folder that was there before"
    shutil.rmtree(own)
    sp.convert(source, tmp_path / "there", to="dcp")


def test_the_configuration_and_tokenizer_of_a_model_are_copied(source: Path, tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    with pytest.raises(StructureError, match="like: .* has no config.json"):
        sp.convert(source, tmp_path / "there", to="hf", include="model", like=like)
    copied = ["config.json", "generation_config.json", "merges.txt", "spiece.model", "tokenizer_config.json"]
    for name in (*copied, "model.safetensors", "pytorch_model.bin", "modeling_x.py", "README.md"):
        (like / name).write_text(name)
    report = sp.convert(source, tmp_path / "there", to="hf", include="model", like=like)
    there = {path.name for path in (tmp_path / "there").iterdir()}
    assert there == {*copied, "model.safetensors"}
    assert all((tmp_path / "there" / name).read_text() == name for name in copied)
    assert not any("--like" in note for note in report.notes)
    assert tensors_of(tmp_path / "there") == tensors_of(source)
    without = sp.convert(source, tmp_path / "bare", to="hf", include="model")
    assert any("config.json" in note and "--like FOLDER" in note for note in without.notes)
    with pytest.raises(ValueError, match="like .* goes with the format hf, not with torch"):
        sp.convert(source, tmp_path / "other", to="torch", like=like)
    for dry_run in (False, True):
        with pytest.raises(StructureError, match="names a file, and like .* needs a folder"):
            sp.convert(
                source, tmp_path / "x.safetensors", to="hf", include="model", like=like, dry_run=dry_run
            )
        with pytest.raises(StructureError, match="has no config.json"):
            sp.convert(source, tmp_path / "y", to="hf", include="model", like=tmp_path, dry_run=dry_run)
    assert not (tmp_path / "x.safetensors.converting").exists()


@pytest.mark.parametrize(("name", "to"), [("x.pt", "torch"), ("x.ckpt", "torch"), ("x.safetensors", "hf")])
def test_a_file_name_of_the_format_is_converted(source: Path, tmp_path: Path, name: str, to: str) -> None:
    sp.convert(source, tmp_path / name, to=to, include="model")
    assert tensors_of(tmp_path / name) == tensors_of(source)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_request_that_writes_nothing_is_refused(source: Path, tmp_path: Path, dry_run: bool) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="max_file_bytes .* is at least 1"):
            sp.convert(source, tmp_path / "there", to="hf", max_file_bytes=size, dry_run=dry_run)
    for patterns in (
        {"exclude": "*"},
        {"exclude": ["model", "step"]},
        {"include": "model", "exclude": "mo*"},
    ):
        with pytest.raises(StructureError, match="include and exclude leave no key of .*source"):
            sp.convert(source, tmp_path / "there", to="shardproof", dry_run=dry_run, **patterns)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_values_that_are_no_plain_data_are_all_named(tmp_path: Path) -> None:
    class Strange:
        pass

    class Stranger:
        pass

    for cls in (Strange, Stranger):
        cls.__qualname__ = cls.__name__
        cls.__module__ = "tests.unit.formats.conversion.test_convert"
        globals()[cls.__name__] = cls
    torch.save({"a": Strange(), "b": Stranger(), "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(PlainDataError, match=r"(?s)2 values.*Strange.*Stranger") as caught:
        sp.convert(tmp_path / "a.pt", tmp_path / "there", to="shardproof")
    assert caught.value.details["keys"] == ["a", "b"]
    sp.convert(tmp_path / "a.pt", tmp_path / "there", to="shardproof", exclude=["a", "b"])
    assert list(tensors_of(tmp_path / "there")) == ["w"]


def test_a_damaged_source_is_not_published(source: Path, tmp_path: Path) -> None:
    (shard,) = (source / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[data.index(STATE["model"]["weight"].numpy().tobytes()) + 3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptChunkError, match=r"model\.weight"):
        sp.convert(source, tmp_path / "there", to="safetensors", include="model")
    assert not (tmp_path / "there").exists()


class Between(LocalRendezvous):
    """Calls a function after the meeting of a phase."""

    def __init__(self, phase: str, then: Callable[[], None]) -> None:
        super().__init__()
        self.phase, self.then = phase, then

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        answer = super().meet(operation, phase, post, decide)
        if phase == self.phase:
            self.then()
        return answer


def test_a_file_that_was_damaged_after_the_write_is_not_published(source: Path, tmp_path: Path) -> None:
    def damage() -> None:
        file = tmp_path / "there.converting" / "files" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[data.index(STATE["model"]["weight"].numpy().tobytes()) + 3] ^= 1
        file.write_bytes(data)

    with pytest.raises(CorruptChunkError, match=r"model\.weight.*not stored as it was written"):
        sp.convert(
            source,
            tmp_path / "there",
            to="safetensors",
            include="model",
            rendezvous=Between("write", damage),
        )
    assert not (tmp_path / "there").exists()


def test_a_part_of_a_value_that_was_damaged_after_the_write_is_not_published(tmp_path: Path) -> None:
    ids = list(range(2000))
    sp.save(tmp_path / "source", {"ids": ids})

    def damage() -> None:
        (file,) = (tmp_path / "there.converting" / "files" / "shards").iterdir()
        data = bytearray(file.read_bytes())
        data[data.index(np.array(ids).tobytes()) + 3] ^= 1
        file.write_bytes(data)

    with pytest.raises(CorruptChunkError, match="ids"):
        sp.convert(
            tmp_path / "source", tmp_path / "there", to="shardproof", rendezvous=Between("write", damage)
        )
    assert not (tmp_path / "there").exists()


def test_files_that_appear_at_the_destination_meanwhile_are_not_touched(source: Path, tmp_path: Path) -> None:
    def appear() -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "mine").write_text("mine")

    with pytest.raises(AlreadyCommittedError, match="was not touched"):
        sp.convert(source, tmp_path / "there", to="shardproof", rendezvous=Between("write", appear))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]


def test_a_full_disk_is_an_error_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="10 bytes are free"):
        sp.convert(source, tmp_path / "there", to="shardproof")


def test_a_small_conversion_needs_little_space_and_an_error_names_all_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sp.convert(source, tmp_path / "there", to="shardproof", dry_run=True).bytes
    free = 2 * size - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    needs = f"{free:,} bytes are free, .* needs {2 * size:,}: {size:,} for tensors and {size:,} for metadata"
    with pytest.raises(StorageError, match=needs):
        sp.convert(source, tmp_path / "there", to="shardproof")
    free += 1
    assert sp.convert(source, tmp_path / "there", to="shardproof").verified == size


def test_a_second_conversion_to_one_destination_is_refused(source: Path, tmp_path: Path) -> None:
    from shardproof.formats.conversion.work_folder import WorkFolder

    other = WorkFolder(str(tmp_path / "there"))
    other.begin("another plan", 0)
    with pytest.raises(StructureError, match="another process converts"):
        sp.convert(source, tmp_path / "there", to="shardproof")
    other.close()
    with pytest.raises(StructureError, match="interrupted conversion with another source or other options"):
        sp.convert(source, tmp_path / "there", to="shardproof")


def test_a_work_folder_that_a_node_does_not_see_is_an_error_before_the_first_unit(
    source: Path, tmp_path: Path
) -> None:
    class Apart(LocalRendezvous):
        """Acts as if another rank had taken the work folder on another node."""

        def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
            answer = super().meet(operation, phase, post, decide)
            (tmp_path / "there.converting" / "plan").unlink()
            return answer

    with pytest.raises(StructureError, match="all nodes have to share it"):
        sp.convert(source, tmp_path / "there", to="shardproof", rendezvous=Apart())
    assert not (tmp_path / "there.converting" / "files").exists()


def test_a_draft_of_a_killed_process_is_not_published(source: Path, tmp_path: Path) -> None:
    draft = tmp_path / "there.converting" / "files" / ".metadata.0123456789abcdef.tmp"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"half")
    sp.convert(source, tmp_path / "there", to="dcp")
    assert (tmp_path / "there" / ".metadata").exists() and not (tmp_path / "there" / draft.name).exists()


def test_progress_counts_each_byte_written_and_verified(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report: ConversionReport = sp.convert(
        source,
        tmp_path / "there",
        to="shardproof",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (2 * report.bytes, 2 * report.bytes)
    assert seen == sorted(seen)


def test_the_command_prints_the_report(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardproof.commands.cli.group import run

    renames = tmp_path / "renames.toml"
    renames.write_text('"model" = "net"\n')
    arguments = [
        "convert",
        str(source),
        str(tmp_path / "there"),
        "--to",
        "shardproof",
        "--rename",
        str(renames),
    ]
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 6
    assert "net.weight" in tensors_of(tmp_path / "there")
    assert run([*arguments, "--json"]) == 1
    assert "was not touched" in capsys.readouterr().err
    assert run(["convert", str(source), str(tmp_path / "more")]) == 2


@pytest.mark.parametrize("to", sorted(WRITERS))
def test_steps_and_metadata_that_a_format_cannot_store_are_noted(to: str, tmp_path: Path) -> None:
    sp.save(tmp_path / "source", {"w": torch.ones(2)}, step=7, metadata={"run": {"seed": 3}})
    notes = sp.convert(tmp_path / "source", tmp_path / "there", to=to).notes
    with sp.open(tmp_path / "there") as checkpoint:
        assert (checkpoint.step == 7) != any("the step (7)" in note for note in notes)
        assert ("run" in checkpoint.metadata) != any("the metadata (run)" in note for note in notes)

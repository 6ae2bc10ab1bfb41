"""Orbax checkpoints: read to their bits from folders and from OCDBT databases; lost chunks are errors."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore
import torch

import shardproof as sp
from shardproof.engine.foreign import foreign_of
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.formats.zarr.zarr_codecs import import_extra
from shardproof.runs.maintenance import VerifyReport, verify_any, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden

GOLDENS = ["orbax_plain", "orbax_zarr3_plain", "orbax_ocdbt"]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    check_golden(Golden(name, tmp_path), "orbax")


def opened(folder: Path) -> ForeignCheckpoint:
    checkpoint = sp.open(folder, format="orbax")
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def verified(folder: Path) -> VerifyReport:
    with opened(folder) as checkpoint:
        return verify_foreign(checkpoint)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_target_is_filled(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    state: dict[str, Any] = {
        key: torch.zeros(shape, dtype=getattr(torch, dtype)) for key, (dtype, shape) in golden.kinds.items()
    }
    state |= {"step": 0, "lr": 0.0}
    sp.load(golden.checkpoint, state)
    for key in golden.kinds:
        assert bits(state[key]) == bits(golden.tensor(key)), key
    assert (state["step"], state["lr"]) == (7, 0.125)


@pytest.mark.parametrize("name", ["orbax_plain/1.0", "orbax_zarr3_plain/c/1/0"])
def test_a_lost_chunk_is_an_error_and_not_zeros(name: str, tmp_path: Path) -> None:
    golden, _, chunk = name.partition("/")
    folder = Golden(golden, tmp_path).checkpoint
    (folder / "params.emb" / chunk).unlink()
    message = rf"params\.emb/{chunk} is missing: it holds the part of params\.emb that begins at \(5, 0\)"
    with pytest.raises(StorageError, match=message):
        opened(folder)["params.emb"].read()
    (fault,) = verified(folder).faults
    assert f"params.emb/{chunk} is missing" in fault.message


def database(folder: Path) -> Any:
    base = {"driver": "file", "path": f"{folder}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


def test_a_lost_entry_of_a_database_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    golden = Golden("orbax_ocdbt", tmp_path)
    store = database(golden.checkpoint)
    store.delete_range(tensorstore.KvStore.KeyRange("params.emb/1.0", "params.emb/1.0\0")).result()
    message = r"has no entry params\.emb/1\.0: it holds the part of params\.emb that begins at \(5, 0\)"
    with opened(golden.checkpoint) as checkpoint:
        with pytest.raises(StorageError, match=message):
            checkpoint["params.emb"].read()
        assert bits(checkpoint["params.emb"][:5]) == bits(golden.tensor("params.emb")[:5])
        assert bits(checkpoint["half"].read()) == bits(golden.tensor("half"))
    (fault,) = verified(golden.checkpoint).faults
    assert "no entry params.emb/1.0" in fault.message
    store.delete_range(tensorstore.KvStore.KeyRange("half/", "half0")).result()
    with pytest.raises(StorageError, match="the array of half is missing"):
        opened(golden.checkpoint)


def test_every_missing_cut_or_changed_file_of_a_database_is_found_or_harmless(tmp_path: Path) -> None:
    golden = Golden("orbax_ocdbt", tmp_path)
    folder = golden.checkpoint
    chosen = random.Random(0)
    found = 0
    files = [path for path in folder.rglob("*") if path.parent.name == "d" or path.suffix == ".ocdbt"]
    for file in sorted(files):
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
        for damaged in (None, b"", whole[: len(whole) // 2], whole[:-1], bytes(changed)):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            report = verify_any(foreign_of(folder), format="orbax")
            if report.ok:
                with opened(folder) as checkpoint:
                    assert all(
                        bits(checkpoint[key].read()) == bits(golden.tensor(key)) for key in golden.kinds
                    )
            else:
                found += 1
                assert "ocdbt" in report.faults[0].message or "/d/" in report.faults[0].message
            file.write_bytes(whole)
    assert found >= 10


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}])
def test_a_lost_data_file_of_a_database_is_an_error(compressor: Any, tmp_path: Path) -> None:
    path = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": path}, "use_ocdbt": True}))
    base = {"driver": "file", "path": f"{tmp_path}/"}
    metadata = {
        "shape": [4000],
        "chunks": [2000],
        "dtype": "<f4",
        "fill_value": None,
        "compressor": compressor,
    }
    store = {"driver": "ocdbt", "base": base, "path": "w/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result()
    expected = torch.rand(4000)
    array[...] = expected.numpy()
    assert bits(opened(tmp_path)["w"].read()) == bits(expected)
    largest = max((tmp_path / "d").iterdir(), key=lambda file: file.stat().st_size)
    assert largest.stat().st_size > 5_000, "the chunks lie in files of their own"
    largest.unlink()
    with pytest.raises(ShardproofError, match=largest.name):  # it may hold nodes of the tree, too
        opened(tmp_path)["w"].read()
    assert not verify_any(foreign_of(tmp_path), format="orbax").ok
    (tmp_path / "manifest.ocdbt").unlink()
    with pytest.raises(StorageError, match="manifest.ocdbt is missing"):
        opened(tmp_path)


def test_an_absent_entry_is_the_fill_value_where_the_writer_skips_such_chunks(tmp_path: Path) -> None:
    tree = {"tree_metadata": {"('w',)": leaf("jax.Array", "w")}, "use_ocdbt": True, "use_zarr3": True}
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    base = {"driver": "file", "path": f"{tmp_path}/"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    metadata = {"shape": [5], "data_type": "float32", "fill_value": 3.0, "chunk_grid": grid}
    store = {"driver": "ocdbt", "base": base, "path": "w/"}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
    array = tensorstore.open(spec, create=True).result()
    array[...] = [3.0, 3.0, 1.0, 2.0, 3.0]
    with opened(tmp_path) as checkpoint:
        assert checkpoint["w"].read().tolist() == [3.0, 3.0, 1.0, 2.0, 3.0]
        assert "2 absent chunks, such as w/c/0, read as the fill value" in checkpoint.reader.notes[0]
        assert {type(box.located().extent).__name__ for box in checkpoint.boxes} == {
            "FillExtent",
            "FileRange",
        }


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(FormatError, match=r"pip install 'shardproof\[orbax\]'"):
        import_extra("no_such_package", "orbax", "manifest.ocdbt")


def test_a_step_with_one_tree_is_opened(tmp_path: Path) -> None:
    golden = Golden("orbax_plain", tmp_path)
    step = tmp_path / "1200"
    shutil.copytree(golden.checkpoint, step / "default")
    shutil.copy(golden.checkpoint / "_CHECKPOINT_METADATA", step)
    with sp.open(step) as checkpoint:
        assert checkpoint.step == 1200
        assert bits(checkpoint["half"].read()) == bits(golden.tensor("half"))
    shutil.copytree(golden.checkpoint, step / "other")
    with pytest.raises(FormatError, match="items default, other"):
        sp.open(step)


def test_saves_that_did_not_finish_are_no_checkpoints(tmp_path: Path) -> None:
    folder = Golden("orbax_plain", tmp_path).checkpoint
    unfinished = folder.rename(tmp_path / "7.orbax-checkpoint-tmp-1")
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(unfinished)
    done = unfinished.rename(tmp_path / "7")
    assert opened(done).step == 7
    (done / "_METADATA").unlink()
    with pytest.raises(NotCommittedError, match="has no _METADATA"):
        opened(done)


def leaf(kind: str, *keys: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": kind not in ("string", "scalar")},
    }


def test_strings_none_and_empty_containers_are_objects(tmp_path: Path) -> None:
    tree = {
        "1": leaf("None", "none"),
        "2": leaf("Dict", "opt", "empty"),
        "3": leaf("List", "list"),
        "4": leaf("Tuple", "tuple"),
        "5": leaf("string", "opt", "name"),
    }
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": tree}))
    (tmp_path / "_strings.json").write_text(json.dumps({"opt.name": "adam"}))
    with sp.open(tmp_path) as checkpoint:
        found = {key: checkpoint[key] for key in checkpoint}
    assert found == {"none": None, "opt.empty": {}, "list": [], "tuple": (), "opt.name": "adam"}
    (tmp_path / "_strings.json").write_text("{}")
    with pytest.raises(FormatError, match=r"the string of opt\.name is missing"):
        opened(tmp_path)["opt.name"]
    assert not verified(tmp_path).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.clear(), "structure"),
        (lambda tree: tree.update(tree_metadata=[]), "structure"),
        (lambda tree: tree["tree_metadata"].update(x={}), "structure"),
        (
            lambda tree: tree["tree_metadata"].update(x=leaf("jax.Array", "half")),
            "two leaves have the key half",
        ),
        (lambda tree: tree["tree_metadata"].update(x=leaf("jax.Array", "..", "etc")), "is missing"),
        (lambda tree: tree["tree_metadata"].update(x=leaf("Custom", "thing")), "as Custom"),
        (lambda tree: tree.update(use_ocdbt=True), "manifest.ocdbt is missing"),
    ],
)
def test_damaged_metadata_is_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    folder = Golden("orbax_plain", tmp_path).checkpoint
    metadata = json.loads((folder / "_METADATA").read_text())
    change(metadata)
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(ShardproofError, match=message):
        opened(folder)
    (folder / "_METADATA").write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        opened(folder)

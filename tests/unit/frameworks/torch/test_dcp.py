"""The adapter for torch DCP in one process: its parameters, its keys, and what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
import os
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.errors import AlreadyCommittedError, KeyMismatchError, PlainDataError, StructureError
from shardproof.frameworks import dcp
from shardproof.frameworks.torch.flat_state import FlatTree
from shardproof.maintenance import repair, verify
from shardproof.storage import LocalStorage
from tests.newer_torch import OLDER
from tests.unit.formats.peers import Golden

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_parameters_are_those_of_torch(name: str) -> None:
    ours, torchs = (
        {key: (entry.kind, entry.default) for key, entry in inspect.signature(call).parameters.items()}
        for call in (getattr(dcp, name), getattr(torch_dcp, name))
    )
    # An older torch has fewer parameters.
    assert {key: ours.get(key) for key in (torchs if OLDER else ours)} == torchs


def test_other_names_are_those_of_torch() -> None:
    assert dcp.FileSystemReader is torch_dcp.FileSystemReader
    with pytest.raises(AttributeError, match="nothing"):
        _ = dcp.nothing
    with pytest.raises(AttributeError, match=r"use dcp\.save"):
        _ = dcp.save_state_dict
    assert torch_dcp.HuggingFaceStorageWriter is dcp.HuggingFaceStorageWriter


VALUES = st.sampled_from([torch.ones(2), 1, None, "text", (torch.ones(1), 2), np.ones(3), b"bytes"])
NAMES = st.sampled_from(["a", "b", "c.d", 0, 1])
TREES = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), TREES, max_size=3))
def test_keys_are_those_of_dcp(state: dict[str, Any]) -> None:
    try:
        expected = list(flatten_state_dict(state)[0])
    except ValueError:  # two values have one key
        with pytest.raises(StructureError, match="two values"):
            FlatTree(state)
        return
    assert list(FlatTree(state).tree) == expected


def state_of(fill: float, **others: Any) -> dict[str, Any]:
    return {
        "model": OrderedDict(weight=torch.full((3, 2), fill)),
        "optim": {
            "state": {0: {"exp_avg": torch.full((2,), fill), "step": torch.tensor(fill)}},
            "param_groups": [{"lr": fill, "betas": (fill, 0.5)}, {"lr": -fill, "params": [0, int(fill)]}],
        },
        "pair": (torch.full((2,), fill), fill),
        "array": np.full(30, fill),
        "place": {1: str(fill), "file": None},
        **others,
    }


def assert_filled(state: dict[str, Any], fill: float) -> None:
    assert torch.equal(state["model"]["weight"], torch.full((3, 2), fill))
    slots = state["optim"]["state"][0]
    assert torch.equal(slots["exp_avg"], torch.full((2,), fill)) and slots["step"] == fill
    assert state["optim"]["param_groups"] == state_of(fill)["optim"]["param_groups"]
    assert torch.equal(state["pair"][0], torch.full((2,), fill)) and state["pair"][1] == fill
    assert state["array"].tolist() == [fill] * 30
    assert state["place"] == {1: str(fill), "file": None}


def converted(path: Path) -> str:
    sp.convert(path, f"{path}-dcp", to="dcp")
    return f"{path}-dcp"


def test_state_goes_from_each_writer_to_each_reader(tmp_path: Path) -> None:
    """The adapter, the storage classes under torch's functions, torch itself, and a conversion to DCP."""
    ours, torchs, written = (tmp_path / name for name in ("ours", "torchs", "written"))
    dcp.save(state_of(3.0), checkpoint_id=ours)
    torch_dcp.save(state_of(3.0), checkpoint_id=torchs)
    torch_dcp.save(state_of(3.0), storage_writer=dcp.ShardproofWriter(written))
    expected = torch_dcp.FileSystemReader(torchs).read_metadata().state_dict_metadata
    for path in (ours, torchs, written):
        state = state_of(0.0)
        weight, model = state["model"]["weight"], state["model"]
        dcp.load(state, checkpoint_id=path)
        assert state["model"] is model and model["weight"] is weight
        assert_filled(state, 3.0)
        metadata = dcp.ShardproofReader(path).read_metadata()
        assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id == path
        described = metadata.state_dict_metadata
        assert {key: type(value) for key, value in described.items()} == {
            key: type(value) for key, value in expected.items()
        }
        for reader in (dcp.ShardproofReader(path), torch_dcp.FileSystemReader(converted(path))):
            state = state_of(0.0)
            torch_dcp.load(state, storage_reader=reader)
            # torch puts a plain value under an integer key beside it, as text
            assert state["place"].pop("1") == "3.0" and state["place"].pop(1) == "0.0"
            state["place"] = {1: "3.0", **state["place"]}
            assert_filled(state, 3.0)
    assert isinstance(described["pair"], BytesStorageMetadata)


def test_the_error_of_torch_names_shardproof_and_two_functions_that_load(tmp_path: Path) -> None:
    dcp.save({"step": 1}, checkpoint_id=tmp_path)
    prefix = "" if OLDER else "global metadata read failed: "
    with pytest.raises(BaseException, match=f"{prefix}'This is a checkpoint of shardproof, which"):
        torch_dcp.load({"step": 0}, checkpoint_id=tmp_path)
    with pytest.raises(
        KeyError, match=r"shardproof\.frameworks\.dcp\.load, or pass storage_reader=shardproof\."
    ):
        torch_dcp.FileSystemReader(tmp_path).read_metadata()
    state = {"step": 0}
    torch_dcp.load(state, checkpoint_id=tmp_path, storage_reader=dcp.ShardproofReader(tmp_path))
    assert state == {"step": 1}


def weights_only() -> dict[str, Any]:
    """A state without an optimizer, whose keys do not determine its paths."""
    return {
        "model": {"layer.weight": torch.ones(2), "layer.0": {"bias": torch.ones(1)}},
        "dcp": {"history": [{"loss": 0.5}, torch.ones(1)]},
        "step": 3,
    }


PATHS = {
    "model.layer.weight": ("model", "layer.weight"),
    "model.layer.0.bias": ("model", "layer.0", "bias"),
    "dcp.history.0.loss": ("dcp", "history", 0, "loss"),
    "dcp.history.1": ("dcp", "history", 1),
    "step": ("step",),
}


def test_the_nesting_survives_without_an_optimizer(tmp_path: Path) -> None:
    ours, torchs, written = (tmp_path / name for name in ("ours", "torchs", "written"))
    dcp.save(weights_only(), checkpoint_id=ours)
    torch_dcp.save(weights_only(), checkpoint_id=torchs)
    torch_dcp.save(weights_only(), storage_writer=dcp.ShardproofWriter(written))
    for path in (ours, torchs, written):
        back = to_dcp_and_back(path)
        for reader in (
            dcp.ShardproofReader(path),
            torch_dcp.FileSystemReader(f"{path}-dcp"),
            back,
        ):
            metadata = reader.read_metadata()
            assert metadata.planner_data == PATHS and metadata.state_dict_metadata.keys() == PATHS.keys()
        dcp_to_torch_save(f"{path}-dcp", f"{path}.pt")
        found = torch.load(f"{path}.pt", weights_only=True)  # noqa: TID251
        assert found["model"]["layer.weight"].all() and found["dcp"]["history"][0] == {"loss": 0.5}
        sp.convert(path, f"{path}-part", to="dcp", include="model", rename={"model": "net"})
        part = torch_dcp.FileSystemReader(f"{path}-part").read_metadata()
        assert part.planner_data == {
            "net.layer.weight": ("net", "layer.weight"),
            "net.layer.0.bias": ("net", "layer.0", "bias"),
        }


def test_recorded_paths_are_no_part_of_the_state(tmp_path: Path) -> None:
    dcp.save(weights_only(), checkpoint_id=tmp_path)
    state = weights_only()
    state["model"]["layer.weight"].zero_()
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["model"]["layer.weight"].all()
    whole = {key: torch.zeros(2 if "weight" in key else 1) for key in sp.open(tmp_path) if "model" in key}
    sp.load(
        tmp_path, {**whole, "dcp.history.0.loss": 0.0, "dcp.history.1": torch.ones(1), "step": 0}
    )  # strict
    assert all(value.all() for value in whole.values())
    dcp.save({"model": {"w": torch.ones(1)}, "step": 3}, checkpoint_id=tmp_path)
    assert len([key for key in sp.open(tmp_path) if key.startswith("dcp.@part.state_paths-")]) == 1
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path)
    assert list(sp.open(tmp_path)) == ["w"]


class Keeping:
    """An object of the state dict that keeps a stream, at the position after its first byte."""

    def __init__(self, content: bytes) -> None:
        self.stream = io.BytesIO(content)
        self.stream.seek(1)

    def state_dict(self) -> dict[str, Any]:
        pair = (io.BytesIO(b""), [self.stream])
        return {"stream": self.stream, "pair": pair, "bytes": self.stream.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (empty, (again,)) = state["pair"]
        assert empty.getvalue() == b"" and type(again) is type(state["stream"]) is io.BytesIO
        assert type(state["bytes"]) is bytes and state["bytes"] == again.getvalue()
        assert state["stream"].tell() == 1 and state["stream"].seek(0) == 0
        self.stream = state["stream"]


def to_dcp_and_back(path: Path) -> dcp.ShardproofReader:
    sp.convert(path, f"{path}-dcp", to="dcp")
    sp.convert(f"{path}-dcp", f"{path}-again", to="shardproof")
    return dcp.ShardproofReader(f"{path}-again")


@pytest.mark.parametrize("size", [5, 3000])
def test_streams_are_loaded_as_streams_from_each_writer(size: int, tmp_path: Path) -> None:
    content = bytes(range(7)) * size
    ours, torchs, written = (tmp_path / name for name in ("ours", "torchs", "written"))
    dcp.save({"data": Keeping(content)}, checkpoint_id=ours)
    torch_dcp.save({"data": Keeping(content)}, checkpoint_id=torchs)
    torch_dcp.save({"data": Keeping(content)}, storage_writer=dcp.ShardproofWriter(written))
    for path in (ours, torchs, written):
        for load, reader in (
            (dcp.load, dcp.ShardproofReader(path)),
            (torch_dcp.load, dcp.ShardproofReader(path)),
            (dcp.load, to_dcp_and_back(path)),
            (torch_dcp.load, torch_dcp.FileSystemReader(f"{path}-dcp")),
        ):
            state = {"data": Keeping(b"..")}
            load(state, storage_reader=reader)
            assert state["data"].stream.getvalue() == content
        assert sp.open(path)["data.stream"] == content


class Counter:
    """An object of the kind that DCP calls `Stateful`."""

    def __init__(self) -> None:
        self.count, self.window = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "window": self.window.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.window = state["count"], state["window"]


def test_objects_at_the_top_are_saved_and_loaded_by_their_state_dict(tmp_path: Path) -> None:
    counter, model = Counter(), torch.nn.Linear(2, 2)
    counter.count, counter.window = 5, torch.ones(2)
    dcp.save({"counter": counter, "model": model}, checkpoint_id=tmp_path)
    keys = [key for key in sp.open(tmp_path) if "@part" not in key]
    assert keys == ["counter.count", "counter.window", "model.bias", "model.weight"]
    fresh, other = Counter(), torch.nn.Linear(2, 2)
    state = {"counter": fresh, "model": other}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"counter": fresh, "model": other}
    assert fresh.count == 5 and torch.equal(fresh.window, torch.ones(2))
    assert torch.equal(other.weight, model.weight)


def test_keys_that_the_checkpoint_lacks_are_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 1}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "c": {"d": 0}}
    with pytest.raises(KeyMismatchError, match=r"missing.*\n *c\.d") as caught:
        dcp.load(state, checkpoint_id=tmp_path)
    assert caught.value.details["missing"] == ["c.d"] and not state["a"].any()
    dcp.load(state, checkpoint_id=tmp_path, planner=torch_dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert state["a"].all() and state["c"] == {"d": 0}
    with pytest.raises(KeyMismatchError, match=r"\[3\]"):
        dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_dicts_that_are_stored_whole_are_loaded(tmp_path: Path) -> None:
    """As `shardproof.save` stores a list of plain dicts, and DCP before torch 2.4 each plain dict."""
    sp.save(tmp_path, {"groups": [{"lr": 0.5}, {"lr": 0.25}], "w": torch.ones(1)})
    state = {"groups": [{"lr": 0.0}, {"lr": 0.0}], "w": torch.zeros(1)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"groups": [{"lr": 0.5}, {"lr": 0.25}], "w": torch.ones(1)}


def blank(value: Any) -> Any:
    """The same dicts with None for each value, as a run has them at its start."""
    return {key: blank(item) for key, item in value.items()} if isinstance(value, dict) else None


def test_dicts_of_torch_2_2_are_loaded(tmp_path: Path) -> None:
    """torch 2.2 stored a dict of plain values under one key. The state dict of today has a key for each."""
    golden = Golden("dcp22_objects_w2", tmp_path)
    with sp.open(golden.checkpoint) as checkpoint:
        stored = {key: checkpoint[key] for key in ("dataloader", "nested")}
    state = blank(stored)
    assert len(FlatTree(state).tree) > len(stored)
    dcp.load(state, checkpoint_id=golden.checkpoint)
    assert state == stored


def test_tensors_on_the_meta_device_get_memory(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(2, 3).state_dict(), "list": [torch.ones(2)]}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)
        state = {"model": model.state_dict(), "list": [torch.ones(2)], "absent": torch.ones(1)}
    with pytest.raises(KeyMismatchError, match="absent"):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["model"]["weight"].is_meta  # nothing was changed
    dcp.load(state, checkpoint_id=tmp_path, planner=torch_dcp.DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(state["model"], assign=True)
    with sp.open(tmp_path) as checkpoint:
        assert torch.equal(model.weight, checkpoint["model.weight"].read())
        assert torch.equal(model.bias, checkpoint["model.bias"].read())
    assert state["list"][0].tolist() == [1, 1] and state["absent"].is_meta


def test_dtypes_are_converted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save({"w": torch.full((2,), 1.5), "n": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(2)}
    with caplog.at_level(logging.WARNING, "shardproof"):
        dcp.load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [1.5, 1.5] and state["w"].dtype is torch.bfloat16
    assert "1 tensors are converted to another dtype, as DCP does: w" in caplog.text


def test_an_optimizer_without_state_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer, "values": [torch.ones(1)]}, checkpoint_id=tmp_path)
    with caplog.at_level(logging.WARNING, "shardproof"):
        dcp.load({"optim": optimizer}, checkpoint_id=tmp_path)
        assert not caplog.text
        dcp.load({"optim": torch.optim.AdamW(model.parameters())}, checkpoint_id=tmp_path)
    assert "6 values of objects in the state dict are left out" in caplog.text
    assert "get_state_dict" in caplog.text


class Renaming(torch_dcp.DefaultSavePlanner):
    """A planner of a user, which renames all keys."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"renamed_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Careful(dcp.ShardproofWriter):
    """A writer of a user, whose methods only torch's functions call."""


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save, torch_dcp.save])
def test_a_writer_without_overwrite_keeps_the_checkpoint(save: Any, tmp_path: Path) -> None:
    writer = dcp.ShardproofWriter(tmp_path, overwrite=False)
    save({"w": torch.ones(2)}, storage_writer=writer)
    dcp.save({}, checkpoint_id=tmp_path / "other")  # waits for the first save
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(BaseException, match="has a committed checkpoint") as caught:
        save({"w": torch.zeros(2)}, storage_writer=writer)
    assert isinstance(caught.value, AlreadyCommittedError) or "AlreadyCommittedError" in str(caught.value)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    save({"w": torch.zeros(2)}, storage_writer=dcp.ShardproofWriter(tmp_path, overwrite=True))
    dcp.save({}, checkpoint_id=tmp_path / "other")
    assert not sp.open(tmp_path)["w"].read().any()


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save, torch_dcp.save])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_a_run_takes_no_checkpoint(save: Any, overwrite: bool, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(7, {"w": torch.ones(2)}).result()
    writer = dcp.ShardproofWriter(tmp_path, overwrite=overwrite)
    with pytest.raises(BaseException, match="is the folder of a run, with step-00000007"):
        getattr(save({"w": torch.zeros(2)}, storage_writer=writer), "result", list)()
    assert os.listdir(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save, torch_dcp.save])
def test_a_writer_without_overwrite_keeps_a_checkpoint_of_torch(save: Any, tmp_path: Path) -> None:
    torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(BaseException, match=r"has a checkpoint of torch\.distributed\.checkpoint"):
        save({"w": torch.zeros(2)}, storage_writer=dcp.ShardproofWriter(tmp_path, overwrite=False))
    state = {"w": torch.zeros(2)}
    torch_dcp.load(state, checkpoint_id=tmp_path)
    assert state["w"].all()


def test_a_storage_is_the_second_argument_or_gets_the_path(tmp_path: Path) -> None:
    writer, reader = dcp.ShardproofWriter(tmp_path / "a"), dcp.ShardproofReader(tmp_path / "a")
    dcp.save({"n": 1}, writer)
    dcp.save({"n": 2}, checkpoint_id=tmp_path / "b", storage_writer=writer)
    assert writer.path == tmp_path / "b"
    for options, expected in (({}, 1), ({"checkpoint_id": tmp_path / "b"}, 2)):
        state = {"n": 0}
        dcp.load(state, reader, **options)
        assert state == {"n": expected}
    with pytest.raises(TypeError, match="positional"):
        dcp.load(state, reader, storage_reader=reader)


def test_hints_without_an_effect_give_warnings(tmp_path: Path) -> None:
    planner = torch_dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with pytest.warns(
        UserWarning, match="dedup_save_to_lowest_rank=True of DefaultSavePlanner has no effect"
    ):
        dcp.save({"n": 1}, checkpoint_id=tmp_path, planner=planner)
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS
    with pytest.warns(UserWarning, match="async_checkpointer_type=PROCESS has no effect"):
        dcp.async_save({"n": 1}, checkpoint_id=tmp_path, async_checkpointer_type=kind).result()


def test_errors_of_refused_calls_say_what_to_do(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    layer = torch.nn.Linear(1, 1)
    for arguments, words in (
        ({}, "give checkpoint_id"),
        ({"checkpoint_id": "s3://bucket/step"}, "a path of a file system"),
        (
            {"storage_writer": torch_dcp.FileSystemWriter(tmp_path, overwrite=False)},
            r"neither FileSystemWriter nor its options: give ShardproofWriter\(path, overwrite=False\)",
        ),
        ({"storage_writer": Careful(tmp_path)}, "neither Careful nor its options"),
        ({"checkpoint_id": tmp_path, "planner": Renaming()}, "storage_writer=ShardproofWriter"),
        (
            {"checkpoint_id": tmp_path, "planner": torch_dcp.DefaultSavePlanner(flatten_state_dict=False)},
            "flatten_state_dict=False",
        ),
        (
            {
                "checkpoint_id": tmp_path,
                "planner": torch_dcp.DefaultSavePlanner(flatten_sharded_tensors=False),
            },
            "flatten_sharded_tensors=False",
        ),
    ):
        for save in (dcp.save, dcp.async_save):
            with pytest.raises(StructureError, match=words):
                save(state, **arguments)
    with pytest.raises(StructureError, match="cannot use Counter: leave async_stager out"):
        dcp.async_save(state, checkpoint_id=tmp_path, async_stager=Counter())
    with pytest.raises(
        StructureError, match=r"FileSystemReader nor its options: give ShardproofReader\(path\)"
    ):
        dcp.load(state, storage_reader=torch_dcp.FileSystemReader(tmp_path))
    planner = torch_dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    with pytest.raises(StructureError, match="flatten_sharded_tensors=False"):
        dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(StructureError, match="Put it at the top level of the state dict"):
        dcp.save({"inside": {"layer": layer}}, checkpoint_id=tmp_path)
    with pytest.raises(PlainDataError, match="value: a value of builtins.object"):
        dcp.save({"value": object()}, checkpoint_id=tmp_path)
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_planner_of_torch_may_cache_plans(tmp_path: Path) -> None:
    planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
    assert list(sp.open(tmp_path)) == ["w"]
    with pytest.raises(BaseException, match="enable_plan_caching"):
        save_twice({"w": torch.ones(2)}, tmp_path / "refused", planner)


def save_twice(state: dict[str, Any], path: Path, planner: Any) -> None:
    for _ in range(2):
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(path), planner=planner)


def test_planners_run_under_torch_with_the_storage_writer(tmp_path: Path) -> None:
    torch_dcp.save(
        {"w": torch.ones(2), "n": 1}, storage_writer=dcp.ShardproofWriter(tmp_path), planner=Renaming()
    )
    assert list(sp.open(tmp_path)) == ["renamed_n", "renamed_w"]
    torch_dcp.async_save({"n": 2}, storage_writer=dcp.ShardproofWriter(tmp_path)).result()
    assert sp.open(tmp_path)["n"] == 2

    class Halving(torch_dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return super().transform_object(write_item, object)

    with pytest.raises(BaseException, match="stores no pickles"):
        save_twice({"n": 1}, tmp_path / "refused", Halving())
    with pytest.raises(StructureError, match="use_collectives=False"):
        torch_dcp.save(
            {"w": torch.ones(2)}, storage_writer=dcp.ShardproofWriter(tmp_path / "x"), use_collectives=False
        )


class Losing(torch_dcp.DefaultSavePlanner):
    """A planner with a defect: it drops the last item after the global plan."""

    def finish_plan(self, new_plan: Any) -> Any:
        return super().finish_plan(dataclasses.replace(new_plan, items=new_plan.items[:-1]))


@pytest.mark.parametrize("last", [torch.ones(2), 1])
def test_an_item_that_no_rank_wrote_prevents_the_commit(last: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": last}
    with pytest.raises(BaseException, match="no rank wrote b, which the plan has; nothing was committed"):
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(tmp_path), planner=Losing())
    assert not (tmp_path / "manifest.json").exists()


def test_the_manifest_is_repaired_from_the_files_of_the_storage_writer(tmp_path: Path) -> None:
    large = torch.arange(6 << 20, dtype=torch.int32).view(6, -1)  # 24 MiB: two chunks, of many blocks
    state = {
        "large": large,
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2.5),
        "n": 7,
        "array": np.ones(50),
    }
    torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(tmp_path))
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    (tmp_path / "manifest.json").unlink()
    repair(storage)
    assert msgspec.structs.replace(read_manifest(storage), repaired=False) == manifest
    report = verify(storage)
    assert report.ok and report.chunks == 4
    target = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(value, state[key]) for key, value in target.items())


def test_async_save_returns_what_torch_returns(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    weight = torch.ones(4)
    future = dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "a")
    weight.zero_()
    assert isinstance(future, Future)
    called: list[bool] = []
    future.add_done_callback(lambda done: called.append(done.result().tensors == 1))
    assert future.result().location == str(tmp_path / "a") and not future.cancel()
    assert sp.open(tmp_path / "a")["w"].read().all()
    stager = DefaultStager(StagingOptions(False, False, True, False))
    answer = dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "b", async_stager=stager)
    stager.close()
    assert isinstance(answer, AsyncSaveResponse)
    assert answer.staging_completion.result() is None
    assert answer.upload_completion.result().tensors == 1
    assert called == [True]


def test_a_checkpoint_is_replaced_and_marked(tmp_path: Path) -> None:
    """torchtitan takes a folder for a checkpoint if it has a file `.metadata`."""
    path = tmp_path / "run" / "step"  # no other test has folders beside it
    torch_dcp.save({"w": torch.zeros(2)}, checkpoint_id=path)
    for fill in (1.0, 2.0):
        dcp.save({"w": torch.full((2,), fill)}, checkpoint_id=path)
        assert sp.open(path)["w"].read().tolist() == [fill, fill]
        assert b"shardproof" in (path / ".metadata").read_bytes()
    assert len(list((path / "shards").iterdir())) == 1


def test_model_files_of_hugging_face_are_left_to_torch(tmp_path: Path) -> None:
    writer = torch_dcp.HuggingFaceStorageWriter(path=str(tmp_path), enable_consolidation=False)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert not list(tmp_path.rglob("manifest.json"))
    state = {"w": torch.zeros(2)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=str(tmp_path)))
    assert state["w"].all()


def test_files_of_torch_save_are_left_to_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    state = {"w": torch.zeros(2)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reader = BroadcastingTorchSaveReader()
        path = tmp_path / "model.pt"
        dcp.load(state, checkpoint_id=path, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    finally:
        dist.destroy_process_group()
    assert state["w"].all()


def test_torch_reads_a_part_of_a_checkpoint_with_the_reader(tmp_path: Path) -> None:
    dcp.save(state_of(3.0), checkpoint_id=tmp_path)
    part = _load_state_dict_from_keys("optim.state", storage_reader=dcp.ShardproofReader(tmp_path))
    assert torch.equal(part["optim"]["state"]["0"]["exp_avg"], torch.full((2,), 3.0))
    assert list(part) == ["optim"] and list(part["optim"]) == ["state"]


def test_a_launcher_without_a_store_is_an_error_and_not_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that take themselves for the only rank would replace each other's checkpoint."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for call in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(ValueError, match="WORLD_SIZE is 2, but MASTER_ADDR is not set"):
            call({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step", no_dist=True)
    assert sp.open(tmp_path / "step").keys() == ["w"]


class PlansWithoutData(torch_dcp.DefaultLoadPlanner):
    """A planner of a user that makes its plans again."""

    def finish_plan(self, new_plan: torch_dcp.LoadPlan) -> torch_dcp.LoadPlan:
        return torch_dcp.LoadPlan(new_plan.items)


class OwnPlans(dcp.ShardproofReader):
    """A reader of a user, which changes no plan of all ranks."""

    def prepare_global_plan(self, plans: list[torch_dcp.LoadPlan]) -> list[torch_dcp.LoadPlan]:
        return plans


def test_plans_that_lost_the_numbers_of_ranks_are_read(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2)})
    for reader, planner in (
        (dcp.ShardproofReader(tmp_path), PlansWithoutData()),
        (OwnPlans(tmp_path), torch_dcp.DefaultLoadPlanner()),
    ):
        state = {"w": torch.zeros(2)}
        torch_dcp.load(state, storage_reader=reader, planner=planner)
        assert state["w"].tolist() == [1, 1]

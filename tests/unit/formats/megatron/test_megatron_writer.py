"""Checkpoints of Megatron-Core that are written here. Megatron-Core itself reads them in tests/interop."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardproof as sp
from shardproof.engine.foreign import Foreign
from shardproof.errors import StructureError
from shardproof.formats import Contents, WriteOptions, writer_of
from shardproof.formats.dcp_reader import DcpReader
from shardproof.formats.pickle_data import read_pickle
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import bits
from tests.unit.formats.writers import torch_loaded, write


def common_of(folder: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch_loaded(folder / "common.pt")


def test_tensors_objects_and_common_state_are_where_megatron_reads_them(tmp_path: Path) -> None:
    tensors = {"decoder.layers.weight": torch.arange(24.0).reshape(2, 4, 3), "rep": torch.ones(5)}
    objects = {
        "rng_state/shard_0.0_1.2": [{"seed": 5}],
        "rng_state/shard_0.1_1.2": [{"seed": 6}],
        "decoder.layers._extra_state/shard_1_2": None,
        "common": {"args": {"num_layers": 2}, "content_metadata": {"a": 1}},
        "common.opt_param_scheduler.max_lr": 0.1,
        "optimizer.param_groups.0.lr": 0.5,
        "optimizer.param_groups.1.lr": 0.25,
    }
    aliases = {"tied": "rep"}
    write("torch_dist", tensors, tmp_path, WriteOptions(40), objects=objects, step=10, aliases=aliases)
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert common_of(tmp_path) == {
        "args": argparse.Namespace(num_layers=2),
        "content_metadata": {"a": 1},
        "opt_param_scheduler": {"max_lr": 0.1},
        "optimizer": {"param_groups": [{"lr": 0.5}, {"lr": 0.25}]},
        "iteration": 10,
    }
    reader = DcpReader(Foreign(LocalStorage(tmp_path)))
    sharded = {key: [value] for key, value in objects.items() if "/shard_" in key}
    assert {key: reader.object(key) for key in reader.object_keys()} == sharded
    metadata = read_pickle((tmp_path / ".metadata").read_bytes(), {}, file=".metadata").value
    assert metadata.state["planner_data"] is None
    assert not reader.notes
    with sp.open(tmp_path, format="dcp") as checkpoint:
        for key, tensor in {**tensors, "tied": tensors["rep"]}.items():
            assert bits(checkpoint[key].read()) == bits(tensor)
    found = {"rep": torch.zeros(5), "rng_state/shard_0.1_1.2": None}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["rng_state/shard_0.1_1.2"] == [[{"seed": 6}]]


def test_the_common_state_of_another_megatron_is_kept(tmp_path: Path) -> None:
    write("torch_dist", {}, tmp_path, objects={"common_state/shard_0_1": [{"iteration": 3}]}, step=4)
    assert common_of(tmp_path) == {"iteration": 3}
    assert DcpReader(Foreign(LocalStorage(tmp_path))).object_keys() == {}.keys()


def test_a_common_state_is_written_even_without_objects(tmp_path: Path) -> None:
    write("torch_dist", {"w": torch.ones(2)}, tmp_path)
    assert common_of(tmp_path) == {}


@pytest.mark.parametrize(
    "objects",
    [
        {"common": {"a": 1}, "common.a": 2},
        {"common": {"a": 1}, "common.a.b": 2},
        {"common.a.b": 2, "common.a": {"c": 1}},
        {"common": {"a": 1}, "a": 2},
    ],
)
def test_two_objects_in_one_place_are_refused(objects: dict[str, Any]) -> None:
    with pytest.raises(StructureError, match="another value at this path"):
        writer_of("torch_dist")(Contents({}, objects=objects), WriteOptions())


def test_objects_that_are_no_plain_data_are_refused() -> None:
    for key in ("common", "rng_state/shard_0_1"):
        with pytest.raises(StructureError, match="is not plain data"):
            writer_of("torch_dist")(Contents({}, objects={key: {"a": object()}}), WriteOptions())


def test_empty_tensors_are_written_with_a_note(tmp_path: Path) -> None:
    write("torch_dist", {"e": torch.empty(0, 3)}, tmp_path)
    (note,) = writer_of("torch_dist")(Contents({"e": ("float32", (0, 3))}), WriteOptions()).notes
    assert "validate_access_integrity=False" in note

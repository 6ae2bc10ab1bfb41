"""Checkpoints of torch_checkpointing: DTensors of all ranks merged, damage found, nothing run."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 to write metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError, TilingError
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_tensors, damages_found


def test_the_golden_checkpoint_reads_to_its_expected_bits(tmp_path: Path) -> None:
    golden = Golden("tcp_fsdp2_w3", tmp_path)
    with sp.open(golden.checkpoint) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert (checkpoint.reader.name, checkpoint.world_size) == ("torch_checkpointing", 3)
        check_tensors(golden, checkpoint)
        assert {*checkpoint.reader.tensors, *checkpoint.aliases} == golden.kinds.keys()
        assert {key: checkpoint[key] for key in golden.objects} == golden.objects
        assert (checkpoint["conf.layers"], checkpoint["blob"]) == (2, b"\0\xff")
        assert checkpoint["optimizer.param_groups.0.params"][0] == "emb.weight"
        report = verify_foreign(checkpoint)
        assert report.ok and report.unproved == 0 < report.bytes


def test_a_load_fills_model_and_optimizer(tmp_path: Path) -> None:
    golden = Golden("tcp_fsdp2_w3", tmp_path)
    names = ("model.l1.weight", "optimizer.state.l1.weight.exp_avg")
    target: dict[str, Any] = {
        "model": {"l1.weight": torch.zeros(7, 6)},
        "optimizer": {"state": {"l1.weight": {"exp_avg": torch.zeros(7, 6)}}},
    }
    sp.load(golden.checkpoint, target, include=names)
    assert bits(target["model"]["l1.weight"]) == bits(golden.tensor(names[0]))
    assert bits(target["optimizer"]["state"]["l1.weight"]["exp_avg"]) == bits(golden.tensor(names[1]))


def spec(placement: Placement) -> dict[str, Any]:
    """A placement as the metadata has it."""
    if isinstance(placement, Replicate):
        return {"type": "Replicate"}
    if isinstance(placement, _StridedShard):
        return {"type": "StridedShard", "dim": placement.dim, "split_factor": placement.split_factor}
    return {"type": "Shard", "dim": placement.dim} if isinstance(placement, Shard) else {"type": "Partial"}


def local_of(
    whole: torch.Tensor, mesh: np.ndarray[Any, Any], rank: int, placements: Sequence[Placement]
) -> torch.Tensor:
    """The part of a rank, cut with `torch.chunk`. A strided shard is cut after the ones to its right."""
    (coordinate,) = np.argwhere(mesh == rank).tolist()
    order = sorted(range(mesh.ndim), key=lambda row: isinstance(placements[row], _StridedShard))
    for row in order:
        placement = placements[row]
        if isinstance(placement, (Shard, _StridedShard)):
            parts = whole.chunk(mesh.shape[row], placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[coordinate[row]] if coordinate[row] < len(parts) else empty
    return whole.clone()


def write(
    folder: Path,
    shape: Sequence[int],
    mesh: np.ndarray[Any, Any],
    placements: Sequence[Placement],
    *,
    described: bool = True,
) -> torch.Tensor:
    """Writes a DTensor as the only one of the item "model", and returns it whole.

    Args:
        folder: that is made.
        shape: global shape.
        mesh: ranks.
        placements: one for each dimension of the mesh.
        described: False leaves the tensor out of the metadata, so that only the pickles describe it.
    """
    whole = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(tuple(shape))
    folder.mkdir(exist_ok=True)
    for rank in range(mesh.size):
        dist.init_process_group("fake", rank=rank, world_size=mesh.size, store=FakeStore())
        try:
            local = local_of(whole, mesh, rank, placements)
            value = DTensor.from_local(
                local,
                DeviceMesh("cpu", torch.from_numpy(mesh)),
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            torch.save({"layer": {"w": value}, "step": 3}, folder / f"model_{rank}.pt")
            torch.save({"seed": rank, "state": torch.tensor([rank])}, folder / f"rng_{rank}.pt")
        finally:
            dist.destroy_process_group()
    data = {
        "global_shape": list(shape),
        "dtype": "torch.float32",
        "mesh_spec": {"mesh_shape": mesh.shape, "mesh_data": tuple(mesh.reshape(-1).tolist())},
        "placements": [spec(placement) for placement in placements],
    }
    groups = [
        {
            "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data},
            "ranks": tuple(range(mesh.size)),
        }
    ]
    item = {
        "nested_path_to_metadata": {'["layer","w"]': groups} if described else {},
        "rank_to_layout_info": dict.fromkeys(range(mesh.size)),
    }
    metadata = {"metadata": {"model": item}, "world_size": mesh.size, "version": "2.0"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return whole


MESHES = [
    ((7, 3), [3], [Shard(0)]),
    ((2, 3), [4], [Shard(0)]),
    ((7, 5), [2, 3], [Replicate(), Shard(1)]),
    ((7, 5), [2, 2], [Shard(0), Shard(1)]),
    ((9, 2), [2, 2], [Shard(0), Shard(0)]),
    ((9, 2), [4, 2], [_StridedShard(0, split_factor=2), Shard(0)]),
    ((8,), [2, 2], [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 2), [3], [Replicate()]),
    ((), [2], [Replicate()]),
]


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize(("shape", "mesh", "placements"), MESHES)
def test_parts_of_a_mesh_are_merged(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    described: bool,
    tmp_path: Path,
) -> None:
    ranks = np.arange(np.prod(mesh)).reshape(mesh)
    whole = write(tmp_path / "a", shape, ranks, placements, described=described)
    with sp.open(tmp_path / "a", format="torch_checkpointing") as checkpoint:
        assert bits(checkpoint["model.layer.w"].read()) == bits(whole)
    assert verified(tmp_path / "a").ok


def test_the_order_of_ranks_in_the_mesh_is_respected(tmp_path: Path) -> None:
    whole = write(tmp_path / "a", (7, 3), np.array([2, 0, 1]), [Shard(0)])
    assert bits(sp.open(tmp_path / "a")["model.layer.w"].read()) == bits(whole)


def test_values_that_differ_between_ranks_keep_their_rank(tmp_path: Path) -> None:
    write(tmp_path / "a", (4,), np.arange(2), [Shard(0)])
    with sp.open(tmp_path / "a") as checkpoint:
        assert checkpoint["model.step"] == 3
        assert [checkpoint[f"{rank}.rng.seed"] for rank in range(2)] == [0, 1]
        assert [checkpoint[f"{rank}.rng.state"].read().item() for rank in range(2)] == [0, 1]


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder, format="torch_checkpointing") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrites the metadata."""
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(metadata)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def group(metadata: Any) -> Any:
    return metadata["metadata"]["model"]["nested_path_to_metadata"]['["layer","w"]'][0]


def data_of(metadata: Any) -> Any:
    return group(metadata)["sharding_metadata"]["data"]


def layouts(metadata: Any) -> Any:
    return metadata["metadata"]["model"]["rank_to_layout_info"]


def test_copies_that_differ_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "a", (4,), np.arange(2), [Replicate()])
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        other = DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
        torch.save({"layer": {"w": other}, "step": 3}, tmp_path / "a" / "model_1.pt")
    finally:
        dist.destroy_process_group()
    with sp.open(tmp_path / "a") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert any("copies of model.layer.w differ" in note for note in checkpoint.reader.notes)
        assert checkpoint["model.layer.w"].read().tolist() == [1, 2, 3, 4]


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    for described in (True, False):
        write(tmp_path / "a", (4,), np.arange(2), [Partial()], described=described)
        with pytest.raises(FormatError, match="Partial"):
            sp.open(tmp_path / "a", format="torch_checkpointing")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda data: data_of(data).update(global_shape=[8]), "expected"),
        (lambda data: data_of(data).update(global_shape=[-7]), "not a shape"),
        (lambda data: data_of(data).update(placements=[]), "placements"),
        (lambda data: data_of(data).update(placements=[{"type": "Shard", "dim": 4}]), "does not fit"),
        (lambda data: data_of(data).update(placements=[{"type": "Replicate"}]), "local tensor"),
        (lambda data: data_of(data)["mesh_spec"].update(mesh_shape=(5,)), "a mesh of shape"),
        (lambda data: data_of(data)["mesh_spec"].update(mesh_data=(0, 2, 1)), "local tensor"),
        (lambda data: group(data).update(ranks=(0, 1, 2, 7)), "structure|missing"),
        (lambda data: group(data)["sharding_metadata"].update(type="Widget"), "Widget"),
        (lambda data: layouts(data).update({1: layout("../model_1.pt")}), "leads out"),
        (lambda data: layouts(data).update({1: layout("model_1.pt", "Safetensors")}), "not supported"),
        (lambda data: data.update(world_size="3"), "world_size"),
        (lambda data: data.update(version="9"), "version"),
        (lambda data: data.pop("metadata"), "structure"),
    ],
)
def test_metadata_that_does_not_fit_is_an_error(
    change: Callable[[Any], None], found: str, tmp_path: Path
) -> None:
    write(tmp_path / "a", (7,), np.arange(3), [Shard(0)])
    changed(tmp_path / "a", change)
    with pytest.raises(ShardproofError, match=found):
        sp.open(tmp_path / "a", format="torch_checkpointing")


def layout(file: str, kind: str = "TorchSerialization") -> dict[str, Any]:
    return {"file_path": file, "serialization_format": {"type": kind}}


def test_a_rank_that_the_metadata_lacks_is_a_hole(tmp_path: Path) -> None:
    write(tmp_path / "a", (7,), np.arange(3), [Shard(0)])
    changed(tmp_path / "a", lambda data: group(data).update(ranks=(0, 2)))
    with pytest.raises(TilingError, match="model.layer.w"):
        sp.open(tmp_path / "a")["model.layer.w"].read()


def test_files_have_the_names_of_the_layout(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    whole = write(folder, (7,), np.arange(3), [Shard(0)])
    (folder / "sub").mkdir()
    (folder / "model_1.pt").rename(folder / "sub" / "one.pt")
    (folder / "conf.json").write_text(json.dumps({"a": [1]}))

    def name(metadata: Any) -> None:
        layouts(metadata)[1] = layout("sub/one.pt")
        files = {0: layout("conf.json", "JsonSerialization")}
        item = {"nested_path_to_metadata": {}, "rank_to_layout_info": files}
        metadata["metadata"]["conf"] = item

    changed(folder, name)
    with sp.open(folder) as checkpoint:
        assert bits(checkpoint["model.layer.w"].read()) == bits(whole)
        assert checkpoint["conf"] == {"a": [1]}
    (folder / "conf.json").write_text("[" * 100000)
    assert any("conf.json" in fault.message for fault in verified(folder).faults)


def test_tensors_that_list_their_own_boxes_are_merged(tmp_path: Path) -> None:
    def own(rows: tuple[int, int]) -> dict[str, Any]:
        begin, end = rows
        return {
            "type": "default_tensor_v1",
            "data": {
                "global_shape": [5, 2],
                "global_offsets": [[begin, 0]],
                "local_offsets": [[1, 0]],
                "local_sizes": [[end - begin, 2]],
                "dtype": "torch.float32",
            },
        }

    whole = torch.arange(10.0).reshape(5, 2)
    rows = [(0, 3), (3, 5)]
    for rank, (begin, end) in enumerate(rows):
        padded = torch.cat([torch.full((1, 2), -1.0), whole[begin:end]])
        torch.save({"w": padded}, tmp_path / f"model_{rank}.pt")
    groups = [{"sharding_metadata": own(part), "ranks": (rank,)} for rank, part in enumerate(rows)]
    item = {"nested_path_to_metadata": {'["w"]': groups}, "rank_to_layout_info": {0: None, 1: None}}
    metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    assert bits(sp.open(tmp_path)["model.w"].read()) == bits(whole)


def test_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, (7,), np.arange(3), [Shard(0)])
    path = folder / "model_1.pt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match="model_1.pt"):
        sp.open(folder)
    path.unlink()
    with pytest.raises(StorageError, match="model_1.pt is missing"):
        sp.open(folder)
    (folder / "metadata.pkl").unlink()
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(folder, format="torch_checkpointing")


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    whole = write(folder, (7,), np.arange(3), [Shard(0)])

    def read(damaged: Path) -> None:
        with sp.open(folder, format="torch_checkpointing") as checkpoint:
            if "model.layer.w" in checkpoint and damaged.suffix == ".pt":
                assert bits(checkpoint["model.layer.w"].read()) == bits(whole)

    assert damages_found(folder.iterdir(), read, every=41) > 50


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_pickles_that_would_run_code_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"
    whole = write(folder, (7,), np.arange(3), [Shard(0)])
    torch.save(Evil(), folder / "evil_0.pt")
    changed(folder, lambda metadata: metadata.update(evil=Evil()))
    monkeypatch.chdir(tmp_path)
    with sp.open(folder) as checkpoint:
        assert bits(checkpoint["model.layer.w"].read()) == bits(whole)
        with pytest.raises(ShardproofError, match="posix.mkdir"):
            _ = checkpoint["evil"]
    assert not (tmp_path / "owned").exists()

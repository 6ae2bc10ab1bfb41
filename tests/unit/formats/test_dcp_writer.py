"""Checkpoints of torch.distributed.checkpoint that are written here: torch and our reader read their bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardproof as sp
from shardproof.dtypes import DTYPES
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import StorageError, StructureError
from shardproof.formats import Contents, WriteOptions, writer_of
from shardproof.report import diff
from shardproof.runs.maintenance import verify_foreign
from shardproof.storage import LocalStorage
from tests.harness import process_group, run_ranks
from tests.unit.formats.peers import bits
from tests.unit.formats.writers import TensorSource, contents_of, random_bits, torch_loaded, write

SHAPES = [(), (5,), (4, 3), (0, 3), (2, 0), (1, 1, 7)]


def every_tensor() -> dict[str, torch.Tensor]:
    """All dtypes in all shapes."""
    return {f"{name}.{at}": random_bits(name, shape) for name in DTYPES for at, shape in enumerate(SHAPES)}


def read_by_us(folder: Path) -> dict[str, tuple[Any, ...]]:
    with sp.open(folder) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        report = verify_foreign(checkpoint)
        assert report.ok, report.faults
        assert report.unproved == 0
        return {
            key: bits(checkpoint[key].read()) for key in {**checkpoint.reader.tensors, **checkpoint.aliases}
        }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("max_file_bytes", [None, 300])
def test_every_dtype_and_shape(tmp_path: Path, max_file_bytes: int | None) -> None:
    tensors = every_tensor()
    write("dcp", tensors, tmp_path, WriteOptions(max_file_bytes))
    expected = {key: bits(tensor) for key, tensor in tensors.items()}
    assert read_by_us(tmp_path) == expected
    assert read_by_torch(tmp_path, tensors) == expected


def read_by_torch(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    found = {key: torch.empty_like(tensor) for key, tensor in like.items()}
    for tensor in found.values():
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).fill_(1)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {key: bits(tensor) for key, tensor in found.items()}


def test_tied_tensors_share_their_entries(tmp_path: Path) -> None:
    weight = torch.arange(10_000.0).reshape(100, 100)
    tensors = {"embed.weight": weight}
    write("dcp", tensors, tmp_path, WriteOptions(20_000), aliases={"head.weight": "embed.weight"})
    both = {"embed.weight": weight, "head.weight": weight}
    expected = dict.fromkeys(both, bits(weight))
    assert read_by_us(tmp_path) == expected
    assert read_by_torch(tmp_path, both) == expected
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 1.5 * weight.nbytes


@pytest.mark.parametrize("to", ["dcp", "fsdp_dtensor", "torch_dist"])
def test_a_tie_is_restored_and_a_note_names_it_for_other_readers(to: str, tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    sp.save(tmp_path / "step", {"a": weight, "b": weight, "equal": weight.clone()})
    report = sp.convert(tmp_path / "step", tmp_path / "there", to=to)
    assert [f"{to} cannot record ties" in note and note.endswith(": b.") for note in report.notes] == [True]
    with sp.open(tmp_path / "there") as checkpoint:
        assert checkpoint.aliases == {"b": "a"}
        assert {bits(checkpoint[key].read()) for key in ("a", "b", "equal")} == {bits(weight)}
    assert diff(LocalStorage(tmp_path / "step"), LocalStorage(tmp_path / "there")).changed == ()
    target = {key: torch.zeros(2, 3) for key in ("a", "b", "equal")}  # not tied
    sp.load(tmp_path / "there", target, exclude="common")
    assert {bits(tensor) for tensor in target.values()} == {bits(weight)}


def test_objects_are_read_by_torch_and_by_us(tmp_path: Path) -> None:
    objects = {
        "step": 7,
        "scheduler": {"last_lr": [0.1], "betas": (0.9, 0.99), "name": None},
        "rng": torch.arange(16, dtype=torch.uint8),
        "blob": b"\0\xff",
    }
    write("dcp", {"w": torch.ones(2)}, tmp_path, objects=objects)
    found: dict[str, Any] = {"w": torch.zeros(2), **dict.fromkeys(objects, None), "scheduler": {"betas": 0}}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["w"].tolist() == [1, 1]
    assert bits(found.pop("rng")) == bits(objects["rng"])  # type: ignore[arg-type]
    assert {key: found[key] for key in objects if key != "rng"} == {
        key: value for key, value in objects.items() if key != "rng"
    }
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint["scheduler"] == objects["scheduler"]
        assert checkpoint["step"] == 7


def test_a_checkpoint_without_tensors_or_without_anything(tmp_path: Path) -> None:
    write("dcp", {}, tmp_path / "objects", objects={"step": 3})
    assert sp.open(tmp_path / "objects")["step"] == 3
    write("dcp", {}, tmp_path / "nothing")
    assert sp.open(tmp_path / "nothing").keys() == []
    write("dcp", {"e": torch.empty(0, 4)}, tmp_path / "empty")
    assert read_by_torch(tmp_path / "empty", {"e": torch.empty(0, 4)}) == read_by_us(tmp_path / "empty")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists of dicts, as DCP names them."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            name: leaf
            for key, item in items
            for name, leaf in flattened(item, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: value}


def write_training(
    folder: Path, max_file_bytes: int | None = None, *, whole_groups: bool = False
) -> dict[str, Any]:
    """Writes the state of a model and its optimizer, and returns that state.

    Args:
        folder: of the checkpoint.
        max_file_bytes: of `WriteOptions`.
        whole_groups: True for the parameter groups as one object, as torch names them up to 2.3.
    """
    model_state, optimizer_state = get_state_dict(*trained())
    state = {"model": model_state, "optim": optimizer_state, "step": 3}
    leaves = flattened(state)
    tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    objects = {key: leaf for key, leaf in leaves.items() if key not in tensors}
    if whole_groups:
        objects = {"optim.param_groups": optimizer_state["param_groups"], "step": 3}
    write("dcp", tensors, folder, WriteOptions(max_file_bytes), objects=objects)
    return state


@pytest.mark.parametrize("whole_groups", [False, True])
def test_set_state_dict_loads_a_model_and_its_optimizer(tmp_path: Path, whole_groups: bool) -> None:
    expected = write_training(tmp_path, 200, whole_groups=whole_groups)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state["optim"])
    again = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    found, wanted = flattened({**again, "step": state["step"]}), flattened(expected)
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        same = bits(found[key]) == bits(leaf) if isinstance(leaf, torch.Tensor) else found[key] == leaf
        assert same, key


def test_the_slots_of_a_live_optimizer_reach_set_state_dict(tmp_path: Path) -> None:
    """A save of an optimizer has slots by parameter and no groups. The groups are those of the program."""
    model, optimizer = trained()
    sp.save(tmp_path / "saved", {"model": model, "optim": optimizer})
    renamed = {"optim": "optim.state"}
    sp.convert(tmp_path / "saved", tmp_path / "dcp", to="dcp", rename=renamed, exclude="*.@options")
    expected = flattened(get_state_dict(model, optimizer)[1]["state"])
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(
        state,
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state["optim"])
    found = flattened(get_state_dict(model, optimizer)[1]["state"])
    assert {key: bits(leaf) for key, leaf in found.items()} == {
        key: bits(leaf) for key, leaf in expected.items()
    }
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_dcp_to_torch_save_gives_the_nested_state(tmp_path: Path) -> None:
    expected = write_training(tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "a.pt")
    found = torch_loaded(tmp_path / "a.pt", weights_only=False)
    assert found.keys() == expected.keys()
    assert found["model"].keys() == expected["model"].keys()
    assert found["optim"]["state"].keys() == expected["optim"]["state"].keys()
    assert found["optim"]["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert found["optim"]["param_groups"] == expected["optim"]["param_groups"]


def plans() -> st.SearchStrategy[dict[str, tuple[str, tuple[int, ...]]]]:
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    kinds = st.tuples(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]), shapes)
    return st.dictionaries(st.text(min_size=1, max_size=5), kinds, max_size=20)


@given(plans(), st.integers(16, 5000))
def test_files_are_bounded_and_complete(tensors: dict[str, tuple[str, tuple[int, ...]]], most: int) -> None:
    contents = Contents(tensors)
    units = writer_of("dcp")(contents, WriteOptions(most)).units
    volumes = dict.fromkeys(tensors, 0)
    for unit in units:
        assert unit.nbytes <= most
        for key, _, sizes in unit.boxes:
            volumes[key] += math.prod(sizes)
    assert volumes == {key: math.prod(shape) for key, (_, shape) in tensors.items()}
    total = sum(unit.nbytes for unit in units)
    assert len(units) <= 2 * math.ceil(total / most) + 1
    assert len({unit.name for unit in units}) == len(units)


def test_large_tensors_are_cut_so_that_files_balance() -> None:
    kinds = {"small": ("float32", (1000,)), "large": ("bfloat16", (128256, 8192)), "b": ("float32", (7,))}
    units = writer_of("dcp")(Contents(kinds), WriteOptions(3 << 29)).units
    sizes = [unit.nbytes for unit in units]
    assert len(sizes) == 2
    assert min(sizes) > 0.9 * max(sizes)
    units = writer_of("dcp")(Contents(kinds), WriteOptions()).units
    assert len(units) == 1
    assert max(math.prod(sizes) for _, _, sizes in units[0].boxes) * 2 <= 512 << 20


def test_memory_is_bounded_by_the_pieces(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(100_000.0).reshape(100, 1000)}
    source = write("dcp", tensors, tmp_path, WriteOptions(piece_bytes=4096))
    assert source.largest <= 4096
    assert read_by_us(tmp_path) == {"w": bits(tensors["w"])}


def test_leftovers_are_replaced_and_a_commit_can_be_repeated(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(10)}
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100_000))
    (tmp_path / ".metadata").write_bytes(b"left")
    write("dcp", tensors, tmp_path)
    assert read_by_us(tmp_path) == {"w": bits(tensors["w"])}


@pytest.mark.parametrize("is_missing", [True, False])
def test_the_commit_finds_a_file_that_was_cut_or_removed(tmp_path: Path, is_missing: bool) -> None:
    tensors = {"w": torch.arange(10)}
    writer = writer_of("dcp")(contents_of(tensors), WriteOptions())
    storage = LocalStorage(tmp_path)
    records = {unit.name: writer.write(unit, TensorSource(tensors), storage) for unit in writer.units}
    (file,) = tmp_path.iterdir()
    if is_missing:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    match = "it is missing" if is_missing else "it has"
    with pytest.raises(StorageError, match=rf"__0_0\.distcp: expected .*{match}"):
        writer.commit(records, storage)
    assert not (tmp_path / ".metadata").exists()


def test_contents_that_the_format_cannot_hold_are_refused_or_noted() -> None:
    with pytest.raises(StructureError, match=r"'a\.b'.*--exclude a\.b"):
        writer_of("dcp")(Contents({}, objects={"a.b": [object()]}), WriteOptions())
    writer = writer_of("dcp")(Contents({}, metadata={"run": "x"}), WriteOptions())
    (note,) = writer.notes
    assert "no place for the metadata (run)" in note


def test_fsdp_dtensor_keeps_the_keys(tmp_path: Path) -> None:
    tensors = {"model.module.a.weight": torch.ones(3, 2), "optimizer.state.0.exp_avg": torch.zeros(3, 2)}
    write("fsdp_dtensor", tensors, tmp_path)
    expected = {key: bits(tensor) for key, tensor in tensors.items()}
    assert read_by_us(tmp_path) == expected
    assert read_by_torch(tmp_path, tensors) == expected


def loaded_onto_shards(folder: Path) -> dict[str, Any]:
    """What DCP loads into DTensors of two ranks, and into a model and its optimizer under FSDP2."""
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        asked = {f"w{dim}": distribute_tensor(torch.zeros(7, 10), mesh, [Shard(dim)]) for dim in (0, 1)}
        dcp.load(asked, checkpoint_id=folder / "shards")
        model, optimizer = trained()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=folder / "training")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state["optim"])
        again = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        leaves = {**asked, **flattened(again)}
        return {
            key: bits(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)
            for key, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor)
        }


@pytest.mark.processes
def test_torch_loads_onto_the_shards_of_two_ranks(tmp_path: Path) -> None:
    tensor = torch.arange(70.0).reshape(7, 10)
    expected = {key: bits(tensor) for key in ("w0", "w1")}
    write("dcp", {"w0": tensor}, tmp_path / "shards", WriteOptions(100), aliases={"w1": "w0"})
    state = write_training(tmp_path / "training", 200)
    expected |= {key: bits(leaf) for key, leaf in flattened(state).items() if isinstance(leaf, torch.Tensor)}
    for outcome in run_ranks(2, loaded_onto_shards, tmp_path, timeout=90):
        assert outcome.value == expected

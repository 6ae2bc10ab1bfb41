"""Single files of torch.save that are written here: torch and `TorchFile` read their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import StorageError, StructureError
from shardproof.formats import Contents, WriteOptions, writer_of
from shardproof.formats.torch.torch_file import TorchFile
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import bits
from tests.unit.formats.writers import TensorSource, contents_of, random_bits, torch_loaded, write


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_shape(tmp_path: Path) -> None:
    shapes = [(), (5,), (4, 3), (0, 3), (2, 0)]
    tensors = {f"{name}.{at}": random_bits(name, shape) for name in DTYPES for at, shape in enumerate(shapes)}
    source = write("torch", tensors, tmp_path, WriteOptions(piece_bytes=64))
    assert source.largest <= 64
    expected = {key: bits(tensor) for key, tensor in tensors.items()}
    found = torch_loaded(tmp_path / "checkpoint.pt")
    assert list(found) == list(tensors)
    assert {key: bits(value) for key, value in found.items()} == expected
    file = TorchFile(LocalStorage(tmp_path), "checkpoint.pt")
    assert {key: bits(file.read(file.value[key])) for key in tensors} == expected
    assert file.verify() == sum(tensor.nbytes for tensor in tensors.values())


def test_keys_stay_flat_beside_objects_and_ties_share_a_storage(tmp_path: Path) -> None:
    objects = {"step": 3, "optim.param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    aliases = {"head.weight": "embed.weight"}
    weight = torch.arange(6.0).reshape(2, 3)
    write("torch", {"embed.weight": weight}, tmp_path, objects=objects, aliases=aliases)
    found = torch_loaded(tmp_path / "checkpoint.pt")
    assert list(found) == ["embed.weight", "head.weight", "step", "optim.param_groups"]
    assert {key: found[key] for key in objects} == objects
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert bits(found["head.weight"]) == bits(weight)
    module = torch.nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": found["head.weight"]})


def test_a_leftover_is_replaced_and_the_commit_finds_a_cut_file(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3)}
    (tmp_path / "checkpoint.pt").write_bytes(bytes(50_000))
    writer = writer_of("torch")(contents_of(tensors), WriteOptions(1))
    (unit,) = writer.units
    assert unit.nbytes == 12
    records = {unit.name: writer.write(unit, TensorSource(tensors), LocalStorage(tmp_path))}
    writer.commit(records, LocalStorage(tmp_path))
    assert bits(torch_loaded(tmp_path / "checkpoint.pt")["w"]) == bits(tensors["w"])
    with open(tmp_path / "checkpoint.pt", "ab") as file:
        file.write(b"x")
    with pytest.raises(StorageError, match="expected"):
        writer.commit(records, LocalStorage(tmp_path))


def test_contents_that_the_format_cannot_hold_are_refused_or_noted() -> None:
    with pytest.raises(StructureError, match="'a'.*not plain data"):
        writer_of("torch")(Contents({}, objects={"a": object()}), WriteOptions())
    (note,) = writer_of("torch")(Contents({}, metadata={"run": 1}), WriteOptions()).notes
    assert "run" in note

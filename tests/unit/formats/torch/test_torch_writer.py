"""Single files of torch.save that are written here: torch and `TorchFile` read their bits."""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import CorruptChunkError, StorageError, StructureError
from shardproof.formats import Contents, WriteOptions, writer_of
from shardproof.formats.torch.torch_file import TorchFile
from shardproof.formats.torch.torch_writer import ArchiveTensor, TorchArchive
from shardproof.formats.writer import new_file
from shardproof.storage import LocalSink, LocalStorage
from tests.newer_torch import OLDER
from tests.unit.formats.peers import bits
from tests.unit.formats.writers import TensorSource, contents_of, random_bits, torch_loaded, write

bytes_of_torch = pytest.mark.skipif(OLDER, reason="an older torch pads the records of an archive differently")


def without_identifier(data: bytes) -> bytes:
    """An archive without its serialization id and the CRC-32 of that."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entry = archive.getinfo("archive/.data/serialization_id")
        found = archive.read(entry)
    return data.replace(found, bytes(40)).replace(entry.CRC.to_bytes(4, "little"), bytes(4))


def saved(value: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


@bytes_of_torch
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 3), (2, 0), (1, 70000)], ids=str)
def test_a_tensor_has_the_bytes_that_torch_writes(name: str, shape: Sequence[int], tmp_path: Path) -> None:
    tensor = random_bits(name, shape)
    data = TorchArchive(tensor).to_bytes()
    assert without_identifier(data) == without_identifier(saved(tensor))
    assert bits(torch_loaded(data)) == bits(tensor)
    (tmp_path / "a.pt").write_bytes(data)
    file = TorchFile(LocalStorage(tmp_path), "a.pt")
    assert file.has_checksums
    assert bits(file.read(file.value)) == bits(tensor)


@bytes_of_torch
def test_a_state_with_ties_has_the_bytes_that_torch_writes() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state = {"a": tied, "b": tied, "c": [1, (2, 3.5), {"x": None}], "d": torch.ones(3, dtype=torch.bfloat16)}
    data = TorchArchive(state).to_bytes()
    assert without_identifier(data) == without_identifier(saved(state))
    found = torch_loaded(data)
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_equal_values_give_equal_bytes() -> None:
    one, other = (TorchArchive({"a": torch.arange(3)}).to_bytes() for _ in range(2))
    assert one == other
    assert one != TorchArchive({"a": torch.arange(1, 4)}).to_bytes()


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    lr: float
    betas: tuple[float, float]


def plain_values() -> dict[str, Any]:
    default: defaultdict[str, list[int]] = defaultdict(list)
    default["a"].append(1)
    return {
        "none": None,
        "numbers": [True, 1, -(1 << 80), 0.1, math.inf, 1 + 2j],
        "text": ["é", "a" * 1000],
        "bytes": [b"\0\xff", bytearray(b"ab")],
        "containers": [(), (1,), {1, 2}, {3: "c", (4, "d"): 5}],
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "default": default,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": [torch.device("cpu"), torch.device("cuda", 1)],
        "tensor": [torch.arange(3), (torch.ones(2),)],
    }


def test_plain_values_are_read_by_torch() -> None:
    values = plain_values()
    found = torch_loaded(TorchArchive(values).to_bytes(), weights_only=False)
    tensors, expected_tensors = found.pop("tensor"), values.pop("tensor")
    assert repr(found) == repr(values)
    assert [bits(tensors[0]), bits(tensors[1][0])] == [
        bits(expected_tensors[0]),
        bits(expected_tensors[1][0]),
    ]
    safe = {key: value for key, value in values.items() if key != "default"}
    assert torch_loaded(TorchArchive(safe).to_bytes()) == safe


def test_arrays_and_declared_classes_are_named() -> None:
    values = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "frozen": frozenset([1]),
        "enum": Color.RED,
        "options": Options(0.1, (0.9, 0.99)),
    }
    found = torch_loaded(TorchArchive(values).to_bytes(), weights_only=False)
    assert found["array"].dtype == np.int16
    assert found.pop("array").tolist() == values.pop("array").tolist()  # type: ignore[attr-defined]
    assert found == values


@pytest.mark.parametrize(
    "value",
    [object(), print, int, io.BytesIO(), LocalStorage("/")],
    ids=["object", "function", "class", "buffer", "storage"],
)
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not plain data"):
        TorchArchive({"a": [value]})


@bytes_of_torch
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_a_box_is_streamed_in_pieces(piece_bytes: int, tmp_path: Path) -> None:
    tensor = torch.arange(7 * 5 * 11.0).reshape(7, 5, 11)
    source = TensorSource({"w": tensor})
    with new_file(LocalStorage(tmp_path), "a.pt") as file:
        file.put(b"before")
        box = ArchiveTensor.box(source, "w", "float32", (1, 0, 2), (6, 5, 8), piece_bytes)
        TorchArchive(box).write(file)
        size = file.finish()
    data = (tmp_path / "a.pt").read_bytes()
    assert size == len(data)
    assert source.largest <= max(piece_bytes, 4)
    expected = tensor[1:, :, 2:10].contiguous()
    assert without_identifier(data[6:]) == without_identifier(saved(expected))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(2)], ids=str
)
def test_a_source_that_gives_something_else_is_an_error(wrong: torch.Tensor) -> None:
    class WrongSource:
        def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
            return wrong

    tensor = ArchiveTensor.box(WrongSource(), "w", "float32", (0,), (4,), 1 << 20)
    with pytest.raises(StructureError, match=r"expected float32 of \[4\]"):
        TorchArchive(tensor).to_bytes()


class SparseSink(LocalSink):
    """Leaves out the bytes that are 0."""

    def write_at(self, start: int, buffer: memoryview) -> None:
        if len(buffer) % 8 or np.frombuffer(buffer, np.uint64).any():
            super().write_at(start, buffer)


class SparseStorage(LocalStorage):
    def create(self, name: str) -> LocalSink:
        made = super().create(name)
        made.__class__ = SparseSink
        return made


def test_an_archive_above_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets that need zip64."""
    piece = memoryview(bytes(64 << 20))

    def pieces() -> Iterator[memoryview]:
        for _ in range(65):
            yield piece

    state = {
        "first": torch.ones(3),
        "large": ArchiveTensor("uint8", (65, 64 << 20), pieces),
        "last": torch.arange(1000),
        "empty": torch.empty(0, 2),
    }
    storage = SparseStorage(tmp_path)
    with new_file(storage, "a.pt") as file:
        TorchArchive(state).write(file)
        assert file.finish() > 65 << 26
    found = torch_loaded(tmp_path / "a.pt", mmap=True)
    assert found["large"].shape == (65, 64 << 20)
    opened = TorchFile(storage, "a.pt")
    for key in ("first", "last", "empty"):
        assert bits(found[key]) == bits(state[key])  # type: ignore[arg-type]
        assert bits(opened.read(opened.value[key])) == bits(state[key])  # type: ignore[arg-type]
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        entry = archive.getinfo("archive/data/2")
        descriptor = struct.pack("<IIQQ", 0x08074B50, entry.CRC, entry.file_size, entry.file_size)
        assert descriptor in storage.read("a.pt", entry.header_offset)
        assert archive.read(entry) == state["last"].numpy().tobytes()  # type: ignore[union-attr]


def test_a_new_file_replaces_leftovers_and_is_removed_if_the_writer_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"left from before, and longer")
    with new_file(LocalStorage(tmp_path), "a") as file:
        file.put(b"new")
        file.put(b"")
        assert (file.size, file.finish()) == (3, 3)
    assert (tmp_path / "a").read_bytes() == b"new"

    def fail() -> None:
        with new_file(LocalStorage(tmp_path), "a") as file:
            file.put(bytes(20 << 20))
            raise OSError("the source failed")

    with pytest.raises(OSError, match="the source failed"):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [[1], [8 << 20], [(8 << 20) - 1, 2], [20 << 20, 5, 13 << 20]])
def test_a_new_file_has_what_was_appended(sizes: list[int], tmp_path: Path) -> None:
    parts = [torch.arange(size, dtype=torch.uint8).numpy().tobytes() for size in sizes]
    with new_file(LocalStorage(tmp_path), "a") as file:
        for part in parts:
            file.put(part)
        file.finish()
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(100)
    data = bytearray(TorchArchive({"a": tensor}).to_bytes())
    data[data.index(bytes(tensor.numpy()[1:])) + 5] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    file = TorchFile(LocalStorage(tmp_path), "a.pt")
    with pytest.raises(CorruptChunkError, match="CRC-32"):
        file.read(file.value["a"])


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

"""Lazy tensors: slices equal numpy's, are verified, and read no more blocks than they need."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace

import shardproof as sp
from shardproof.engine.loading.checkpoint import Checkpoint, NativeCheckpoint
from shardproof.engine.saving import Saver
from shardproof.errors import CorruptChunkError, NotCommittedError, StorageError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.small_blocks import blocks_of

TENSORS = {
    "scalar": torch.tensor(7.5),
    "line": torch.arange(11, dtype=torch.int16),
    "plane": torch.arange(9 * 7, dtype=torch.float32).reshape(9, 7),
    "space": torch.arange(4 * 5 * 6, dtype=torch.float64).reshape(4, 5, 6),
    "wide": torch.arange(3 * 40, dtype=torch.int32).reshape(1, 3, 1, 40),
    "nothing": torch.zeros(3, 0, 2),
    "half": torch.arange(20, dtype=torch.bfloat16).reshape(4, 5),
    "complex": torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(3, 2),
}
NUMPY_HAS = [key for key in TENSORS if key != "half"]


CHUNK, BLOCK = 64, 16


@pytest.fixture(scope="module", autouse=True)
def _blocks() -> Iterator[None]:
    with blocks_of(BLOCK):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "step"
    saver = Saver(LocalRendezvous(), chunk_bytes=CHUNK)
    saver.save(LocalStorage(place), {**TENSORS, "note": {"a": (1, 2)}}, step=5, metadata={"who": ("me", 1)})
    return place


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with sp.open(folder) as opened:
        assert len(opened.table) > 2 * len(TENSORS), "tensors of many chunks"
        yield opened


@st.composite
def _indices(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    key = draw(st.sampled_from(NUMPY_HAS))
    shape = tuple(TENSORS[key].shape)
    count = draw(st.integers(0, len(shape)))
    index: list[Any] = []
    hole = draw(st.one_of(st.none(), st.integers(0, count)))
    rest = shape[:count] if hole is None else shape[:hole] + shape[len(shape) - (count - hole) :]
    for extent in rest:
        bound = st.one_of(st.none(), st.integers(-extent - 3, extent + 3))
        entry: st.SearchStrategy[Any] = st.builds(
            slice, bound, bound, st.one_of(st.none(), st.integers(1, extent + 2))
        )
        if extent:
            entry = st.one_of(entry, st.integers(-extent, extent - 1))
        index.append(draw(entry))
    if hole is not None:
        index.insert(hole, ...)
    return key, tuple(index)


@given(_indices())
def test_slices_equal_those_of_numpy(checkpoint: Checkpoint, drawn: tuple[str, tuple[Any, ...]]) -> None:
    key, index = drawn
    expected = TENSORS[key].numpy()[index]
    found = checkpoint[key][index]
    assert found.dtype == TENSORS[key].dtype
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("key", TENSORS)
def test_a_whole_tensor_is_read(checkpoint: Checkpoint, key: str) -> None:
    for found in (checkpoint[key].read(), checkpoint[key][...]):
        assert found.dtype == TENSORS[key].dtype and torch.equal(found, TENSORS[key])
    stored = checkpoint[key]
    assert (stored.shape, stored.dtype) == (tuple(TENSORS[key].shape), TENSORS[key].dtype)
    assert stored.nbytes == TENSORS[key].nbytes
    assert checkpoint.shape(key) == stored.shape and f"torch.{checkpoint.dtype(key)}" == str(stored.dtype)
    assert repr(key) in repr(stored)


def test_a_single_index_need_not_be_a_tuple(checkpoint: Checkpoint) -> None:
    plane, numpy = checkpoint["plane"], TENSORS["plane"].numpy()
    for index in (3, -1, np.int64(2), slice(1, None, 3), ...):
        assert np.array_equal(plane[index].numpy(), numpy[index])
    assert plane[2, 3].shape == () and plane[2, 3].item() == numpy[2, 3]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (9, "out of range"),
        (-10, "out of range"),
        ((0, 7), "dimension 1"),
        ((0, 0, 0), "3 indices"),
        ((..., ...), "one ..."),
        (slice(None, None, -1), "positive"),
        (slice(None, None, 0), "positive"),
        (True, "integers"),
        (None, "integers"),
        ([0, 1], "integers"),
        (1.0, "integers"),
        (torch.tensor([1, 2]), "integers|scalar|only"),
    ],
)
def test_an_invalid_index_is_refused(checkpoint: Checkpoint, index: Any, words: str) -> None:
    with pytest.raises((IndexError, TypeError), match=words):
        checkpoint["plane"][index]


def test_keys_and_plain_values(checkpoint: Checkpoint) -> None:
    assert checkpoint.keys() == sorted([*TENSORS, "note.a"]) == list(checkpoint)
    assert len(checkpoint) == len(TENSORS) + 1 and "plane" in checkpoint and "plan" not in checkpoint
    assert (
        checkpoint["note.a"] == (1, 2) and checkpoint.step == 5 and checkpoint.metadata == {"who": ("me", 1)}
    )
    for get in (checkpoint.__getitem__, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(KeyError, match="has no 'plan'; near it: plane"):
            get("plan")
        with pytest.raises(KeyError, match="has no 'xyz';.*keys"):
            get("xyz")
    for get in (checkpoint.shape, checkpoint.dtype):
        with pytest.raises(
            KeyError, match=r"'note.a' is a plain value and no tensor: checkpoint\[key\] has it"
        ):
            get("note.a")


@pytest.mark.parametrize("key", NUMPY_HAS)
def test_numpy_takes_a_stored_tensor(checkpoint: Checkpoint, key: str) -> None:
    expected = TENSORS[key].numpy()
    array = np.asarray(checkpoint[key])
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape) and np.array_equal(array, expected)
    assert np.asarray(checkpoint[key], np.complex128).dtype == np.complex128
    assert np.array_equal(np.add(checkpoint[key], 1), expected + 1)
    with pytest.raises(ValueError, match="copy=False"):
        checkpoint[key].__array__(copy=False)


@pytest.mark.parametrize("key", sorted(TENSORS))
def test_torch_takes_a_stored_tensor(checkpoint: Checkpoint, key: str) -> None:
    for take in (torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack):
        taken = take(checkpoint[key])
        assert taken.dtype == TENSORS[key].dtype and torch.equal(taken, TENSORS[key])


def test_an_array_of_a_dtype_that_numpy_lacks_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"numpy has no torch.bfloat16, the dtype of half: .read\(\) returns"):
        np.asarray(checkpoint["half"])
    assert np.array_equal(checkpoint["half"].read().float().numpy(), TENSORS["half"].float().numpy())


class _Counting(FaultyStorage):
    """A storage that counts the bytes that are read."""

    def __init__(self, inner: LocalStorage) -> None:
        super().__init__(inner)
        self.read_bytes = 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().read(name, start, stop)
        self.read_bytes += len(data)
        return data

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.read_bytes += len(buffer)
        super().read_into(name, start, buffer)


Index = int | slice | EllipsisType


INDICES: list[tuple[str, tuple[Index, ...]]] = [
    ("plane", (slice(2, 4),)),
    ("plane", (slice(None), 3)),
    ("plane", (5, 6)),
    ("plane", (slice(0, 0),)),
    ("space", (1, slice(2, 4), slice(1, 5))),
    ("space", (..., 0)),
    ("space", (2, ...)),
    ("line", (slice(3, 9, 5),)),
    ("nothing", (...,)),
    ("scalar", ()),
    ("half", (..., slice(1, 3))),
]


def _blocks_of_slice(opened: NativeCheckpoint, key: str, index: tuple[Index, ...]) -> list[tuple[int, range]]:
    """Row and needed blocks of each chunk that a slice touches, found element by element."""
    value = TENSORS[key]
    filled = tuple(slice(part.start, part.stop) if isinstance(part, slice) else part for part in index)
    wanted = torch.zeros(value.shape, dtype=torch.bool)
    wanted[filled] = True  # elements that a step skips are read too
    table, found = opened.table, []
    for row in np.flatnonzero(table.tensor == opened.row(key)).tolist():
        box = slice(int(table.box_start[row]), int(table.box_start[row + 1]))
        ends = table.box_offsets[box] + table.box_sizes[box]
        chunk = wanted[tuple(map(slice, table.box_offsets[box].tolist(), ends.tolist()))].flatten()
        elements = chunk.nonzero().flatten().tolist()
        if elements:
            first, last = (elements[at] * value.element_size() for at in (0, -1))
            found.append((row, range(first // BLOCK, (last + value.element_size() - 1) // BLOCK + 1)))
    return found


@pytest.mark.parametrize(("key", "index"), INDICES)
def test_a_slice_reads_only_the_blocks_it_needs(folder: Path, key: str, index: tuple[Index, ...]) -> None:
    counting = _Counting(LocalStorage(folder))
    opened = NativeCheckpoint(counting)  # type: ignore[arg-type]
    counting.read_bytes = 0
    stored = opened[key]
    assert counting.read_bytes == 0, "a tensor is not read before it is sliced"
    found = stored[index]
    assert torch.equal(found, TENSORS[key][index])
    counts = opened.table.byte_count
    needed = carried = 0
    for row, blocks in _blocks_of_slice(opened, key, index):
        count = int(counts[row])
        part = min(blocks.stop * BLOCK, count) - blocks.start * BLOCK
        needed += part
        if part < count:  # then the digests of its blocks are read
            carried += 16 * -(-count // BLOCK)
    assert counting.read_bytes == needed + carried


@given(st.sampled_from(INDICES), st.data())
def test_every_byte_of_a_slice_is_verified(folder: Path, drawn: Any, data: st.DataObject) -> None:
    """After a change of any byte of the file, a slice is right, or an error if the byte is in its blocks."""
    key, index = drawn
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "copy"))
        with sp.open(copy) as opened:
            (record,) = opened.manifest.files
            at = data.draw(st.integers(record.data_start, record.size - 1))
            raw = bytearray((copy / record.name).read_bytes())
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
            (copy / record.name).write_bytes(raw)
            starts, counts = opened.table.byte_start.tolist(), opened.table.byte_count.tolist()
            is_hit = any(
                starts[row] <= at < starts[row] + counts[row] and (at - starts[row]) // BLOCK in blocks
                for row, blocks in _blocks_of_slice(opened, key, index)
            )
            if not is_hit:  # if the digests of blocks are damaged, the chunk is read whole
                assert torch.equal(opened[key][index], TENSORS[key][index])
                return
            with pytest.raises(CorruptChunkError, match=repr(key)) as caught:
                opened[key][index]
            start, count = (caught.value.details[name] for name in ("byte_start", "byte_count"))
            assert start <= at < start + count


def test_a_short_file_is_refused_before_memory_is_allocated(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with sp.open(copy) as opened:
        shard = copy / opened.manifest.files[0].name
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(StorageError, match="expected .* bytes, it has"):
            opened["plane"].read()
        assert opened["nothing"].read().shape == (3, 0, 2), "needs no file"


def test_open_refuses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError):
        sp.open(tmp_path / "nowhere")
    with pytest.raises(NotCommittedError):
        sp.open(tmp_path)


def test_a_plain_value_may_refer_to_a_tensor(tmp_path: Path) -> None:
    blob = bytes(range(256))
    sp.save(tmp_path / "a", {"blob": blob, "pair": [1, {"inner": blob + blob}]})
    with sp.open(tmp_path / "a") as opened:
        assert opened["blob"] == blob and opened["pair"] == [1, {"inner": blob + blob}]


class _Only(tuple[Any, ...]):
    """The records of a manifest, of which only one row may be accessed."""

    row: int

    def __getitem__(self, row: Any) -> Any:
        assert row == self.row, f"row {row} is looked at"
        return super().__getitem__(row)

    def __iter__(self) -> Any:
        raise AssertionError("all rows are looked at")


def test_reading_a_tensor_accesses_no_other(tmp_path: Path) -> None:
    """Otherwise reading all tensors takes time quadratic in their number."""
    tree = {f"t{number}": torch.full((3,), float(number)) for number in range(9)}
    sp.save(tmp_path / "ckpt", tree)
    with sp.open(tmp_path / "ckpt") as ckpt:
        only = _Only(ckpt.manifest.tensors)
        only.row = ckpt.row("t5")
        ckpt.manifest = replace(ckpt.manifest, tensors=only)
        assert torch.equal(ckpt["t5"].read(), tree["t5"])
        assert ckpt["t5"][1:].tolist() == [5.0, 5.0]


def test_the_representation_names_place_format_step_and_sizes(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"w": torch.ones(1000), "lr": 0.1}, step=3)
    with sp.open(tmp_path / "c") as checkpoint:
        assert repr(checkpoint) == (
            f"<NativeCheckpoint {str(tmp_path / 'c')!r}, format='shardproof', step=3, 1 tensor of 4.00 kB, "
            "1 plain value>"
        )
    torch.save({"w": torch.ones(1000)}, tmp_path / "w.pt")
    with sp.open(tmp_path / "w.pt") as checkpoint:
        assert repr(checkpoint).endswith(", 1 tensor of 4.00 kB, 0 plain values>")

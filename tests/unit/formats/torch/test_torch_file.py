"""Files of torch.save: read to the bits that torch reads, damage found, nothing run."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.engine.foreign import Opaque
from shardproof.errors import CorruptChunkError, FormatError, ShardproofError, StorageError
from shardproof.formats.torch.torch_file import TorchFile, TorchTensor, leaves
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import Golden, bits, tagged


def opened(path: Path) -> TorchFile:
    return TorchFile(LocalStorage(path.parent), path.name)


@pytest.mark.parametrize("name", ["torch_zip", "torch_legacy"])
def test_golden_files_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    file = opened(golden.checkpoint / "model.pt")
    by_key = {".".join(map(str, path)): leaf for path, leaf in leaves(file.value)}
    found = {key: file.read(leaf) for key, leaf in by_key.items() if isinstance(leaf, TorchTensor)}
    objects = {key: tagged(leaf) for key, leaf in by_key.items() if not isinstance(leaf, TorchTensor)}
    assert file.has_checksums == (name == "torch_zip")
    assert objects == golden.objects
    assert {key: bits(value) for key, value in found.items()} == {
        key: bits(golden.tensor(key)) for key in golden.kinds
    }


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden("evil_bin", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (path,) = golden.checkpoint.iterdir()
    file = opened(path)
    opaque = [leaf for _, leaf in leaves(file.value) if isinstance(leaf, Opaque)]
    assert opaque
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_ties_and_layouts(tmp_path: Path, is_zip: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base,
        "tied": base,
        "row": base[2],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(base[1:3]),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "scalar": torch.tensor(7, dtype=torch.int32),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    file = opened(tmp_path / "a.pt")
    assert {key: bits(file.read(file.value[key])) for key in state} == {
        key: bits(value.detach().resolve_conj().resolve_neg()) for key, value in state.items()
    }
    assert file.value["base"].storage == file.value["row"].storage
    assert file.verify() == (base.nbytes + 36 if is_zip else 0)


def test_every_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    value = torch.arange(8, dtype=torch.int32)
    torch.save({"a": value}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    at = whole.index(bytes(value.numpy()))
    for bit in range(value.nbytes * 8):
        damaged = bytearray(whole)
        damaged[at + bit // 8] ^= 1 << bit % 8
        (tmp_path / "b.pt").write_bytes(damaged)
        file = opened(tmp_path / "b.pt")
        with pytest.raises(CorruptChunkError, match="CRC-32"):
            file.read(file.value["a"])


def read_from(file: TorchFile, key: str) -> torch.Tensor:
    return file.read(file.value[key])


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_cut_file_is_an_error(tmp_path: Path, is_zip: bool) -> None:
    torch.save({"a": torch.arange(100)}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    whole = (tmp_path / "a.pt").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "b.pt").write_bytes(whole[:size])
        with pytest.raises((FormatError, StorageError)):
            read_from(opened(tmp_path / "b.pt"), "a")
        if not is_zip and size > len(whole) - 800:  # the cut is in the tensor
            cut = TorchFile(LocalStorage(tmp_path), "b.pt", may_be_cut=True)
            assert cut.cut_from == len(whole)


def test_a_cut_range_of_a_file_does_not_read_the_bytes_behind_it(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "many.bin").write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(FormatError, match=f"needs {len(whole)} bytes and has {len(whole) - 8}"):
        TorchFile(LocalStorage(tmp_path), "many.bin", size=len(whole) - 8)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_changed_byte_never_gives_another_kind_of_error(tmp_path: Path, is_zip: bool) -> None:
    torch.save({"a": torch.arange(3), "b": [1.5]}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    whole = (tmp_path / "a.pt").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (tmp_path / "b.pt").write_bytes(damaged)
        try:
            file = opened(tmp_path / "b.pt")
            for _, leaf in leaves(file.value):
                if isinstance(leaf, TorchTensor):
                    file.read(leaf)
        except ShardproofError:
            pass


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 20))
    with pytest.raises(FormatError, match="compressed"):
        opened(tmp_path / "bomb.pt")


def test_a_value_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    value: dict[str, Any] = {}
    value["again"] = value
    torch.save(value, tmp_path / "a.pt")
    file = opened(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="200 levels"):
        list(leaves(file.value))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing\.pt"):
        opened(tmp_path / "nothing.pt")


def test_lists_that_are_shared_many_times_are_visited_once() -> None:
    shared: list[Any] = [1]
    for _ in range(150):
        shared = [shared, shared]
    assert [key for key, _ in leaves({"a": shared})] == [("a",)]

"""Files that are no checkpoint are named for what they are, and the advice of the error helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.errors import FormatError
from tests.unit.formats.peers import bits

LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
"""A pointer as the specification of Git LFS shows it."""
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>"
POINTER = r"is a Git LFS pointer, and not the file of 12345 bytes: run `git lfs pull`"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        *((f"a{suffix}", LFS, POINTER) for suffix in (".pt", ".ckpt", ".safetensors", ".unknown")),
        ("a.pt", PAGE, "is an HTML or XML page"),
        ("a.safetensors", PAGE, "is an HTML or XML page"),
        ("a.bin", b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF model"),
        ("a.onnx", b"\x08\x08\x12\x07pytorch" + bytes(50), "is an ONNX model"),
        ("a.pt", b"\x1f\x8b\x08\0" + bytes(50), "is compressed by gzip. Decompress it"),
        ("a.pt", b"", "is empty. Download or copy it again"),
        ("a.safetensors", b"", "is empty. Download or copy it again"),
    ],
)
def test_a_file_is_named_for_what_it_is(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    for use in (sp.open, lambda path: sp.load(path, {"w": torch.zeros(2)})):
        with pytest.raises(FormatError, match=rf"{name} {message}") as caught:
            use(tmp_path / name)
        assert caught.value.details["file"] == str(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "manifest.json"]
)
def test_a_pointer_in_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LFS)
    with pytest.raises(FormatError, match=rf"{name} {POINTER}"):
        sp.open(tmp_path)


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    """Its directory was at the end. Formats with the directory in front: `test_cut_files`."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"a.pt.*it was cut. Download or copy it again"):
        sp.open(tmp_path / "a.pt")


def script(path: Path, module: torch.nn.Module) -> None:
    torch.jit.script(module).save(path)


def export(path: Path, module: torch.nn.Module) -> None:
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "write", "message", "advised"),
    [
        ("a.pt", script, r"TorchScript.*torch\.jit\.load", lambda p: torch.jit.load(p).state_dict()),
        ("a.pt2", export, r"torch\.export\.load", lambda p: torch.export.load(p).state_dict),
    ],
)
def test_models_of_torch_are_named_and_the_advice_helps(
    tmp_path: Path,
    name: str,
    write: Callable[[Path, torch.nn.Module], None],
    message: str,
    advised: Callable[[Path], Any],
) -> None:
    module = torch.nn.Linear(2, 2)
    write(tmp_path / name, module)
    with pytest.raises(FormatError, match=rf"{name} is .*{message}"):
        sp.open(tmp_path / name)
    torch.save(dict(advised(tmp_path / name)), tmp_path / "state.pt")
    target = torch.nn.Linear(2, 2)
    sp.load(tmp_path / "state.pt", target)
    assert bits(target.weight.detach()) == bits(module.weight.detach())


def test_arrays_of_numpy_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(FormatError, match=rf"{name} .*numpy\.load"):
            sp.open(tmp_path / name)


def test_a_damaged_checkpoint_keeps_its_own_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(b"data.pkl")] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        sp.open(tmp_path / "a.pt")

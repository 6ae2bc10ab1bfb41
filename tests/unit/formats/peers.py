"""Checkpoints that released packages of other projects wrote, and the values expected of a reader."""

from __future__ import annotations

import base64
import copy
import json
import random
import tarfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import shardproof as sp
from shardproof.engine.loading import Checkpoint, ForeignCheckpoint
from shardproof.errors import ShardproofError
from shardproof.runs.maintenance import verify_foreign

PEERS = Path(__file__).resolve().parents[2] / "golden" / "peers"


class Golden:
    """One checkpoint, unpacked."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        with tarfile.open(PEERS / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        self.checkpoint = folder / name / "ckpt"
        self._expect(folder / name)

    def _expect(self, folder: Path) -> None:
        expected = json.loads((folder / "expected.json").read_text())
        self.kinds: dict[str, list[Any]] = expected["tensors"]
        """By key, the name of the dtype and the shape."""
        self.objects: dict[str, Any] = {key: _as_read(value) for key, value in expected["objects"].items()}
        """By key, the value as `tagged` gives it."""
        self._tensors = load_file(folder / "expected.safetensors")

    def merged(self) -> Golden:
        """The same checkpoint, with the values expected after flat ranges or ranks are merged."""
        merged = Golden(self._name, self._folder)
        merged._expect(self._folder / self._name / "merged")
        return merged

    def renamed(self, key_of: Callable[[str], str]) -> Golden:
        """The same with other keys of tensors, where the expectations leave keys free."""
        other = copy.copy(self)
        other.kinds = {key_of(key): kind for key, kind in self.kinds.items()}
        other._tensors = {key_of(key): tensor for key, tensor in self._tensors.items()}
        return other

    def tensor(self, key: str) -> torch.Tensor:
        """The expected tensor. Dtypes that safetensors lacks are in the file as bytes."""
        dtype, shape = self.kinds[key]
        found = self._tensors[key].reshape(-1)
        if not found.numel():
            return torch.empty(shape, dtype=getattr(torch, dtype))
        aligned = found.view(torch.uint8).clone()  # the file aligns no tensor
        return aligned.view(getattr(torch, dtype)).reshape(shape)

    def correct(self, key: str, index: tuple[int, ...], found: torch.Tensor, stored: torch.Tensor) -> None:
        """Replaces one expected element, where the peer's loader does not give the bits that are stored.

        Args:
            key: of the tensor.
            index: of the element.
            found: what the expectation has now.
            stored: the bits in the file.
        """
        expected = self.tensor(key).clone()
        assert bits(expected[index]) == bits(found), "the expectation is another one"
        expected[index] = stored
        self._tensors[key] = expected


def tagged(value: Any) -> Any:
    """A value as the expectations write it."""
    match value:
        case bool() | None | str():
            return value
        case np.generic():
            raw = base64.b64encode(value.tobytes()).decode()
            return {"$": "scalar", "dtype": value.dtype.str, "v": raw}
        case int():
            return value if abs(value) < 2**53 else {"$": "int", "v": str(value)}
        case float():
            return {"$": "float", "v": value.hex()}
        case torch.Size():
            return {"$": "size", "v": list(value)}
        case torch.dtype() | torch.device():
            return {"$": type(value).__name__, "v": str(value)}
        case tuple():
            return {"$": "tuple", "v": [tagged(item) for item in value]}
        case list():
            return [tagged(item) for item in value]
        case complex():
            return {"$": "complex", "v": [value.real.hex(), value.imag.hex()]}
        case bytes():
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        case set() | frozenset():
            return {"$": type(value).__name__, "v": [tagged(item) for item in sorted(value)]}
        case torch.Tensor():
            dtype, shape, data = bits(value)
            text = base64.b64encode(data).decode()
            return {
                "$": "tensor",
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(shape),
                "v": text,
            }
        case dict():
            pairs = [[tagged(key), tagged(item)] for key, item in value.items()]
            return {"$": "dict", "of": type(value).__name__, "v": pairs}
        case np.ndarray():
            raw = base64.b64encode(value.tobytes()).decode()
            return {"$": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "v": raw}
    return value


def _as_read(value: Any) -> Any:
    """An expectation with the values that readers give for classes: dict for Namespace, bytes for BytesIO."""
    match value:
        case {"$": "BytesIO"}:
            return value | {"$": "bytes"}
        case {"$": "object", "of": "argparse.Namespace"}:
            return {"$": "dict", "of": "dict", "v": _as_read(value["v"])}
        case {"$": _, "v": list()}:
            return value | {"v": _as_read(value["v"])}
        case list():
            return [_as_read(item) for item in value]
    return value


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """The dtype, shape and bytes of a tensor, to compare tensors bit for bit."""
    dense = tensor.reshape(-1)
    if not dense.numel():
        return tensor.dtype, tensor.shape, b""
    if dense.stride(0) != 1:
        dense = dense.clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, bytes(dense.view(torch.uint8).numpy())


def check_golden(golden: Golden, name: str, path: Path | None = None, *, more: Collection[str] = ()) -> None:
    """A golden checkpoint is recognized, and reads to its expected bits, whole and sliced.

    Args:
        golden: of which every key is expected under its own name.
        name: of the format that has to be recognized.
        path: to open; None for the folder of the checkpoint.
        more: keys of objects that the expectations leave out.
    """
    with sp.open(path or golden.checkpoint) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert checkpoint.reader.name == name
        assert checkpoint.keys() == sorted([*golden.kinds, *golden.objects, *more])
        check_tensors(golden, checkpoint)
        found = {key: tagged(checkpoint.reader.object(key)) for key in golden.objects}
        assert found == golden.objects
        report = verify_foreign(checkpoint)
        assert report.ok, report.faults
        assert report.bytes + report.unproved > 0


def check_tensors(golden: Golden, checkpoint: Checkpoint) -> None:
    """The tensors of an open checkpoint read to their expected bits, whole and sliced."""
    chosen = random.Random(0)
    for key in golden.kinds:
        expected = golden.tensor(key)
        assert bits(checkpoint[key].read()) == bits(expected), key
        box = tuple(
            slice(at, chosen.randint(at, extent), chosen.randint(1, 2))
            for extent in expected.shape
            for at in (chosen.randint(0, extent),)
        )
        assert bits(checkpoint[key][box]) == bits(expected[box]), (key, box)


def damages_found(paths: Iterable[Path], read: Callable[[Path], object], *, every: int) -> int:
    """Flips a bit of each `every`-th byte of files in turn. Returns how many times the read was an error.

    Args:
        paths: of the files.
        read: opens the checkpoint and compares what it reads, given the file that is damaged.
        every: bytes from one damage to the next.
    """
    found = 0
    for path in sorted(paths):
        whole = path.read_bytes()
        for at in range(0, len(whole), every):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            path.write_bytes(damaged)
            try:
                read(path)
            except ShardproofError:
                found += 1
        path.write_bytes(whole)
    return found

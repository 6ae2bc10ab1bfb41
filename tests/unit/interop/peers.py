"""Checkpoints that released packages of other projects wrote, and what they must read as."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

PEERS = Path(__file__).resolve().parents[2] / "golden" / "peers"


class Golden:
    """One checkpoint, unpacked."""

    def __init__(self, name: str, folder: Path) -> None:
        with tarfile.open(PEERS / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        self.checkpoint = folder / name / "ckpt"
        expected = json.loads((folder / name / "expected.json").read_text())
        self.kinds: dict[str, list[Any]] = expected["tensors"]
        """By key, the name of the dtype and the shape."""
        self.objects: dict[str, Any] = expected["objects"]
        """By key, the value as `tagged` gives it."""
        self._tensors = load_file(folder / name / "expected.safetensors")

    def tensor(self, key: str) -> torch.Tensor:
        """The expected tensor. Dtypes that safetensors lacks are in the file as bytes."""
        dtype, shape = self.kinds[key]
        found = self._tensors[key]
        return (
            found.reshape(-1).view(getattr(torch, dtype)).reshape(shape)
            if found.numel()
            else (torch.empty(shape, dtype=getattr(torch, dtype)))
        )


def tagged(value: Any) -> Any:
    """A value as the expectations write it."""
    if isinstance(value, float):
        return {"$": "float", "v": value.hex()}
    if isinstance(value, tuple):
        return {"$": "tuple", "v": [tagged(item) for item in value]}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    return value


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """What two tensors have in common if they are equal bit for bit."""
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

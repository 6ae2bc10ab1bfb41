"""Helpers for tests of writers: tensors of every kind, a source of boxes, and torch's own loader."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardproof.interop import Contents, WriteOptions, writer_of
from shardproof.storage import LocalStorage, Storage

__all__ = ["Source", "contents_of", "loaded", "some_tensor", "written"]


def some_tensor(name: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a dtype with various bits."""
    dtype: torch.dtype = getattr(torch, name)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).to(torch.uint8) % (2 if name == "bool" else 250)
    return raw.view(dtype).reshape(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def loaded(source: bytes | Path, **options: Any) -> Any:
    """The value that ``torch.load`` reads, by default with ``weights_only=True``."""
    options = {"weights_only": True, **options}
    found = io.BytesIO(source) if isinstance(source, bytes) else source
    return torch.load(found, **options)  # noqa: TID251 the reader that others use


class Source:
    """A source of boxes that records the bytes of its largest read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.largest = 0

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Reads a box; see `BoxSource`."""
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        found = self.tensors[key][box].contiguous()
        self.largest = max(self.largest, found.nbytes)
        return found


def contents_of(tensors: Mapping[str, torch.Tensor], **rest: Any) -> Contents:
    """Contents with these tensors."""
    kinds = {key: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in tensors.items()}
    return Contents(kinds, **rest)


def written(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    target: Path | Storage,
    options: WriteOptions | None = None,
    **rest: Any,
) -> Source:
    """Writes a whole checkpoint of a format, and returns the source that it was read from."""
    storage = LocalStorage(target) if isinstance(target, Path) else target
    writer = writer_of(name)(contents_of(tensors, **rest), options or WriteOptions())
    source = Source(tensors)
    records = {unit.name: writer.write(unit, source, storage) for unit in reversed(writer.units)}
    writer.commit(records, storage)
    return source

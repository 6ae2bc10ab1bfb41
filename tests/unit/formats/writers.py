"""Helpers for tests of writers: tensors of random bits, a source of boxes, and the steps of a conversion."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shardproof.dtypes import DTYPES
from shardproof.formats import Contents, FormatWriter, WriteOptions, writer_of
from shardproof.storage import LocalStorage, Storage

ALL_DTYPES = [name for name in DTYPES if hasattr(torch, name)]


def random_bits(name: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, so that NaN payloads and denormals are among them; booleans are 0 or 1."""
    dtype: torch.dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    raw = raw % 2 if name == "bool" else raw
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def tensors(dtypes: Sequence[str]) -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """Tensors by key, of up to 3 dimensions, empty ones among them."""
    shapes = st.lists(st.integers(0, 5), max_size=3)
    kind = st.builds(random_bits, st.sampled_from(dtypes), shapes, st.integers(0, 1 << 16))
    keys = st.sampled_from(["w", "model.w", "model.layers.0.bias", "ü/ 1", "z", "a.b.c", "[0:1]"])
    return st.dictionaries(keys, kind, max_size=5)


class TensorSource:
    """A source of boxes in memory. It fails at the read with number `fails_at`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], fails_at: int = -1) -> None:
        self._tensors = tensors
        self._fails_at = fails_at
        self.reads = 0
        self.largest = 0
        """Bytes of the largest read."""

    def note(self, key: str, offsets: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        pass

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if self.reads == self._fails_at:
            raise InterruptedError
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        values = self._tensors[key][box].contiguous()
        self.reads += 1
        self.largest = max(self.largest, values.nbytes)
        return values


def contents_of(tensors: Mapping[str, torch.Tensor], **rest: Any) -> Contents:
    """Contents with these tensors."""
    kinds = {key: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in tensors.items()}
    return Contents(kinds, **rest)


def write_all(
    writer: FormatWriter, tensors: Mapping[str, torch.Tensor], target: Path | Storage
) -> TensorSource:
    """Writes all units, the last first, and commits with records that went through JSON."""
    source, target = TensorSource(tensors), LocalStorage(target) if isinstance(target, Path) else target
    for unit in writer.units:
        if all(key in tensors for key, _, _ in unit.boxes):
            volumes = [math.prod(sizes) * tensors[key].element_size() for key, _, sizes in unit.boxes]
            assert sum(volumes) == unit.nbytes
    records = {unit.name: writer.write(unit, source, target) for unit in reversed(writer.units)}
    writer.commit(json.loads(json.dumps(records)), target)
    return source


def write(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    target: Path | Storage,
    options: WriteOptions | None = None,
    **rest: Any,
) -> TensorSource:
    """Writes a whole checkpoint of a format, and returns the source that it was read from."""
    writer = writer_of(name)(contents_of(tensors, **rest), options or WriteOptions())
    return write_all(writer, tensors, target)


def torch_loaded(source: bytes | Path, **options: Any) -> Any:
    """The value that ``torch.load`` reads, by default with ``weights_only=True``."""
    options = {"weights_only": True, **options}
    found = io.BytesIO(source) if isinstance(source, bytes) else source
    return torch.load(found, **options)  # noqa: TID251 the reader that others use

"""Reads the bytes of a box from a source, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import Boxes, cut
from shardproof.engine.state import as_bytes
from shardproof.errors import StructureError
from shardproof.formats.writer import BoxSource


def box_bytes(
    source: BoxSource, key: str, dtype: str, offsets: Sequence[int], sizes: Sequence[int], piece_bytes: int
) -> Iterator[memoryview]:
    r"""Yields the bytes of a box in row-major order.

    Args:
        source: gives the values.
        key: key of a tensor.
        dtype: torch's name of its dtype.
        offsets: (d,) first index of the box.
        sizes: (d,) sizes of the box.
        piece_bytes: bytes of one read, at most, unless a single element is larger.

    Yields:
        Pieces of at least one byte; none for an empty box.

    Raises:
        StructureError: the source gives another dtype or shape.
        ShardproofError: the source is damaged or cannot be read.

    Example:
        >>> import torch
        >>> values = torch.arange(6, dtype=torch.uint8).reshape(3, 2)
        >>> class Source:
        ...     def read(self, key, offsets, sizes):
        ...         return values[offsets[0] : offsets[0] + sizes[0]]
        >>> [bytes(piece) for piece in box_bytes(Source(), "w", "uint8", (1, 0), (2, 2), 3)]
        [b'\x02\x03', b'\x04\x05']
    """
    limit = max(piece_bytes // DTYPES[dtype].itemsize, 1)
    pieces, _ = cut(Boxes.of((offsets, sizes)), limit)
    for start, extent in zip(pieces.offsets.tolist(), pieces.sizes.tolist(), strict=True):
        values = source.read(key, tuple(start), tuple(extent))
        found = str(values.dtype).removeprefix("torch."), list(values.shape)
        if found != (dtype, extent):
            raise StructureError(
                f"{key!r}: the source gives {found[0]} of shape {found[1]}, expected {dtype} of {extent}",
                key=key,
            )
        yield as_bytes(values).numpy().data

"""Tensors whose local parts the program describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from shardproof.engine.state.records import Piece
from shardproof.engine.state.tensors import PLAIN_TYPES, check_memory, dtype_name
from shardproof.errors import StructureError

if TYPE_CHECKING:
    from shardproof.engine.geometry import IndexMap


class LocalShards:
    """The boxes of a global tensor on this rank.

    Args:
        shape: global shape, the same on every rank.
        pieces: pairs of a local view and the global offsets of its first element. A rank may have none.
        dtype: dtype of the tensor; required without pieces.

    Raises:
        StructureError: a piece does not lie within the shape or has another dtype.

    Example:
        Rank 1 of a 4 x 3 tensor whose first three rows are on rank 0:

        >>> row = torch.zeros(1, 3)
        >>> LocalShards((4, 3), [(row, (3, 0))])
        LocalShards(shape=(4, 3), dtype=torch.float32, pieces=1)
    """

    def __init__(
        self,
        shape: Sequence[int],
        pieces: Iterable[tuple[torch.Tensor, Sequence[int]]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.pieces = [(view, tuple(int(offset) for offset in offsets)) for view, offsets in pieces]
        if dtype is None:
            if not self.pieces:
                raise StructureError(
                    "LocalShards without pieces need a dtype: give dtype=, the same as on other ranks"
                )
            dtype = self.pieces[0][0].dtype
        self.dtype = dtype
        for view, offsets in self.pieces:
            self._check(view, offsets)

    def _check(self, view: torch.Tensor, offsets: tuple[int, ...]) -> None:
        if type(view) not in PLAIN_TYPES or view.layout is not torch.strided:
            raise StructureError(
                f"a piece must be a plain strided tensor, found a {type(view).__name__} of {view.layout}"
            )
        if view.dtype != self.dtype:
            raise StructureError(f"a piece has dtype {view.dtype}, but the tensor has {self.dtype}")
        inside = len(offsets) == view.dim() == len(self.shape) and all(
            0 <= offset <= size - part
            for offset, part, size in zip(offsets, view.shape, self.shape, strict=True)
        )
        if not inside:
            raise StructureError(
                f"a piece of shape {list(view.shape)} at offsets {list(offsets)} does not lie within "
                f"the global shape {list(self.shape)}"
            )

    def __repr__(self) -> str:
        return f"LocalShards(shape={self.shape}, dtype={self.dtype}, pieces={len(self.pieces)})"


class FlatShard:
    """A 1-D buffer with the elements [start, stop) of a tensor in row-major order.

    Args:
        buffer: 1-D, ``stop - start`` elements.
        shape: global shape.
        start: first element.
        stop: element after the last.
        index_map: map (`shardproof.geometry.IndexMap`) from the local array to the global tensor, for
            a tensor parallel shard or a fused weight. The range then counts elements of the local array.
            Without it the local array is the global tensor.

    Raises:
        StructureError: `buffer` does not have the shape ``[stop - start]``, or `index_map` has another global
            shape.

    >>> FlatShard(torch.zeros(5), (4, 3), 2, 7).sharded()
    LocalShards(shape=(4, 3), dtype=torch.float32, pieces=3)
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        shape: Sequence[int],
        start: int,
        stop: int,
        index_map: IndexMap | None = None,
    ) -> None:
        self.buffer = buffer
        self.shape = tuple(shape)
        self.start = start
        self.stop = stop
        self.index_map = index_map
        if buffer.dim() != 1 or buffer.numel() != stop - start:
            raise StructureError(
                f"the buffer of a flat shard has shape {list(buffer.shape)}, expected [{stop - start}] for "
                f"elements {start} to {stop}"
            )
        if index_map is not None and tuple(index_map.global_shape) != self.shape:
            raise StructureError(
                f"the index map has the global shape {list(index_map.global_shape)}, expected {list(shape)}"
            )

    def sharded(self) -> LocalShards:
        """The same elements as boxes that share the memory of the buffer."""
        from shardproof.engine.geometry import IndexMap, flat_shard

        try:
            boxes, starts, strides = flat_shard(
                self.index_map or IndexMap.whole(self.shape), self.start, self.stop
            )
        except ValueError as error:
            raise StructureError(f"flat shard [{self.start}, {self.stop}): {error}") from error
        buffer = self.buffer.detach()
        base, step = buffer.storage_offset(), buffer.stride(0)
        pieces = [
            (buffer.as_strided(sizes, [stride * step for stride in strides_of], base + start * step), offsets)
            for offsets, sizes, start, strides_of in zip(
                boxes.offsets.tolist(), boxes.sizes.tolist(), starts.tolist(), strides.tolist(), strict=True
            )
        ]
        return LocalShards(self.shape, pieces, dtype=self.buffer.dtype)

    def __repr__(self) -> str:
        return f"FlatShard(shape={self.shape}, dtype={self.buffer.dtype}, range=[{self.start}, {self.stop}))"


def described(value: LocalShards | FlatShard, key: str) -> tuple[str, tuple[int, ...], tuple[Piece, ...]]:
    """Returns dtype, global shape and the non-empty pieces.

    Raises:
        StructureError: a piece cannot be stored; the message names the key.
    """
    if isinstance(value, FlatShard):
        check_memory(value.buffer, key)
        value = value.sharded()
    placed = [(view.detach(), offsets) for view, offsets in value.pieces if view.numel()]
    views, offsets = [view for view, _ in placed], [offsets for _, offsets in placed]
    sizes = [tuple(view.shape) for view in views]
    pieces = tuple(Piece.of_all([key] * len(views), views, offsets, sizes))
    return dtype_name(value.dtype, key), value.shape, pieces

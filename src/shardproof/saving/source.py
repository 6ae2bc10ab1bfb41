"""Where the bytes of each planned chunk lie in this rank's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardproof.planning import RankPlan
from shardproof.state import Piece, is_plain_memory

__all__ = ["Chunk", "chunks_of"]


@dataclass(slots=True)
class Chunk:
    """Bytes of one chunk: an address in host memory, and the tensor that keeps it valid."""

    address: int
    byte_count: int
    owner: torch.Tensor


def chunks_of(pieces: Sequence[Piece], plan: RankPlan) -> Iterator[Chunk]:
    """The chunks of a plan, in the order of the file.

    Contiguous host memory is handed out as it is. Anything else (device memory, strided or conjugate views)
    is copied to host memory one chunk at a time, so that at most one chunk's worth is held.
    """
    ndims = [piece.view.dim() for piece in pieces]
    box_start = 0
    columns = zip(plan.piece.tolist(), plan.piece_start.tolist(), plan.byte_count.tolist(), strict=True)
    for row, start, byte_count in columns:
        piece, ndim = pieces[row], ndims[row]
        view = piece.view
        if is_plain_memory(view):
            yield Chunk(view.data_ptr() + start * view.element_size(), byte_count, view)
        else:
            offsets = plan.box_offsets[box_start : box_start + ndim]
            sizes = plan.box_sizes[box_start : box_start + ndim]
            copied = _to_host(piece, offsets.tolist(), sizes.tolist())
            yield Chunk(copied.data_ptr(), byte_count, copied)
        box_start += ndim


def _to_host(piece: Piece, offsets: list[int], sizes: list[int]) -> torch.Tensor:
    """A contiguous host copy of one chunk of a piece."""
    part = piece.view
    for dim, (offset, size, first) in enumerate(zip(offsets, sizes, piece.offsets, strict=True)):
        part = part.narrow(dim, offset - first, size)
    return part.resolve_conj().resolve_neg().contiguous().cpu()


def digests_as_array(digests: Sequence[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Digests of 16 big-endian bytes as (n, 2) columns: high half, low half."""
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)

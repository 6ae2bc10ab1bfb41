"""Proves that the moves of a map fill every written tensor once, from boxes that the stored tensors have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import Boxes, tiling_faults
from shardproof.errors import StructureError, TilingError
from shardproof.formats.conversion.key_maps.key_matching import Stored
from shardproof.formats.conversion.request import MappedTensor, Move


def check_mapped(tensors: Mapping[str, MappedTensor], stored: Mapping[str, Stored]) -> None:
    """Checks what a map gives.

    Args:
        tensors: the written tensors by key.
        stored: dtype and shape of each stored tensor.

    Raises:
        StructureError: a value is not a `MappedTensor`, or a move does not fit its tensors.
        TilingError: moves overlap, or do not fill a tensor.
    """
    by_dimensions: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not key or not isinstance(tensor, MappedTensor):
            raise StructureError(f"key map: {key!r} is mapped to {type(tensor).__name__}, not MappedTensor")
        if tensor.dtype not in DTYPES or any(type(size) is not int or size < 0 for size in tensor.shape):
            raise StructureError(
                f"key map: {key!r} has dtype {tensor.dtype!r} and shape {tensor.shape!r}", key=key
            )
        for move in tensor.moves:
            _check_move(key, tensor, move, stored)
        by_dimensions.setdefault(len(tensor.shape), []).append(key)
    for ndim, keys in by_dimensions.items():
        _check_tiling(ndim, keys, tensors)


def _check_move(key: str, tensor: MappedTensor, move: Move, stored: Mapping[str, Stored]) -> None:
    fits = len(move.offsets) == len(move.sizes) == len(tensor.shape) and min(move.sizes, default=0) >= 0
    if fits and move.key is not None:
        shape = stored.get(move.key, ("", None))[1]
        if shape is None:
            raise StructureError(f"key map: {key!r} comes from {move.key!r}, which is not stored", key=key)
        axes = move.axes or tuple(range(len(shape)))
        fits = (
            len(move.source_offsets) == len(move.source_sizes) == len(shape)
            and all(
                min(at, size) >= 0 and at + size <= extent
                for at, size, extent in zip(move.source_offsets, move.source_sizes, shape, strict=True)
            )
            and sorted(axes) == list(range(len(shape)))
            and prod(move.source_sizes) == prod(move.sizes)
        )
    if not fits:
        raise StructureError(
            f"key map: {key!r} of shape {list(tensor.shape)} has a wrong move: {move}", key=key
        )


def _check_tiling(ndim: int, keys: list[str], tensors: Mapping[str, MappedTensor]) -> None:
    moves = [move for key in keys for move in tensors[key].moves]
    counts = [len(tensors[key].moves) for key in keys]
    columns = (len(moves), ndim)
    boxes = Boxes(
        np.array([move.offsets for move in moves], np.int64).reshape(columns),
        np.array([move.sizes for move in moves], np.int64).reshape(columns),
    )
    shapes = np.array([tensors[key].shape for key in keys], np.int64).reshape(len(keys), ndim)
    for fault in tiling_faults(shapes, np.repeat(np.arange(len(keys)), counts), boxes):
        key = keys[fault.tensor]
        raise TilingError(
            f"key map: the moves of {key!r} have a fault, {fault.kind}, at {list(fault.offsets)}, sizes "
            f"{list(fault.sizes)}: each element of {list(tensors[key].shape)} needs exactly one move",
            key=key,
            kind=fault.kind,
        )

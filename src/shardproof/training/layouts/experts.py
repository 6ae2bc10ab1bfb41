"""Experts as separate modules, as numbered parameters, side by side in one weight, or stacked.

All four have the same key and the same shape in the model, (experts, *shape of one expert). So a checkpoint
of one loads into any other. A checkpoint stores scalars (step counts) for each expert. Experts in one
weight share one scalar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from shardproof.engine.state import Layout, declare, number_expert
from shardproof.errors import StructureError
from shardproof.training.layouts.parts import Owned, Part, Segments, blocks_of, index_map_of

__all__ = ["grouped", "numbered", "sequential", "stacked"]


def sequential(experts: Sequence[torch.nn.Module], *, first: int = 0, total: int | None = None) -> None:
    """Declares that modules are experts, each with the same parameters.

    The keys omit the segment of an expert (its number in the list). Declare layouts inside an expert (a fused
    SwiGLU) before this call.

    Args:
        experts: the local experts, in order.
        first: number of the first local expert in the model.
        total: number of experts in the model. Default: up to the last local expert.

    Raises:
        StructureError: there are more experts than `total`, or a parameter already belongs to an expert.

    >>> from shardproof.state import collect
    >>> local = torch.nn.ModuleList([torch.nn.Linear(3, 2, bias=False) for _ in range(2)])
    >>> sequential(local, first=2, total=4)
    >>> (entry,) = collect(local).tensors
    >>> entry.key, entry.shape, [piece.offsets for piece in entry.pieces]
    ('weight', (4, 2, 3), [(2, 0, 0), (3, 0, 0)])
    """
    total = _total(first, len(experts), total)
    for number, expert in enumerate(experts, first):
        number_expert(expert, number)
        for part in expert.modules():
            for name, tensor in {**part._parameters, **part._buffers}.items():
                if tensor is not None and name not in part._non_persistent_buffers_set:
                    _declare_expert(Owned(part, name), number, total)


def numbered(module: torch.nn.Module, name: str, *, first: int = 0, total: int | None = None) -> None:
    """Declares that parameters ``<name>0``, ``<name>1``, ... of one module are experts.

    Args:
        module: the module that owns the parameters, or one above it.
        name: dotted name of the parameters in `module`, without the number. Keys contain this name.
        first: number of the first local expert in the model.
        total: number of experts in the model. Default: up to the last local expert.

    Raises:
        StructureError: there are no such parameters, there are more than `total`, or one already belongs to
            an expert.

    >>> from shardproof.state import collect
    >>> module = torch.nn.Module()
    >>> module.weight0, module.weight1 = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    >>> numbered(module, "weight")
    >>> [(entry.key, entry.shape) for entry in collect(module).tensors]
    [('weight', (2, 3, 2))]
    """
    *_, last = name.split(".")
    items = [Owned(module, f"{name}0")]
    while items[0].module._parameters.get(f"{last}{len(items)}") is not None:
        items.append(Owned(module, f"{name}{len(items)}"))
    total = _total(first, len(items), total)
    for number, item in enumerate(items, first):
        _declare_expert(item, number, total, last)


def stacked(
    module: torch.nn.Module,
    name: str,
    *,
    first: int = 0,
    total: int | None = None,
    transposed: bool = False,
    key: str | None = None,
    parts: Sequence[int | Part] | None = None,
    dim: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Declares that the first dimension of a tensor indexes experts.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        first: number of the first local expert in the model.
        total: number of experts in the model. Default: up to the last local expert.
        transposed: True if an expert's matrix is (in, out) in this tensor and (out, in) in the model.
        key: name of the tensor in keys, if it differs from its own name, for example ``fc1.weight``.
        parts: the parts of an expert's tensor along `dim`, as in `fused`.
        dim: dimension of an expert's tensor in local memory.
        rank: tensor parallel rank of this process, within an expert.
        ranks: number of tensor parallel ranks of an expert.

    Raises:
        ValueError: the ranks cannot divide the parts.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    >>> from shardproof.state import collect
    >>> module = torch.nn.Module()
    >>> module.w1 = torch.nn.Parameter(torch.ones(2, 3, 4))
    >>> stacked(module, "w1", first=2, total=4, transposed=True, key="fc1.weight")
    >>> [(entry.key, entry.shape, entry.pieces[0].offsets) for entry in collect(module).tensors]
    [('fc1.weight', (4, 4, 3), (2, 0, 0))]
    """
    item = Owned(module, name)
    if not item.tensor.dim():
        raise StructureError(f"{item.where} is a scalar and has no dimension for experts")
    factors = tuple((size,) for size in item.tensor.shape)
    _declare_axes(item, factors, 0, first, total, transposed, key, _Cut(parts, dim, rank, ranks))


def grouped(
    module: torch.nn.Module,
    name: str,
    *,
    count: int,
    along: int,
    first: int = 0,
    total: int | None = None,
    transposed: bool = False,
    key: str | None = None,
    parts: Sequence[int | Part] | None = None,
    dim: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Declares that a tensor concatenates the tensors of several experts.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        count: number of experts in the tensor.
        along: dimension of the concatenation: 1 for (in, experts * out).
        first: number of the first local expert in the model.
        total: number of experts in the model. Default: up to the last local expert.
        transposed: True if an expert's matrix is (in, out) in this tensor and (out, in) in the model.
        key: name of the tensor in keys, if it differs from its own name, for example ``fc1.weight``.
        parts: the parts of an expert's tensor along `dim`, as in `fused`.
        dim: dimension of an expert's tensor in local memory.
        rank: tensor parallel rank of this process, within an expert.
        ranks: number of tensor parallel ranks of an expert.

    Raises:
        ValueError: the ranks cannot divide the parts.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    >>> from shardproof.state import collect
    >>> module = torch.nn.Module()
    >>> module.weight1 = torch.nn.Parameter(torch.ones(3, 2 * 4))  # (in, experts * out)
    >>> grouped(module, "weight1", count=2, along=1, transposed=True, key="fc1.weight")
    >>> [(entry.key, entry.shape) for entry in collect(module).tensors]
    [('fc1.weight', (2, 4, 3))]
    """
    item = Owned(module, name)
    shape = tuple(item.tensor.shape)
    if not -len(shape) <= along < len(shape) or count < 1 or shape[along] % count:
        raise StructureError(
            f"{item.where} has shape {list(shape)}, which is not {count} experts side by side along {along}"
        )
    along %= len(shape)
    factors = tuple((count, size // count) if axis == along else (size,) for axis, size in enumerate(shape))
    _declare_axes(item, factors, along, first, total, transposed, key, _Cut(parts, dim, rank, ranks))


class _Cut(NamedTuple):
    """The part of each expert that a rank has; see `stacked`."""

    parts: Sequence[int | Part] | None
    dim: int
    rank: int
    ranks: int


def _declare_axes(
    item: Owned,
    factors: tuple[tuple[int, ...], ...],
    axis: int,
    first: int,
    total: int | None,
    transposed: bool,
    key: str | None,
    cut: _Cut,
) -> None:
    """Declares a tensor whose axes are split into `factors`, of which number `axis` indexes the experts."""
    local_shape = [size for sizes in factors for size in sizes]
    count, shape = local_shape[axis], local_shape[:axis] + local_shape[axis + 1 :]
    total = _total(first, count, total)
    if transposed and len(shape) != 2:
        raise StructureError(f"{item.where} holds experts of shape {shape}; transposed=True needs matrices")
    own: list[tuple[Segments, int]] = [([(0, size)], size) for size in shape]
    if cut.parts is not None:
        if not -len(own) <= cut.dim < len(own):
            raise StructureError(
                f"{item.where} holds experts of shape {shape}, which have no dimension {cut.dim}"
            )
        sizes = [part.size if isinstance(part, Part) else part for part in cut.parts]
        blocks = blocks_of(cut.parts, cut.ranks)
        own[cut.dim] = item.segments_of(shape[cut.dim], blocks, cut.rank), sum(sizes)
    axes = [*own[:axis], ([(first, count)], total), *own[axis:]]
    within = [number for number in range(len(axes)) if number != axis]
    order = (axis, *(reversed(within) if transposed else within))
    index_map = index_map_of(axes, local_shape)
    item.declare(Layout.of(index_map, factors=factors, order=order, name=key, experts=True))


def _declare_expert(item: Owned, number: int, total: int, name: str | None = None) -> None:
    layout = item.layout or Layout.whole(item.tensor.shape)
    if layout.experts:
        raise StructureError(f"{item.where} already belongs to an expert: {layout}")
    layout = layout.expert(number, total)
    declare(item.module, item.name, replace(layout, name=name) if name else layout)


def _total(first: int, count: int, total: int | None) -> int:
    total = first + count if total is None else total
    if first < 0 or first + count > total:
        raise StructureError(f"{count} experts from number {first} on exceed a total of {total}")
    return total

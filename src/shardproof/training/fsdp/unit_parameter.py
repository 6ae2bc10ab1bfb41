"""The parameters of a unit: sharded for the optimizer, whole for the module, packed into flat buffers.

The packing is pure arithmetic, the same on every rank. A flat buffer is cut into equal ranges, one for each
rank. No cut may fall inside a row of a parameter (an index of its first dimension). This holds if the
parameter starts at a multiple of its row size, and the ranges are multiples of it, too. So each buffer has a
*row unit*, the least common multiple of the row sizes in it. A parameter whose row size would make the row
unit too large gets another buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.training.fsdp.row_layout import TensorSpec
from shardproof.training.fsdp.row_sharded import RowSharded, in_layout, row_sharded

_WASTE = 16
"""Row sizes share a buffer if the padding for their common multiple is below 1 / _WASTE of all elements."""


class UnitParameter:
    """A parameter, the modules that have it, and its position in a flat buffer.

    Each owner is a module with the name of the parameter in it. A tied parameter has several owners.
    """

    def __init__(
        self,
        name: str,
        owners: list[tuple[nn.Module, str]],
        spec: TensorSpec,
        packing: Packing,
        member: int,
        index: int,
    ) -> None:
        self.name, self.owners, self.spec, self.member = name, owners, spec, member
        self.rows = packing.rows(member, index)
        bounds = tuple(packing.rows(member, rank) for rank in range(packing.ranks))
        self.layout = spec.layout(bounds, index)
        self.elements = packing.elements(member, index)
        self.start = packing.starts[member]
        self.shape = packing.shapes[member]
        self.stop = self.start + prod(self.shape)
        self.local = torch.empty(0, dtype=torch.float32, device="cpu")
        self.sharded: Any = None
        self.whole: Any = None
        self.on_gradient: Callable[[UnitParameter, torch.Tensor], None]
        """Called with each gradient of the whole parameter. The unit sets it."""

    def current(self) -> Any:
        """The parameter that the module has now."""
        module, name = self.owners[0]
        return module._parameters[name]

    def register(self, parameter: Any) -> None:
        """Registers a tensor as the parameter of all owners."""
        for module, name in self.owners:
            module._parameters[name] = parameter

    def show_sharded(self) -> None:
        """Registers the sharded parameter."""
        self.register(self.sharded)

    def show_whole(self) -> None:
        """Registers the whole parameter, for the module's computation."""
        if self.whole.requires_grad != self.sharded.requires_grad:
            self.whole.requires_grad_(self.sharded.requires_grad)
        self.register(self.whole)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's rows."""
        return (self.rows[1] - self.rows[0], *self.shape[1:])

    def part(self, shard: torch.Tensor) -> torch.Tensor:
        """This parameter's rows in a rank's range of a buffer, as a view.

        Without rows it is a new tensor: two empty views of one buffer would count as one tied parameter.
        """
        if self.elements[0] == self.elements[1]:
            return shard.new_empty(self.local_shape())
        return shard[self.elements[0] : self.elements[1]].view(self.local_shape())

    def bind_shard(self, shard: torch.Tensor, requires_grad: bool) -> None:
        """Makes the sharded parameter a view of the rank's range. An existing one keeps its identity."""
        self.local = self.part(shard)
        with torch.no_grad():
            fresh = nn.Parameter(row_sharded(self.layout, self.local), requires_grad=requires_grad)
        if self.sharded is None:
            self.sharded = fresh
            if fresh.is_floating_point():  # also if frozen, because that may change
                fresh.requires_grad_(True).register_hook(partial(in_layout, self.layout))  # type: ignore[no-untyped-call]
                fresh.requires_grad_(requires_grad)
        else:
            torch.utils.swap_tensors(self.sharded, fresh)  # type: ignore[no-untyped-call]
            self.sharded._backward_hooks = self.sharded._backward_hooks  # swap_tensors drops them
        self.local = self.sharded._local_tensor
        self.show_sharded()

    def bind_whole(self, whole: torch.Tensor) -> None:
        """Makes the whole parameter a view of the gathered buffer."""
        view = whole[self.start : self.stop].view(self.shape)
        with torch.no_grad():
            self.whole = nn.Parameter(self.spec.gathered(view), requires_grad=view.is_floating_point())
        if self.whole.requires_grad:  # also if frozen, because that may change
            self.whole.register_post_accumulate_grad_hook(self._arrived)
            self.whole.requires_grad_(self.sharded.requires_grad)

    def is_bound(self) -> bool:
        """True if the module's parameter is still the view of the flat buffer."""
        current = self.current()
        return current is self.sharded and current._local_tensor is self.local

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that replaced the parameter: a shard of the same layout, or a whole.

        Raises:
            ValueError: the tensor has another shape.
        """
        if isinstance(parameter, RowSharded):
            if tuple(parameter._local_tensor.shape) == self.local_shape():
                return parameter._local_tensor
            raise self._shape_error(parameter._local_tensor, self.local_shape())
        if isinstance(parameter, DTensor) and parameter.device_mesh == self.layout.mesh:
            if tuple(parameter.shape) != self.layout.shape:
                raise self._shape_error(parameter, self.layout.shape)
            return self.layout.take(parameter)
        return self.rows_of(parameter)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that is not sharded by data parallelism.

        A DTensor is a tensor parallel shard. A plain tensor is the whole parameter.

        Raises:
            ValueError: the tensor has another shape.
        """
        if isinstance(whole, DTensor):
            whole = whole._local_tensor
        elif self.spec.parallel is not None and tuple(whole.shape) == self.spec.shape:
            packed = whole.new_empty(self.shape)
            outer = self.spec.outer
            for index in range(len(outer.local)):
                local, size = outer.local.pair(index)
                start, _ = outer.placed.pair(index)
                packed[_box(local, size)] = whole[_box(start, size)]
            whole = packed
        if tuple(whole.shape) != self.shape:
            raise self._shape_error(whole, self.shape)
        return whole[self.rows[0] : self.rows[1]]

    def _shape_error(self, found: torch.Tensor, expected: tuple[int, ...]) -> ValueError:
        return ValueError(
            f"{self.name}: expected a tensor of local shape {list(expected)}, this rank's part of "
            f"{list(self.spec.shape)}, found {list(found.shape)}. Use load_full_state_dict or shardproof.load"
        )

    def gradient(self, part: torch.Tensor) -> None:
        """Sets the gradient from a reduced buffer, or adds to the gradient that the parameter has."""
        local = self.part(part)
        if self.sharded.grad is None:
            self.sharded.grad = row_sharded(self.layout, local)
        else:
            self.sharded.grad.add_(row_sharded(self.layout, local))

    def _arrived(self, whole: Any) -> None:
        gradient, whole.grad = whole.grad, None
        if gradient is None:  # frozen since the forward
            return
        if isinstance(gradient, DTensor):
            assert self.spec.parallel is not None
            if tuple(gradient.placements) != self.spec.parallel[1]:  # partial sums of a replicated weight
                gradient = gradient.redistribute(placements=self.spec.parallel[1])
            gradient = gradient.to_local()
        if hasattr(gradient, "wait"):  # a collective of tensor parallelism that has not ended
            gradient = gradient.wait()
        self.on_gradient(self, gradient)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Packing:
    """A flat buffer of `ranks` ranges of `shard` elements, and the parameters in it.

    >>> packing = pack([(5, 4), (3,)], 2, 4)[0]
    >>> packing
    Packing(ranks=2, shard=12, members=(0, 1), shapes=((5, 4), (3,)), starts=(0, 20))
    >>> packing.rows(0, 0), packing.rows(0, 1), packing.rows(1, 0)
    ((0, 3), (3, 5), (0, 0))
    """

    ranks: int
    shard: int
    members: tuple[int, ...]
    """Indices of the packed parameters in the argument of `pack`."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each member."""
    starts: tuple[int, ...]
    """Element of the buffer at which each member starts."""

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.ranks * self.shard

    def rows(self, member: int, rank: int) -> tuple[int, int]:
        """The rows [first, stop) of a member in a rank's range; (0, 0) if none."""
        row = prod(self.shapes[member][1:])
        count, start = self.shapes[member][0], self.starts[member]
        if not row or not count:
            return 0, 0
        first = min(max(rank * self.shard - start, 0) // row, count)
        stop = min(max((rank + 1) * self.shard - start, 0) // row, count)
        return (first, stop) if first < stop else (0, 0)

    def elements(self, member: int, rank: int) -> tuple[int, int]:
        """The same rows as a range of elements, counted from the start of the rank's range."""
        first, stop = self.rows(member, rank)
        if first == stop:
            return 0, 0
        row, start = prod(self.shapes[member][1:]), self.starts[member] - rank * self.shard
        return start + first * row, start + stop * row


def pack(shapes: Sequence[tuple[int, ...]], ranks: int, alignment: int = 16) -> list[Packing]:
    """Packs parameters into flat buffers whose ranges, one for each rank, cut no row.

    Args:
        shapes: shapes of the parameters, each of at least one dimension.
        ranks: number of ranges of each buffer.
        alignment: a parameter starts at a multiple of so many elements, unless that costs too much padding.

    Returns:
        The buffers. At the end of a buffer, the padding is below `ranks` times its row unit. Before each
        member, it is below the greatest of the member's row size, 64 times the alignment, and a sixteenth of
        its elements.

    >>> [packing.members for packing in pack([(3, 7), (3, 5), (6, 14)], 4)]
    [(2, 0), (1,)]
    """
    by_row: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_row.setdefault(prod(shape[1:]) or 1, []).append(index)
    total = sum(map(prod, shapes))
    classes: list[tuple[int, list[int]]] = []
    for row in sorted(by_row, reverse=True):
        for index, (unit, members) in enumerate(classes):
            joint = lcm(unit, row)
            if joint == unit or ranks * joint * _WASTE <= total:
                classes[index] = (joint, members + by_row[row])
                break
        else:
            classes.append((row, by_row[row]))
    return [_place(shapes, members, unit, ranks, alignment) for unit, members in classes]


def _place(
    shapes: Sequence[tuple[int, ...]], members: list[int], unit: int, ranks: int, alignment: int
) -> Packing:
    starts: list[int] = []
    end = 0
    for index in members:
        row, size = prod(shapes[index][1:]) or 1, prod(shapes[index])
        step = lcm(row, alignment)
        if step > max(row, 64 * alignment, size // 16):
            step = row
        starts.append(-(-end // step) * step)
        end = starts[-1] + size
    shard = max(-(-end // (ranks * unit)), 1) * unit
    return Packing(ranks, shard, tuple(members), tuple(shapes[index] for index in members), tuple(starts))

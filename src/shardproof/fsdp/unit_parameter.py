"""One parameter of a unit: sharded, as the world sees it, and whole, as the module computes with it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.fsdp.mesh_ranks import TensorSpec
from shardproof.fsdp.packing import Packing
from shardproof.state import LOCAL

__all__ = ["UnitParameter"]


class UnitParameter:
    """A parameter, the modules that have it, and its place in a flat buffer.

    Args:
        name: for messages.
        owners: (module, name in it), several if the module shares the parameter with itself.
        spec: how it is sharded.
        packing: of its buffer.
        member: its number in the packing.
        index: this rank's range of the buffer.
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
        self.held = packing.held(member, index)
        self.start = packing.starts[member]
        self.shape = packing.shapes[member]
        self.stop = self.start + prod(self.shape)
        self.local = torch.empty(0, dtype=torch.float32, device="cpu")
        self.sharded: Any = None
        self.whole: Any = None
        self.on_gradient: Callable[[UnitParameter, torch.Tensor], None] = _lost

    def current(self) -> Any:
        """What is registered in the module."""
        module, name = self.owners[0]
        return module._parameters[name]

    def register(self, parameter: Any) -> None:
        """Makes a tensor the parameter of the modules."""
        for module, name in self.owners:
            module._parameters[name] = parameter

    def show_sharded(self) -> None:
        """The world's view."""
        self.register(self.sharded)

    def show_whole(self) -> None:
        """The module's view while it computes."""
        if self.whole.requires_grad != self.sharded.requires_grad:
            self.whole.requires_grad_(self.sharded.requires_grad)
        self.register(self.whole)

    def local_shape(self) -> tuple[int, ...]:
        """Of the rows that this rank holds."""
        return (self.rows[1] - self.rows[0], *self.shape[1:])

    def part(self, shard: torch.Tensor) -> torch.Tensor:
        """This parameter's rows in a rank's range of a buffer, as a view.

        Where there are none the tensor is one of its own: empty views of one buffer cannot be told apart, and
        would pass for one tied parameter.
        """
        if self.held[0] == self.held[1]:
            return shard.new_empty(self.local_shape())
        return shard[self.held[0] : self.held[1]].view(self.local_shape())

    def bind_shard(self, shard: torch.Tensor, requires_grad: bool) -> None:
        """Makes the sharded parameter a view of the rank's range. An existing object stays the same one."""
        self.local = self.part(shard)
        with torch.no_grad():
            fresh = nn.Parameter(self.spec.sharded(self.local), requires_grad=requires_grad)
        if self.sharded is None:
            self.sharded = fresh
        else:
            torch.utils.swap_tensors(self.sharded, fresh)  # type: ignore[no-untyped-call]
        setattr(self.sharded, LOCAL, self.spec.embedding(self.rows))
        self.local = self.sharded._local_tensor
        self.show_sharded()

    def bind_whole(self, whole: torch.Tensor) -> None:
        """Makes the whole parameter a view of the gathered buffer."""
        view = whole[self.start : self.stop].view(self.shape)
        with torch.no_grad():
            self.whole = nn.Parameter(self.spec.gathered(view), requires_grad=view.is_floating_point())
        if self.whole.requires_grad:  # frozen or not: it may change
            self.whole.register_post_accumulate_grad_hook(self._arrived)
            self.whole.requires_grad_(self.sharded.requires_grad)

    def is_bound(self) -> bool:
        """Whether the module still has the parameter that is a view of the flat buffer."""
        current = self.current()
        return current is self.sharded and current._local_tensor is self.local

    def values_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what somebody put in the parameter's place: such a shard, or a whole tensor.

        Raises:
            ValueError: it has another shape.
        """
        if isinstance(parameter, DTensor) and tuple(parameter.placements) == self.spec.placements:
            if tuple(parameter._local_tensor.shape) == self.local_shape():
                return parameter._local_tensor
            raise self._unfit(parameter._local_tensor, self.local_shape())
        return self.rows_of(parameter)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor without data parallelism: plain, or tensor parallelism's DTensor.

        For a tensor parallel parameter a plain tensor is the whole one.

        Raises:
            ValueError: it has another shape.
        """
        if isinstance(whole, DTensor):
            whole = whole._local_tensor
        elif self.spec.parallel is not None and tuple(whole.shape) == self.spec.shape:
            packed = whole.new_empty(self.shape)
            outer = self.spec.outer
            for index in range(len(outer.local)):
                place, size = outer.local.pair(index)
                start, _ = outer.placed.pair(index)
                packed[_box(place, size)] = whole[_box(start, size)]
            whole = packed
        if tuple(whole.shape) != self.shape:
            raise self._unfit(whole, self.shape)
        return whole[self.rows[0] : self.rows[1]]

    def _unfit(self, found: torch.Tensor, expected: tuple[int, ...]) -> ValueError:
        return ValueError(
            f"{self.name} was given a tensor whose local shape is {list(found.shape)}; this rank has "
            f"{list(expected)} of {list(self.spec.shape)}. Use load_full_state_dict or shardproof.load"
        )

    def gradient(self, part: torch.Tensor) -> None:
        """Gives the sharded parameter its rows of a reduced buffer, added to a gradient that is there."""
        local = self.part(part)
        if self.sharded.grad is None:
            self.sharded.grad = self.spec.sharded(local)
        else:
            self.sharded.grad._local_tensor.add_(local)

    def _arrived(self, whole: Any) -> None:
        gradient, whole.grad = whole.grad, None
        if gradient is None:  # frozen since the forward
            return
        if isinstance(gradient, DTensor):
            assert self.spec.parallel is not None
            if tuple(gradient.placements) != self.spec.parallel[1]:  # partial sums of a replicated weight
                gradient = gradient.redistribute(placements=self.spec.parallel[1])
            gradient = gradient.to_local()
        if hasattr(gradient, "wait"):  # a collective of tensor parallelism that is still running
            gradient = gradient.wait()
        self.on_gradient(self, gradient)


def _lost(parameter: UnitParameter, gradient: torch.Tensor) -> None:
    raise AssertionError(f"a gradient of {parameter.name} arrived before its unit was made")


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))

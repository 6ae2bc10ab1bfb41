"""The layouts of slots, which are those of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shardproof.engine.state.dtensor import LIKE, LOCAL, is_dtensor, is_sharded, local_tensor
from shardproof.engine.state.layout import Layout, local_layout
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.optimizer.slots import LocalRange, StoredSlot
from shardproof.engine.state.tensors import check_memory, local_of
from shardproof.engine.state.visitor import VisitedModule, join
from shardproof.errors import StructureError


@dataclass(frozen=True, slots=True)
class SlotLayouts:
    """The declared layouts of parameters, and the keys of the parameters."""

    declared: Mapping[int, Layout]
    """Id of a parameter to its declared layout."""
    weights: Mapping[int, str]
    """Id of a parameter to its key in the checkpoint."""

    @staticmethod
    def of(modules: Iterable[VisitedModule], owners: Iterable[VisitedModule]) -> SlotLayouts:
        """The layouts of all parameters of `modules`, and the keys of the parameters of `owners`."""
        layouts: dict[int, Layout] = {}
        for module in modules:
            layouts = _declared_in(module) | layouts
        weights: dict[int, str] = {}
        for owner in owners:
            for name, parameter in owner.parameters():
                weights.setdefault(id(parameter), join(owner.key, owner.module.clean(name)))
        return SlotLayouts(layouts, weights)

    def of_slots(self, parameter: torch.Tensor) -> SlotLayout:
        """The layout of the slots of a parameter."""
        declared = self.declared.get(id(parameter)) if self.declared else None
        is_own = declared is None and not hasattr(parameter, LOCAL)
        return SlotLayout(parameter, declared, is_own, is_dtensor(parameter))


def _declared_in(module: VisitedModule) -> dict[int, Layout]:
    """The declared layouts of a module's parameters, by id."""
    if not module.module.layouts:
        return {}
    layouts = ((parameter, module.module.layout(name)) for name, parameter in module.parameters())
    return {id(parameter): layout for parameter, layout in layouts if layout is not None}


@dataclass(slots=True)
class SlotLayout:
    """The layout of one parameter, for its slots."""

    parameter: torch.Tensor
    declared: Layout | None
    is_own: bool
    """True if the parameter has no declared layout and no index map of its own."""
    is_dtensor: bool
    """True if the parameter is a DTensor."""
    _layout: Layout | None = None

    def sharded(self, item: torch.Tensor | LocalRange, key: str) -> LocalShards | None:
        """The pieces of a slot; None if the tensor needs no layout.

        A plain tensor without a layout means equal values on every rank. For a slot of a sharded parameter
        that is not certain, even if the slot has the parameter's global shape: the residual of a compressed
        gradient has that shape, and differs between ranks. So such a slot must be a scalar, have the
        parameter's local shape, or be a DTensor.

        Raises:
            StructureError: the shape of the slot does not determine its layout.
        """
        if is_dtensor(item) and (self.is_own or hasattr(self.parameter, LIKE) > hasattr(item, LIKE)):
            return None  # its placements are its layout
        if isinstance(item, LocalRange):
            check_memory(item.buffer, key)
            return self._local(key).range(item.buffer, item.start, item.stop)
        if self.is_own:
            if not self.is_dtensor:
                return None
            if not item.dim() and self.parameter.dim():
                return None  # a scalar of the model, for any layout of the parameter
        local = local_of(item, key)
        layout = self._local(key)
        if tuple(local.shape) == layout.local_shape or not local.numel():  # empty on ranks outside the mesh
            return layout.pieces(local)
        if not local.dim():
            return layout.scalar(local)
        if self.is_own:
            if not is_sharded(self.parameter):
                return None
            raise StructureError(
                f"{key}: the slot is a plain tensor of shape {list(item.shape)}, but its parameter is a "
                f"sharded DTensor of local shape {list(layout.local_shape)}. It is unknown which part this "
                "is, or whether it is equal on all ranks. Make it a DTensor on the parameter's mesh: with "
                "Shard(dim) if each rank has a part, with Replicate() if it is equal on all ranks",
                key=key,
            )
        raise StructureError(
            f"{key}: the slot has shape {list(item.shape)}, but its parameter has local shape "
            f"{list(layout.local_shape)} in a declared layout. It is unknown which part this is. "
            "Only elementwise optimizers can train such parameters",
            key=key,
        )

    def stored(self, dtype: torch.dtype, shape: tuple[int, ...], key: str) -> StoredSlot:
        """A stored slot, with the shape that it has on this rank."""
        if self.declared is None and not shape and self.parameter.dim():
            return StoredSlot(dtype, ())
        layout = self._local(key)
        if shape == layout.shape:
            return StoredSlot(dtype, tuple(local_tensor(self.parameter).shape))  # (0,) outside the mesh
        if shape == layout.scalar(torch.empty((), dtype=dtype, device="cpu")).shape:
            return StoredSlot(dtype, ())
        return StoredSlot(dtype, shape)

    def _local(self, key: str) -> Layout:
        if self._layout is None:
            self._layout = local_layout(self.parameter, self.declared, key)
        return self._layout

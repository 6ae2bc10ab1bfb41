"""How the slots of parameters are laid out: as the parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.dtensor import LOCAL, is_dtensor, local_tensor
from shardproof.state.layout import Layout, local_layout
from shardproof.state.local_shards import LocalShards
from shardproof.state.module_names import NamedModule
from shardproof.state.optimizer.slots import LocalRange, StoredSlot
from shardproof.state.tensors import check_memory, local_of
from shardproof.state.visitor import OwnedParameters, join

__all__ = ["SlotLayout", "SlotLayouts"]


@dataclass(frozen=True, slots=True)
class SlotLayouts:
    """Layouts that modules declared, by parameter, and the keys of the parameters themselves."""

    declared: Mapping[int, Layout]
    """Identity of a parameter to the layout below data parallelism."""
    weights: Mapping[int, str]
    """Identity of a parameter to its key in the checkpoint."""

    @staticmethod
    def of(modules: Iterable[NamedModule], owners: Iterable[OwnedParameters]) -> SlotLayouts:
        """Of all parameters of the modules; keys are known of those that are in the tree."""
        layouts: dict[int, Layout] = {}
        for module in modules:
            layouts = module.layouts_by_parameter() | layouts
        weights: dict[int, str] = {}
        for owner in owners:
            for name, parameter in owner.module.parameters():
                weights.setdefault(id(parameter), join(owner.key, owner.module.clean(name)))
        return SlotLayouts(layouts, weights)

    def of_slots(self, parameter: torch.Tensor) -> SlotLayout:
        """How the slots of a parameter are laid out."""
        declared = self.declared.get(id(parameter)) if self.declared else None
        is_own = declared is None and not hasattr(parameter, LOCAL)
        return SlotLayout(parameter, declared, is_own, is_dtensor(parameter))


@dataclass(slots=True)
class SlotLayout:
    """The layout of one parameter, for its slots."""

    parameter: torch.Tensor
    declared: Layout | None
    is_own: bool
    """Whether the parameter itself says how it is laid out."""
    is_dtensor: bool
    """Whether the parameter is one."""
    _layout: Layout | None = None

    def sharded(self, item: torch.Tensor | LocalRange, key: str) -> LocalShards | None:
        """The pieces of a slot; None where the tensor says it all itself.

        A plain tensor stands for the same values on every rank. Beside a sharded parameter nothing says that
        ranks hold the same, not even the parameter's global shape (what a compressed gradient left out has
        it, and is each rank's own): there a slot is a scalar, of the parameter's local shape, or a DTensor.

        Raises:
            StructureError: the slot has a shape from which nothing follows.
        """
        if self.is_own and is_dtensor(item):
            return None
        if isinstance(item, LocalRange):
            check_memory(item.buffer, key)
            return self._local(key).range(item.buffer, item.start, item.stop)
        if self.is_own:
            if not self.is_dtensor:
                return None
            if not item.dim() and self.parameter.dim():
                return None  # a scalar of the model, however the parameter is laid out
        local = local_of(item, key)
        layout = self._local(key)
        if tuple(local.shape) == layout.local_shape or not local.numel():  # off the mesh, whatever its shape
            return layout.pieces(local)
        if not local.dim():
            return layout.scalar(local)
        if self.is_own:
            if not _is_sharded(self.parameter):
                return None
            raise StructureError(
                f"{key}: the slot is a plain tensor of shape {list(item.shape)}, its parameter a sharded "
                f"DTensor held as {list(layout.local_shape)}, so nobody can say which part this is, or that "
                "all ranks hold the same. Keep it as a DTensor on the parameter's mesh: with Shard(dim) if "
                "each rank has its part, with Replicate() if all have the same",
                key=key,
            )
        raise StructureError(
            f"{key}: the slot has shape {list(item.shape)}, its parameter is held as "
            f"{list(layout.local_shape)} in a layout of its own, so nobody can say which part this is. "
            "Only elementwise optimizers can train such parameters",
            key=key,
        )

    def stored(self, dtype: torch.dtype, shape: tuple[int, ...], key: str) -> StoredSlot:
        """A stored slot in the terms of what this rank holds."""
        if self.declared is None and not shape and self.parameter.dim():
            return StoredSlot(dtype, ())
        layout = self._local(key)
        if shape == layout.shape:
            return StoredSlot(dtype, tuple(local_tensor(self.parameter).shape))  # (0,) outside of the mesh
        if shape == layout.scalar(torch.empty((), dtype=dtype, device="cpu")).shape:
            return StoredSlot(dtype, ())
        return StoredSlot(dtype, shape)

    def _local(self, key: str) -> Layout:
        if self._layout is None:
            self._layout = local_layout(self.parameter, self.declared, key)
        return self._layout


def _is_sharded(parameter: Any) -> bool:
    """Whether ranks of the mesh hold different parts of a DTensor."""
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return any(ranks > 1 and not placement.is_replicate() for ranks, placement in placed)

"""Describes the state of optimizers independently of the optimizer.

A *slot* is one tensor or value of optimizer state that belongs to one parameter. Torch's optimizers hold
slots in `optimizer.state`, with the shape of the parameter's local tensor. An optimizer that stores them
differently (in ranges of flat buffers, or on another device) implements `SlotProvider`. It describes its
slots, and receives those of a checkpoint, without communication. A slot has the layout of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from shardproof.engine.state.dtensor import LIKE, LOCAL, is_dtensor, is_sharded, local_tensor
from shardproof.engine.state.layout import Layout, local_layout
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.subclass_binding import StoredWrapper
from shardproof.engine.state.tensors import check_memory, empty_like_layout, local_of
from shardproof.engine.state.visitor import VisitedModule, join
from shardproof.errors import StructureError

MASTER = "master"
"""The slot with a parameter's values in a wider dtype than the parameter's."""


OPTIONS = "@options"
"""Segment of the object with the options of a parameter."""
EMPTY_GROUP = "@group-"
"""Beginning of the segment of the object with the options of a group without parameters. The number of the
group follows."""
_NOT_OPTIONS = ("params", "param_names")
_OF_TORCH = ("fused", "foreach", "capturable", "differentiable")
_OF_MEGATRON_OFFLOAD = (
    "offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
)
EXECUTION_OPTIONS = frozenset((*_OF_TORCH, *_OF_MEGATRON_OFFLOAD))
"""Options that say how or where a step is computed. A load does not change the target's."""


def options_of(group: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The options in a group of an optimizer.

    >>> options_of({"params": [], "lr": 0.1, "capturable": True}, {"capturable"})
    {'lr': 0.1}
    """
    return {name: item for name, item in group.items() if name not in _NOT_OPTIONS and name not in without}


def tensors_and_values(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The slots of one parameter that are tensors, and those that are not."""
    tensors = {slot: item for slot, item in state.items() if isinstance(item, torch.Tensor)}
    return tensors, {slot: item for slot, item in state.items() if slot not in tensors}


def device_of_scalar(slot: str, options: Mapping[str, Any], device: torch.device) -> torch.device:
    """The device of a new slot without dimensions, as in torch's `Optimizer.load_state_dict`.

    Step counts are on the CPU, unless the group computes with them on the device of the parameter.

    >>> device_of_scalar("step", {"capturable": True}, torch.device("meta"))
    device(type='meta')
    """
    on_device = slot != "step" or options.get("capturable") or options.get("fused")
    return device if on_device else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class LocalRange:
    """A 1-D buffer with the row-major elements [start, stop) of a parameter's local tensor.

    An empty range declares the slot, with the buffer's dtype, on a rank that owns no part of it.

    >>> LocalRange(torch.zeros(3), 2, 5)
    LocalRange(float32, [2, 5))
    """

    buffer: torch.Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.buffer.dim() != 1 or self.buffer.numel() != self.stop - self.start:
            raise ValueError(
                f"the buffer of the range [{self.start}, {self.stop}) has shape {list(self.buffer.shape)}, "
                f"expected [{self.stop - self.start}]"
            )

    def __repr__(self) -> str:
        return f"LocalRange({str(self.buffer.dtype).removeprefix('torch.')}, [{self.start}, {self.stop}))"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSlots:
    """The slots of one parameter on one rank."""

    parameter: torch.Tensor
    """The program's parameter."""
    kind: str
    """Class of the torch optimizer with the same update rule."""
    options: Mapping[str, Any]
    """Options of the parameter's group: learning rate, betas, ..."""
    tensors: Mapping[str, torch.Tensor | LocalRange]
    """Slot to tensor: of the parameter's local shape, a DTensor like it, a scalar, or a range of it."""
    values: Mapping[str, Any]
    """Slots that are plain values."""
    weights: tuple[torch.Tensor, ...] = ()
    """The memory of the weight that a step writes, if `parameter` is only a description without memory."""


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A tensor slot in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Its shape on this rank: that of the parameter's local tensor, or () for a scalar."""
    wrapper: StoredWrapper | None = None
    """The stored parts of a tensor subclass that wraps others."""


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """The destinations for the stored slots of one parameter."""

    kind: str
    """As in `ParameterSlots`."""
    tensors: Mapping[str, torch.Tensor | LocalRange]
    """Destinations. It may contain a master that is not stored: a stored weight of its dtype fills it."""
    attach: Callable[[Mapping[str, Any], frozenset[str]], None]
    """Called after all bytes are read, with the plain values and the names of the filled tensor slots. It
    replaces the parameter's state by the stored one, and drops other slots. It makes a master that was not
    filled from the parameter."""


Receiver: TypeAlias = Callable[[torch.Tensor, dict[str, Any], Mapping[str, StoredSlot]], Receipt]
"""Arguments: a parameter, its group, and the stored tensor slots."""


@runtime_checkable
class SlotProvider(Protocol):
    """An optimizer that describes its state. None of these methods may communicate.

    If another optimizer takes the steps, the attribute ``stepper`` is that optimizer: saves that overlap
    training wait for its steps.
    """

    param_groups: list[dict[str, Any]]

    def describe_slots(self) -> Iterable[ParameterSlots]:
        """The slots of every parameter of every group, even if this rank owns no part of them."""

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """The destinations for the stored slots of one parameter. Does not change the present state."""

    def describe_shared(self) -> dict[str, Any]:
        """Plain values that belong to no parameter (a loss scale)."""

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `describe_shared`."""


def slot_dtype(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, like: StoredSlot) -> torch.dtype:
    """The dtype in which the optimizer makes a slot, or the stored dtype if that is unknown.

    Torch's classes make shaped slots in the parameter's dtype, and most fail to step with another. The stored
    dtype differs if the saved optimizer had a master, or narrower state.
    """
    known = type(optimizer).__module__.startswith("torch.optim.") and like.shape != ()
    floating = parameter.dtype.is_floating_point and like.dtype.is_floating_point
    return parameter.dtype if known and floating else like.dtype


def destination_dtype(like: StoredSlot, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the memory that a load fills, before `cast_slot` gives the slot the dtype of `slot_dtype`.

    A stored slot widens without ``cast=True``. A narrower destination needs it, as any other tensor does.

    >>> destination_dtype(StoredSlot(torch.bfloat16, (2,)), torch.float32)
    torch.bfloat16
    >>> destination_dtype(StoredSlot(torch.float32, (2,)), torch.bfloat16)
    torch.bfloat16
    """
    return like.dtype if torch.promote_types(like.dtype, dtype) == dtype else dtype


@torch.inference_mode(False)
def cast_slot(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The slot in a dtype: a new tensor of the same layout, or the slot itself if it has the dtype."""
    if tensor.dtype == dtype:
        return tensor
    new = empty_like_layout(tensor, dtype)
    local_tensor(new).copy_(local_tensor(tensor))
    return new


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

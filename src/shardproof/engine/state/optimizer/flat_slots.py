"""The slots of an optimizer of FSDP1's parameters, by the parameters of the model.

The optimizer trains flat parameters (``use_orig_params=False``), or each rank's 1-D ranges of the model's
parameters (``use_orig_params=True``). Its slots are 1-D like them. `FlatSlots` describes them as ranges of
slots of the model's parameters, so that they load into any other layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.flat_parameters import FlatPart
from shardproof.engine.state.optimizer.slots import (
    MASTER,
    LocalRange,
    ParameterSlots,
    Receipt,
    StoredSlot,
    cast_slot,
    destination_dtype,
    device_of_scalar,
    options_of,
    slot_dtype,
    tensors_and_values,
)
from shardproof.engine.state.visitor import Place
from shardproof.errors import StructureError


class FlatSlots:
    """An optimizer of FSDP1's parameters, as a `SlotProvider`.

    `parts` are the parameters of all modules that FSDP1 wraps.

    Raises:
        StructureError: the optimizer trains a parameter of no such module.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Iterable[FlatPart], place: Place) -> None:
        self.optimizer = optimizer
        self.kind = type(optimizer).__qualname__
        self._path = place.path
        self._parts: dict[int, FlatPart] = {}
        """By the parameter without memory."""
        of_trained: dict[int, list[FlatPart]] = {}
        for part in parts:
            if id(part.meta) not in self._parts:  # tied parameters have one slot
                self._parts[id(part.meta)] = part
                of_trained.setdefault(id(part.trained), []).append(part)
        self.param_groups: list[dict[str, Any]] = []
        """Groups with the options of the optimizer's, and the parameters without memory."""
        self._groups: dict[int, dict[str, Any]] = {}
        """By the parameter without memory."""
        for group in optimizer.param_groups:
            if not all(id(trained) in of_trained for trained in group["params"]):
                raise StructureError(
                    f"{place.path} trains parameters of FullyShardedDataParallel (FSDP1) whose module is not "
                    "in the state tree, or others beside them. Put the module into the tree, or use "
                    "shardproof.OptimizerState(optimizer, module). Give parameters that FSDP1 ignores an "
                    "optimizer of their own",
                    key=place.key,
                )
            members = [part.meta for trained in group["params"] for part in of_trained[id(trained)]]
            self.param_groups.append({**group, "params": members})
            self._groups |= {id(meta): self.param_groups[-1] for meta in members}
        self._received: dict[int, dict[str, Any]] = {}
        """New state by the id of the trained parameter."""
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        """Destinations of slots with a range on this rank, by the id of the trained parameter."""
        self._dtypes: dict[tuple[int, str], torch.dtype] = {}
        """The dtypes that the optimizer steps with, of those that it has not made yet."""
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Shards of parameters, and their values from masters."""

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """The slots of the parameters with elements on this rank. Other ranks describe the others."""
        for group in self.param_groups:
            options = options_of(group)
            for meta in group["params"]:
                part = self._parts[id(meta)]
                if not part.shard.numel():
                    continue
                tensors, values = tensors_and_values(self.optimizer.state.get(part.trained) or {})
                ranges = {slot: self._range(part, slot, item) for slot, item in tensors.items()}
                yield ParameterSlots(meta, self.kind, options, ranges, values)

    def _range(self, part: FlatPart, slot: str, item: torch.Tensor) -> torch.Tensor | LocalRange:
        if not item.dim() and part.trained.dim():
            return item
        if item.numel() != part.trained.numel() or not item.is_contiguous():
            raise StructureError(
                f"{self._path}: the slot {slot!r} of {part.name} has shape {list(item.shape)}, but FSDP1's "
                f"parameter has {list(part.trained.shape)} on this rank. Only elementwise optimizers can "
                "train flat parameters"
            )
        count = part.shard.numel()
        flat = item.detach().view(-1)[part.offset : part.offset + count]
        return LocalRange(flat, part.start, part.start + count)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """The destinations for the stored slots of one parameter. The optimizer's state does not change."""
        part = self._parts[id(parameter)]
        tensors: dict[str, torch.Tensor | LocalRange] = {}
        for slot, like in stored.items():
            if like.wrapper is not None:
                raise StructureError(
                    f"{self._path}: the stored slot {slot!r} of {part.name} is a tensor subclass, which the "
                    "flat parameters of FSDP1 cannot have. Use fully_shard (FSDP2)"
                )
            if slot == MASTER:  # see "masters" in `bind.py`
                if like.dtype == part.shard.dtype:
                    stop = part.start + part.shard.numel()
                    tensors[slot] = LocalRange(torch.empty_like(part.shard), part.start, stop)
                continue
            if not like.shape and parameter.dim():
                device = device_of_scalar(slot, self._groups[id(parameter)], part.trained.device)
                tensors[slot] = torch.zeros((), dtype=like.dtype, device=device)
            else:
                tensors[slot] = self._range(part, slot, self._buffer(part, slot, like))
        return Receipt(self.kind, tensors, partial(self._attach, part, tensors))

    def _buffer(self, part: FlatPart, slot: str, like: StoredSlot) -> torch.Tensor:
        """The whole slot of the trained parameter: the present one, or a new one. Padding is zero."""
        key = id(part.trained), slot
        if key not in self._buffers:
            present = (self.optimizer.state.get(part.trained) or {}).get(slot)
            if isinstance(present, torch.Tensor) and present.numel() == part.trained.numel():
                self._buffers[key] = present
            else:
                dtype = self._dtypes[key] = slot_dtype(self.optimizer, part.trained, like)
                self._buffers[key] = torch.zeros(
                    part.trained.shape, dtype=destination_dtype(like, dtype), device=part.trained.device
                )
        return self._buffers[key]

    def _attach(
        self,
        part: FlatPart,
        tensors: Mapping[str, torch.Tensor | LocalRange],
        values: Mapping[str, Any],
        filled: frozenset[str],
    ) -> None:
        if not part.shard.numel():
            return
        state = self._received.setdefault(id(part.trained), {})
        for slot in filled:
            item = tensors[slot]
            if slot == MASTER and isinstance(item, LocalRange):
                self._exact.append((part.shard, item.buffer))
                continue
            new = self._buffers[id(part.trained), slot] if isinstance(item, LocalRange) else item
            self._set(state, part, slot, new)
        for slot, value in values.items():
            self._set(state, part, slot, value)

    def _set(self, state: dict[str, Any], part: FlatPart, slot: str, new: Any) -> None:
        """Sets a slot. The parameters of one flat parameter have one value of each slot that is no range."""
        present = state.setdefault(slot, new)
        if present is new or (isinstance(new, torch.Tensor) and new.dim()):
            return
        if bool(present != new):
            raise StructureError(
                f"{self._path}: {part.name} has {slot}={new}, but another parameter in the same flat "
                f"parameter has {present}. Load with use_orig_params=True"
            )

    def describe_shared(self) -> dict[str, Any]:
        """Returns nothing: torch's optimizers of flat parameters have no such state."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Does nothing; see `describe_shared`."""

    @torch.no_grad()
    def apply(self) -> None:
        """Sets the optimizer's state and options to the received ones, and the weights to masters."""
        for shard, exact in self._exact:
            shard.copy_(exact)
        for group, mine in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            group.update(options_of(mine))
            for trained in group["params"]:
                if state := self._received.get(id(trained)):
                    self.optimizer.state[trained] = {
                        slot: cast_slot(item, dtype)
                        if (dtype := self._dtypes.get((id(trained), slot)))
                        else item
                        for slot, item in state.items()
                    }
                elif id(trained) in self._received:
                    self.optimizer.state.pop(trained, None)

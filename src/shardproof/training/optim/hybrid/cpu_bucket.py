"""CPU parameters that are copied and stepped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shardproof.engine.state import local_tensor
from shardproof.training.optim.hybrid.stepped_copy import SteppedCopy

_BUCKET_BYTES = 4 << 20
"""Limit of a bucket's stepped bytes. An optimizer's call takes about 60 µs, and the step of 4 MiB 1 ms."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes whose fused step runs on the CPU. A subclass may step in another way."""

_COUNTS = (torch.float32, torch.float64)
"""Dtypes of the step count in a fused step."""

Layout: TypeAlias = tuple[bool, tuple[str, ...]]
Slots: TypeAlias = Mapping[str, Any] | None


class CpuBucket:
    """Copies of one group and dtype whose gradients arrive with one event, and the optimizer that steps them.

    Args:
        copies: copies of the CPU's side with the same transfers.
        optimizer: their optimizer, with one group.
    """

    def __init__(self, copies: Sequence[SteppedCopy], optimizer: torch.optim.Optimizer) -> None:
        self._copies = copies
        self._optimizer = optimizer
        (self.group,) = optimizer.param_groups
        self._may_fuse = type(optimizer) in _FUSED and copies[0].tensor.is_floating_point()
        self._transfers = copies[0].transfers
        self._arrived = self._transfers.event()
        self._sent = self._transfers.event()
        for stepped in copies:
            stepped.optimizer, stepped.sent = optimizer, self._sent

    def fetch(self, gradients: Mapping[SteppedCopy, torch.Tensor]) -> list[SteppedCopy]:
        """Starts the copies of this bucket's gradients to the host. See "Down waits for main".

        Returns:
            The copies that have a gradient.
        """
        found = [stepped for stepped in self._copies if stepped in gradients]
        if found:
            sources = [gradients[stepped] for stepped in found]
            if any(source.layout != torch.strided for source in sources):
                raise ValueError("a sparse gradient cannot be stepped on the CPU side: use cpu_fraction=0")
            self._transfers.down([stepped.host_gradient() for stepped in found], sources, self._arrived)
        return found

    def await_gradients(self) -> None:
        """Waits until the copies can be stepped. See the notes on the waits of the host."""
        self._arrived.synchronize()
        self._sent.synchronize()

    def step(self, copies: Sequence[SteppedCopy], states: Sequence[Slots]) -> None:
        """Steps copies whose gradients have arrived.

        Tensors with different slots need separate calls: fused SGD reads the momentum of all tensors of a
        call, or of none.

        Args:
            copies: the copies.
            states: the optimizer's state of each, None if the step makes it.
        """
        by_layout: dict[Layout, list[SteppedCopy]] = {}
        for stepped, state in zip(copies, states, strict=True):
            by_layout.setdefault(_layout(state, stepped.tensor.dtype), []).append(stepped)
        for (is_plain, _), chosen in by_layout.items():
            try:
                for stepped in chosen:
                    stepped.tensor.grad = stepped.host_gradient()
                self._call(is_plain)
            finally:
                for stepped in chosen:
                    stepped.tensor.grad = None

    def send(self, copies: Sequence[SteppedCopy]) -> None:
        """Starts the copies to the parameters. See "Up waits for main"."""
        locals_ = [local_tensor(stepped.parameter) for stepped in copies]
        values = [stepped.outgoing(local) for stepped, local in zip(copies, locals_, strict=True)]
        self._transfers.up(locals_, values, self._sent)

    def _call(self, is_plain: bool) -> None:
        """Calls the optimizer, fused unless the program chose an implementation."""
        group = self.group
        chosen = group.get("fused"), group.get("foreach"), group.get("differentiable") or None
        if not (is_plain and self._may_fuse and chosen == (None, None, None)):
            self._optimizer.step()
            return
        group["fused"] = True
        try:
            self._optimizer.step()
        finally:
            group["fused"] = None


def _layout(state: Slots, dtype: torch.dtype) -> Layout:
    """Whether a fused step can read the slots, and the names of those that are tensors."""
    names, is_plain = [], True
    for slot, item in state.items() if state else ():
        if isinstance(item, torch.Tensor):
            names.append(slot)
            if item.dtype is not dtype or not item.is_contiguous():
                is_plain = is_plain and not item.dim() and item.dtype in _COUNTS
    return is_plain, tuple(names)


def cut(copies: Sequence[SteppedCopy]) -> list[list[SteppedCopy]]:
    """Cuts copies of one group into the contents of buckets, in order."""
    full: list[list[SteppedCopy]] = []
    open_ones: dict[Any, tuple[list[SteppedCopy], int]] = {}
    for stepped in copies:
        key = (stepped.transfers, stepped.tensor.dtype)
        content, size = open_ones.get(key, ([], _BUCKET_BYTES + 1))
        size += stepped.tensor.nbytes
        if size > _BUCKET_BYTES:
            content, size = [], stepped.tensor.nbytes
            full.append(content)
        content.append(stepped)
        open_ones[key] = content, size
    return full

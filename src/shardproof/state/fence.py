"""Where training stops for a moment, so that a save has its copies before memory changes.

A fence stands while a save may read memory that training will write to. It is opened by the step of any
optimizer that shares memory with the save (a hook that torch calls before every step), by a load, and by the
program itself. See "Why no torn value can be written" in `shardproof.saving.snapshot`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof import events
from shardproof._utils import forks
from shardproof.state.dtensor import local_tensor
from shardproof.state.records import Stepped, memory_of

__all__ = ["Fence", "open_all"]


class Fence:
    """Stands before the memory that a save reads, until it is closed.

    Args:
        stepped: the optimizers of the state, and what they write.
        secure: returns when that memory may be written to, with the bytes that were copied for it.
        phase: for whoever listens: what training waits for.
    """

    def __init__(
        self, stepped: Sequence[Stepped], secure: Callable[[], int], phase: Callable[[], events.Phase]
    ) -> None:
        self._secure = secure
        self._phase = phase
        self._opened = False
        self._process = os.getpid()
        self._memory = frozenset[int]().union(*(item.memory for item in stepped))
        self._concerned: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        for item in stepped:
            self._concerned[item.optimizer] = True
        _standing.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Opens the fence if this optimizer's step writes to what is saved."""
        concerned = self._concerned.get(optimizer)
        if concerned is None:
            concerned = self._concerned[optimizer] = _may_write(optimizer, self._memory)
        if concerned:
            self.open()

    def open(self) -> None:
        """Returns when everything may be written to."""
        if self._opened or self._process != os.getpid():  # a child made by fork writes to memory of its own
            return
        with self._phase() as phase:
            copied = self._secure()
            phase.progress(copied, copied)
        self._opened = True

    def close(self) -> None:
        """Nothing is read any more."""
        _standing.remove(self)


def open_all() -> None:
    """Opens all fences of this process: what is about to be written to may be part of any save."""
    for fence in _standing.fences():
        fence.open()


def _may_write(optimizer: torch.optim.Optimizer, memory: Set[int]) -> bool:
    """Whether a step may write to storages that begin at these addresses.

    Of a parameter that says nothing of its memory (sparse, or a tensor made of other tensors) that is
    assumed. One without memory (lazy, or on the meta device) is not written.
    """
    parameters = [local_tensor(item) for group in optimizer.param_groups for item in group["params"]]
    held = [tensor for tensor in parameters if not (is_lazy(tensor) or tensor.is_meta)]
    if any(tensor.layout is not torch.strided for tensor in held):
        return True
    starts = memory_of(held)
    is_hidden = any(not start and tensor.numel() for start, tensor in zip(starts, held, strict=True))
    return is_hidden or not memory.isdisjoint(starts)


class _Standing:
    """All fences of this process.

    The hook is there from the first of them on: fences are closed by the thread of a save, and to take a hook
    away while a step goes through all hooks would end the step.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._fences: list[Fence] = []
        self._hooked = False

    def add(self, fence: Fence) -> None:
        with self._lock:
            self._fences.append(fence)
            if not self._hooked:
                register_optimizer_step_pre_hook(_uncompiled(_before_step))
                self._hooked = True

    def remove(self, fence: Fence) -> None:
        with self._lock:
            if fence in self._fences:
                self._fences.remove(fence)

    def fences(self) -> list[Fence]:
        return list(self._fences)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for fence in _standing.fences():
        fence.before_step(optimizer)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, kept out of compiled steps: they would be compiled again for each save."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing is compiled yet
        return hook
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


_standing = _Standing()

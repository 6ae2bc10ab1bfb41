"""Fences: training waits at a fence until a save has copied the memory that training is about to change.

A fence is closed while a save may read memory that training will write. Three calls open it: the step of an
optimizer that shares memory with the save (by a hook that torch calls before every step), a load, and a call
of the program. See "Why no torn value can be written" in `shardproof.engine.saving.snapshot`.
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

from shardproof._utils import forks
from shardproof.engine import events
from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.records import Stepped, memory_of
from shardproof.engine.state.subclasses import inner_tensors


class Fence:
    """Protects the memory that a save reads until `close`.

    Args:
        stepped: the optimizers of the state, and the tensors that they write.
        stage: stages the memory. Returns when training may write to it, with the number of copied bytes.
        phase: returns the event phase of the wait.
    """

    def __init__(
        self, stepped: Sequence[Stepped], stage: Callable[[], int], phase: Callable[[], events.Phase]
    ) -> None:
        self._stage = stage
        self._phase = phase
        self._opened = False
        self._process = os.getpid()
        self._memory = frozenset[int]().union(*(item.memory for item in stepped))
        self._writes: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        for item in stepped:
            self._writes[item.optimizer] = True
        _registry.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Opens the fence if this optimizer's step may write to memory of the save."""
        writes = self._writes.get(optimizer)
        if writes is None:
            writes = self._writes[optimizer] = _may_write(optimizer, self._memory)
        if writes:
            self.open()

    def open(self) -> None:
        """Returns when training may write to all memory of the save."""
        if self._opened or self._process != os.getpid():  # a forked child writes to its own memory
            return
        with self._phase() as phase:
            copied = self._stage()
            phase.progress(copied, copied)
        self._opened = True

    def close(self) -> None:
        """Removes the fence. Call this when the save has read all its memory."""
        _registry.remove(self)


def open_all() -> None:
    """Opens all fences of this process. Call this before writing to memory that may be part of a save."""
    for fence in _registry.fences():
        fence.open()


def _may_write(optimizer: torch.optim.Optimizer, memory: Set[int]) -> bool:
    """True if a step may write to storages that begin at these addresses.

    A parameter with unknown memory (sparse, or a tensor that wraps others) counts as writing. A parameter
    without memory (lazy, or on the meta device) does not.
    """
    parameters = [
        local_tensor(inner)
        for group in optimizer.param_groups
        for item in group["params"]
        for inner in inner_tensors(item)
    ]
    allocated = [tensor for tensor in parameters if not (is_lazy(tensor) or tensor.is_meta)]
    if any(tensor.layout is not torch.strided for tensor in allocated):
        return True
    starts = memory_of(allocated)
    is_hidden = any(not start and tensor.numel() for start, tensor in zip(starts, allocated, strict=True))
    return is_hidden or not memory.isdisjoint(starts)


class _FenceRegistry:
    """All fences of this process.

    The first fence registers the hook, and the hook stays. The thread of a save closes fences, and removing
    a hook while a step iterates over the hooks would make the step fail.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._fences: list[Fence] = []
        self._hooked = False

    def add(self, fence: Fence) -> None:
        with self._lock:
            self._fences.append(fence)
            if not self._hooked:
                hook: Callable[..., None] = _before_step
                if "torch._dynamo" in sys.modules:
                    # Otherwise torch would recompile compiled steps for each save. Without the module, which
                    # takes seconds to import, no step is compiled yet.
                    hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
                register_optimizer_step_pre_hook(hook)
                self._hooked = True

    def remove(self, fence: Fence) -> None:
        with self._lock:
            if fence in self._fences:
                self._fences.remove(fence)

    def fences(self) -> list[Fence]:
        return list(self._fences)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for fence in _registry.fences():
        fence.before_step(optimizer)


_registry = _FenceRegistry()

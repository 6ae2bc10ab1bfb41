"""A guard under which any collective of torch.distributed is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collective", "no_collectives"]

_KINDS = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "monitored_barrier")
_KINDS += ("reduce", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_group")


class Collective(Exception):
    """A collective was called where none may be."""


class _NoCollectiveOps(TorchDispatchMode):
    """Refuses the operators that collectives call, from any caller."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise Collective(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_collectives() -> Iterator[None]:
    """Within it every collective raises `Collective`, by its name in Python and by its operator."""

    def refuse(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Collective(name)

        return call

    with ExitStack() as stack:
        for module in (dist, distributed_c10d, functional):
            for name, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type) and name.startswith(_KINDS):
                    stack.enter_context(mock.patch.object(module, name, refuse(name)))
        stack.enter_context(_NoCollectiveOps())
        torch.ones(1)
        yield

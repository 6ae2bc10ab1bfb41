"""Stand-ins that let Megatron-Core be imported, and load and save checkpoints, without CUDA.

`install()` goes before the first import of `megatron`. It makes the CPU the current device, and stands in for
triton, which Megatron-Core imports and does not call here. No code that handles the bytes is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import typing
from typing import Any, ClassVar

import torch
import typing_extensions

__all__ = ["install"]


class _Absent(types.ModuleType):
    """A module of which any name can be imported: a function that returns what it is given."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(given: Any = None, *more: Any, **options: Any) -> Any:
    """Serves as `jit`, with options or without, and as `constexpr`."""
    return _unchanged if given is None else given


class _Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        """An event, as a stream of CUDA returns it."""
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: True


def install(current_device: Any = "cpu") -> None:
    """Puts the stand-ins in place. Does nothing where there is CUDA, but for `typing.override`.

    Args:
        current_device: what `torch.cuda.current_device` returns. Megatron-Core makes tensors there;
            Megatron-FSDP needs a number.
    """
    if not hasattr(typing, "override"):  # Python 3.12 has it
        typing.override = typing_extensions.override
    if torch.cuda.is_available():
        return
    importlib.import_module("torch._inductor.compile_fx")  # torch itself must find that there is no triton
    if "triton" not in sys.modules:
        triton = sys.modules["triton"] = _Absent("triton")
        triton.language = sys.modules["triton.language"] = _Absent("triton.language")
    torch.cuda.current_device = lambda: current_device
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor

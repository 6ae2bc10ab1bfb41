"""`torch.simulated`: the names that torch and its users need in the module of a device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from tests.simulated.building import library

__all__ = ["held", "load", "set_delays"]


def load() -> None:
    """Makes the simulated device the accelerator of this process until it ends."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def set_delays(seconds: float, seed: int = 0) -> None:
    """Delays operations of all streams at random, by at most this time. 0: no delays."""
    torch.ops.simulated.set_delays(seconds, seed)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Keeps a stream from running its work until the context ends."""
    place = stream.device_index, stream.stream_id
    torch.ops.simulated.hold(*place, True)
    try:
        yield
    finally:
        torch.ops.simulated.hold(*place, False)


def _module() -> ModuleType:
    parent = os.getpid()
    module = ModuleType("torch.simulated")
    names: dict[str, Any] = {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "device": lambda which: torch.accelerator.device_index(_index(which)),
        "is_available": lambda: True,
        "is_initialized": torch.ops.simulated.is_used,
        "device_count": torch.ops.simulated.device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "manual_seed": lambda seed: _generator(None).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: os.getpid() != parent,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices."""
    for index in range(torch.accelerator.device_count()):
        _generator(index).manual_seed(seed)


def _index(which: Any) -> int:
    if isinstance(which, int):
        return which
    index = None if which is None else torch.device(which).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(which: Any) -> torch.Generator:
    """A device's own generator."""
    return torch.ops.simulated.generator(_index(which))

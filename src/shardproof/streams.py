"""A device's queues of work.

Note: Current streams belong to threads
    A stream is made the current one of the calling thread for a while, and what was current before is
    current again afterwards. A thread that never chose a device has device 0: going back to it must not make
    a context there, which is what the device modules' own guards take care of. (`with stream:` would keep
    what to go back to in the stream, where threads would find each other's; torch has it from 2.7 on.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["on_stream"]


@contextmanager
def on_stream(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Makes a stream of a device this thread's current one; see "Current streams belong to threads"."""
    guard = getattr(torch.get_device_module(device), "device", None)
    with nullcontext() if guard is None else guard(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

"""A device's queues of work.

Note: Current streams belong to threads
    A stream is made the current one of the calling thread for a while, and what was current before is
    current again afterwards. A thread that never chose a device has device 0: going back to it must not make
    a context there, which is what the device modules' own guards take care of. (`with stream:` would keep
    what to go back to in the stream, where threads would find each other's; torch has it from 2.7 on.)

Note: Helpers work on their caller's streams
    A new thread's current stream is the device's default one. What it enqueues there is not ordered with
    what its caller has enqueued on a stream of its own: a copy of the helper's may be overwritten by work
    that the caller gave the device before, or still be under way when the caller reads its target, for the
    host waits for the bytes to arrive and not for the kernel that lays them out. So whoever helps makes the
    caller's streams its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

__all__ = ["CurrentStreams", "has_streams", "on_stream"]


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


def has_streams(device: torch.device) -> bool:
    """Whether the device is an accelerator with more than one queue of work."""
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator is not None
        and accelerator.type == device.type
        and hasattr(torch.get_device_module(device), "Stream")
    )


class CurrentStreams:
    """The current streams of the thread that makes this; see "Helpers work on their caller's streams".

    Args:
        devices: whose streams; those that have none are left out.

    >>> streams = CurrentStreams([torch.device("cpu")])
    >>> with streams.entered():
    ...     value = torch.ones(2)
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = [
            (torch.accelerator.current_stream(device), device) for device in devices if has_streams(device)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes them this thread's current ones. Any thread may, and several at once."""
        with ExitStack() as stack:
            for stream, device in self._streams:
                stack.enter_context(on_stream(stream, device))
            yield

"""The current streams of threads.

Note: Current streams belong to threads
    `on_stream` makes a stream the current one of the calling thread, and restores the previous one
    afterwards. A thread that never chose a device has device 0. Restoring device 0 must not create a
    context there: the guards of the device modules ensure that. (`with stream:`, available from torch 2.7,
    stores the previous stream in the stream object, which several threads share.)

Note: Helpers work on their caller's streams
    A new thread's current stream is the device's default one. The device does not order work there with
    work on the caller's stream. So earlier work of the caller may overwrite what the helper copies. The
    copy may also still run when the caller reads its destination: the host waits for the bytes to arrive,
    but not for the kernel that arranges them. So a helper thread enters the caller's streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from shardproof._utils.accelerator import is_on_accelerator


@contextmanager
def on_stream(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Makes a stream the current one of this thread. See "Current streams belong to threads"."""
    guard = getattr(torch.get_device_module(device), "device", None)
    with nullcontext() if guard is None else guard(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def has_streams(device: torch.device) -> bool:
    """True if the device is an accelerator with streams."""
    return is_on_accelerator(device) and hasattr(torch.get_device_module(device), "Stream")


class CurrentStreams:
    """The current streams of the thread that makes this object. See "Helpers work on their caller's streams".

    Args:
        devices: the devices. Those without streams are ignored.

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
        """Makes these the current streams of the calling thread. Several threads may enter at once."""
        with ExitStack() as stack:
            for stream, device in self._streams:
                stack.enter_context(on_stream(stream, device))
            yield

"""The accelerator of this process: devices of process groups, page-locked memory, and current streams.

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
import torch.distributed as dist

from shardproof._utils.libc import address


def available_accelerator() -> torch.device | None:
    """The accelerator; None if this machine has none. Loads its driver.

    >>> device = available_accelerator()
    >>> (device is not None) == torch.accelerator.is_available()
    True
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_on_accelerator(device: torch.device) -> bool:
    """True if this device, which has tensors, is an accelerator.

    >>> is_on_accelerator(torch.device("cpu"))
    False
    """
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator; later versions name the device of the build
        return False
    return accelerator is not None and accelerator.type == device.type


def device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors a process group sends and reduces: the CPU if it can."""
    kinds = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def page_locked(nbytes: int, alignment: int = 1) -> memoryview | None:
    """New page-locked memory; None if this process uses no accelerator or the system locks no more memory.

    An accelerator that the process has not used stays unused, since locking would load its driver. The
    allocator may round up to a power of two, and caches freed memory.

    Args:
        nbytes: size, at least 1.
        alignment: the address is a multiple of it.

    >>> page_locked(10_000) is None or len(page_locked(10_000)) == 10_000
    True
    """
    accelerator = available_accelerator()
    if accelerator is None:
        return None
    is_used = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_used is not None and not is_used():  # this process does not use it yet
        return None
    for spare in dict.fromkeys((0, alignment)):
        try:
            memory = (
                torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=True, device="cpu").numpy().data
            )
        except RuntimeError:  # the limit of locked memory, or of the backend
            return None
        skip = -address(memory) % alignment
        if skip <= spare:
            return memory[skip : skip + nbytes]
    return None


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

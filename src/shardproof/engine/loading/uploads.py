"""Copies from a load to devices, concurrent with its reads.

Note: Uploads have a stream of their own
    The threads of a load enqueue copies on a *side* stream of each device. Side waits once for the work that
    the caller had enqueued when the load began, which may still use the destinations. A load waits on the
    host for side before it returns, so the caller's later work finds the values. Hence no `record_stream` is
    needed for destinations, and temporaries belong to side.

Note: A thread reads while the device copies
    A copy from page-locked memory runs without the host. Each thread reads into two buffers in turn, and
    waits for the copies from a buffer before it reads into it again. A thread may end before its last
    copies. Torch gives freed page-locked memory to other threads, so `Uploads` owns the buffers.

Note: Small parts share one upload
    A copy to the device costs the host 20 to 40 microseconds, as much as a copy of a megabyte takes. So the
    small parts of a buffer go to the device in one copy, and a kernel distributes them there. One thread at
    a time does this: each call of torch gives up the interpreter's lock, and threads that wait for it slow
    each other down. See benchmarks/results/2026-11-27-gpu-small-tensors.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from shardproof._utils.accelerator import page_locked
from shardproof._utils.streams import has_streams, on_stream

UPLOAD_BYTES = 8 << 20
"""Bytes of one copy, at most. With smaller ones, threads wait for the interpreter's lock. See
benchmarks/results/2026-11-26-gpu.md."""
SMALL_BYTES = 1 << 20
"""Smaller chunks share reads and uploads."""
_COPY_BYTES = 512 << 10
"""A device copies about this many bytes in the time that the host needs to enqueue one copy."""


class DeviceRange(NamedTuple):
    """A contiguous range of a chunk that is copied unchanged to contiguous memory of a device."""

    target: torch.Tensor
    """(n,) uint8."""
    begin: int
    """First byte in the chunk."""


class Uploads:
    """The side streams of one load, and the buffers of its threads.

    Args:
        devices: the devices of the destinations. Those without streams are ignored.

    >>> uploads = Uploads([torch.device("cpu")])
    >>> uploads.devices
    []
    >>> with uploads.entered():
    ...     value = torch.ones(2)
    >>> uploads.finish()
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = [device for device in devices if has_streams(device)]
        """The devices with streams."""
        self._sides = [torch.Stream(device) for device in self.devices]
        for side, device in zip(self._sides, self.devices, strict=True):
            side.wait_event(torch.accelerator.current_stream(device).record_event())
        self._buffers: list[UploadBuffers] = []
        self.one_at_a_time = threading.Lock()
        """Held by the thread that uploads small parts. See "Small parts share one upload"."""

    def new_buffers(self) -> UploadBuffers:
        """Buffers for the calling thread, which live until `finish`."""
        buffers = UploadBuffers(self.devices)
        self._buffers.append(buffers)
        return buffers

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the side streams current in the calling thread. Several threads may enter at once."""
        with ExitStack() as stack:
            for side, device in zip(self._sides, self.devices, strict=True):
                stack.enter_context(on_stream(side, device))
            yield

    def upload_small(
        self, memory: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]], *, non_blocking: bool
    ) -> bool:
        """Copies small parts of host memory. See "Small parts share one upload".

        Args:
            memory: (count,) uint8 host memory.
            parts: first byte of each part in `memory`, and its (n,) uint8 target on one of `devices`.
            non_blocking: True if the memory is page-locked and may still be read when this returns.

        Returns:
            False if a device has no room for the upload, or a copy of each part costs less. Some targets may
            be filled then.
        """
        for device in self.devices:
            here = [part for part in parts if part[1].device == device]
            if not here:
                continue
            first, end = (
                min(start for start, _ in here),
                max(start + target.numel() for start, target in here),
            )
            if end - first > len(here) * _COPY_BYTES:
                return False
            try:
                uploaded = memory[first:end].to(device, non_blocking=non_blocking)
            except torch.OutOfMemoryError:
                return False
            sources = [uploaded[start - first :][: target.numel()] for start, target in here]
            with torch.no_grad():
                torch._foreach_copy_([target for _, target in here], sources)
        return True

    def finish(self) -> None:
        """Waits for all copies, including those of a thread that ended with an error. Drops the buffers."""
        for side in self._sides:
            side.synchronize()
        self._buffers.clear()


class UploadBuffers:
    """Two page-locked buffers of one thread, for some devices. Their owner drops them after their copies."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._memory = [memoryview(b""), memoryview(b"")]
        self._tensors = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._copied: list[list[torch.Event]] = [[], []]
        self._at = 0

    def next(self, count: int) -> memoryview:
        """Memory of `count` bytes that no copy uses. The previous memory stays valid until the next call."""
        at = self._at = 1 - self._at
        for event in self._copied[at]:
            event.synchronize()
        self._copied[at].clear()
        if len(self._memory[at]) < count:
            locked = page_locked(count)
            self._memory[at] = memoryview(bytearray(count)) if locked is None else locked
            self._tensors[at] = torch.frombuffer(self._memory[at], dtype=torch.uint8)
        return self._memory[at][:count]

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of the last `next`, and perhaps more behind it, as uint8."""
        return self._tensors[self._at]

    def enqueued(self) -> None:
        """Notes that all copies from the memory of the last `next` are on the current streams."""
        self._copied[self._at] = [
            torch.accelerator.current_stream(device).record_event() for device in self._devices
        ]

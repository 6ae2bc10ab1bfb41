"""Copies of device memory to the host, beside what the device is doing for training.

Three parties: the *main* stream, on which the caller enqueues training; a *side* stream of each save; the
host. Threads of the save and the caller's own may copy at the same time.

Note: Side waits for main, once
    The values to be saved are those that main has written when the save begins. A mark is set on main then,
    and side waits for it before its first copy; it waits for nothing that is enqueued later, so copies run
    while the next forward and backward do. Work that the caller has on streams other than the current one
    must have been joined to it, as any use of its results requires.

Note: The host waits for each copy
    `copy` returns when the bytes are in host memory. Whoever must not overwrite a tensor before it is copied
    (see "Why no torn value can be written") waits on the host for the copy to return: main then gets the work
    that overwrites it after the copy is done, and need not wait for side. For the same reason the caching
    allocator need not be told that side reads a tensor: the caller holds a reference until `copy` returns,
    and then nothing of side reads it.

Note: Temporaries belong to side
    A strided, conjugated or negated tensor is first laid out in row-major order on the device. That memory is
    allocated while side is the thread's current stream, so the allocator hands it out again to side only,
    whose later work comes after the copy. It is no larger than what is copied at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardproof._utils.streams import has_streams, on_stream
from shardproof.storage import ALIGNMENT, address, aligned_buffer

__all__ = ["DeviceCopies", "copies_of", "pinned_buffer"]


class DeviceCopies:
    """Copies of one device's tensors in one save: of their values when this was made.

    Where the device has no streams, `copy` copies as anybody would.

    Args:
        device: of the tensors.

    >>> copies = DeviceCopies(torch.device("cpu"))
    >>> bytes_of = memoryview(bytearray(4))
    >>> copies.copy(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, bytes_of)
    >>> bytes_of.tolist()
    [1, 3, 2, 4]
    >>> copies.finish()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.Stream | None = None
        if has_streams(device):  # see "Side waits for main, once"
            self._side = torch.Stream(device)
            self._side.wait_event(torch.accelerator.current_stream(device).record_event())

    def copy(self, source: torch.Tensor, into: memoryview) -> None:
        """Copy a tensor's elements in row-major order; returns when they are there.

        Any thread may call this, and several at once. Page-locked memory (`pinned_buffer`) is filled fastest.

        Args:
            source: on the device, of any layout in memory and any dtype. Nothing may write to it until
                this returns.
            into: writable, as many bytes as the elements take.

        Raises:
            torch.OutOfMemoryError: the device has no room for a row-major copy of a strided `source`.
        """
        assert len(into) == source.numel() * source.element_size(), (len(into), source.shape, source.dtype)
        if len(into) == 0:
            return
        target = torch.frombuffer(into, dtype=torch.uint8).view(source.dtype).view(source.shape)
        if self._side is None:
            target.copy_(source.detach())
            return
        with on_stream(self._side, self._device):
            row_major = source.detach().resolve_conj().resolve_neg().contiguous()
            target.copy_(row_major, non_blocking=True)
            done = self._side.record_event()
            del row_major  # see "Temporaries belong to side"
        done.synchronize()

    def gathered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies of 1-D tensors of one dtype, one behind the other, in host memory.

        Args:
            parts: on the device; as for `copy`.
        """
        if self._side is None:
            return torch.cat(list(parts)).cpu()
        with on_stream(self._side, self._device):
            return torch.cat(list(parts)).cpu()

    def finish(self) -> None:
        """Wait until nothing is being copied any more, also not for a `copy` that an error ended."""
        if self._side is not None:
            self._side.synchronize()


def copies_of(tensors: Iterable[torch.Tensor]) -> dict[torch.device, DeviceCopies]:
    """Copies of the values that tensors have now, by the device that they are on; none for host memory."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return {device: DeviceCopies(device) for device in devices}


def pinned_buffer(nbytes: int) -> memoryview:
    """New memory that starts on a page: page-locked if this process uses an accelerator that can do so.

    Otherwise, and where the system lets no more memory be locked, it is `aligned_buffer(nbytes)`. An
    accelerator that was not used yet is left alone: locking would bring its driver's memory into the process.
    Its allocator may round up to a power of two, and keeps what is freed for the next one who asks.

    >>> buffer = pinned_buffer(10_000)
    >>> len(buffer), buffer.readonly, address(buffer) % ALIGNMENT
    (10000, False, 0)
    """
    if nbytes > 0 and _locks_pages():
        for spare in (0, ALIGNMENT):
            try:
                memory = (
                    torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=True, device="cpu").numpy().data
                )
            except RuntimeError:  # the limit of locked memory, or of the backend
                break
            skip = -address(memory) % ALIGNMENT
            if skip <= spare:
                return memory[skip : skip + nbytes]
    return aligned_buffer(nbytes)


def _locks_pages() -> bool:
    """Whether there is an accelerator that this process uses already."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return False
    is_used = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_used is None or bool(is_used())

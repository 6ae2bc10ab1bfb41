"""Copies of device memory to the host, concurrent with training on the device.

Three parties take part: the *main* stream, on which the caller enqueues training; a *side* stream of each
save; and the host. Several threads may copy at the same time.

Note: Side waits for main, once
    A save stores the values that main has written when the save begins. The save records an event on main
    then, and side waits for it before its first copy. Side waits for no later work, so copies overlap the
    next forward and backward. The caller joins work on other streams to the current one, as any use of its
    results requires.

Note: The host waits for copies
    `copy` returns when the bytes are in host memory; `enqueue` leaves that to `wait`. Code that overwrites a
    tensor after its copy (see "Why no torn value can be written") waits on the host until then. So main gets
    that work after the copy is done, and does not wait for side. For the same reason no `record_stream` is
    needed: the caller holds a reference until then, and after that no work of side reads the tensor.

Note: Temporaries belong to side
    A strided, conjugated or negated tensor is first copied into row-major order on the device. Side is the
    current stream of the thread when this memory is allocated. So the allocator reuses it only for side,
    whose later work comes after the copy. It is no larger than one copied part. Small tensors are gathered
    in such memory, too: for them, the start of a copy to the host takes longer than the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardproof._utils.accelerator import page_locked
from shardproof._utils.streams import has_streams, on_stream
from shardproof.engine.storage import ALIGNMENT, aligned_buffer


class DeviceCopies:
    """Copies of one device's tensors, with their values when this object was made.

    On a device without streams, copies run in the device's default order.

    >>> copies = DeviceCopies(torch.device("cpu"))
    >>> bytes_of = memoryview(bytearray(4))
    >>> copies.copy(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, bytes_of)
    >>> bytes_of.tolist()
    [1, 3, 2, 4]
    >>> copies.wait()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.Stream | None = None
        if has_streams(device):  # see "Side waits for main, once"
            self._side = torch.Stream(device)
            self._side.wait_event(torch.accelerator.current_stream(device).record_event())

    def copy(self, source: torch.Tensor, into: memoryview) -> None:
        """Copies a tensor's elements in row-major order; returns when they are in host memory.

        Several threads may call this at once. Page-locked memory (`pinned_buffer`) is fastest.

        Args:
            source: on the device, of any strides and dtype. No code may write to it until this returns.
            into: writable memory of the size of the elements.

        Raises:
            torch.OutOfMemoryError: the device has no room for a row-major copy of a strided `source`.
        """
        if (done := self.enqueue(source, into)) is not None:
            done.synchronize()

    def enqueue_together(
        self, sources: Sequence[torch.Tensor], starts: Sequence[int], into: memoryview
    ) -> None:
        """As `enqueue` for several small tensors, which a single copy brings to the host.

        Args:
            sources: as `source` of `copy`, and not empty.
            starts: first byte of each tensor in `into`.
            into: writable memory. Bytes between the tensors are overwritten, too.
        """
        if self._side is not None:
            with on_stream(self._side, self._device):
                if _gather(sources, starts, into):
                    return
        for source, start in zip(sources, starts, strict=True):
            self.enqueue(source, into[start : start + source.nbytes])

    def wait(self) -> None:
        """Waits for all copies, including those whose `copy` ended with an error."""
        if self._side is not None:
            self._side.synchronize()

    def enqueue(self, source: torch.Tensor, into: memoryview) -> torch.Event | None:
        """As `copy`, but the elements are in host memory only when a later `wait` has returned.

        So the host prepares the next copy during this one. Returns an event after the copy, if it has to be
        waited for.
        """
        assert len(into) == source.numel() * source.element_size(), (len(into), source.shape, source.dtype)
        if len(into) == 0:
            return None
        target = torch.frombuffer(into, dtype=torch.uint8).view(source.dtype).view(source.shape)
        if self._side is None:
            target.copy_(source.detach())
            return None
        with on_stream(self._side, self._device):
            row_major = source.detach().resolve_conj().resolve_neg().contiguous()
            target.copy_(row_major, non_blocking=True)
            done = self._side.record_event()
            del row_major  # see "Temporaries belong to side"
        return done

    def gathered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The concatenation of 1-D tensors of one dtype on the device, in host memory."""
        if self._side is None:
            return torch.cat(list(parts)).cpu()
        with on_stream(self._side, self._device):
            return torch.cat(list(parts)).cpu()


def _gather(sources: Sequence[torch.Tensor], starts: Sequence[int], into: memoryview) -> bool:
    """Enqueues one copy for all tensors, on the current stream; False if the device has no room for it."""
    try:
        gathered = torch.empty(len(into), dtype=torch.uint8, device=sources[0].device)
        row_major = [source.detach().resolve_conj().resolve_neg().contiguous() for source in sources]
    except torch.OutOfMemoryError:
        return False
    # A contiguous tensor of one element may have any stride.
    parts = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in row_major]
    torch._foreach_copy_(
        [gathered[start : start + part.numel()] for start, part in zip(starts, parts, strict=True)], parts
    )
    torch.frombuffer(into, dtype=torch.uint8).copy_(gathered, non_blocking=True)
    return True


def copies_of(tensors: Iterable[torch.Tensor]) -> dict[torch.device, DeviceCopies]:
    """A `DeviceCopies` for each device that a tensor is on; none for host memory."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return {device: DeviceCopies(device) for device in devices}


def pinned_buffer(nbytes: int) -> memoryview:
    """New memory that starts on a page; page-locked if this process uses an accelerator that supports it.

    Otherwise, and if the system refuses to lock more memory, it is `aligned_buffer(nbytes)`. See
    `page_locked`.

    >>> buffer = pinned_buffer(10_000)
    >>> len(buffer), buffer.readonly
    (10000, False)
    """
    locked = page_locked(nbytes, ALIGNMENT) if nbytes > 0 else None
    return aligned_buffer(nbytes) if locked is None else locked

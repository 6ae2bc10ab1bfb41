"""Copies between a device and the host that overlap the steps on both.

A device has three streams. The *main* stream is current when the program calls `step`, and backward ran on
it. The *down* stream copies gradients to the host. The *up* stream copies parameters to the device. The host
waits for single events, never for a stream or a device.

Note: Down waits for main
    `step` first redistributes gradients whose sharding differs from their parameter's. Main then records an
    event, the mark. A gradient is complete when main reaches the mark. Down waits for the mark and for
    nothing later, so it overlaps the device's step, which follows on main. The device's step does not access
    the memory that down reads, because each parameter is on one side only.

Note: The host waits for the gradients of one bucket
    Each bucket of parameters has its own event, which down records after the copies of the bucket's
    gradients. The host waits for it right before it steps the bucket, while later copies continue. The
    destination buffers are free, because their only reader, the host's previous step, has finished. `step`
    keeps a redistributed gradient alive until it ends. When `step` returns, the host has waited for every
    event of down. The program may then free or zero gradients without `record_stream` on down. After an
    error, main waits for down.

Note: Up waits for main
    Forward and backward, enqueued on main before the mark, read the parameters that up overwrites. The
    host's wait for a copied gradient implies that they are done. A gradient that is already on the host needs
    no copy, so up waits for the mark itself.

Note: Main waits for up
    Work after `step` on main reads the new parameters. Before `step` returns, it makes main wait for up. The
    host does not wait.

Note: The host waits for a sent bucket
    A copy up may still be reading the host's tensors after `step` has returned. The next step, a load or a
    refresh writes to them again. Before it does, the host waits for the event that up recorded after the
    copies of the bucket.

Note: The device's own gradients stay on main
    Where the device steps an fp32 master, its gradient is cast on main, right before the step that reads
    it. Both run on main, so they need no event.

Without an accelerator, or with overlap off, each copy is complete when its call returns.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from shardproof._utils.accelerator import is_on_accelerator, on_stream

Tensors: TypeAlias = list[torch.Tensor]


class CopyEvent:
    """A point in a queue of copies. Here, the copies before it are always complete."""

    def synchronize(self) -> None:
        """Blocks the host until the copies before this point are complete."""


Event: TypeAlias = CopyEvent | torch.Event


class Transfers:
    """Copies between the host and one device. Here, each copy is complete when its call returns.

    The notes above state what each call of `SideStreams` waits for.
    """

    def event(self) -> Event:
        """An event for one bucket, reused at each step. A wait before its first record returns at once."""
        return CopyEvent()

    def begin(self) -> None:
        """Records the mark on main."""

    def down(self, destinations: Tensors, sources: Tensors, event: Event) -> None:
        """Copies tensors to the host."""
        torch._foreach_copy_(destinations, sources)

    def up(self, destinations: Tensors, sources: Tensors, event: Event) -> None:
        """Copies tensors to the device."""
        torch._foreach_copy_(destinations, sources)

    def end(self) -> None:
        """Makes main wait for the copies."""


class SideStreams(Transfers):
    """Copies on two side streams of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)

    def event(self) -> torch.Event:
        """An event of the device."""
        return torch.Event(self._device)

    def begin(self) -> None:
        """See "Down waits for main" and "Up waits for main"."""
        mark = torch.accelerator.current_stream(self._device).record_event()
        self._down.wait_event(mark)
        self._up.wait_event(mark)

    def down(self, destinations: Tensors, sources: Tensors, event: Event) -> None:
        """Enqueues copies to the host. Down casts dtypes on the device."""
        self._enqueue(self._down, destinations, sources, event)

    def up(self, destinations: Tensors, sources: Tensors, event: Event) -> None:
        """Enqueues copies to the device."""
        self._enqueue(self._up, destinations, sources, event)

    def end(self) -> None:
        """See "Main waits for up". Down is complete, unless an error ended the step early."""
        main = torch.accelerator.current_stream(self._device)
        main.wait_stream(self._down)
        main.wait_stream(self._up)

    def _enqueue(self, stream: torch.Stream, destinations: Tensors, sources: Tensors, event: Event) -> None:
        assert isinstance(event, torch.Event)
        with on_stream(stream, self._device):
            torch._foreach_copy_(destinations, sources, non_blocking=True)
            event.record(stream)


def transfers_for(device: torch.device, overlap: bool) -> Transfers:
    """The transfers of one device: on side streams if it is an accelerator and `overlap` is true."""
    if overlap and is_on_accelerator(device):
        return SideStreams(device)
    return Transfers()

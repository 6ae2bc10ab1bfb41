"""Copies between a device and the host, beside the steps on both.

Three queues of work belong to a device: the *main* stream, which is current when `step` is called and on
which backward ran, and two side streams, *down* (gradients to the host) and *up* (parameters to the device).
The host is the fourth party. It waits for single events, never for a stream or a device.

Note: Down waits for main
    A gradient is complete when main has done all that was enqueued when `step` began, and what lays it out
    as its parameter where it is not (one that is sharded in another way). Down waits for the mark set then,
    and for nothing later: the device's step, enqueued on main afterwards, runs at the same time. The device's
    step neither reads nor writes what down reads, because a parameter is on one side only.

Note: The host waits for one gradient
    Each parameter has an event of its own, recorded on down after its gradient's copy. The host waits for
    it right before it steps that parameter: the copies of those behind it go on meanwhile. The buffer
    that it fills is free, because the host has finished the previous step of the parameter, its only
    reader. A gradient made for the copy alone (another layout's) is held until the step ends. When `step`
    returns, the host has waited for every event of down, so gradients may be freed or zeroed without
    telling the allocator of down; after an error, main has been made to wait for down.

Note: Up waits for main
    Forward and backward, enqueued on main before the mark, read the parameters that up overwrites. The
    host's wait for a gradient implies that they are done, but a gradient may have come another way (a
    gradient that is on the host already); up waits for the mark in its own right.

Note: Main waits for up
    What follows `step` on main reads the new parameters, so main waits for all of up before `step`
    returns. The device waits, not the host.

Note: The host waits for a sent parameter
    A copy up may still be reading the host's tensor after `step` has returned. Before the host writes to
    that tensor again (the next step, a load, a refresh) it waits for the event recorded on up after the
    copy, which has nearly always happened long ago.

Note: The device's own gradients stay on main
    Where the device steps an fp32 master, its gradient is cast on main, right before the step that reads
    it, also on main: the order of the stream is the order of the work. A cast on a side stream would need
    a wait, which is the one that other implementations forgot.

With no accelerator, or with overlap off, a copy is done when the call returns, and nobody waits.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardproof._utils.streams import on_stream

__all__ = ["BlockingTransfers", "CopyEvent", "SideStreams", "Transfers", "transfers_for"]


class CopyEvent(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""


class Transfers(Protocol):
    """Copies of one device. The notes above say what each call waits for."""

    def event(self) -> CopyEvent:
        """An event for one parameter, used again at each step. Before it is recorded, nobody waits for it."""

    def begin(self) -> None:
        """Set the mark on main."""

    def down(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Copy to the host."""

    def up(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Copy to the device."""

    def end(self) -> None:
        """Let main wait for the copies."""


class _Reached:
    def synchronize(self) -> None:
        return


class BlockingTransfers:
    """Copies that are done when the call returns."""

    def event(self) -> CopyEvent:
        """One that is always reached."""
        return _Reached()

    def begin(self) -> None:
        """Nothing to order."""

    def down(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Copy now."""
        destination.copy_(source)

    def up(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Copy now."""
        destination.copy_(source)

    def end(self) -> None:
        """Nothing to order."""


class SideStreams:
    """Copies on two streams beside the device's main stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)

    def event(self) -> CopyEvent:
        """An event of the device."""
        return torch.Event(self._device)

    def begin(self) -> None:
        """See "Down waits for main" and "Up waits for main"."""
        mark = torch.accelerator.current_stream(self._device).record_event()
        self._down.wait_event(mark)
        self._up.wait_event(mark)

    def down(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Enqueue a copy to the host. A change of dtype happens on the device, on down."""
        self._enqueue(self._down, destination, source, event)

    def up(self, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent) -> None:
        """Enqueue a copy to the device."""
        self._enqueue(self._up, destination, source, event)

    def end(self) -> None:
        """See "Main waits for up". Down is done by then, unless an error ended the step before."""
        main = torch.accelerator.current_stream(self._device)
        main.wait_stream(self._down)
        main.wait_stream(self._up)

    def _enqueue(
        self, stream: torch.Stream, destination: torch.Tensor, source: torch.Tensor, event: CopyEvent
    ) -> None:
        assert isinstance(event, torch.Event)
        with on_stream(stream, self._device):
            destination.copy_(source, non_blocking=True)
            event.record(stream)


def transfers_for(device: torch.device, overlap: bool) -> Transfers:
    """How the parameters on one device exchange data with the host."""
    accelerator = torch.accelerator.current_accelerator()
    if overlap and accelerator is not None and accelerator.type == device.type:
        return SideStreams(device)
    return BlockingTransfers()

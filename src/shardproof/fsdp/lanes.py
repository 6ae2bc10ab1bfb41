"""Work beside the computation: streams and events on an accelerator, work handles on a CPU.

Note: who waits for whom
    There is one compute stream (the current one), one lane for gathers and one for reductions. On entering a
    lane its stream waits for the compute stream as it is then. This one wait covers: the optimizer's writes
    to the shards that a gather reads, the copies of gradients that a reduction reads, the last use of memory
    that was given back (to the allocator or to the pool) and is written again in the lane, because all of
    that was enqueued on the compute stream before. At the end of a lane's work an event is recorded, and
    the compute stream waits for it before it reads gathered parameters or reduced gradients, or writes
    again to a buffer that a reduction was reading.

    All memory is allocated and freed on the compute stream. What a lane uses is freed only after the compute
    stream has waited for that use, so the allocator, which orders by the compute stream, may hand it out
    again and nothing is recorded on two streams. Nothing here waits on the host.

    On a CPU the lanes are the process group's own threads: a collective starts at once and its handle is
    waited for on the host, at the places where an accelerator's compute stream waits for the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Done", "Lane"]


class Done:
    """The end of work in a lane, for the compute stream (or the host, on a CPU) to wait for."""

    __slots__ = ("_event", "_works")

    def __init__(self, event: torch.Event | None, works: tuple[Any, ...] = ()) -> None:
        self._event, self._works = event, works

    def wait(self) -> None:
        """What comes after sees the work's results (see "who waits for whom")."""
        if self._event is not None:
            torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        for work in self._works:
            work.wait()
        self._event, self._works = None, ()


class Lane:
    """A stream beside the compute stream of a device; nothing on a CPU.

    >>> lane = Lane(torch.device("cpu"))
    >>> with lane.entered():
    ...     value = torch.ones(2)
    >>> lane.end().wait()
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device) if device.type not in ("cpu", "meta") else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work enqueued within comes after all that the compute stream was given before."""
        if self.stream is None:
            yield
            return
        compute = torch.accelerator.current_stream(self.device)
        self.stream.wait_stream(compute)
        torch.accelerator.set_stream(self.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(compute)

    def end(self, *works: Any) -> Done:
        """The end of what was given to the lane; called within `entered`.

        Args:
            works: handles of the collectives among it. On an accelerator the lane's stream waits for them.
        """
        if self.stream is None:
            return Done(None, works)
        for work in works:
            work.wait()
        return Done(self.stream.record_event())

"""Work that overlaps the computation: streams and events on an accelerator, work handles on a CPU.

Note: who waits for whom
    There is one compute stream (the current one), one lane for gathers and one for reductions. When work
    enters a lane, the lane's stream waits for all work that is enqueued on the compute stream. This one wait
    covers three cases, because all of them were enqueued on the compute stream before:

    - the optimizer's writes to the shards that a gather reads;
    - the copies of gradients that a reduction reads;
    - the last use of memory that was returned to the allocator or the pool, and that the lane writes again.

    At the end of its work the lane records an event. The compute stream waits for the event before it reads
    gathered parameters or reduced gradients, and before it writes to a buffer that a reduction reads.

    All memory is allocated and freed on the compute stream. Memory that a lane uses is freed only after the
    compute stream has waited for that use. The allocator orders by the compute stream, so it may reuse the
    memory, and no memory needs `record_stream`. Nothing here waits on the host.

    On a CPU the lanes are the threads of the process group. A collective starts at once. The host waits for
    its handle wherever an accelerator's compute stream waits for the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardproof._utils.accelerator import on_stream


class Done:
    """The end of work in a lane. The compute stream waits for it; on a CPU, the host does."""

    __slots__ = ("_event", "_works")

    def __init__(self, event: torch.Event | None, works: tuple[Any, ...] = ()) -> None:
        self._event, self._works = event, works

    def wait(self) -> None:
        """Orders later work after the lane's work (see "who waits for whom")."""
        if self._event is not None:
            torch.accelerator.current_stream(self._event.device).wait_event(self._event)
        for work in self._works:
            work.wait()
        self._event, self._works = None, ()


class Lane:
    """A stream in addition to the compute stream of a device. A CPU has none.

    Example:
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
        """Enqueues work in the lane, after all work that is enqueued on the compute stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with on_stream(self.stream, self.device):
            yield

    def end(self, *works: Any) -> Done:
        """The end of the work in the lane. Call it within `entered`.

        Args:
            works: handles of the collectives in the work. On an accelerator the lane's stream waits for them.
        """
        if self.stream is None:
            return Done(None, works)
        for work in works:
            work.wait()
        return Done(self.stream.record_event())

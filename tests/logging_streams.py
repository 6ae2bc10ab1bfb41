"""Streams that only log their operations, for tests without an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

__all__ = ["LoggingStream", "streams_that_log"]


class LoggingStream:
    """A queue that runs no operation and logs each one."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> SimpleNamespace:
        self.log.append(f"mark on {self.name}")
        return SimpleNamespace(
            of=self.name, synchronize=lambda: self.log.append(f"host waits for {self.name}'s mark")
        )

    def wait_event(self, event: SimpleNamespace) -> None:
        self.log.append(f"{self.name} waits for {event.of}'s mark")

    def wait_stream(self, other: LoggingStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


def streams_that_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Patches torch to log stream operations on an accelerator called cpu; returns the log.

    Each thread has its own current stream.
    """
    events: list[str] = []
    state = threading.local()

    def now() -> str:
        return getattr(state, "stream", main).name

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        events.append("device")
        yield
        events.append("device back")

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.of = "nothing"

        def record(self, stream: LoggingStream) -> None:
            events.append(f"event on {stream.name}")
            self.of = stream.name

        def synchronize(self) -> None:
            events.append(f"host waits for {self.of}'s event")

    main = LoggingStream(events, "main")
    module = SimpleNamespace(Stream=LoggingStream, device=guard)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    names = iter(("side", "second side"))
    monkeypatch.setattr(torch, "Stream", lambda device: LoggingStream(events, next(names)))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device=None: getattr(state, "stream", main)
    )
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(state, "stream", stream))
    original_copy, original_contiguous = torch.Tensor.copy_, torch.Tensor.contiguous

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        events.append(f"copy on {now()}" + ("" if non_blocking else ", blocking"))
        return original_copy(self, source)

    def foreach_copy(
        destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
    ) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source, non_blocking)

    def contiguous(self: torch.Tensor) -> torch.Tensor:
        events.append(f"layout on {now()}")
        return original_contiguous(self)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    return events

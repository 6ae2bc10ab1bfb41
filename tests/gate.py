"""Delays the writes of shard files until a test lets them continue."""

from __future__ import annotations

import threading

import pytest

from shardproof.engine.storage.sink import LocalSink

LIMIT = 60.0


class Gate:
    """Writes of shard files wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        write_at = LocalSink.write_at

        def gated(sink: LocalSink, start: int, buffer: memoryview) -> None:
            self.reached.set()
            assert self._open.wait(LIMIT)
            write_at(sink, start, buffer)

        monkeypatch.setattr(LocalSink, "write_at", gated)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

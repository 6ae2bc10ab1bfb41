"""`ObjectSink`: the parts of an upload."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from shardproof.engine.storage.remote_requests import ObjectSink
from shardproof.errors import StorageError
from tests.thread_limit import limit_threads


@pytest.mark.parametrize(("size", "part_bytes"), [(0, 16 << 20), (1 << 40, -(-(1 << 40) // 9_000))])
def test_parts_of_a_large_object_are_larger(size: int, part_bytes: int) -> None:
    """A store takes at most 10,000 parts."""
    uploads: list[tuple[int, dict[str, Any]]] = []

    def put(data: Any, **how: Any) -> None:
        uploads.append((sum(map(len, data)), how))

    sink = ObjectSink(put, "object", size)
    sink.write_at(0, memoryview(bytes(16 << 20)))  # begins the upload
    sink.finish(16 << 20)
    assert uploads == [(16 << 20, {"chunk_size": part_bytes, "max_concurrency": 8})]


MIB = 1 << 20


@pytest.mark.parametrize("sizes", [[40 * MIB, 50 * MIB], [100 * MIB], [10 * MIB, 20 * MIB]])
def test_an_object_is_sent_whole_without_a_thread(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    sent = bytearray()

    def put(data: Any, **how: Any) -> None:
        sent.extend(data.read() if hasattr(data, "read") else b"".join(data))

    limit_threads(monkeypatch)
    sink, pieces = ObjectSink(put, "object"), [os.urandom(MIB) * (size // MIB) for size in sizes]
    start = 0
    for piece in pieces:
        sink.write_at(start, memoryview(piece))
        start += len(piece)
    sink.finish(start)
    assert sent == b"".join(pieces)


def test_finish_sends_in_its_own_thread_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part has a hole, so no upload begins before `finish`."""
    sent = bytearray()
    threads: list[threading.Thread] = []

    def put(data: Any, **how: Any) -> None:
        threads.append(threading.current_thread())
        sent.extend(b"".join(data))

    limit_threads(monkeypatch)
    sink = ObjectSink(put, "object")
    sink.write_at(MIB, memoryview(b"1" * 20 * MIB))
    sink.finish(21 * MIB)
    assert sent == bytes(MIB) + b"1" * 20 * MIB and threads == [threading.current_thread()]
    failing = ObjectSink(failing_put, "object")
    failing.write_at(MIB, memoryview(bytes(20 * MIB)))
    with pytest.raises(StorageError, match="the store is gone"):
        failing.finish(21 * MIB)


def failing_put(data: Any, **how: Any) -> None:
    raise StorageError("the store is gone")


def test_abort_without_a_thread_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch)
    sink = ObjectSink(failing_put, "object")
    sink.write_at(0, memoryview(bytes(20 * MIB)))
    sink.abort()
    sink.abort()

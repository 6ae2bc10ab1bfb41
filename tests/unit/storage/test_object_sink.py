"""`ObjectSink`: the parts of an upload."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.storage.object_sink import ObjectSink


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

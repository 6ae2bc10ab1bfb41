"""Fixtures: one S3 server for a session, and a bucket or prefix for each test."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from shardproof.storage import ObjectStorage
from tests.object_store.seaweed import PART, S3Server, running_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_server(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket("tests")
        yield server


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that no other test uses. The environment has the credentials."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://tests/{uuid.uuid4().hex}"


@pytest.fixture
def begin_upload(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Begins an upload whose first parts arrive, and leaves it as a killed process does. Returns its id."""

    def begin(storage: ObjectStorage, name: str, parts: int = 1) -> str:
        sink = storage.create(name)
        request.addfinalizer(sink.abort)
        sink.write_at(0, memoryview(os.urandom(parts * PART + 1)))
        ends = time.monotonic() + 60.0
        while True:
            uploads = [one for one in storage.uploads(time.time() + 3600.0) if one.name == name]
            if uploads and uploads[0].bytes == parts * PART:
                return uploads[0].id
            assert time.monotonic() < ends, "no part arrived"
            time.sleep(0.05)

    return begin

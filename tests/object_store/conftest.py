"""Fixtures: one S3 server for a session, and a bucket or prefix for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.object_store.seaweed import S3Server, running_server


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

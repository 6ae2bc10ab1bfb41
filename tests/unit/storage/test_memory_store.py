"""MemoryStorage: the conformance suite, and what only a keeper process can do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardproof.storage import MemoryStorage
from shardproof.storage.conformance import StorageConformance


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    storage = MemoryStorage(f"memory://test-{os.getpid()}", budget=1 << 30, idle_timeout=120)
    yield storage
    storage.drop()


class TestConformance(StorageConformance):
    @pytest.fixture
    def storage(self, storage: MemoryStorage) -> MemoryStorage:
        return storage

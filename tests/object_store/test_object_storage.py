"""`ObjectStorage` against a real S3 server."""

from __future__ import annotations

import pytest

from shardproof.storage import ObjectStorage
from shardproof.storage.conformance import StorageConformance

pytestmark = pytest.mark.processes


class TestObjectStorage(StorageConformance):
    @pytest.fixture
    def storage(self, url: str) -> ObjectStorage:
        return ObjectStorage(url)

    def test_delete(self, storage: ObjectStorage) -> None:  # type: ignore[override]
        """SeaweedFS keeps an emptied folder for a while, so no object can have its name at once."""
        for name in ("a/b/c", "a/d"):
            storage.create(name).finish(0)
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        assert storage.list() == ["a/d"]

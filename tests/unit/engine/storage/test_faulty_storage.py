"""The storage of the fault tests fails at the chosen operation, and only there."""

from __future__ import annotations

import pytest

from shardproof.errors import StorageError
from shardproof.storage import LocalStorage
from shardproof.storage.conformance import StorageConformance
from tests.faulty_storage import FaultyStorage


class TestWithoutFault(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        return FaultyStorage(LocalStorage(tmp_path / "root"))


def _save(storage) -> None:
    part = storage.within("step")
    sink = part.create("s")
    sink.write_at(0, memoryview(b"x"))
    sink.finish(1)
    part.publish("manifest.json", b"{}")


STEPS = [
    ("create", "step/s"),
    ("write_at", "step/s"),
    ("finish", "step/s"),
    ("publish", "step/manifest.json"),
]


def test_counts_everything(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path))
    _save(storage)
    assert storage.operations == STEPS


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("after", [False, True])
def test_fails_at_the_operation(tmp_path, at, after):
    storage = FaultyStorage(LocalStorage(tmp_path), at, StorageError("full"), after=after)
    with pytest.raises(StorageError, match="full"):
        _save(storage)
    assert storage.operations == STEPS[: at + 1]
    committed = LocalStorage(tmp_path).size("step/manifest.json") is not None
    assert committed == (at == 3 and after)


def test_only_some_operations(tmp_path):
    called = []
    storage = FaultyStorage(LocalStorage(tmp_path), 0, lambda *what: called.append(what), only=("finish",))
    _save(storage)
    assert called == [("finish", "step/s")]

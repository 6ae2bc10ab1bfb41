"""A storage that does not answer a publish, and carries it out later. Files that it names stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.runs.maintenance import make_standalone, verify
from shardproof.storage import LocalStorage


class LateStorage(LocalStorage):
    """Answers each publish of a manifest with a timeout, and carries it out on request."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.late: list[Any] = []

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        if name != MANIFEST_NAME:
            super().publish(name, data, replace=replace)
            return
        self.late.append(lambda: LocalStorage.publish(self, name, data, replace=replace))
        raise sp.StorageError("Connection timed out", errno="ETIMEDOUT", missing=False, unanswered=True)


def test_a_save_keeps_its_files(tmp_path: Path) -> None:
    storage = LateStorage(tmp_path)
    with pytest.raises(sp.RankFailure, match="it is unknown whether it was committed") as failed:
        sp.save(storage, {"w": torch.ones(4)})
    assert failed.value.details["committed"] is None
    storage.late.pop()()
    assert verify(LocalStorage(tmp_path)).ok


def test_an_overwrite_loses_neither_checkpoint(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.zeros(4)})
    storage = LateStorage(tmp_path)
    with pytest.raises(sp.RankFailure):
        sp.save(storage, {"w": torch.ones(4)}, overwrite=True)
    assert verify(LocalStorage(tmp_path)).ok
    storage.late.pop()()
    assert verify(LocalStorage(tmp_path)).ok
    target = {"w": torch.zeros(4)}
    sp.load(tmp_path, target)
    assert target["w"].tolist() == [1.0] * 4


def test_a_copy_keeps_its_files(tmp_path: Path) -> None:
    sp.save(tmp_path / "source", {"w": torch.ones(4)})
    storage = LateStorage(tmp_path / "copy")
    with pytest.raises(sp.StorageError, match="timed out"):
        make_standalone(LocalStorage(tmp_path / "source"), storage)
    storage.late.pop()()
    assert verify(LocalStorage(tmp_path / "copy")).ok


def test_a_refusal_removes_the_files(tmp_path: Path) -> None:
    """So that the tests above show the effect of the missing answer."""

    class Refusing(LateStorage):
        def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
            raise sp.StorageError("No space left on device", errno="ENOSPC", missing=False)

    with pytest.raises(sp.RankFailure, match="nothing was committed"):
        sp.save(Refusing(tmp_path), {"w": torch.ones(4)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def is_unanswered(monkeypatch: pytest.MonkeyPatch, request: str, text: str) -> bool:
    """True if a bucket raises an error without an answer when a request of obstore fails with a text."""
    obstore = pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "region")
    storage = sp.storage.ObjectStorage("s3://bucket/run")

    def fail(*arguments: Any, **how: Any) -> Any:
        raise obstore.exceptions.GenericError(text)

    monkeypatch.setattr(obstore, request, fail)
    with pytest.raises(sp.StorageError) as failed:
        storage.read("a") if request == "get" else storage.publish("manifest.json", b"", replace=True)
    return bool(failed.value.details.get("unanswered"))


def test_a_store_that_refuses_a_read_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "Server returned non-2xx status code: 416 Range Not Satisfiable"
    assert not is_unanswered(monkeypatch, "get", refused)
    for code in (408, 429, 503):
        busy = f"after 10 retries: Server returned non-2xx status code: {code}"
        assert is_unanswered(monkeypatch, "get", busy)


def test_a_refused_write_may_follow_one_that_the_store_carries_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "after 2 retries: Server returned non-2xx status code: 400 Bad Request"
    assert is_unanswered(monkeypatch, "put", refused)


def test_only_timeouts_are_without_an_answer() -> None:
    from shardproof.engine.storage.paths import storage_error

    assert storage_error(TimeoutError(110, "Connection timed out"), "write", "/x").details["unanswered"]
    assert "unanswered" not in storage_error(PermissionError(13, "Permission denied"), "write", "/x").details

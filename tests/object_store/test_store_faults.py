"""Failures of the network and of the server: saves end in bounded time, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.exceptions import AlreadyExistsError

import shardproof as sp
from shardproof.errors import tells_nothing
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.judge import is_damage
from shardproof.storage import ObjectStorage, Sink
from tests.object_store.faulty_proxy import FaultyProxy
from tests.object_store.seaweed import S3Server, running_server

pytestmark = pytest.mark.processes

QUICK = {"retry_timeout": timedelta(seconds=4), "max_retries": 100}


def state(value: float) -> dict[str, Any]:
    """80 MB: several parts of an upload."""
    return {"big": torch.full((20_000_000,), value), "n": value}


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(s3.endpoint)
    yield proxy
    proxy.close()


def options(s3: S3Server, proxy: FaultyProxy, **more: Any) -> dict[str, Any]:
    """Fresh connections for each request, so that each fault meets one request."""
    client = {"pool_max_idle_per_host": "0", "timeout": "3s", **more.pop("client_options", {})}
    return {**s3.options, "endpoint": proxy.endpoint, "client_options": client, **more}


def test_a_storm_of_503_passes(s3: S3Server, proxy: FaultyProxy, url: str) -> None:
    often = {"backoff": {"max_backoff": timedelta(seconds=1)}}
    proxy.refuse = 25
    sp.save(f"{url}/step", state(1.0), storage_options=options(s3, proxy, retry_config=often))
    assert proxy.refuse == 0
    proxy.refuse = 10
    target = state(0.0)
    sp.load(f"{url}/step", target, storage_options=options(s3, proxy, retry_config=often))
    assert torch.equal(target["big"], state(1.0)["big"])


def test_cut_connections_are_made_again(s3: S3Server, proxy: FaultyProxy, url: str) -> None:
    proxy.cut_after, proxy.cuts = 300_000, 6
    sp.save(f"{url}/step", state(2.0), storage_options=options(s3, proxy))
    assert proxy.cuts == 0
    target = state(0.0)
    sp.load(f"{url}/step", target)
    assert torch.equal(target["big"], state(2.0)["big"])


def test_a_stalled_store_ends_a_save_at_its_deadline_and_nothing_is_committed(
    s3: S3Server, proxy: FaultyProxy, url: str
) -> None:
    checkpointer = sp.Checkpointer(url, storage_options=options(s3, proxy, retry_config=QUICK))
    checkpointer.save(1, state(1.0)).result()
    proxy.stalled.set()
    begun = time.monotonic()
    with pytest.raises(sp.ShardproofError, match="at most 4 s"):
        checkpointer.save(2, state(2.0)).result()
    assert time.monotonic() - begun < 60
    proxy.stalled.clear()
    assert checkpointer.steps() == [1]
    checkpointer.save(2, state(2.0)).result()
    target = state(0.0)
    assert checkpointer.restore(target) == 2 and target["n"] == 2.0


def test_every_operation_ends_at_the_deadline_that_its_error_names(
    s3: S3Server, proxy: FaultyProxy, url: str
) -> None:
    retry = {**QUICK, "max_retries": 1000, "backoff": {"max_backoff": timedelta(seconds=1)}}
    more = options(s3, proxy, retry_config=retry, client_options={"timeout": "1s"})
    storage = ObjectStorage(url, more)
    storage.publish("there", bytes(100))  # tests conditional PUTs, too
    large, small = storage.create("large"), storage.create("small")
    proxy.stalled.set()

    def upload(sink: Sink, size: int) -> None:
        sink.write_at(0, memoryview(bytes(size)))
        sink.finish(size)

    operations: dict[str, Callable[[], object]] = {
        "read": lambda: storage.read("there"),
        "read a range": lambda: storage.read("there", 5, 10),
        "read_into": lambda: storage.read_into("there", 0, memoryview(bytearray(10))),
        "read_buffer": lambda: storage.read_buffer("there", 0, 10),
        "read like a status": lambda: storage.read_buffer("part-416", 0, 10),  # its error has the digits
        "size": lambda: storage.size("there"),
        "modified": lambda: storage.modified("there"),
        "flush": lambda: storage.flush("there"),
        "create": lambda: storage.create("new"),
        "publish": lambda: storage.publish("new", b"1"),
        "replace": lambda: storage.publish("there", b"1", replace=True),
        "list": lambda: storage.list(),
        "folders": lambda: storage.folders(),
        "siblings": lambda: storage.siblings(),
        "delete": lambda: storage.delete("there"),
        "upload in parts": lambda: upload(large, 33 << 20),
        "upload": lambda: upload(small, 10),
    }

    def end(operation: Callable[[], object]) -> tuple[float, str]:
        begun = time.monotonic()
        with pytest.raises(sp.StorageError) as failed:
            operation()
        return time.monotonic() - begun, str(failed.value)

    with ThreadPoolExecutor(len(operations)) as pool:
        ended = dict(zip(operations, pool.map(end, operations.values()), strict=True))
    for name, (seconds, text) in ended.items():
        assert "for at most 4 s" in text, (name, text)
        assert seconds < 8, (name, text)  # a second deadline would be over after 8 s
    proxy.refuse = 1 << 30
    proxy.stalled.clear()
    for name in ("publish", "read a range"):
        seconds, text = end(operations[name])
        assert "for at most 4 s" in text and seconds < 8, (name, seconds, text)


def test_a_lost_answer_to_the_commit_is_no_conflict(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the manifest. The client repeats the PUT, and finds its own bytes."""
    storage = ObjectStorage(url)
    put = obstore.put

    def twice(*arguments: Any, **how: Any) -> Any:
        with suppress(AlreadyExistsError):
            put(*arguments, **how)
        return put(*arguments, **how)

    storage.publish("first", b"probe done")
    monkeypatch.setattr(obstore, "put", twice)
    storage.publish("manifest.json", b"mine")
    with pytest.raises(sp.AlreadyCommittedError):
        storage.publish("manifest.json", b"another's")
    assert storage.read("manifest.json") == b"mine"
    sink = storage.create("small")
    sink.write_at(0, memoryview(b"data"))
    sink.finish(4)
    assert storage.read("small") == b"data"


def test_a_store_without_conditional_writes_is_refused(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes the second PUT of a name, too."""
    url = s3.make_bucket("unconditional")  # a process tests a bucket once
    put = obstore.put

    def unconditional(*arguments: Any, **how: Any) -> Any:
        how.pop("mode", None)
        return put(*arguments, **how)

    monkeypatch.setattr(obstore, "put", unconditional)
    with pytest.raises(sp.ShardproofError, match="does not honour conditional writes"):
        sp.save(f"{url}/step", {"a": torch.ones(3)})
    names = ObjectStorage(url).list()
    assert not any(name.endswith(("manifest.json", ".probe")) for name in names)


@pytest.mark.slow
def test_a_server_that_dies_in_an_upload_and_comes_back(tmp_path: Path) -> None:
    """The second save commits or fails as a whole. The first step stays readable; a later save succeeds."""
    with running_server(tmp_path) as server:
        url = server.make_bucket("crash") + "/run"
        proxy = FaultyProxy(server.endpoint)
        retry = {"retry_timeout": timedelta(seconds=30), "max_retries": 1000}
        checkpointer = sp.Checkpointer(url, storage_options=options(server, proxy, retry_config=retry))
        checkpointer.save(1, state(1.0)).result()
        proxy.mark = proxy.sent + 30_000_000  # in the middle of the second step's shard
        pending = checkpointer.save(2, state(2.0))
        assert proxy.reached.wait(60)
        server.kill()
        server.start()
        try:
            pending.result()
        except sp.ShardproofError:
            assert 2 not in sp.Checkpointer(url, storage_options=server.options).steps()
            checkpointer.save(2, state(2.0)).result()
        target = state(0.0)
        assert sp.Checkpointer(url, storage_options=server.options).restore(target) == 2
        assert torch.equal(target["big"], state(2.0)["big"])
        again = sp.Checkpointer(url, storage_options=server.options)
        assert again.restore(target, step=1) == 1
        assert torch.equal(target["big"], state(1.0)["big"])
        proxy.close()


def test_a_conflict_is_no_other_save(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store answers 409 to a conditional PUT while an earlier one of the same object is under way."""
    storage = ObjectStorage(f"{url}/step")
    storage.publish("first", b"probe done")
    put, conflicts = obstore.put, [AlreadyExistsError("409 Conflict")] * 2

    def conflict(*arguments: Any, **how: Any) -> Any:
        if conflicts:
            raise conflicts.pop()
        return put(*arguments, **how)

    monkeypatch.setattr(obstore, "put", conflict)
    storage.publish("manifest.json", b"ours")
    assert storage.read("manifest.json") == b"ours" and not conflicts
    with pytest.raises(sp.AlreadyCommittedError):
        storage.publish("manifest.json", b"theirs")
    never = ObjectStorage(f"{url}/never", {"retry_config": {"retry_timeout": timedelta(seconds=0.1)}})
    conflicts += [AlreadyExistsError("409 Conflict")] * 100
    with pytest.raises(sp.StorageError, match="another request") as failed:
        never.publish("manifest.json", b"ours")
    assert failed.value.details["unanswered"] and not isinstance(failed.value, sp.AlreadyCommittedError)


def test_a_bucket_that_refuses_reads_is_no_damage(s3: S3Server, proxy: FaultyProxy, url: str) -> None:
    """So `restore` raises instead of taking an older step, and `verify` has no answer."""
    run = sp.Checkpointer(url, rendezvous=LocalRendezvous())
    for step in (1, 2):
        run.save(step, {"w": torch.full((1000,), float(step))}).result()
    short = options(s3, proxy, retry_config={"retry_timeout": timedelta(seconds=0.5), "max_retries": 1})
    storage = ObjectStorage(f"{url}/step-00000002", short)
    proxy.refuse = 1000
    with pytest.raises(sp.StorageError) as failed:
        storage.read("manifest.json")
    assert failed.value.details["damaged"] is False and not is_damage(failed.value)
    assert tells_nothing(failed.value.details)
    proxy.refuse = 0
    with pytest.raises(sp.StorageError) as missing:
        storage.read("shards/none")
    assert missing.value.details["missing"] and is_damage(missing.value)

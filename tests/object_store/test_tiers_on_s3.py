"""A bucket as the second tier: uploads, requests that are refused, and a restore without the first tier."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer import open_run
from shardproof.storage import LocalStorage, ObjectStorage
from tests.object_store.faulty_proxy import FaultyProxy
from tests.object_store.seaweed import S3Server

pytestmark = pytest.mark.processes


def state(value: float) -> dict[str, Any]:
    """20 MB, so that the shard is sent in parts."""
    return {"big": torch.full((5_000_000,), value), "epoch": int(value)}


def test_a_bucket_that_refuses_recovers_and_restores_the_run(s3: S3Server, url: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    proxy = FaultyProxy(s3.endpoint)
    try:
        options = {
            **s3.options,
            "endpoint": proxy.endpoint,
            "client_options": {"pool_max_idle_per_host": "0", "timeout": "60s"},
            "retry_config": {"retry_timeout": timedelta(seconds=60), "max_retries": 3},
        }
        run = sp.Checkpointer(
            near,
            second_tier=sp.SecondTier(url, keep=sp.KeepLatest(2), bandwidth=200_000_000),
            storage_options=options,
            rendezvous=LocalRendezvous(deadline=30.0),
        )
        proxy.refuse = 100_000
        pending = run.save(1, state(1.0))
        assert pending.result().step == 1
        with pytest.raises(sp.StorageError):
            pending.durable(60)
        assert sp.Checkpointer(near).steps() == [1]
        proxy.refuse = 0
        for step in (2, 3):
            run.save(step, state(float(step))).durable(120)
        run.wait_for_uploads(120)
    finally:
        proxy.close()
    bucket = ObjectStorage(url)
    assert sp.Checkpointer(url).steps() == [2, 3]
    for step in (2, 3):
        assert verify(bucket.within(f"step-0000000{step}")).ok
    folder = LocalStorage(near / "step-00000003")
    for name in folder.list():
        assert bucket.read(f"step-00000003/{name}") == folder.read(name)
    shutil.rmtree(near)
    again = sp.Checkpointer(near, second_tier=url, rendezvous=LocalRendezvous(deadline=30.0))
    target = state(0.0)
    restored = again.restore(target)
    assert restored == 3 and restored.tier == url
    assert torch.equal(target["big"], state(3.0)["big"]) and target["epoch"] == 3
    again.wait_for_uploads(60)


@contextlib.contextmanager
def silent_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that accepts connections and never answers. Gives its endpoint and the requests so far."""
    requests: list[bytes] = []
    connections: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                requests.append(connection.recv(65536))

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for one in (listener, *connections):
            one.close()


ONE_TRY: dict[str, Any] = {
    "client_options": {"timeout": "2s", "pool_max_idle_per_host": "0"},
    "retry_config": {"retry_timeout": timedelta(seconds=2), "max_retries": 0},
}
"""Each request of the store is one connection, so that requests can be counted."""


def second_tier(endpoint: str) -> dict[str, Any]:
    """Storage options of a tier that gives up a request after two seconds."""
    keys = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
    return {"endpoint": endpoint, **keys, **ONE_TRY}


def test_a_second_tier_that_never_answers_costs_one_request_and_the_advice_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_run, "_LOG_SECONDS", 0.1)
    near = tmp_path / "near"
    for step in (1, 2):
        sp.Checkpointer(near, rendezvous=LocalRendezvous()).save(
            step, {"w": torch.full((4,), float(step))}
        ).result()
    with silent_server() as (endpoint, requests):
        for choice in ({}, {"step": 1}):
            requests.clear()
            run = sp.Checkpointer(
                near,
                second_tier="s3://tests/silent",
                storage_options=second_tier(endpoint),
                rendezvous=LocalRendezvous(),
            )
            with pytest.raises(sp.StorageError, match=f"newest step of {near} now, leave out second_tier="):
                run.restore({"w": torch.zeros(4)}, **choice)
            assert len(requests) == 1, requests
            assert "restore waits for the second tier, s3://tests/silent, for" in caplog.text
        best = sp.Checkpointer(
            near,
            second_tier="s3://tests/silent",
            storage_options=second_tier(endpoint),
            keep=sp.KeepBest("loss"),
            rendezvous=LocalRendezvous(),
        )
        requests.clear()
        with pytest.raises(sp.StorageError, match="leave out second_tier="):
            best.restore({"w": torch.zeros(4)}, step="best")
        assert len(requests) == 1, requests
    target = {"w": torch.zeros(4)}
    assert sp.Checkpointer(near, rendezvous=LocalRendezvous()).restore(target) == 2


@pytest.mark.parametrize("stall", ["step-00000002/manifest.json", "step-00000002/index-", "shards/00000-"])
def test_a_second_tier_that_falls_silent_costs_one_request(
    s3: S3Server, url: str, tmp_path: Path, stall: str
) -> None:
    """The store stalls at a file of step 2, which only the second tier has."""
    near = tmp_path / "near"
    for step in (1, 2):
        run = sp.Checkpointer(near, second_tier=url, rendezvous=LocalRendezvous())
        run.save(step, {"w": torch.full((4,), float(step))}).durable(60)
    shutil.rmtree(near / "step-00000002")
    proxy = FaultyProxy(s3.endpoint)
    try:
        options = {**s3.options, "endpoint": proxy.endpoint, **ONE_TRY}
        run = sp.Checkpointer(near, second_tier=url, storage_options=options, rendezvous=LocalRendezvous())
        proxy.stall_at = stall
        with pytest.raises(sp.StorageError, match=f"newest step of {near} now, leave out second_tier="):
            run.restore({"w": torch.zeros(4)})
        assert len(proxy.unanswered) == 1, proxy.unanswered
        assert stall in proxy.unanswered[0]
    finally:
        proxy.close()
    target = {"w": torch.zeros(4)}
    assert sp.Checkpointer(near, rendezvous=LocalRendezvous()).restore(target) == 1

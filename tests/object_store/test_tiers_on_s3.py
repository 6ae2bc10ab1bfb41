"""A bucket as the second tier: uploads, requests that are refused, and a restore without the first tier."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
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
            then=url,
            keep_then=sp.KeepLatest(2),
            storage_options=options,
            rendezvous=LocalRendezvous(deadline=30.0),
            upload_bandwidth=200_000_000,
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
    again = sp.Checkpointer(near, then=url, rendezvous=LocalRendezvous(deadline=30.0))
    target = state(0.0)
    restored = again.restore(target)
    assert restored == 3 and restored.tier == url
    assert torch.equal(target["big"], state(3.0)["big"]) and target["epoch"] == 3
    again.wait_for_uploads(60)

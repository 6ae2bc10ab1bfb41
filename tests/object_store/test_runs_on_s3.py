"""Checkpoints in a bucket: what works on a folder works with a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_command
from shardproof.rendezvous import LocalRendezvous, Rendezvous
from shardproof.storage import ObjectStorage
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.object_store.faulty_proxy import FaultyProxy
from tests.object_store.seaweed import S3Server

pytestmark = pytest.mark.processes


def state(value: float) -> dict[str, Any]:
    """40 MB, so that the shard is sent in parts."""
    return {"big": torch.full((10_000_000,), value), "small": torch.arange(5), "epoch": int(value)}


def test_a_checkpoint_in_a_bucket_is_saved_verified_loaded_and_opened(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sp.save(f"{url}/step", state(3.0))
    target = state(0.0)
    report = sp.load(f"{url}/step", target)
    assert torch.equal(target["big"], state(3.0)["big"]) and target["epoch"] == 3
    assert report.location == f"{url}/step"
    with sp.open(f"{url}/step") as checkpoint:
        assert checkpoint["big"][5:7].tolist() == [3.0, 3.0]
    assert run_command(["verify", f"{url}/step"]) == 0
    assert run_command(["inspect", f"{url}/step", "--json"]) == 0
    with pytest.raises(sp.AlreadyCommittedError):
        sp.save(f"{url}/step", state(4.0))
    capsys.readouterr()


def test_damage_in_a_bucket_is_found(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    sp.save(f"{url}/step", state(3.0))
    storage = ObjectStorage(f"{url}/step")
    (shard,) = storage.list("shards")
    data = bytearray(storage.read(shard))
    data[len(data) // 2] ^= 1
    storage.publish(shard, bytes(data), replace=True)
    target = state(0.0)
    with pytest.raises(sp.CorruptChunkError, match="big"):
        sp.load(f"{url}/step", target)
    assert run_command(["verify", f"{url}/step"]) == 1
    storage.delete(shard)
    with pytest.raises(sp.StorageError, match="missing|no such"):
        sp.load(f"{url}/step", target)
    capsys.readouterr()


def _save(url: str, options: dict[str, str]) -> list[int]:
    """Each rank has its part of a tensor, larger than one part of an upload."""
    rows = 3_000_000
    part = torch.full((rows, 2), float(rank()))
    shards = sp.LocalShards((world_size() * rows, 2), [(part, (rank() * rows, 0))])
    keep = sp.KeepLatest(2)
    checkpointer = sp.Checkpointer(
        url, keep=keep, storage_options=options, rendezvous=rendezvous(deadline=120.0), incremental=True
    )
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": shards, "n": step}).result()
    return checkpointer.steps()


def _restore(url: str, options: dict[str, str]) -> tuple[int, list[float], int]:
    rows = 9_000_000 // world_size()
    part = torch.zeros((rows, 2))
    shards = sp.LocalShards((9_000_000, 2), [(part, (rank() * rows, 0))])
    tree = {"w": shards, "n": 0}
    checkpointer = sp.Checkpointer(url, storage_options=options, rendezvous=rendezvous(deadline=120.0))
    step = checkpointer.restore(tree)
    assert step is not None
    return int(step), part[:, 1].unique().tolist(), tree["n"]


def test_a_sharded_run_in_a_bucket_resumes_on_other_ranks(
    s3: S3Server, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for outcome in run_ranks(3, _save, url, s3.options):
        assert outcome.value == [
            1,
            2,
            3,
        ]  # step 1 has no references, so it is the last that is proved readable
    found = [outcome.value for outcome in run_ranks(2, _restore, url, s3.options)]
    assert [(step, n) for step, _, n in found] == [(3, 3), (3, 3)]
    assert sorted({value for _, values, _ in found for value in values}) == [0.0, 1.0, 2.0]
    assert run_command(["ls", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [item["step"] for item in listed if item["status"] == "committed"] == [1, 2, 3]


def _load(url: str, options: dict[str, Any]) -> float:
    target = state(0.0)
    sp.load(url, target, storage_options=options, rendezvous=rendezvous(deadline=120.0))
    return float(target["big"].sum())


def test_rank_0_reads_manifest_and_index_for_all_ranks(s3: S3Server, url: str) -> None:
    sp.save(f"{url}/step", state(1.0))
    proxy = FaultyProxy(s3.endpoint)
    options = {
        **s3.options,
        "endpoint": proxy.endpoint,
        "client_options": {"pool_max_idle_per_host": "0"},  # a connection has one request
    }
    outcomes = run_ranks(3, _load, f"{url}/step", options)
    proxy.close()
    assert [outcome.value for outcome in outcomes] == [1e7] * 3
    read = [line for line in proxy.requests if "/shards/" not in line]
    assert sum(line.startswith("GET") and "manifest.json" in line for line in read) == 1
    assert sum(line.startswith("GET") and "/index-" in line for line in read) == 1
    assert not [line for line in read if line.startswith("HEAD")]
    sizes = [line for line in proxy.requests if line.startswith("HEAD")]
    assert len(sizes) == 1  # of the shard, by rank 0
    assert len(proxy.requests) - 3 <= 3 * 6  # 40 MB a rank in requests of at most 8 MiB, and the small chunks


def test_each_rank_reports_a_manifest_that_is_missing(s3: S3Server, url: str) -> None:
    for outcome in run_ranks(2, _load, f"{url}/none", s3.options):
        assert isinstance(outcome.error, sp.NotCommittedError)


def test_one_of_two_committers_of_one_step_wins(s3: S3Server, url: str) -> None:
    """Both write; the conditional PUT of the manifest decides."""
    outcomes = [outcome.value for outcome in run_ranks(2, _race, url, s3.options)]
    assert sorted(won for won, _ in outcomes) == [False, True]
    (text,) = [text for won, text in outcomes if not won]
    assert "there already" in text or "committed" in text
    target = {"w": torch.zeros(1000)}
    sp.load(f"{url}/step-00000001", target)
    winner = next(number for number, (won, _) in enumerate(outcomes) if won)
    assert target["w"].unique().tolist() == [float(winner)]


class _Gated(ObjectStorage):
    """Publishes the manifest when both ranks are about to."""

    ranks: Rendezvous

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        if name == "manifest.json":
            self.ranks.meet("race", "publish", b"", lambda posts: b"")
        super().publish(name, data, replace=replace)


def _race(url: str, options: dict[str, str]) -> tuple[bool, str]:
    """Each rank is a job of its own."""
    storage = _Gated(f"{url}/step-00000001", options)
    storage.ranks = rendezvous(deadline=60.0)
    mine = {"w": torch.full((1000,), float(rank()))}
    try:
        sp.save(storage, mine, rendezvous=LocalRendezvous())
    except sp.AlreadyCommittedError as error:
        return False, str(error)
    return True, ""


def test_prune_removes_the_objects_of_dead_saves(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    sp.Checkpointer(url).save(1, state(1.0)).result()
    storage = ObjectStorage(url)
    storage.create("step-00000002/shards/00000-dead.safetensors").finish(10)
    assert run_command(["prune", url, "--older-than", "0s", "--yes"]) == 0
    assert storage.list("step-00000002") == []
    assert sp.Checkpointer(url).steps() == [1]
    capsys.readouterr()


def test_steps_move_between_folder_and_bucket(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sp.save(tmp_path / "step", state(2.0))
    assert run_command(["convert", str(tmp_path / "step"), f"{url}/copy", "--standalone"]) == 0
    sp.convert(f"{url}/copy", tmp_path / "back.safetensors", to="safetensors", include="small", workers=1)
    assert sp.open(tmp_path / "back.safetensors")["small"].read().tolist() == [0, 1, 2, 3, 4]
    capsys.readouterr()


def test_other_formats_are_read_from_a_bucket(url: str, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "w.pt")
    ObjectStorage(url).publish("w.pt", (tmp_path / "w.pt").read_bytes())
    target = {"w": torch.zeros(6)}
    sp.load(f"{url}/w.pt", target)
    assert target["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_wrong_credentials_and_buckets_are_named(s3: S3Server, url: str) -> None:
    wrong = {**s3.options, "secret_access_key": "wrong"}
    with pytest.raises(sp.StorageError, match="credentials"):
        sp.save(f"{url}/step", {"a": 1}, storage_options=wrong)
    with pytest.raises(sp.StorageError, match="no such bucket"):
        sp.Checkpointer("s3://nowhere-at-all/run", storage_options=s3.options).restore({"a": 1})
    with pytest.raises(sp.StorageError, match="names no bucket"):
        sp.save("s3://", {"a": 1})
    with pytest.raises(sp.StorageError, match="storage_options are for object stores"):
        sp.save("/tmp/x", {"a": 1}, storage_options={"region": "x"})


@pytest.mark.parametrize(
    "url", ["gcs://b/run", "hdfs://b/run", "file:///tmp/run", b"s3://b/run", Path("s3://b/run")]
)
def test_urls_of_unknown_stores_are_no_folders(url: Any) -> None:
    with pytest.raises(sp.StorageError, match="no URL of a known store"):
        sp.Checkpointer(url)


def test_a_full_temporary_folder_is_a_storage_error(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bytes after a gap go to a temporary file, whose folder must exist."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    sink = ObjectStorage(url).create("a")
    part = memoryview(bytes(1 << 24))
    for number in range(1, 5):
        sink.write_at(number << 24, part)
    with pytest.raises(sp.StorageError, match="set TMPDIR"):
        sink.write_at(5 << 24, part)
    sink.abort()

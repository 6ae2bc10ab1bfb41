"""`doctor` and `watch` on a bucket."""

from __future__ import annotations

import json

import pytest
import torch

import shardproof as sp
from shardproof.cli.group import run
from shardproof.storage import ObjectStorage

pytestmark = pytest.mark.processes


def answer(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    code = run([*arguments, "--json"])
    told = json.loads(capsys.readouterr().out)
    return code, told


def test_doctor_and_watch_on_a_bucket(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = sp.Checkpointer(url)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(1000)}).result()
    storage = ObjectStorage(url)
    files = storage.list()
    code, told = answer(capsys, "doctor", url, "--probe", "--scrub", "--bandwidth", "1GB")
    assert (code, told["findings"]) == (0, [])
    assert storage.list() == files, "the probe left nothing"

    storage.delete("step-00000001/manifest.json")
    (shard,) = storage.list("step-00000002/shards")
    storage.delete(shard)
    code, told = answer(capsys, "doctor", url, "--older-than", "0s")
    assert code == 1
    found = {(one["where"], one["kind"]): one["mend"] for one in told["findings"]}
    assert found["step-00000002", "lost"] == f"shardproof prune {url} --damaged"
    assert found["step-00000001", "leftover"] == f"shardproof prune {url}"

    code, told = answer(capsys, "watch", url, "--once")
    assert [save["state"] for save in told["saves"]] == ["writing", "damaged"]
    code, told = answer(capsys, "watch", url, "--once", "--older-than", "0s")
    assert (code, [save["state"] for save in told["saves"]]) == (0, ["leftover", "damaged"])

"""`doctor` and `watch` on a bucket."""

from __future__ import annotations

import json

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.storage import ObjectStorage

pytestmark = pytest.mark.processes


def answer(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    code = run([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    return code, report


def test_doctor_and_watch_on_a_bucket(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = sp.Checkpointer(url)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(1000)}).result()
    storage = ObjectStorage(url)
    files = storage.list()
    code, report = answer(capsys, "doctor", url, "--probe", "--scrub", "--bandwidth", "1GB")
    assert (code, report["findings"]) == (0, [])
    assert storage.list() == files, "the probe left nothing"

    storage.delete("step-00000001/manifest.json")
    (shard,) = storage.list("step-00000002/shards")
    storage.delete(shard)
    code, report = answer(capsys, "doctor", url, "--older-than", "0s")
    assert code == 1
    found = {(one["where"], one["kind"]): one["fix"] for one in report["findings"]}
    assert found["step-00000002", "damaged"] == f"shardproof verify {url}/step-00000002", "no step is whole"
    assert found["step-00000001", "repairable"] == f"shardproof repair {url}/step-00000001"

    code, report = answer(capsys, "watch", url, "--once")
    assert [save["state"] for save in report["saves"]] == ["writing", "damaged"]
    code, report = answer(capsys, "watch", url, "--once", "--older-than", "0s")
    assert (code, [save["state"] for save in report["saves"]]) == (0, ["repairable", "damaged"])


def test_a_run_is_not_repaired_and_its_newest_step_is_verified(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sp.Checkpointer(url).save(1, {"w": torch.ones(4)}).result()
    assert run(["repair", url]) == 2
    assert f"this is a run: give a step, e.g. {url}/step-00000001" in capsys.readouterr().err
    for name in ("verify", "inspect"):
        assert run([name, url]) == 0
        printed = capsys.readouterr()
        assert f"{url}/step-00000001" in printed.out
        assert printed.err == "step-00000001: the newest step that can be restored\n"
    assert run(["verify", f"{url}/step-00000001"]) == 0

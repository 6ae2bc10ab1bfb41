"""The commands on what `sp.save` and `Checkpointer` write."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.engine.format import BLOCK_BYTES, MANIFEST_NAME
from tests.small_blocks import blocks_of
from tests.unit.commands.cli.samples import cut


@pytest.fixture(autouse=True, params=[BLOCK_BYTES, 100])
def _blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test with chunks of one block, and of several."""
    with blocks_of(request.param):
        yield


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = run([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def trained(steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3, "betas": (0.9, float("inf"))}


def test_a_run_from_save_to_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    state = trained()
    for step in (10, 20):
        checkpointer.save(step, state).result()
    checkpointer.save(30, trained(3)).result()

    code, report = answer(capsys, "ls", tmp_path)
    assert code == 0
    assert [(info["step"], info["committed"]) for info in report["checkpoints"]] == [
        (10, True),
        (20, True),
        (30, True),
    ]
    ten, twenty, thirty = (tmp_path / f"step-{step:08d}" for step in (10, 20, 30))

    code, report = answer(capsys, "inspect", ten)
    assert code == 0
    assert ("model.{0..3}.weight", 4, [16, 16]) in [
        (r["key"], r["count"], r["shape"]) for r in report["rows"]
    ]
    assert "optimizer.{0..3}.weight.exp_avg" in [row["key"] for row in report["rows"]]
    assert answer(capsys, "inspect", ten, "betas")[1]["value"] == {"$tuple": [0.9, {"$float": "inf"}]}
    assert run(["inspect", str(ten), "betas"]) == 0
    assert capsys.readouterr().out == "betas = (0.9, inf)\n"

    assert answer(capsys, "verify", ten)[0] == 0
    assert answer(capsys, "diff", ten, twenty)[0] == 0
    code, report = answer(capsys, "diff", ten, thirty)
    assert code == 1
    assert "model.0.weight" in [value["key"] for value in report["values"]]

    (ten / MANIFEST_NAME).unlink()
    assert answer(capsys, "ls", tmp_path)[1]["checkpoints"][0]["status"] == "writing"
    assert answer(capsys, "repair", ten)[1]["repaired"] is True
    assert answer(capsys, "diff", ten, twenty)[0] == 0

    (thirty / MANIFEST_NAME).unlink()
    cut(thirty)
    code, report = answer(capsys, "prune", tmp_path, "--keep", 1, "--older-than", "0s", "--yes")
    assert code == 0
    assert report["steps"] == ["step-00000010"]
    assert [leftover["folder"] for leftover in report["leftovers"]] == ["step-00000030"]
    assert checkpointer.steps() == [20]
    restored = trained(0)
    assert checkpointer.restore(restored) == 20
    assert restored["epoch"] == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex32", "complex128", "uint64", "bool"])
def test_layouts_differ_and_the_state_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    bits = torch.randint(0, 2, (6, 32), dtype=torch.uint8)
    whole = bits.view(torch.bool) if dtype == "bool" else bits.view(getattr(torch, dtype))
    sp.save(tmp_path / "whole", {"w": whole})
    halves = sp.LocalShards(whole.shape, [(whole[:2], (0, 0)), (whole[2:], (2, 0))])
    sp.save(tmp_path / "halves", {"w": halves})
    code, report = answer(capsys, "diff", tmp_path / "whole", tmp_path / "halves")
    assert (code, report["by_reading"], report["same_tensors"]) == (0, 1, 1)
    assert answer(capsys, "verify", tmp_path / "halves")[0] == 0


def test_a_run_that_was_saved_incrementally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, inspect, diff, verify, prune and convert over steps that refer to others."""

    def shardproof(*arguments: object) -> tuple[int, str, str]:
        code = run([*map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def ok(*arguments: object) -> str:
        code, out, err = shardproof(*arguments)
        assert code == 0, err
        return out

    state = {"model": torch.arange(9000.0), "optimizer": torch.zeros(3000)}
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    for step in (1, 2, 3):
        state["optimizer"].fill_(step)
        checkpointer.save(step, state).result()
    one, two, three = (tmp_path / f"step-{step:08d}" for step in (1, 2, 3))

    report = json.loads(ok("ls", tmp_path, "--json"))["checkpoints"]
    assert [info["references"] for info in report] == [[], [one.name], [one.name]]
    assert report[0]["referenced_by"] == [two.name, three.name]
    assert "saved incrementally" in ok("inspect", three) and one.name in ok("inspect", three, "model")
    assert json.loads(ok("inspect", three, "--json"))["referenced_bytes"] == 36_000
    code, out, _ = shardproof("diff", one, two, "--json")
    assert code == 1 and json.loads(out)["by_digest"] == 2
    assert json.loads(ok("verify", three, "--json"))["bytes"] == 48_000

    dry = json.loads(ok("prune", tmp_path, "--keep", "1", "--dry-run", "--json"))
    assert dry["steps"] == [one.name, two.name] and dry["referenced"] == {one.name: [three.name]}
    before = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    text = ok("prune", tmp_path, "--keep", "1", "--yes")
    assert f"not removed: files of {one.name}: {three.name} refers to them" in text
    after = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert before - after == dry["bytes"], "as the dry run reported"
    assert not two.exists() and [path.name for path in one.iterdir()] == ["shards"]
    assert json.loads(ok("verify", three, "--json"))["ok"]
    listed = json.loads(ok("ls", tmp_path, "--json"))["checkpoints"]
    assert [info["status"] for info in listed] == ["referenced", "committed"]
    for file in (*one.rglob("*"), one):
        os.utime(file, (0, 0))
    report = json.loads(ok("prune", tmp_path, "--json"))
    assert report["leftovers"] == [] and report["referenced"] == {one.name: [three.name]}

    code, _, err = shardproof("convert", three, tmp_path / "whole")
    assert code == 2 and "--standalone" in err
    report = json.loads(ok("convert", three, tmp_path / "whole", "--standalone", "--json"))
    assert (report["step"], report["tensors"]) == (3, 2)
    assert "the same state" in ok("diff", three, tmp_path / "whole")
    code, _, err = shardproof("convert", three, tmp_path / "whole", "--standalone", "--json")
    assert code == 1 and json.loads(err)["type"] == "AlreadyCommittedError"
    ok("prune", tmp_path, "--keep", "1", "--yes")
    shutil.rmtree(one)
    assert json.loads(ok("verify", tmp_path / "whole", "--json"))["ok"]
    code, out, _ = shardproof("verify", three)
    assert code == 1 and one.name in out
    listed = json.loads(ok("ls", tmp_path, "--json"))["checkpoints"]
    assert {info["name"]: info["status"] for info in listed} == {three.name: "damaged", "whole": "committed"}

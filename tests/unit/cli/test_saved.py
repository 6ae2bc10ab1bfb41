"""The commands on what `sp.save` and `Checkpointer` write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.cli.group import run
from shardproof.format import MANIFEST_NAME


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

    code, told = answer(capsys, "ls", tmp_path)
    assert code == 0
    assert [(info["step"], info["committed"]) for info in told["checkpoints"]] == [
        (10, True),
        (20, True),
        (30, True),
    ]
    ten, twenty, thirty = (tmp_path / f"step-{step:08d}" for step in (10, 20, 30))

    code, told = answer(capsys, "inspect", ten)
    assert code == 0
    assert ("model.{0..3}.weight", 4, [16, 16]) in [(r["key"], r["count"], r["shape"]) for r in told["rows"]]
    assert "optimizer.{0..3}.weight.exp_avg" in [row["key"] for row in told["rows"]]
    assert answer(capsys, "inspect", ten, "betas")[1]["value"] == {"$tuple": [0.9, {"$float": "inf"}]}
    assert run(["inspect", str(ten), "betas"]) == 0
    assert capsys.readouterr().out == "betas = (0.9, inf)\n"

    assert answer(capsys, "verify", ten)[0] == 0
    assert answer(capsys, "diff", ten, twenty)[0] == 0
    code, told = answer(capsys, "diff", ten, thirty)
    assert code == 1
    assert "model.0.weight" in [value["key"] for value in told["values"]]

    (ten / MANIFEST_NAME).unlink()
    assert answer(capsys, "ls", tmp_path)[1]["checkpoints"][0]["status"] == "leftover"
    assert answer(capsys, "repair", ten)[1]["repaired"] is True
    assert answer(capsys, "diff", ten, twenty)[0] == 0

    (thirty / MANIFEST_NAME).unlink()
    code, told = answer(capsys, "prune", tmp_path, "--keep", 1, "--older-than", "0s", "--yes")
    assert code == 0
    assert told["steps"] == ["step-00000010"]
    assert [leftover["folder"] for leftover in told["leftovers"]] == ["step-00000030"]
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
    halves = sp.ShardedTensor(whole.shape, [(whole[:2], (0, 0)), (whole[2:], (2, 0))])
    sp.save(tmp_path / "halves", {"w": halves})
    code, told = answer(capsys, "diff", tmp_path / "whole", tmp_path / "halves")
    assert (code, told["by_reading"], told["same_tensors"]) == (0, 1, 1)
    assert answer(capsys, "verify", tmp_path / "halves")[0] == 0

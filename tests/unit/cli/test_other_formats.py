"""The commands on checkpoints of other projects: formats by name, metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.cli.group import run
from tests.unit.interop.peers import Golden


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with ``--json``: exit code, standard output as JSON, standard error."""

    def called(*arguments: object) -> tuple[int, Any, str]:
        code = run([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else None, captured.err

    return called


def test_diff_takes_the_name_of_either_format(call: Any, tmp_path: Path) -> None:
    """No detection finds `megatron_legacy_merged`. Without its name, ranks are read one by one."""
    golden = Golden("legacy_plain_bf16_tp2_w2", tmp_path).checkpoint
    merged, step = ("--format", "megatron_legacy_merged"), tmp_path / "step"
    assert call("convert", golden, step, "--to", "shardproof", *merged, "--include", "decoder")[0] == 0
    tensors = len(call("inspect", step)[1]["rows"])
    for arguments in ((golden, step, *merged), (step, golden, "--other-format", merged[1])):
        _, report, _ = call("diff", *arguments)
        assert (report["same_tensors"], report["changed"], report["values"]) == (tensors, [], [])
    assert call("diff", golden, step)[1]["same_tensors"] == 0
    assert call("diff", golden, golden, *merged, "--other-format", merged[1])[0] == 0


@pytest.mark.parametrize("command", [("inspect", "."), ("verify", "."), ("diff", ".", ".")])
def test_an_unknown_format_is_bad_usage(call: Any, command: tuple[str, ...]) -> None:
    code, out, err = call(*command, "--format", "parchment")
    assert (code, out) == (2, None)
    assert "'parchment' is none of shardproof, " in err


@pytest.mark.parametrize("to", ["safetensors", "zarr"])
def test_inspect_shows_the_metadata_as_of_a_step(call: Any, tmp_path: Path, to: str) -> None:
    metadata = {"run": {"seeds": (1, 2), "lr": 0.1}, "note": "hi"}
    sp.save(tmp_path / "step", {"w": torch.arange(3.0)}, step=7, metadata=metadata)
    sp.convert(tmp_path / "step", tmp_path / "there", to=to)
    step, there = (call("inspect", tmp_path / name)[1] for name in ("step", "there"))
    assert there["format"] == to
    assert {key: there["metadata"][key] for key in metadata} == step["metadata"]

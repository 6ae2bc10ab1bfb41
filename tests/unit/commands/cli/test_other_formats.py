"""The commands on checkpoints of other projects: formats by name, metadata, values of classes."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from tests.unit.formats.peers import Golden


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
    assert there["time"] is None and step["time"] > 0
    assert {key: there["metadata"][key] for key in metadata} == step["metadata"]


MODULE = """
import dataclasses, enum, functools
import shardproof as sp

class Phase(enum.Enum):
    WARMUP = 1

@functools.partial(sp.register_dataclass, name=f"{__name__}.Progress")
@dataclasses.dataclass
class Progress:
    tokens: int

class Scaler:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
"""


@pytest.fixture
def run_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a training run. Each test has its own, because the registry knows classes by name."""
    name = f"run_of_{tmp_path.name}"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{name}.py").write_text(MODULE.replace("Phase", f"Phase_{name}"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    module = importlib.import_module(name)
    yield module
    del sys.modules[name]


@pytest.mark.processes
def test_classes_that_are_registered_by_name_convert(
    call: Any, run_module: ModuleType, tmp_path: Path
) -> None:
    """The worker processes register the classes, too."""
    name = f"Phase_{run_module.__name__}"
    phase, member = f"{run_module.__name__}.{name}", getattr(run_module, name).WARMUP
    values = {"phase": member, "progress": run_module.Progress(5)}
    torch.save({"a": torch.ones(64), "b": torch.ones(64), **values}, tmp_path / "run.pt")
    code, _, err = call("inspect", tmp_path / "run.pt", "phase", "--trust-pickle")
    assert code == 1
    assert f"the enum {phase} is not registered" in err
    assert "--register MODULE.CLASS" in err
    named = ("--trust-pickle", "--register", phase, "--register", run_module.__name__)
    assert call("inspect", tmp_path / "run.pt", "phase", *named)[1]["value"] == {"$enum": [name, "WARMUP"]}
    split = ("--max-file-size", "256", "--workers", "2")
    code, report, err = call("convert", tmp_path / "run.pt", tmp_path / "step", "--to", "dcp", *named, *split)
    assert (code, report["units"]) == (0, 2), err
    with sp.open(tmp_path / "step", trust_pickle=True) as checkpoint:
        assert {key: checkpoint[key] for key in values} == values
    assert call("diff", tmp_path / "run.pt", tmp_path / "step", *named)[0] == 0


def test_the_error_for_an_object_that_is_no_plain_data_names_what_to_do(
    call: Any, run_module: ModuleType, tmp_path: Path
) -> None:
    torch.save({"scaler": run_module.Scaler()}, tmp_path / "run.pt")
    for trust, advice in (
        ([], "torch unpickles the value"),
        (["--trust-pickle"], "torch unpickled the value"),
    ):
        code, _, err = call("inspect", tmp_path / "run.pt", "scaler", *trust)
        assert code == 1
        assert f"{run_module.__name__}.Scaler" in err
        assert advice in err
        assert "has no state_dict" not in err
    for name, why in (
        ("no.such.module", "cannot be imported"),
        (f"{run_module.__name__}.Scaler", "is no module"),
    ):
        code, _, err = call("inspect", tmp_path / "run.pt", "--register", name)
        assert code == 2
        assert why in err


@pytest.mark.parametrize("to", ["dcp", "fsdp_dtensor", "torch_dist", "torch"])
def test_the_documented_diff_compares_all_tensors_of_an_optimizer(call: Any, tmp_path: Path, to: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sp.save(tmp_path / "step", {"model": model, "optimizer": optimizer, "epoch": 3})
    there = tmp_path / ("there.pt" if to == "torch" else "there")
    tensors = sp.convert(tmp_path / "step", there, to=to).tensors
    page = (Path(__file__).parents[4] / "docs" / "cli.md").read_text()
    line = page.partition("shardproof diff runs/gpt/step-00001000 dcp ")[2].partition("\n```")[0]
    options = shlex.split(line.replace("\\\n", ""))
    assert call("diff", tmp_path / "step", there)[0] == 1
    code, report, _ = call("diff", tmp_path / "step", there, *options)
    assert (code, report["same"], report["same_tensors"], tensors) == (0, True, 8, 8)
    with torch.no_grad():
        optimizer.state[model.bias]["exp_avg"] += 1
    sp.save(tmp_path / "other", {"model": model, "optimizer": optimizer, "epoch": 3})
    assert call("diff", tmp_path / "other", there, *options)[0] == 1

"""Result files of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recording")


def test_each_answer_is_added_to_the_file(recording: Any, tmp_path: Path) -> None:
    file = tmp_path / "results" / "before.json"
    recording.record(str(file), "save", [("ours", "s", [3.0, 1.0, 2.0]), ("not measured", "s", [])])
    recording.record(str(file), "load", [("ours", "s", [1.0])])
    save, load = json.loads(file.read_text())
    assert save["question"] == "save" and load["question"] == "load"
    assert save["figures"] == [{"name": "ours", "unit": "s", "median": 2.0, "values": [3.0, 1.0, 2.0]}]
    assert {"machine", "date", "commit", "command"} <= save.keys()
    assert [path.name for path in file.parent.iterdir()] == ["before.json"]


def test_the_recorded_command_does_not_name_the_file(
    recording: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "results.json")
    for arguments in (["--cold", "--json", file], [f"--json={file}", "--cold"]):
        monkeypatch.setattr("sys.argv", ["/somewhere/load.py", *arguments])
        recording.record(file, "load", [("ours", "s", [1.0])])
    assert [answer["command"] for answer in json.loads(Path(file).read_text())] == ["load.py --cold"] * 2


@pytest.mark.parametrize(("arguments", "target"), [([], None), (["--json"], "-"), (["--json", "f"], "f")])
def test_without_a_file_nothing_is_written(
    recording: Any, arguments: list[str], target: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = argparse.ArgumentParser()
    recording.json_option(options)
    given = options.parse_args(arguments).json
    assert given == target
    recording.record(given, "save", [("ours", "s", [1.0])])
    assert [path.name for path in tmp_path.iterdir()] == (["f"] if target == "f" else [])


def test_every_benchmark_uses_the_shared_json_option() -> None:
    for script in BENCHMARKS.rglob("*.py"):
        if script.name != "recording.py":
            assert '"--json"' not in script.read_text(), script

"""Numbers and measures of stored bits, against torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.commands.cli.group import run
from shardproof.commands.report import tensor_statistics
from shardproof.commands.report.measures import Measure, MeasuredDifference, numbers
from shardproof.dtypes import DTYPES
from tests.unit.commands.cli.samples import Sample, rows_cut, write

_TORCH_LACKS = {"float4_e2m1fn_x2"}


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in _TORCH_LACKS])
def test_numbers_are_those_of_torch(name: str) -> None:
    itemsize = DTYPES[name].itemsize
    random = np.random.default_rng(0)
    bits = random.integers(0, 256, (4096, itemsize), np.uint8)
    if itemsize == 1:
        bits = np.arange(2 if name == "bool" else 256, dtype=np.uint8).reshape(-1, 1)
    dtype = getattr(torch, name)
    values = torch.from_numpy(bits.reshape(-1).copy()).view(dtype)
    want = (torch.view_as_real(values).reshape(-1) if dtype.is_complex else values).double()
    assert np.array_equal(numbers(bits, name), want.numpy(), equal_nan=True)


def test_a_packed_pair_gives_two_numbers_the_low_half_first() -> None:
    assert numbers(np.array([[0x71], [0xF9]], np.uint8), "float4_e2m1fn_x2").tolist() == [0.5, 6, -0.5, -6]


def test_a_measure_of_parts_is_that_of_the_whole() -> None:
    values = torch.randn(1000, dtype=torch.float64) * 10
    values[::7], values[3], values[4], values[5] = 0, math.nan, math.inf, -math.inf
    whole, parts = Measure.of(values.numpy()), Measure()
    for part in values.split(77):
        parts.join(Measure.of(part.numpy()))
    finite = values[values.isfinite()]
    assert (whole.count, whole.nan, whole.inf) == (1000, 1, 2)
    assert whole.zeros == int((finite == 0).sum())
    assert (whole.low, whole.high) == (finite.min().item(), finite.max().item())
    assert whole.norm.value == pytest.approx(finite.norm().item())
    assert whole.mean == pytest.approx(finite.mean().item())
    assert whole.magnitudes.sum() == len(finite) - whole.zeros
    assert (parts.low, parts.high, parts.norm.value) == (
        whole.low,
        whole.high,
        pytest.approx(whole.norm.value),
    )
    assert np.array_equal(parts.magnitudes, whole.magnitudes)


def test_magnitudes_are_powers_of_two() -> None:
    found = Measure.of(np.array([1.0, -1.5, 2.0, 0.0, 0.3, 1e-300, 1e300]))
    assert found.to_json()["magnitudes"] == {"-41": 1, "-2": 1, "0": 2, "1": 1, "40": 1}
    assert Measure().to_json()["min"] is None


def test_a_difference_is_relative_to_the_first_tensor() -> None:
    a, b = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    a[0], b[1], b[2] = math.nan, math.inf, math.nan
    found = MeasuredDifference()
    for left, right in zip(a.split(30), b.split(30), strict=True):
        found.join(MeasuredDifference.of(left.numpy(), right.numpy()))
    both = a.isfinite() & b.isfinite()
    assert found.largest == pytest.approx((a - b)[both].abs().max().item())
    assert found.relative == pytest.approx(((a - b)[both].norm() / a[a.isfinite()].norm()).item())
    assert (found.nan, found.inf) == ((1, 1), (0, 1))
    from_zero = MeasuredDifference.of(np.zeros(2), np.ones(2))
    assert from_zero.relative == math.inf
    assert from_zero.to_json()["relative"] is None


def test_numbers_near_the_ends_of_float64_are_measured() -> None:
    large, small = np.array([1e300, -1.7e308]), np.array([1e-300, 2e-300])
    found = Measure.of(large)
    found.join(Measure.of(-large))
    assert (found.mean, found.norm.value) == (pytest.approx(0, abs=1e295), math.inf)
    assert found.to_json()["norm"] is None
    difference = MeasuredDifference.of(small, 2 * small)
    assert (difference.relative, difference.largest) == (pytest.approx(1), 2e-300)
    difference = MeasuredDifference.of(large, -large)
    assert difference.to_json()["largest"] is None
    json.dumps(difference.to_json(), allow_nan=False)


def test_a_place_that_is_finite_on_one_side_alone_is_counted() -> None:
    found = MeasuredDifference.of(np.array([np.nan, 1.0, np.inf, 2.0]), np.array([1.0, np.nan, np.inf, 2.0]))
    assert (found.one_finite, found.nan, found.inf, found.relative) == (2, (1, 1), (1, 1), 0.0)


STATE: dict[str, np.ndarray[Any, Any]] = {
    "model.a": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "model.b": np.array([1, 2, np.inf, np.nan], np.float32),
    "step": np.array(7),
}


@pytest.mark.parametrize("most", [16, 1 << 20])
def test_stats_measures_each_tensor_box_by_box(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(tensor_statistics, "MOST_NUMBERS", most)
    write(tmp_path / "step-00000003", Sample(STATE, cuts={"model.a": rows_cut((20, 30), 3, 1)}, world_size=3))
    assert run(["stats", str(tmp_path), "--json"]) == 1
    a, b, step = json.loads(capsys.readouterr().out)["tensors"]
    assert (a["key"], a["count"], a["min"], a["max"], a["nan"]) == ("model.a", 600, -1, 1, 0)
    assert a["norm"] == pytest.approx(float(np.linalg.norm(STATE["model.a"].astype(np.float64))))
    assert (b["nan"], b["inf"], b["max"]) == (1, 1, 2)
    assert (step["count"], step["mean"]) == (1, 7)
    assert run(["stats", str(tmp_path), "3", "model.a", "step"]) == 0
    assert "2 tensors, 0 with NaN or infinities" in capsys.readouterr().out
    assert run(["stats", str(tmp_path), "model.b"]) == 1
    shown = capsys.readouterr().out.split()
    assert [word for word in shown if word.startswith("2^") or word == "1"][-4:] == ["2^0", "1", "2^1", "1"]
    assert run(["stats", str(tmp_path), "modl"]) == 2
    assert "no tensor has a key like 'modl'" in capsys.readouterr().err


def test_diff_measures_the_tensors_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {key: array.copy() for key, array in STATE.items()}
    other["model.a"][3] += 0.5
    other["model.b"][0] = np.nan
    write(tmp_path / "a", Sample(STATE))
    write(tmp_path / "b", Sample(other))
    places = [str(tmp_path / name) for name in "ab"]
    assert run(["diff", *places, "--json"]) == 1
    assert [value["measured"] for value in json.loads(capsys.readouterr().out)["values"]] == [None, None]
    assert run(["diff", *places, "--measure", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["by_digest"], report["by_reading"]) == (1, 2)
    a, b = report["values"]
    assert (a["different"], a["total"], a["measured"]["largest"]) == (30, 600, 0.5)
    want = 0.5 * math.sqrt(30) / float(np.linalg.norm(STATE["model.a"].astype(np.float64)))
    assert a["measured"]["relative"] == pytest.approx(want)
    assert (b["measured"]["nan"], b["measured"]["inf"]) == ([1, 2], [1, 1])
    assert run(["diff", *places, "--measure"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "model.b" and "1, 2" in lines[1], "a number became NaN"
    assert lines[2].split()[:5] == ["model.a", "30", "of", "600", f"{want:.3g}"]

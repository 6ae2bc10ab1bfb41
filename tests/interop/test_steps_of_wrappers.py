"""Optimizers that a framework wraps wait at the fence, so a save has the values as of its call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interop.training import SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]


@pytest.mark.parametrize(
    "framework", ["lightning", "accelerate", "transformers", "deepspeed-1", "deepspeed-3"]
)
def test_a_step_of_a_wrapper_waits_at_the_fence(framework: str, tmp_path: Path) -> None:
    """Without the fence, the save finds that its values were changed, and commits nothing."""
    script = SCRIPTS / "step_while_saving.py"
    environment = "deepspeed" if framework.startswith("deepspeed") else "torch"
    fenced = train(environment, script, framework, "fence", tmp_path / "fenced", nproc=1)
    assert "torn" not in fenced
    assert re.search(r"compared \d+ tensors", fenced)
    text = train(environment, script, framework, "open", tmp_path / "open", nproc=1)
    assert "was changed while it was being saved" in text
    assert "compared" not in text

"""`ckpt-chaos` kills `examples/torch_loop.py` at operations of its saves; every resume ends like a whole run.

To find the newest whole checkpoint, ckpt-chaos compares file names with those of a run without a fault. The
names of shardproof's files are drawn for each save, so its verdict LOST_WORK does not apply. The resume
command of this test makes that check: it must begin from the newest step that has a manifest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof as sp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_loop.py"
STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("ckpt_chaos") is None,
        reason="ckpt-chaos is not installed: pip install ckpt-chaos",
    ),
]


def digest(folder: str) -> str:
    """Of all tensors of the last step, but for the generators of Python and numpy, which are not seeded."""
    found = hashlib.sha256()
    with sp.open(Path(folder) / f"step-{STEPS:08d}") as checkpoint:
        for key in sorted(checkpoint.catalogue().tensors):
            if not re.search(r"\.(python|numpy)\b", key):
                found.update(key.encode())
                found.update(checkpoint[key][...].contiguous().numpy().tobytes())
    return found.hexdigest()


def resume(folder: str) -> None:
    """Runs the example, and fails if it does not begin from the newest step that has a manifest."""
    import runpy

    begun: list[int] = []
    restore = sp.Checkpointer.restore

    def noted(self: sp.Checkpointer, *arguments: object, **options: object) -> object:
        restored = restore(self, *arguments, **options)  # type: ignore[arg-type]
        begun.append(int(restored or 0))
        return restored

    manifests = Path(folder).glob("step-*/manifest.json")
    newest = max((int(path.parent.name[5:]) for path in manifests), default=0)
    sp.Checkpointer.restore = noted  # type: ignore[method-assign,assignment]
    sys.argv = [str(EXAMPLE), folder]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert begun == [newest], f"resumed from step {begun}, and step {newest} is committed"
    print(f"resumed from step {begun[0]}")


@pytest.mark.parametrize("rank", [0, 1], ids=["the coordinator dies", "a follower dies"])
def test_every_resume_ends_like_the_run_without_a_fault(rank: int, tmp_path: Path) -> None:
    python = [sys.executable, str(Path(__file__).resolve())]
    here = os.pathsep.join([str(EXAMPLE.parents[1] / "src"), str(EXAMPLE.parents[1])])
    environment = {**os.environ, "STEPS": str(STEPS), "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--ranks", "2", "--crash-rank", str(rank)),
        *("--modes", "before,unsynced", "--max-points", "24", "--timeout", "300"),
        *("--step-regex", r"resumed from step (\d+)"),
        *("--result-cmd", " ".join([*python, "digest", "{out}"])),
        *("--resume-cmd", " ".join([*python, "resume", "{out}"])),
        *("--work", str(tmp_path / "work"), "--", sys.executable, str(EXAMPLE), "{out}"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    points = [json.loads(path.read_text()) for path in (tmp_path / "work").glob("pt_*/result.json")]
    assert sum(point["crashed"] for point in points) >= 16, done.stdout[-4000:]


if __name__ == "__main__":
    if sys.argv[1] == "digest":
        print(digest(sys.argv[2]))
    else:
        resume(sys.argv[2])

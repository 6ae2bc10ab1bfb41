"""`ckpt-chaos` kills training at operations of its saves; every resume ends like a run without a fault.

The programs are `examples/torch_loop.py`, and the trainer of the demo.

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
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof as sp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_loop.py"
STEPS = 4
POINTS = 16
"""Operations before which a rank is killed; half of them lose what was not flushed, too."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("ckpt_chaos") is None,
        reason="ckpt-chaos is not installed: pip install ckpt-chaos",
    ),
]


def train(program: str, folder: str) -> None:
    """Runs a program on this rank. Its checkpoints are in the folder, or in a folder below it."""
    if program == "loop":
        sys.argv = [str(EXAMPLE), folder]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return
    from examples.demo.run import TEXT
    from examples.demo.story import RankLayout, Task
    from examples.demo.train import Trainer, leave, run_task

    records = Path(folder).parent / "records"  # not counted, because they are no part of a save
    records.mkdir(exist_ok=True)
    task = Task(
        name="chaos",
        folder=str(records),
        text=str(TEXT),
        device="cpu",
        layout=RankLayout(2),
        checkpoints=str(Path(folder) / "checkpoints"),
        horizon=STEPS,
        stop=STEPS,
        save_every=1,
        restore=newest(folder) > 0,
    )
    leave(run_task(Trainer, task))


def newest(folder: str) -> int:
    """The newest step that has a manifest; 0 without one."""
    manifests = Path(folder).rglob("step-*/manifest.json")
    return max((int(path.parent.name[5:]) for path in manifests), default=0)


def digest(folder: str) -> str:
    """Of all tensors of the last step, but for the generators that the loop does not seed."""
    found = hashlib.sha256()
    (last,) = Path(folder).rglob(f"step-{STEPS:08d}")
    with sp.open(last) as checkpoint:
        for key in sorted(checkpoint.catalogue().tensors):
            if not re.search(r"\.(python|numpy)\b", key):
                found.update(key.encode())
                found.update(checkpoint[key][...].contiguous().numpy().tobytes())
    return found.hexdigest()


def resume(program: str, folder: str) -> None:
    """Runs a program, and fails if it does not begin from the newest step that has a manifest."""
    begun: list[int] = []
    expected = newest(folder)
    restore = sp.Checkpointer.restore

    def noted(self: sp.Checkpointer, *arguments: object, **options: object) -> object:
        restored = restore(self, *arguments, **options)  # type: ignore[arg-type]
        begun.append(int(restored or 0))
        assert begun == [expected], f"resumed from step {begun}, and step {expected} is committed"
        print(f"resumed from step {begun[0]}", flush=True)
        return restored

    sp.Checkpointer.restore = noted  # type: ignore[method-assign,assignment]
    train(program, folder)


@pytest.mark.parametrize(
    ("program", "rank"),
    [("loop", 0), ("loop", 1), ("demo", 1)],
    ids=["the coordinator of the loop", "a follower of the loop", "a follower of the demo"],
)
def test_every_resume_ends_like_the_run_without_a_fault(program: str, rank: int, tmp_path: Path) -> None:
    python = [sys.executable, str(Path(__file__).resolve())]
    here = os.pathsep.join([str(EXAMPLE.parents[1] / "src"), str(EXAMPLE.parents[1])])
    environment = {**os.environ, "STEPS": str(STEPS), "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    environment["CKPT_CHAOS_CRASH_RANK"] = str(rank)  # ckpt-chaos 0.1.8 does not pass it on
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--ranks", "2", "--crash-rank", str(rank)),
        *("--modes", "before,unsynced", "--max-points", str(POINTS), "--timeout", "300"),
        *("--step-regex", r"resumed from step (\d+)"),
        *("--result-cmd", " ".join([*python, "digest", "{out}"])),
        *("--resume-cmd", " ".join([*python, "resume", program, "{out}"])),
        *("--work", str(tmp_path / "work"), "--", *python, "train", program, "{out}"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    points = [json.loads(path.read_text()) for path in (tmp_path / "work").glob("pt_*/result.json")]
    assert sum(point["crashed"] for point in points) >= POINTS * 2 // 3, done.stdout[-4000:]


if __name__ == "__main__":
    action = {"train": train, "resume": resume, "digest": digest}[sys.argv[1]]
    text = action(*sys.argv[2:])  # type: ignore[operator]
    if text is not None:
        print(text)

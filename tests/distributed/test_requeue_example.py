"""`examples/requeue.sbatch`: a job near its limit saves and is queued again; the next job ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardproof as sp

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "requeue.sbatch"
pytestmark = pytest.mark.timeout(300)

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & ranks+=($!)
done
highest=0
for rank in "${ranks[@]}"; do
    wait "$rank"; code=$?
    if ((code > highest)); then highest=$code; fi
done
exit $highest
"""
"""Starts the ranks on this machine, and returns the highest code, as Slurm's does."""

SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


def run_job(folder: Path, run: Path, steps: int, **variables: str) -> subprocess.CompletedProcess[str]:
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    (commands / "python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (commands / "python").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "MASTER_PORT": str(port),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_JOB_ID": "77",
        "REQUEUED": str(folder / "requeued"),
        "STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
    }
    environment = {key: value for key, value in environment.items() if key != "SLURM_JOB_END_TIME"}
    return subprocess.run(
        ["bash", str(SCRIPT), str(run)],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=140,
    )


def test_a_job_is_requeued_only_if_it_was_preempted(tmp_path: Path) -> None:
    run, requeued = tmp_path / "run", tmp_path / "requeued"
    first = run_job(tmp_path, run, 10**9, SLURM_JOB_END_TIME=str(int(time.time()) + 60))
    assert first.returncode == 0, first.stderr
    assert requeued.read_text() == "requeue 77\n", first.stderr
    assert "the time limit of the job" in first.stderr and "with exit code 85" in first.stderr
    newest = max(sp.Checkpointer(run).steps())

    second = run_job(tmp_path, run, newest + 3, SLURM_NTASKS="1")
    assert second.returncode == 0, second.stderr
    assert max(sp.Checkpointer(run).steps()) == newest + 3
    assert requeued.read_text() == "requeue 77\n"  # the run is at its end

    failed = run_job(tmp_path, run, newest + 9, PYTHONHASHSEED="wrong")
    assert failed.returncode not in (0, 85)
    assert requeued.read_text() == "requeue 77\n"


def test_the_script_and_the_page() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=30)
    page = (ROOT / "docs" / "schedules.md").read_text()
    for line in SCRIPT.read_text().splitlines():
        assert line in page
    example = (ROOT / "examples" / "preempted_loop.py").read_text().splitlines()
    assert len(example) <= 40

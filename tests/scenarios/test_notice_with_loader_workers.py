"""A notice that reaches every process of a job does not end the workers of a DataLoader before the save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof as sp

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import sys
from contextlib import nullcontext
import torch
import shardproof as sp
from torch.utils.data import DataLoader, IterableDataset

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)

def main():
    folder, start = sys.argv[1:]
    model = torch.nn.Linear(4, 1)
    preemption = sp.Preemption()
    checkpointer = sp.Checkpointer(folder, preemption=preemption)
    options = {} if start == "fork" else {"worker_init_fn": preemption.worker_init_fn}
    loader = DataLoader(Endless(), batch_size=2, num_workers=2, multiprocessing_context=start, **options)
    with preemption.starting_workers() if start != "fork" else nullcontext():
        batches = iter(loader)
    step = 0
    try:
        while True:
            model(next(batches)).sum()
            step += 1
            if step == 10:
                print("ready", flush=True)
            checkpointer.save_if_due(step, {"model": model})
    except sp.Preempted:
        for _ in range(50):  # more than the workers had prepared
            next(batches)
        raise

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("start", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_to_the_process_group_saves_and_ends_all_processes(start: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), start],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        os.killpg(job.pid, signal.SIGTERM)
        _, errors = job.communicate(timeout=200)  # until the workers, which have the pipe too, have ended
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 85, errors
    (step,) = sp.Checkpointer(tmp_path / "run").steps()
    assert step >= 10

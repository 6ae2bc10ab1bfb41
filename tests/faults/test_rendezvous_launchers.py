"""`connect` under the real torchrun: with and without a process group, made again, and after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, sys
import torch.distributed as dist
from shardproof.rendezvous import connect

mode, folder = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
join = lambda posts: b",".join(posts)
answers = []

def meet(note):
    assert connect(deadline=20.0) is connect()
    answers.append(connect().meet("save a", "agree", f"{attempt}:{note}:{rank}".encode(), join).decode())

meet("before")
if mode == "group":
    for life in (1, 2):
        # A prefix of its own: gloo may take the addresses of its former life for new ones.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore(str(life), store), rank=rank, world_size=2)
        meet(f"life {life}")
        meet(f"life {life}")
        dist.destroy_process_group()
meet("after")
if rank == 0:
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with open(f"{folder}/{attempt}.keys", "w") as file:
        file.write(str(agent.num_keys()))
with open(f"{folder}/{attempt}-{rank}.json", "w") as file:
    json.dump(answers, file)
if mode == "restart" and attempt == 0:
    meet("only in the first life")
    sys.exit(3 if rank == 1 else 0)
"""


# The first life of "restart" is "plain".
@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.slow), "group", "restart"])
def test_ranks_meet_under_torchrun(mode: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(script), mode, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    lives = (
        ["before", "life 1", "life 1", "life 2", "life 2", "after"]
        if mode == "group"
        else ["before", "after"]
    )
    attempts = [0, 1] if mode == "restart" else [0]
    for attempt in attempts:
        for rank in range(2):
            answers = json.loads((tmp_path / f"{attempt}-{rank}.json").read_text())
            assert answers == [f"{attempt}:{life}:0,{attempt}:{life}:1" for life in lives]
    counts = [int((tmp_path / f"{attempt}.keys").read_text()) for attempt in attempts]
    assert max(counts) - counts[0] <= 3, "a restart deletes the keys of the workers before it"


def meet_without_agent() -> list[bytes]:
    """Rank 0 serves the store itself, and a process group made later shares the port."""
    from shardproof.rendezvous import connect

    first = connect(deadline=20.0).meet("save a", "agree", b"1", lambda posts: b"".join(posts))
    with harness.process_group():
        second = connect(deadline=20.0).meet("save a", "agree", b"2", lambda posts: b"".join(posts))
    return [first, second]


def test_ranks_meet_without_torchrun() -> None:
    assert [outcome.value for outcome in run_ranks(2, meet_without_agent, store="rank 0")] == [
        [b"11", b"22"]
    ] * 2

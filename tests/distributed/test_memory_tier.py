"""A run whose steps are in memory, under the real torchrun: it resumes from there after a crash of the ranks.

A rank dies in its fourth save, after it handed over its file. The next life restores the third step from
memory. Then the keeper process dies too. The next life finds nothing in memory and restores from disk.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.storage import MemorySink, MemoryStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, logging, os, signal, sys
import torch
import shardproof as sp
from shardproof.storage import MemorySink, MemoryStorage

url, folder = sys.argv[1:]
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
logging.basicConfig(filename=f"{folder}/{life}-{rank}.log", level=logging.INFO)
storage = MemoryStorage(url, budget=64 << 20, idle_timeout=120)
memory, disk = sp.Checkpointer(storage, keep=sp.KeepLatest(1)), sp.Checkpointer(f"{folder}/disk")
local = torch.zeros(1000, 64)
state = {"w": sp.LocalShards((2000, 64), [(local, (1000 * rank, 0))]), "step": 0}


def train(step):
    local.copy_(torch.rand(2000, 64, generator=torch.Generator().manual_seed(step))[rank * 1000 :][:1000])
    state["step"] = step


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def finish_and_die(sink, size):
    finish(sink, size)
    die()


restored = memory.restore(state)
origin = None if restored is None else memory.last_restore.location
if restored is None and life:
    restored = disk.restore(state)
    origin = disk.last_restore.location
given = local.clone()
if restored:
    train(restored)
found = {
    "restored": restored, "origin": origin, "same": torch.equal(given, local), "step": state["step"],
    "files": storage.list(),
}
with open(f"{folder}/{life}-{rank}.json", "w") as file:
    json.dump(found, file)
if life == 0:
    for step in (1, 2, 3):
        train(step)
        memory.save(step, state).result()
        if step == 2:
            disk.save(step, state).result()
    if rank == 1:
        finish = MemorySink.finish
        MemorySink.finish = finish_and_die
    train(4)
    memory.save(4, state).result()
if life == 1:
    train(4)
    memory.save(4, state).result()
    if rank == 0:
        os.kill(storage.usage().keeper, signal.SIGKILL)
        die()
    signal.alarm(60)
    signal.pause()  # until torchrun ends this rank
train(3)
memory.save(3, state).result()
"""


@pytest.fixture
def url() -> Iterator[str]:
    url = f"memory://test-tier-{os.getpid()}"
    yield url
    MemoryStorage(url).drop()


def test_a_job_resumes_from_memory_and_without_it_from_disk(url: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.2"]
    ended = subprocess.run(
        [*torchrun, str(script), url, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    lives = [[_found(tmp_path, life, number) for number in range(2)] for life in range(3)]
    nothing = {"restored": None, "origin": None, "same": True, "step": 0, "files": []}
    assert lives[0] == [nothing, nothing]
    for found in lives[1]:
        files = found.pop("files")
        assert found == {"restored": 3, "origin": f"{url}/step-00000003", "same": True, "step": 3}
        assert len(files) == 4 and all(name.startswith("step-00000003/") for name in files), files
    for found in lives[2]:
        origin = f"{tmp_path}/disk/step-00000002"
        assert found == {"restored": 2, "origin": origin, "same": True, "step": 2, "files": []}
    for number in range(2):
        log = (tmp_path / f"2-{number}.log").read_text()
        assert f"{url}: no keeper process on this node, so nothing is in memory" in log
    _check_step_3(url)


def _save_while_the_keeper_dies(url: str) -> tuple[str, list[int], list[int], float]:
    checkpointer = sp.Checkpointer(
        MemoryStorage(url, budget=64 << 20, idle_timeout=120), rendezvous=rendezvous(deadline=30.0)
    )
    state = {"w": sp.LocalShards((2,), [(torch.ones(1), (rank(),))])}
    checkpointer.save(1, state).result()
    finish = MemorySink.finish

    def finish_and_wait(sink: MemorySink, size: int) -> None:
        finish(sink, size)
        reach("written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemorySink, "finish", finish_and_wait)
        failure = _failure(checkpointer.save(2, state))
    left = checkpointer.steps()
    checkpointer.save(3, state).result()
    loaded = torch.zeros(1)
    assert checkpointer.restore({"w": sp.LocalShards((2,), [(loaded, (rank(),))])}) == 3
    return failure, left, checkpointer.steps(), loaded.item()


def _failure(pending: sp.PendingSave) -> str:
    with pytest.raises(sp.ShardproofError) as error:
        pending.result()
    return str(error.value)


def test_a_keeper_killed_in_a_save_fails_it_on_all_ranks(url: str) -> None:
    def kill_keeper(job: Job) -> None:
        job.until_held(0, "written")
        job.until_held(1, "written")
        usage = MemoryStorage(url).usage()
        assert usage is not None
        watched = os.pidfd_open(usage.keeper)
        os.kill(usage.keeper, signal.SIGKILL)
        assert select.select([watched], [], [], 30)[0]
        os.close(watched)
        job.go(0)
        job.go(1)

    hold = {0: "written", 1: "written"}
    outcomes = run_ranks(2, _save_while_the_keeper_dies, url, timeout=90, hold=hold, script=kill_keeper)
    failures = {outcome.value[0] for outcome in outcomes}
    assert len(failures) == 1, "the ranks report different failures"
    assert re.search("/shards/0.* went before the commit, .* the keeper", failures.pop())
    for outcome in outcomes:
        assert outcome.value[1:] == ([], [3], 1.0)


def _found(folder: Path, life: int, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{life}-{number}.json").read_text())
    return found


def _check_step_3(url: str) -> None:
    """Another job, after torchrun has ended, with another number of ranks."""
    assert verify(MemoryStorage(f"{url}/step-00000003")).ok
    state = {"w": torch.zeros(2000, 64), "step": 0}
    assert sp.Checkpointer(url).restore(state) == 3
    assert torch.equal(state["w"], torch.rand(2000, 64, generator=torch.Generator().manual_seed(3)))

"""A run whose steps are in memory: under the real torchrun, and on several nodes, each of which is a folder.

Under torchrun, a rank dies in its fourth save, after it finished its file. The next life restores the third
step from memory. Then the run is dropped from memory. The next life finds nothing there and restores from
disk.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage, MemoryStorage
from tests.distributed.test_nodes import Stage
from tests.harness import rank, rendezvous, run_ranks
from tests.in_memory import VARIABLE, private_tmpfs
from tests.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
URL = "memory://run"

SCRIPT = """
import json, logging, os, signal, sys
import torch
import shardproof as sp
from shardproof.storage import LocalSink, MemoryStorage

url, folder = sys.argv[1:]
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
logging.basicConfig(filename=f"{folder}/{life}-{rank}.log", level=logging.INFO)
storage = MemoryStorage(url)
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
        finish = LocalSink.finish
        LocalSink.finish = finish_and_die
    train(4)
    memory.save(4, state).result()
if life == 1:
    train(4)
    memory.save(4, state).result()
    if rank == 0:
        storage.drop()
        die()
    signal.alarm(60)
    signal.pause()  # until torchrun ends this rank
train(3)
memory.save(3, state).result()
"""


def test_a_job_resumes_from_memory_and_without_it_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.2"]
    with private_tmpfs(monkeypatch):
        ended = subprocess.run(
            [*torchrun, str(script), URL, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        memory = MemoryStorage(URL).location
        lives = [[_found(tmp_path, life, number) for number in range(2)] for life in range(3)]
        nothing = {"restored": None, "origin": None, "same": True, "step": 0, "files": ["node.json"]}
        assert lives[0] == [nothing, nothing]
        for found in lives[1]:
            mark, *files = found.pop("files")
            assert found == {"restored": 3, "origin": f"{memory}/step-00000003", "same": True, "step": 3}
            assert mark == "node.json" and len(files) == 4, "the files of the dead save went"
            assert all(name.startswith("step-00000003/") for name in files), files
        origin = f"{tmp_path}/disk/step-00000002"
        on_disk = {"restored": 2, "origin": origin, "same": True, "step": 2, "files": ["node.json"]}
        assert lives[2] == [on_disk, on_disk]
        _check_step_3()


def _found(folder: Path, life: int, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{life}-{number}.json").read_text())
    return found


def _check_step_3() -> None:
    """Another job, after torchrun has ended, with another number of ranks."""
    assert verify(MemoryStorage(f"{URL}/step-00000003")).ok
    state = {"w": torch.zeros(2000, 64), "step": 0}
    assert sp.Checkpointer(URL).restore(state) == 3
    assert torch.equal(state["w"], torch.rand(2000, 64, generator=torch.Generator().manual_seed(3)))


class MemoryStage(Stage):
    """Jobs whose nodes have a tmpfs each: a folder of the root."""

    def checkpointer(self, node: str, options: dict[str, Any]) -> sp.Checkpointer:
        gc.collect()  # the processes of earlier jobs have ended
        self._enter(node)
        return sp.Checkpointer(URL, **options)

    def folder(self, node: str) -> Path:
        self._enter(node)
        return MemoryStorage(URL).path

    def _enter(self, node: str) -> None:
        (self.root / node).mkdir(exist_ok=True)
        os.environ[VARIABLE] = str(self.root / node)


def _nodes_in_memory(root: str, far: str) -> None:
    stage = MemoryStage(root)
    places = ["a", "a", "b"]
    stage.save(places, 1, node_local=sp.NodeLocal(replicas=1))
    stage.save(places, 2, node_local=sp.NodeLocal(replicas=1), keep=sp.KeepLatest(1))
    for node in ("a", "b"):
        assert stage.shards(node, 2) == {0, 1, 2} and stage.shards(node, 1) == set()
        assert stage.folder(node).stat().st_mode & 0o777 == 0o700
        assert verify(LocalStorage(stage.folder(node) / "step-00000002")).ok

    # A node is lost. The others restore from their memory, and give the node that replaces it its copies.
    for lost, left in (("b", ["a", "a"]), ("a", ["b"])):
        stage.alone(partial(shutil.rmtree, stage.root / lost))
        restored = stage.restore(left, 2, node_local=sp.NodeLocal(replicas=1))
        if restored is not None:
            assert (restored, restored.tier) == (2, str(stage.folder(left[0]))) and not restored.passed_over
        restored = stage.restore(places, 2, node_local=sp.NodeLocal(replicas=1))
        assert restored is None or (restored == 2 and "was emptied" in restored.passed_over[0].reason)
        assert stage.shards("a", 2) == stage.shards("b", 2) == {0, 1, 2}

    # A job died while it published a manifest. The files of this node are no files of a dead save.
    gc.collect()
    stage.together()
    for node in ("a", "b"):
        stage.folder(node)
        assert not MemoryStorage(URL).in_use(), "or nothing would be removed"
    stage.alone(lambda: (stage.folder("b") / "step-00000002" / MANIFEST_NAME).unlink())
    restored = stage.restore(places, 2)
    assert restored is None or restored == 2
    assert stage.shards("b", 2) == {0, 1, 2}

    # The second tier has the step if both nodes are lost.
    stage.save(places, 3, node_local=sp.NodeLocal(replicas=1), second_tier=far)
    for node in ("a", "b"):
        stage.alone(partial(shutil.rmtree, stage.root / node))
    restored = stage.restore(places, 3, node_local=sp.NodeLocal(replicas=1), second_tier=far)
    assert restored is None or (restored, restored.tier) == (3, far)


def test_nodes_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_tmpfs(monkeypatch) as tmpfs:
        outcomes = run_ranks(3, _nodes_in_memory, str(tmpfs), str(tmp_path / "far"), timeout=120)
        for outcome in sorted(outcomes, key=lambda one: one.seconds if one.error is not None else 1e9):
            assert outcome.value is None


def _save_two_copies(root: str) -> dict[str, Any]:
    os.environ[VARIABLE] = f"{root}/{rank()}"
    meetings = rendezvous(deadline=30.0)
    state = {name: torch.ones(5 << 18) for name in "ab"}  # 5 MiB on each rank
    with pytest.raises(sp.NoSpaceError) as error:
        sp.Checkpointer(URL, node_local=sp.NodeLocal(replicas=1), rendezvous=meetings).save(1, state).result()
    left = MemoryStorage(URL).folders()
    step = sp.Checkpointer(URL, rendezvous=meetings).save(1, state).result().step
    return {**error.value.details, "left": left, "step": step}


def test_a_save_whose_copies_do_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "0", 8 << 20), small_disk(tmp_path / "1", 8 << 20):
        for outcome in run_ranks(2, _save_two_copies, str(tmp_path)):
            found = outcome.value
            assert (found["needed"], found["ranks"]) == (10 << 20, [0, 1])
            assert 7 << 20 < found["free"] <= 8 << 20
            assert (found["left"], found["step"]) == ([], 1), "without copies it fits"

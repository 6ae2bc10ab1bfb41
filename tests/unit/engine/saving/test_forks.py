"""Children made by fork while the parent saves: they end at once, and save by themselves."""

from __future__ import annotations

import atexit
import multiprocessing.util
import threading
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.programs import run_program

LIMIT = 120.0

_PARENT = """
import multiprocessing, os, sys, threading, time
import torch
import shardproof as sp
from shardproof._utils import forks

root, kind = sys.argv[1:]
checkpointer = sp.Checkpointer(root)
state = {"weight": torch.ones(1 << 22), "other": torch.ones(1 << 22)}


def child(number):
    if kind == "saves":
        checkpointer.save(100 + number, {"weight": torch.ones(3)}).result(30)
    sys.exit(0)


def fork(number):
    if kind == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child, args=(number,))
        process.start()
        process.join(30)
        return process.exitcode
    pid = os.fork()
    if pid == 0:
        child(number)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.005)
    os.kill(pid, 9)
    return "it hung"


held, done = threading.Barrier(2), threading.Event()


def hold_all():
    locks = list(forks._locks)
    for lock in locks:
        lock.acquire()
    held.wait(30)
    done.wait(120)
    for lock in locks:
        lock.release()


checkpointer.save(0, state).result()
codes = []
for number in range(2):  # while a save is under way
    pending = checkpointer.save(1 + number, state)
    codes.append(fork(number))
    pending.result()
holder = threading.Thread(target=hold_all)  # while another thread holds every lock
holder.start()
held.wait(30)
codes.append(fork(2))
done.set()
holder.join()
checkpointer.save(10, state).result()
print(codes)
"""


@pytest.mark.parametrize("kind", [pytest.param("exits", marks=pytest.mark.slow), "multiprocessing", "saves"])
def test_a_child_made_by_fork_ends(kind: str, tmp_path: Path) -> None:
    ended = run_program(_PARENT, str(tmp_path), kind, timeout=LIMIT)
    assert ended.stdout.strip() == "[0, 0, 0]", ended.stderr
    assert ended.returncode == 0, ended.stderr


def _save_and_return(folder: str) -> None:
    """Saves in the background. Each write waits until the process runs its functions for the exit."""
    leaving = threading.Event()
    multiprocessing.util.Finalize(None, leaving.set, exitpriority=10)
    storage = FaultyStorage(
        LocalStorage(folder), lambda: True, lambda *_: leaving.wait(LIMIT), only=("write_at",)
    )
    sp.Checkpointer(storage).save(1, {"weight": torch.ones(3)})
    atexit.register(leaving.set)  # it runs before that of the save, which is older
    assert not leaving.is_set()


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_process_of_multiprocessing_ends_after_its_save(start: str, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path / "parent").save(1, {"weight": torch.ones(3)}).result(LIMIT)
    process = multiprocessing.get_context(start).Process(target=_save_and_return, args=(str(tmp_path / "c"),))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert verify(LocalStorage(tmp_path / "c" / "step-00000001")).faults == []

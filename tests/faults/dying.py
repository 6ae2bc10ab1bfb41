"""Kills jobs at every file operation of a save: each job one operation later than the job before.

Each rank of `run_ranks` forks a child for each job, while it has no threads, so that a job is cheap. The
children of all ranks form the job. They meet under a name of their own, and are killed with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from tests.harness import rank, world_size

__all__ = ["Deadly", "Job", "die_at_every_operation"]

DEADLINE = 0.7
"""Seconds after which survivors give up on a killed rank. These saves are quick."""

_TOO_BUSY = {"RankSilent", "RankFailure"}
"""How a save ends on a machine that is too busy for so short a deadline."""

_CALLS = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "rmdir", "link", "unlink", "replace", "rename")
"""Functions of `os` through which a local storage changes files. Opening a folder begins its flush."""

Deadly = Callable[[], AbstractContextManager[None]]
"""Makes the context in which the victim is killed. All ranks enter it."""

Job = Callable[[Any, int, Deadly], str]
"""Called with rendezvous, number of the job and `Deadly`; returns how the save ended, for `look`."""


def die_at_every_operation(
    job: Job, look: Callable[[int, list[str]], None], who: int, everyone: bool, every: int = 1
) -> list[str]:
    """Runs jobs 0, 1, ... until one is not killed. Called by every rank.

    Args:
        job: what a child does.
        look: called on rank 0 after each job with its number and how each rank ended: what `job` returned,
            or "killed".
        who: the rank that is killed before its ``k * every``-th file operation in job k.
        everyone: whether all ranks are killed then.
        every: 1 for a job for each operation, 3 for each third one.

    Returns:
        How rank `who` ended in each job.
    """
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=60))
    ended: list[str] = []
    number = repeated = 0
    while True:
        name = f"job-{number}-{repeated}"
        child = os.fork()
        if child == 0:
            _run_child(job, name, number, number * every, who, everyone)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            store.set(f"{name}/ended/{rank()}", "killed")
        ends = [store.get(f"{name}/ended/{member}").decode() for member in range(world_size())]
        if rank() == 0:
            _guarded(store, f"{name}/looked", partial(look, number, ends))
        trouble = store.get(f"{name}/looked").decode()
        assert not trouble, trouble
        assert not any(text.startswith("Traceback") for text in ends), ends
        if "killed" not in ends and not _TOO_BUSY.isdisjoint(ends) and repeated < 5:
            repeated += 1  # no rank was killed: the machine was too busy for so short a deadline
            continue
        ended.append(ends[who])
        if "killed" not in ends:
            return ended
        number, repeated = number + 1, 0


def _run_child(job: Job, name: str, number: int, operation: int, who: int, everyone: bool) -> None:
    """Ends this process."""
    from torch.distributed import TCPStore

    from shardproof.rendezvous import StoreRendezvous

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=60))

    def main() -> str:
        meetings = StoreRendezvous(store, rank(), world_size(), deadline=30.0, name=name)
        store.set(f"{name}/pid/{rank()}", str(os.getpid()))
        victims = range(world_size()) if everyone else [who]
        pids = [int(store.get(f"{name}/pid/{victim}")) for victim in victims if victim != rank()]

        @contextmanager
        def deadly() -> Iterator[None]:
            meetings.meet("test", "ready", b"", lambda posts: b"")
            meetings.deadline = DEADLINE
            with _file_operations(operation if rank() == who else None, [*pids, os.getpid()]):
                yield

        return job(meetings, number, deadly)

    try:
        _guarded(store, f"{name}/ended/{rank()}", main)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _guarded(store: Any, key: str, call: Callable[[], str | None]) -> None:
    """Puts the result of the call, or its traceback, into the store."""
    try:
        text = call() or ""
    except BaseException:
        text = traceback.format_exc()
    store.set(key, text)


@contextmanager
def _file_operations(at: int | None, pids: list[int]) -> Iterator[None]:
    """Within it, file operation number `at` kills the processes `pids` instead of running."""
    lock = threading.Lock()
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if len(args) > 1 and real.__name__ == "open" and args[1] & os.O_PATH:
                return real(*args, **kwargs)  # changes nothing
            with lock:  # of two threads that write, one comes first
                if seen == at:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    threading.Event().wait()  # the signal is under way
                seen += 1
            return real(*args, **kwargs)

        return call

    patches = [mock.patch.object(os, name, counted(getattr(os, name))) for name in _CALLS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()

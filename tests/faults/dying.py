"""Death at every file operation of a save: job after job, each of which dies one operation later.

A rank of `run_ranks` forks a child for each job, while it has no thread of its own, so that a job is cheap.
The children of all ranks are the job: they meet under a name of their own, and are ended with SIGKILL.
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
"""Seconds after which survivors give up: who is killed says nothing more, and these saves are quick."""

_TOO_BUSY = {"RankSilent", "RankFailure"}
"""How a save ends on a machine that is too busy for so short a deadline."""

_CALLS = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "rmdir", "link", "unlink", "replace", "rename")
"""Functions of `os` through which a local storage changes files. Opening a folder begins its flush."""

Deadly = Callable[[], AbstractContextManager[None]]
"""Makes the context in which the victim dies, on all ranks."""

Job = Callable[[Any, int, Deadly], str]
"""Called with rendezvous, number of the job and `Deadly`; returns what became of the save, for `look`."""


def die_at_every_operation(
    job: Job, look: Callable[[int, list[str]], None], who: int, everyone: bool, every: int = 1
) -> list[str]:
    """Runs jobs 0, 1, ... until one gets through. Called by every rank.

    Args:
        job: what a child does.
        look: called on rank 0 after each job with its number and how each rank ended: what `job` returned,
            or "killed".
        who: the rank that dies before its ``k * every``-th file operation in job k.
        everyone: whether all ranks die then.
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
        said = [store.get(f"{name}/ended/{member}").decode() for member in range(world_size())]
        if rank() == 0:
            _guarded(store, f"{name}/looked", partial(look, number, said))
        trouble = store.get(f"{name}/looked").decode()
        assert not trouble, trouble
        assert not any(text.startswith("Traceback") for text in said), said
        if "killed" not in said and not _TOO_BUSY.isdisjoint(said) and repeated < 5:
            repeated += 1  # nobody died: the machine was too busy for so short a deadline
            continue
        ended.append(said[who])
        if "killed" not in said:
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
    """Puts what the call returned, or its traceback, into the store."""
    try:
        said = call() or ""
    except BaseException:
        said = traceback.format_exc()
    store.set(key, said)


@contextmanager
def _file_operations(at: int | None, pids: list[int]) -> Iterator[None]:
    """Within it, the file operation number `at` is not carried out: those processes are killed instead."""
    lock = threading.Lock()
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
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

"""Child processes, such as the workers of a DataLoader, outlast a notice to all processes of a job.

Slurm and torchrun signal every process of a job. If a worker ended by the signal, the loader would raise in
the training loop before the next `save_if_due`, and the save would be lost.

Note "Who may end a child"
    A child ends by a signal of its parent: `Process.terminate` of a loader or a pool sends SIGTERM. A handler
    in Python does not get the sender, `sigwaitinfo` does. So all threads of the child block the signals, and
    one thread takes them. It ignores those of other processes, and delivers those of the parent to the
    handlers that the program had. If the parent has ended, it delivers all.

Note "All threads of a child"
    A thread inherits the blocked signals of the thread that starts it, and so does a program. A forked child
    has one thread. A spawned child has threads of libraries before it runs code of the program, so the thread
    that spawns it has to block the signals meanwhile.

Note "A program that a child starts"
    It should end by these signals. So the child unblocks them while it starts a program. A signal at that
    moment acts as without this module.
"""

from __future__ import annotations

import _posixsubprocess
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing import resource_tracker
from typing import Any

_STARTS: tuple[tuple[Any, str], ...] = (
    (subprocess, "_fork_exec"),
    (_posixsubprocess, "fork_exec"),
    (os, "execv"),
    (os, "execve"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
)
"""The functions through which Python starts programs."""


def outlast(signals: Collection[int]) -> None:
    """Makes this process ignore signals, except those that its parent sends.

    Call it in the main thread of a child. Other threads of the child must block the signals (see "All
    threads of a child"). Signals that the child ignores already stay ignored.
    """
    chosen = {number for number in signals if signal.getsignal(number) is not signal.SIG_IGN}
    if not chosen:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    threading.Thread(
        target=_take, args=(chosen, os.getppid()), name="shardproof-child-signals", daemon=True
    ).start()
    for module, name in _STARTS:
        call = getattr(module, name, None)
        if call is not None and not hasattr(call, "__wrapped__"):  # a child of a child has it
            setattr(module, name, _with_signals(call, chosen))


def _take(signals: Collection[int], parent: int) -> None:
    """Takes signals for ever. See "Who may end a child"."""
    while True:
        found = signal.sigwaitinfo(signals)
        starter = multiprocessing.parent_process()  # not the parent, if that is a fork server
        obeyed = {parent, starter.pid if starter is not None else parent}
        if found.si_pid in obeyed or os.getppid() != parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {found.si_signo})
            os.kill(os.getpid(), found.si_signo)
            signal.pthread_sigmask(signal.SIG_BLOCK, {found.si_signo})


def _with_signals(call: Callable[..., Any], signals: Collection[int]) -> Callable[..., Any]:
    """The function, called while the signals are not blocked. See "A program that a child starts"."""

    @wraps(call)
    def unblocked(*args: Any, **options: Any) -> Any:
        with _masked(signal.SIG_UNBLOCK, signals):
            return call(*args, **options)

    return unblocked


@contextmanager
def blocked(signals: Collection[int]) -> Iterator[None]:
    """Blocks signals in this thread, and so in the processes that it starts. They arrive at the end."""
    resource_tracker.ensure_running()  # its start unblocks SIGTERM in this thread
    with _masked(signal.SIG_BLOCK, signals):
        yield


@contextmanager
def _masked(how: signal.Sigmasks, signals: Collection[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(how, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Preemption: notices that the program has to end soon, and the exception that ends it after a save.

Child processes, such as the workers of a DataLoader, outlast a notice. Slurm and torchrun signal every
process of a job. If a worker ended by the signal, the loader would raise in the training loop before the next
`save_if_due`, and the save would be lost.

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
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from shardproof._utils.arguments import check_number, check_whole

EXIT_CODE = 85
"""No shell, Python, torchrun or signal uses this code."""

SAME_NOTICE = 5.0
"""Seconds in which a repeated signal counts as the same notice. Slurm signals every process of a step, and
torchrun passes the signal on, so that one notice reaches a rank twice."""

UNMEASURED_SAVE = 60.0
"""Seconds that a save is assumed to take before one has been measured."""

_END_TIME = "SLURM_JOB_END_TIME"
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

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """When and how `Checkpointer.save_if_due` ends the program before the scheduler does.

    After a notice, all ranks save at the same call of `save_if_due`, wait for the commit, and raise
    `Preempted`. A notice is a signal that any rank receives, or the approach of `end_time`.

    A signal handler notes the signal and calls the handler that was installed before it. If the same signal
    comes again more than 5 seconds later, the handler that was installed before it, or the default action,
    gets the signal.

    Processes that `multiprocessing` forks while the `Checkpointer` exists, such as the workers of a
    DataLoader, ignore the signals of all processes but their parent. So a notice to all processes of a job
    does not end a loader before the save. For workers that are spawned, see `starting_workers`.

    Args:
        signals: the signals. Empty to install no handlers.
        end_time: Unix seconds at which the scheduler ends the job. None: the environment variable
            ``SLURM_JOB_END_TIME`` of rank 0, if it is set. ``math.inf``: no limit.
        reserve: seconds before `end_time` at which the program has to have saved. The save begins earlier: by
            twice the longest of the last saves, and by the longest time between two calls of `save_if_due`
            so far.
        exit_code: exit code of the program if it does not catch `Preempted`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has an invalid value.

    >>> Preemption(end_time=1_700_000_000.0, reserve=30.0).exit_code
    85
    """

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    end_time: float | None = None
    reserve: float = 30.0
    exit_code: int = EXIT_CODE

    def __post_init__(self) -> None:
        uncatchable = (signal.SIGKILL, signal.SIGSTOP)
        if wrong := [one for one in self.signals if one not in signal.valid_signals() or one in uncatchable]:
            raise ValueError(f"signals are signals that a program can handle, not {wrong[0]!r}")
        check_number("end_time", self.end_time, "of seconds since 1970")
        check_number("reserve", self.reserve, "of seconds", optional=False)
        check_whole("exit_code", self.exit_code, "from 0 to 255", optional=False)
        if self.end_time is not None and not self.end_time > 0:
            raise ValueError(f"end_time is a time in Unix seconds, or None, not {self.end_time!r}")
        if not 0 <= self.reserve < math.inf:
            raise ValueError(f"reserve is a number of seconds, at least 0, not {self.reserve!r}")
        if not 0 <= self.exit_code <= 255:
            raise ValueError(f"exit_code is a whole number from 0 to 255, not {self.exit_code!r}")

    @contextmanager
    def starting_workers(self) -> Iterator[None]:
        """Blocks the signals in processes that start by spawn or forkserver within the block.

        A signal to this process arrives at the end of the block. Workers need `worker_init_fn` too::

            loader = DataLoader(
                ..., multiprocessing_context="spawn", worker_init_fn=preemption.worker_init_fn
            )
            with preemption.starting_workers():
                batches = iter(loader)

        The fork server must not run before the block.
        """
        with _blocked(self.signals):
            yield

    def worker_init_fn(self, worker: int) -> None:
        """Makes a worker of a DataLoader ignore the signals of all processes but its parent.

        Only for workers that start within `starting_workers`. Forked workers do so without it.

        Args:
            worker: number of the worker, which is not used.
        """
        _outlast(self.signals)


class Preempted(SystemExit):
    """The program has to end, and its state is saved. It ends with the exit code if nothing catches this.

    >>> preempted = Preempted(1200, "SIGTERM on rank 3", 85)
    >>> preempted.code, str(preempted)
    (85, 'step 1200 is saved, and the program ends: SIGTERM on rank 3')
    """

    def __init__(self, step: int, reason: str, code: int) -> None:
        super().__init__(step, reason, code)
        self.step = step
        """The saved step."""
        self.reason = reason
        """The first notice, and its rank."""
        self.code = code

    def __str__(self) -> str:
        return f"step {self.step} is saved, and the program ends: {self.reason}"


def limit_of(preemption: Preemption, environment: Mapping[str, str], now: float) -> float:
    """The time at which the scheduler ends the job, Unix seconds; infinity if it is unknown.

    Only rank 0 reads the environment variable, and the other ranks would wait for its error. So a value that
    is no time is a warning.

    >>> limit_of(Preemption(), {"SLURM_JOB_END_TIME": "1700000000"}, 1_600_000_000.0)
    1700000000.0
    """
    if preemption.end_time is not None:
        return preemption.end_time
    text = environment.get(_END_TIME)
    if text is None:
        return math.inf
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        _log.warning(
            "%s is %r, expected Unix seconds: it is ignored. Pass Preemption(end_time=...) for a save before "
            "the limit of the job",
            _END_TIME,
            text,
        )
        return math.inf
    if limit <= now:
        _log.warning(
            "%s is %.0f s ago, so the limit of the job was extended or the variable is of another job: it is "
            "ignored. Pass Preemption(end_time=...) for a save before the limit",
            _END_TIME,
            now - limit,
        )
        return math.inf
    return limit


def lead_seconds(preemption: Preemption, saves: Sequence[float], pause: float) -> float:
    """Seconds before the limit at which a save has to be requested.

    Args:
        preemption: the options.
        saves: seconds of the last saves, from the call to the commit.
        pause: the longest time between two calls of `save_if_due`.

    >>> lead_seconds(Preemption(reserve=30.0), saves=[4.0, 10.0, 5.0], pause=2.0)
    52.0
    """
    return preemption.reserve + 2 * max(saves, default=UNMEASURED_SAVE) + pause


class SignalNotices:
    """Signal handlers that note the first signal. They end with this object and with the process.

    Note "What a handler may do": Python runs a handler in the main thread between two steps of any code, so
    that the thread may hold any lock. The handler writes attributes and calls `noticed`, which must take no
    lock. `queue.SimpleQueue.put` takes no lock that the thread may hold here.

    Raises:
        ValueError: this is not the main thread. Python allows handlers only there.
    """

    def __init__(
        self, signals: Sequence[int], noticed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.first: signal.Signals | None = None
        """The first signal."""
        self._noticed = noticed
        self._clock = clock
        self._times: dict[int, float] = {}
        self._process = os.getpid()
        reference, numbers = weakref.ref(self), tuple(signals)
        self._previous = {number: _install(number, reference) for number in numbers}
        # Not os.register_at_fork, which also acts before the exec of a program with `preexec_fn`.
        multiprocessing.util.register_after_fork(self, SignalNotices.leave_to_parent)

    def leave_to_parent(self) -> None:
        """In a forked child: restore the previous handlers, and ignore the signals of other processes."""
        for number, (ours, previous) in self._previous.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, previous)
        _outlast(self._previous)

    def notes(self, number: int) -> bool:
        """Note a signal. False for the previous handler: a repeated signal, or one to a forked child."""
        if os.getpid() != self._process:
            return False
        now = self._clock()
        if now - self._times.setdefault(number, now) > SAME_NOTICE:
            return False
        if self.first is None:
            self.first = signal.Signals(number)
        self._noticed()
        return True


def _install(number: int, reference: weakref.ref[SignalNotices]) -> tuple[Any, Any]:
    """Installs the handler of a signal, without a reference to its notices. Returns it, and the previous."""

    def handle(signum: int, frame: FrameType | None) -> None:
        notices = reference()
        if notices is not None and notices.notes(signum):
            # `default_int_handler` raises KeyboardInterrupt: it is the default action, not a handler.
            if callable(previous) and previous is not signal.default_int_handler:
                previous(signum, frame)
            return
        is_installed = signal.getsignal(signum) is handle
        if is_installed:
            signal.signal(signum, previous)
        if callable(previous):
            previous(signum, frame)
        elif is_installed and previous == signal.SIG_DFL:  # else the installed handler would run again
            signal.raise_signal(signum)

    found: Any = signal.getsignal(number)
    previous: Any = signal.SIG_DFL if found is None else found  # None: a handler that is not Python's
    try:
        signal.signal(number, handle)
    except ValueError as error:
        raise ValueError(
            "Checkpointer(preemption=...) installs signal handlers, which Python allows in the main thread "
            "only. Make the Checkpointer there, or pass Preemption(signals=()) to watch the time limit alone"
        ) from error
    return handle, previous


def _outlast(signals: Collection[int]) -> None:
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
def _blocked(signals: Collection[int]) -> Iterator[None]:
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

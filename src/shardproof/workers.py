"""Workers that run tasks: in this process, in processes of this machine, or on Ray.

Each worker makes what its tasks work with, for example opens a checkpoint. So processes exchange only a
function that makes it, tasks and results.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

from shardproof._utils import libc
from shardproof.errors import ShardproofError

_log = logging.getLogger("shardproof")

_SET_PARENT_DEATH_SIGNAL = 1
"""Number of ``PR_SET_PDEATHSIG`` in ``<linux/prctl.h>``."""
_REPORT_SECONDS = 1.0
"""How often an actor on Ray reports the bytes of a running task."""
_BATCH_ITEMS = 1024

Where = Literal["processes", "ray"]
"""Where workers run: in processes of this machine, or on a Ray cluster."""
Item = TypeVar("Item")


class WorkerContext(Protocol):
    """What the tasks of one worker work with."""

    on_bytes: Callable[[int], None]
    """A task calls it with the bytes that it read since the last call."""


Task = Callable[[Any], Any]
"""A function of a `WorkerContext` that pickle can send to a worker."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers do, in the words of errors."""

    name: str
    """Such as "the conversion"."""
    remedy: str
    """What to do after a worker ended, such as "run the conversion again"."""


def check_where(on: object) -> None:
    """Refuses an argument that is not one of `Where`.

    Raises:
        ValueError: naming the argument.
    """
    if on not in get_args(Where):
        raise ValueError(f"on is 'processes' or 'ray', not {on!r}")


def batches(items: Sequence[Item], nbytes: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbouring items in groups of limited size.

    Args:
        items: such as boxes.
        nbytes: gives the bytes of an item.
        most: bytes of a group, at most, unless a single item has more.

    >>> list(batches([3, 4, 9, 1], lambda size: size, 8))
    [[3, 4], [9], [1]]
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if batch and (total + size > most or len(batch) == _BATCH_ITEMS):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


class Executor(Protocol):
    """Runs tasks."""

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks and yields their results as they arrive, in any order.

        Args:
            tasks: to run.
            on_bytes: called in this process with the bytes that workers read since the last call.

        Raises:
            ShardproofError: a task failed, or a worker ended without a result. No further task begins.
        """
        ...

    def close(self) -> None:
        """Ends the workers."""
        ...


class InlineExecutor:
    """Runs tasks in this process, one after the other."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks; see `Executor.run`."""
        self._context.on_bytes = on_bytes
        for task in tasks:
            yield task(self._context)

    def close(self) -> None:
        """Does nothing: the caller owns the context."""


class ProcessExecutor:
    """Runs tasks in processes of this machine. They end with this process, even if it is killed.

    Args:
        job: what the workers do.
        make_context: a function that pickle can send to a worker. It makes what the tasks work with.
        workers: number of processes.
        deadline: seconds within which any worker must report bytes or a result.
    """

    def __init__(
        self, job: Job, make_context: Callable[[], WorkerContext], workers: int, deadline: float
    ) -> None:
        self._job = job
        self._deadline = deadline
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads
        self._workers = []
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make_context, os.getpid()), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks; see `Executor.run`. A worker gets its next task when it has finished one."""
        left = iter(tasks)
        busy: dict[Connection, Any] = {}
        for process, pipe in self._workers:
            self._give(pipe, process, left, busy)
        while busy:
            found = wait(list(busy), self._deadline)
            if not found:
                raise _no_progress(self._job, self._deadline)
            for ready in found:
                pipe = cast(Connection, ready)
                process = busy[pipe]
                with self._report_end(process):
                    kind, value = pipe.recv()
                if kind == "bytes":
                    on_bytes(value)
                elif kind == "error":
                    raise value
                else:
                    yield value
                    self._give(pipe, process, left, busy)

    def _give(
        self, pipe: Connection, process: Any, left: Iterator[Task], busy: dict[Connection, Any]
    ) -> None:
        task = next(left, None)
        if task is None:
            busy.pop(pipe, None)
        else:
            busy[pipe] = process
            with self._report_end(process):
                pipe.send(task)

    @contextmanager
    def _report_end(self, process: Any) -> Iterator[None]:
        """Around a use of a worker's pipe: raises an error with the exit code if the worker has ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            process.join(self._deadline)
            cause = (
                "Is memory short? Give fewer workers"
                if process.exitcode == -signal.SIGKILL
                else 'Its own error is above; a script needs `if __name__ == "__main__":`'
            )
            raise ShardproofError(
                f"a worker of {self._job.name} ended with exit code {process.exitcode} and no result. "
                f"{cause}. Then {self._job.remedy}",
                damaged=False,
            ) from error

    def close(self) -> None:
        """Ends the workers. A running task ends with its worker."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()  # a stopped process ignores a gentler signal
        ends = time.monotonic() + self._deadline
        for process, _ in self._workers:
            process.join(max(ends - time.monotonic(), 0.0))


def _serve(pipe: Connection, make_context: Callable[[], WorkerContext], parent: int) -> None:
    """A worker process: runs the tasks that come through the pipe until it closes."""
    libc.call("prctl", ctypes.c_int(_SET_PARENT_DEATH_SIGNAL), ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call
        return
    context: WorkerContext | None = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            context = context or make_context()
            context.on_bytes = lambda count: pipe.send(("bytes", count))
            result = task(context)
        except Exception as error:
            pipe.send(("error", error))
        else:
            pipe.send(("result", result))


class RayExecutor:
    """Runs tasks on a Ray cluster, whose nodes share the file systems that the tasks use.

    Args:
        job: what the workers do.
        make_context: as of `ProcessExecutor`.
        workers: number of actors; each uses one processor. Actors without a processor wait, and the others do
            their work.
        deadline: seconds within which any actor must report bytes or a result.

    Raises:
        ShardproofError: Ray is not installed.
    """

    def __init__(
        self, job: Job, make_context: Callable[[], WorkerContext], workers: int, deadline: float
    ) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise ShardproofError(
                f"{job.name} on Ray needs the package ray: pip install 'shardproof[ray]'", damaged=False
            ) from error
        self._job = job
        self._ray = ray
        self._deadline = deadline
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        processors = int(ray.cluster_resources().get("CPU", 0))
        if processors < workers:
            _log.warning(
                "%s: the Ray cluster has %d processors, so at most as many of the %d workers run until it "
                "has more",
                job.name,
                processors,
                workers,
            )
        # One thread of an actor runs a task, the other answers `report`.
        actor = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(_Actor)
        self._actors = [actor.remote(make_context) for _ in range(workers)]

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks; see `Executor.run`.

        An actor gets its first task when Ray has placed it, and its next task when it has finished one. So
        the actors that Ray cannot place keep no task.
        """
        left = deque(tasks)
        running: dict[Any, Any] = {}
        """Calls that run a task, each with its actor."""
        reports: dict[Any, Any] = {actor.report.remote(0.0): actor for actor in self._actors}
        """Calls that wait for the bytes of a running task, each with its actor. The first of an actor returns
        when Ray has placed it."""
        latest = time.monotonic()
        while running or left:
            remaining = latest + self._deadline - time.monotonic()
            if remaining <= 0:
                raise _no_progress(
                    self._job, self._deadline, " `ray status` shows whether processors are missing."
                )
            done, _ = self._ray.wait([*running, *reports], num_returns=1, timeout=remaining)
            for call in done:
                if call in reports:
                    actor, count = reports.pop(call), self._result(call)
                    if any(actor is other for other in running.values()):
                        reports[actor.report.remote(_REPORT_SECONDS)] = actor
                    else:
                        self._give(actor, left, running, reports)
                    if count:
                        on_bytes(count)
                        latest = time.monotonic()
                    continue
                actor = running.pop(call)
                result, count = self._result(call)
                if isinstance(result, Exception):
                    raise result
                on_bytes(count)
                yield result
                self._give(actor, left, running, reports)
                latest = time.monotonic()

    @staticmethod
    def _give(actor: Any, left: deque[Task], running: dict[Any, Any], reports: dict[Any, Any]) -> None:
        if left:
            running[actor.run.remote(left.popleft())] = actor
            if not any(actor is other for other in reports.values()):
                reports[actor.report.remote(_REPORT_SECONDS)] = actor

    def _result(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise ShardproofError(
                f"a worker of {self._job.name} on Ray ended with no result: {error}\nIs memory short? Then "
                f"give fewer workers, and {self._job.remedy}",
                damaged=False,
            ) from error

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """A worker on Ray, with two threads."""

    def __init__(self, make_context: Callable[[], WorkerContext]) -> None:
        self._make_context = make_context
        self._context: WorkerContext | None = None
        self._lock = threading.Lock()
        self._count = 0
        """Bytes that were read and not reported yet."""
        self._is_idle = threading.Event()

    def run(self, task: Task) -> tuple[Any, int]:
        """The result of a task or its error, and the bytes that were read since the last report."""
        self._is_idle.clear()
        try:
            self._context = self._context or self._make_context()
            self._context.on_bytes = self._add
            return task(self._context), self._take()
        except Exception as error:
            return error, self._take()
        finally:
            self._is_idle.set()

    def report(self, seconds: float) -> int:
        """The bytes that were read since the last report. Waits at most `seconds` for the end of the task."""
        self._is_idle.wait(seconds)
        return self._take()

    def _add(self, count: int) -> None:
        with self._lock:
            self._count += count

    def _take(self) -> int:
        with self._lock:
            count, self._count = self._count, 0
        return count


def _no_progress(job: Job, deadline: float, advice: str = "") -> ShardproofError:
    return ShardproofError(
        f"no worker of {job.name} made progress for {deadline:g} s, the deadline. Check the storage, and "
        f"{job.remedy}.{advice}",
        damaged=False,
    )


def start_workers(
    job: Job,
    on: Where,
    workers: int,
    *,
    own: WorkerContext,
    make_context: Callable[[], WorkerContext],
    deadline: float,
) -> Executor:
    """Starts workers. One worker of this machine is this process.

    Args:
        job: what the workers do.
        on: where they run.
        workers: how many.
        own: what the tasks work with in this process.
        make_context: makes it in another process; pickle can send it there.
        deadline: seconds that the workers may go without progress.

    Raises:
        ShardproofError: Ray is not installed.
    """
    if on == "ray":
        return RayExecutor(job, make_context, workers, deadline)
    if workers > 1:
        return ProcessExecutor(job, make_context, workers, deadline)
    return InlineExecutor(own)

"""Where the tasks of a conversion run: in this process, in processes of this machine, or on Ray.

A task is a unit to write or boxes to verify. A worker opens the source and plans by itself, from the request
alone, so that nothing but requests, tasks and results goes between processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from shardproof._utils import libc
from shardproof.conversion.mapped_source import HashedBox
from shardproof.conversion.request import ConversionRequest
from shardproof.conversion.work import Work
from shardproof.conversion.work_folder import UnitRecord
from shardproof.errors import ShardproofError

__all__ = ["Executor", "InlineExecutor", "ProcessExecutor", "RayExecutor", "Task", "VerifyTask", "WriteTask"]

_SET_PARENT_DEATH_SIGNAL = 1
"""Number of ``PR_SET_PDEATHSIG`` in ``<linux/prctl.h>``."""


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Write a unit; the result is its `UnitRecord`."""

    unit: int

    def run(self, work: Work) -> UnitRecord:
        """Carries the task out."""
        return work.write(self.unit)


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Compare written boxes with their digests; the result is the number of bytes."""

    boxes: Sequence[HashedBox]

    def run(self, work: Work) -> int:
        """Carries the task out."""
        return work.verify(self.boxes)


Task = WriteTask | VerifyTask


class Executor(Protocol):
    """Runs tasks."""

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks and gives their results as they come, in any order.

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

    def __init__(self, work: Work) -> None:
        self._work = work

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks; see `Executor.run`."""
        self._work.on_bytes = on_bytes
        for task in tasks:
            yield task.run(self._work)

    def close(self) -> None:
        """Does nothing: the caller owns the work."""


class ProcessExecutor:
    """Runs tasks in processes of this machine. They end with this process, however it ends.

    Args:
        request: of the conversion.
        workers: how many processes.
        deadline: seconds in which some worker has to report bytes or a result.
    """

    def __init__(self, request: ConversionRequest, workers: int, deadline: float) -> None:
        self._deadline = deadline
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads
        self._workers = []
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, request, os.getpid()), daemon=True)
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
                raise ShardproofError(
                    f"no worker of the conversion made progress for {self._deadline:g} s, the deadline. "
                    "Look at the storage of source and destination, and run the conversion again: it goes on "
                    "where it was"
                )
            for ready in found:
                pipe = cast(Connection, ready)
                process = busy[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError) as error:
                    process.join(self._deadline)
                    raise ShardproofError(
                        f"a worker of the conversion ended with exit code {process.exitcode} and no result. "
                        "Is memory short? Run the conversion again: it goes on where it was"
                    ) from error
                if kind == "bytes":
                    on_bytes(value)
                elif kind == "error":
                    raise value
                else:
                    yield value
                    self._give(pipe, process, left, busy)

    @staticmethod
    def _give(pipe: Connection, process: Any, left: Iterator[Task], busy: dict[Connection, Any]) -> None:
        task = next(left, None)
        if task is None:
            busy.pop(pipe, None)
        else:
            busy[pipe] = process
            pipe.send(task)

    def close(self) -> None:
        """Ends the workers; a task that is under way ends with its worker."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()  # a stopped process ignores a gentler signal
            process.join(self._deadline)


def _serve(pipe: Connection, request: ConversionRequest, parent: int) -> None:
    """A worker process: runs the tasks that come through the pipe until it closes."""
    libc.call("prctl", ctypes.c_int(_SET_PARENT_DEATH_SIGNAL), ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call
        return
    work: Work | None = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            work = work or Work(request)
            work.on_bytes = lambda count: pipe.send(("bytes", count))
            result = task.run(work)
        except Exception as error:
            pipe.send(("error", error))
        else:
            pipe.send(("result", result))


class RayExecutor:
    """Runs tasks on a Ray cluster, whose nodes share the file system of source and destination.

    Args:
        request: of the conversion.
        workers: how many actors; each takes one processor.

    Raises:
        ShardproofError: Ray is not installed.
    """

    def __init__(self, request: ConversionRequest, workers: int) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise ShardproofError(
                "conversion on Ray needs the package ray: pip install 'shardproof[ray]'"
            ) from error
        self._ray = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        actor = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._actors = [actor.remote(request) for _ in range(workers)]

    def run(self, tasks: Sequence[Task], on_bytes: Callable[[int], None]) -> Iterator[Any]:
        """Runs tasks; see `Executor.run`."""
        left: Iterable[Task] = iter(tasks)
        busy = {}
        for actor in self._actors:
            for task in left:
                busy[actor.run.remote(task)] = actor
                break
        while busy:
            (done,), _ = self._ray.wait(list(busy), num_returns=1)
            actor = busy.pop(done)
            result, count = self._ray.get(done)
            if isinstance(result, Exception):
                raise result
            on_bytes(count)
            yield result
            for task in left:
                busy[actor.run.remote(task)] = actor
                break

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """A worker on Ray."""

    def __init__(self, request: ConversionRequest) -> None:
        self._request = request
        self._work: Work | None = None
        self._count = 0

    def run(self, task: Task) -> tuple[Any, int]:
        """The result of a task or its error, and the bytes that were read."""
        self._count = 0
        try:
            self._work = self._work or Work(self._request)
            self._work.on_bytes = self._add
            return task.run(self._work), self._count
        except Exception as error:
            return error, self._count

    def _add(self, count: int) -> None:
        self._count += count

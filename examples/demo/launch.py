"""Starts the trainer's processes, reads their records and ends them within a time limit.

Note "Worker processes": torchrun starts each worker in its own session. A signal to torchrun's process group
does not reach the workers, and workers continue after a kill of torchrun. So each worker first records its
process id. `Job.kill` kills these ids one by one, after it checks that each id still is a worker of this
task.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import shardproof
from examples.demo.story import Record, Task, read_records
from shardproof.errors import ShardproofError

__all__ = ["DemoError", "Job", "check_device"]

POLL = 0.05
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class DemoError(ShardproofError):
    """A run of the demo failed, so the next run cannot start. Details: ``log``."""


def check_device(name: str) -> None:
    """Checks that the runs can use a type of device.

    Raises:
        ValueError: torch has no device of this type here.

    >>> check_device("cpu")
    """
    if name == "cpu":
        return
    import torch  # a demo on the CPU needs it in the workers only

    try:
        count = torch.get_device_module(name).device_count()
    except (AttributeError, RuntimeError):  # not the name of a type
        count = 0
    if not count:
        raise ValueError(f"--device {name}: torch finds no device of this type on this machine: use cpu")


class Job:
    """The processes of one run.

    A context manager, which ends all processes on exit.

    Args:
        task: the task of the processes.
        limit: time limit in seconds.
        module: the trainer module, which gets the task's file as its argument.
    """

    def __init__(self, task: Task, *, limit: float = 300.0, module: str = "examples.demo.train") -> None:
        self.task = task
        self.log = Path(task.folder) / f"{task.name}.log"
        self.seconds = 0.0
        self._limit = limit
        self._begin = time.monotonic()
        self._records_read = 0
        worker = ["-m", module, str(task.write())]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *_launcher(task.layout.ranks), *worker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.kill()

    def finish(self, on_record: Callable[[Record], None], codes: Collection[int] = (0,)) -> int:
        """Wait for the end of the run. Returns the exit code.

        Raises:
            DemoError: the exit code is not in `codes`, or the run took longer than its limit.
        """
        while self._process.poll() is None:
            self._poll(on_record, "finish")
        self._read_records(on_record)
        self.seconds = time.monotonic() - self._begin
        if self._process.returncode not in codes:
            raise self._error(f"ended with exit code {self._process.returncode}")
        return self._process.returncode

    def wait_for(self, mark: Path, on_record: Callable[[Record], None]) -> None:
        """Wait until the run has made the file `mark`.

        Raises:
            DemoError: the run ended without the file, or took longer than its limit.
        """
        while not mark.exists():
            if self._process.poll() is not None:
                raise self._error(
                    f"ended with exit code {self._process.returncode} before it made {mark.name}"
                )
            self._poll(on_record, f"make {mark.name}")
        self._read_records(on_record)

    def kill(self) -> int:
        """Send SIGKILL to the launcher, so that it cannot clean up, and to every worker.

        Returns:
            The number of workers that were running.
        """
        workers = [pid for pid in self._worker_pids() if _is_alive(pid, self.task)]
        if self._process.poll() is None:
            self._process.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(GRACE)
        deadline = time.monotonic() + GRACE
        while any(_is_alive(pid, self.task) for pid in workers) and time.monotonic() < deadline:
            time.sleep(POLL)
        self.seconds = time.monotonic() - self._begin
        return len(workers)

    def _poll(self, on_record: Callable[[Record], None], what: str) -> None:
        self._read_records(on_record)
        if time.monotonic() - self._begin > self._limit:
            raise self._error(f"did not {what} within {self._limit:.0f} s")
        time.sleep(POLL)

    def _read_records(self, on_record: Callable[[Record], None]) -> None:
        records = read_records(self.task.records(0))
        for record in records[self._records_read :]:
            on_record(record)
        self._records_read = len(records)

    def _worker_pids(self) -> list[int]:
        ranks = range(self.task.layout.ranks)
        starts = [read_records(self.task.records(rank))[:1] for rank in ranks]
        # A worker that fails before it starts has a first record without a process id.
        return [int(record["pid"]) for records in starts for record in records if "pid" in record]

    def _error(self, what: str) -> DemoError:
        failures = [
            f"rank {rank}: {record['error']}"
            for rank in range(self.task.layout.ranks)
            for record in read_records(self.task.records(rank))
            if record["event"] == "failed"
        ]
        cause = failures or _outline(self.log.read_text(errors="replace").splitlines())
        return DemoError(
            f"the demo's run {self.task.name!r} ({self.task.layout}) {what}; its output is in {self.log}\n"
            + "\n".join(cause),
            log=str(self.log),
        )


def _outline(lines: list[str]) -> list[str]:
    """The first lines of a log, with the worker's error, and the last lines, with torchrun's summary."""
    return lines if len(lines) <= 30 else [*lines[:12], f"({len(lines) - 27} more lines)", *lines[-15:]]


def _launcher(ranks: int) -> list[str]:
    """The torchrun command with a rendezvous on a free port. One rank needs no launcher."""
    if ranks == 1:
        return []
    return [
        *("-m", "examples.demo.torchrun", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"),
    ]


def _environment() -> dict[str, str]:
    """This process's environment, without the variables of a launcher."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may vary from run to run
    places = [str(Path(shardproof.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*places, environment.get("PYTHONPATH")]))
    if Path("/sys/class/net/lo").exists():
        # Otherwise gloo looks up the host's name, which may not resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _is_alive(pid: int, task: Task) -> bool:
    """True if `pid` is a running worker of `task`. A zombie does not run."""
    process = Path(f"/proc/{pid}")
    if Path("/proc/self").exists():
        try:
            return task.folder in (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

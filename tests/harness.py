"""Real processes for tests: a few ranks, a store, a time limit, and the outcome of each rank.

    outcomes = run_ranks(3, save_once, path, timeout=30)
    assert [outcome.value for outcome in outcomes] == ["saved"] * 3

`save_once` stands at the top of its module. It finds its rank in the environment (`rank()`), as under
torchrun. It may call `reach("writing")`, which waits for the parent. The parent continues the rank, kills it
(`kill={2: "writing"}`), or holds it for a `script` that gets the `Job`. Processes are forked from a server
that has imported torch, so a start is cheap.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__ = [
    "Job",
    "Outcome",
    "RanksTimedOut",
    "process_group",
    "rank",
    "reach",
    "rendezvous",
    "run_ranks",
    "world_size",
]

# Modules that nearly every rank imports, some (torch._dynamo) when it makes an optimizer. The fork server
# imports them once for all ranks.
# Packages of shardproof load their modules lazily, so the modules are named.
_PRELOAD = [
    *(
        "pytest",
        "hypothesis",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "numpy.ma",
    ),
    *("shardproof.runs.checkpointer.checkpointer", "shardproof.runs.checkpointer.agreed_calls"),
    *(
        "shardproof.engine.loading.load_protocol",
        "shardproof.runs.maintenance.verify",
        "shardproof.training.optim.distributed",
    ),
    *(
        "shardproof.training.rerun.machine",
        "shardproof.training.fsdp.unit",
        "shardproof.training.layouts.parts",
    ),
]
_to_parent: list[Connection] = []


class RanksTimedOut(AssertionError):
    """Ranks were still running at the time limit. The parent killed them; their stacks are on stderr."""


@dataclass
class Outcome:
    """How a rank ended."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    cause: BaseException | None = None
    """The error's ``__cause__``."""
    trace: str = ""
    exit_code: int | None = None
    """0, the code that the rank gave to `os._exit`, or minus the number of the signal that killed it."""
    seconds: float = 0.0
    """From the start of this rank to the end of the target."""
    reached: list[str] = field(default_factory=list)
    job: list[Outcome] = field(default_factory=list, repr=False, compare=False)
    """Outcomes of all ranks: the cause of one rank's failure may show in another's outcome."""

    @property
    def value(self) -> Any:
        """The result. If the rank failed, raises AssertionError with the end of each rank."""
        if self.error is None and self.exit_code == 0:
            return self.result
        others = "".join(f"\n{other._end()}" for other in self.job if other is not self)
        raise AssertionError(f"{self._end()}\n{self.trace}{others}") from self.error

    def _end(self) -> str:
        raised = f" raised {self.error!r}," if self.error is not None else ""
        return f"rank {self.rank}{raised} ended with exit code {self.exit_code} after {self.reached}"


@dataclass
class Job:
    """The running ranks, for a script in the parent."""

    processes: list[Any]
    outcomes: list[Outcome]
    pipes: list[Connection]
    ends: float
    store: Any
    held: dict[int, str] = field(default_factory=dict)
    """Ranks that wait at a point, which is named in `hold`."""
    hold: set[tuple[int, str]] = field(default_factory=set)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self.processes[rank].pid, number)

    def stop(self, rank: int) -> None:
        """SIGSTOP; returns when the process has stopped."""
        self.signal(rank, signal.SIGSTOP)
        while _state(self.processes[rank].pid) not in "TZ":
            self.pump(0.005)

    def resume(self, rank: int) -> None:
        """SIGCONT."""
        self.signal(rank, signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """SIGKILL; returns when the process has ended. It may have ended before."""
        with suppress(ProcessLookupError):
            self.signal(rank, signal.SIGKILL)
        self.processes[rank].join(10)

    def until_held(self, rank: int, point: str) -> None:
        """Wait until a rank is at a point named in `hold`; it waits there for `go`."""
        while self.held.get(rank) != point:
            self.pump(0.05)
            if self.pipes[rank].closed:
                raise AssertionError(f"rank {rank} ended before {point}:\n{self.outcomes[rank].trace}")

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something happened. An error of a rank ends the wait."""
        while not happened():
            self.pump(0.01)
            for outcome in self.outcomes:
                if outcome.error is not None:
                    raise AssertionError(f"rank {outcome.rank}:\n{outcome.trace}") from outcome.error

    def go(self, rank: int) -> None:
        """Let a held rank continue."""
        del self.held[rank]
        self.pipes[rank].send("go")

    def until_done(self, *ranks: int) -> None:
        """Wait until those ranks have ended."""
        while any(self.processes[rank].is_alive() for rank in ranks):
            self.pump(0.05)

    def pump(self, seconds: float) -> None:
        """Receive messages of ranks for `seconds`; raise `RanksTimedOut` past the time limit."""
        if time.monotonic() > self.ends:
            alive = [number for number, process in enumerate(self.processes) if process.is_alive()]
            raise RanksTimedOut(
                f"ranks {alive} still run; points reached: {[o.reached for o in self.outcomes]}"
            )
        pipes = {pipe: number for number, pipe in enumerate(self.pipes) if not pipe.closed}
        if not pipes:
            time.sleep(seconds)
        for pipe in wait(list(pipes), seconds):
            self._take(pipes[pipe])  # type: ignore[index]

    def _take(self, rank: int) -> None:
        outcome, pipe = self.outcomes[rank], self.pipes[rank]
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            pipe.close()
            return
        if kind == "done":
            outcome.result, outcome.error, outcome.cause, outcome.trace, outcome.seconds = content
            return
        outcome.reached.append(content)
        if (rank, f"kill {content}") in self.hold:
            self.kill(rank)
        elif (rank, content) in self.hold:
            self.held[rank] = content
        else:
            try:
                pipe.send("go")
            except BrokenPipeError:
                pipe.close()  # the rank was killed after it reached the point: see its exit code


def run_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    kill: Mapping[int, str] | None = None,
    hold: Mapping[int, str | Sequence[str]] | None = None,
    script: Callable[[Job], None] | None = None,
    store: str = "parent",
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run `target(*args)` in `world_size` processes and return the outcome of each.

    Args:
        world_size: number of ranks.
        target: a function at the top of a module.
        args: for the target; picklable.
        timeout: seconds for everything; then all ranks are killed and `RanksTimedOut` is raised.
        kill: rank to the point (see `reach`) at which it is killed with SIGKILL.
        hold: rank to the point or points at which it waits for the script's `Job.go`.
        script: runs in the parent while the ranks run.
        store: which process serves the TCPStore: ``"parent"``, or ``"rank 0"``, where the target makes it.
        environment: more variables for every rank.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    began = time.monotonic()
    server: Any = TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    port = server.port
    if store == "rank 0":
        server = None  # its port is free again
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if store == "parent":
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    job = Job([], [Outcome(number) for number in range(world_size)], [], began + timeout, server)
    del server  # the job's is the only reference: a script may end the store
    job.hold |= {(number, f"kill {point}") for number, point in (kill or {}).items()}
    for number, points in (hold or {}).items():
        job.hold |= {(number, point) for point in ([points] if isinstance(points, str) else points)}
    try:
        for number in range(world_size):
            ours, theirs = context.Pipe()
            own = {name: str(value) for name, value in shared.items()} | dict(environment or {})
            own |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            process = context.Process(
                target=_rank_main, args=(theirs, own, timeout, target, args), daemon=True
            )
            process.start()
            theirs.close()
            job.processes.append(process)
            job.pipes.append(ours)
        if script is not None:
            script(job)
        job.until_done(*range(world_size))
        for number in range(world_size):
            while not job.pipes[number].closed:
                job._take(number)
    finally:
        for process in job.processes:
            if process.is_alive():
                process.kill()
        for outcome, process, pipe in zip(job.outcomes, job.processes, job.pipes, strict=False):
            process.join(10)
            outcome.exit_code, outcome.job = process.exitcode, job.outcomes
            pipe.close()
    return job.outcomes


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """Number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def reach(point: str) -> None:
    """Report a point to the parent, and wait for its answer. Outside of `run_ranks`, do nothing."""
    if _to_parent:
        _to_parent[0].send(("reached", point))
        _to_parent[0].recv()


def open_files() -> list[str]:
    """Open files of this process, without sockets: gloo closes one of its own some time after connecting."""
    gc.collect()
    names = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself, and what another thread just closed
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(name for name in names if not name.startswith("socket:"))


def rendezvous(*, deadline: float, name: str = "shardproof") -> Any:
    """A new `StoreRendezvous` of all ranks over the parent's store. Waits until all ranks make theirs.

    Without the wait, the late start of a rank would count as silence.
    """
    from torch.distributed import TCPStore

    from shardproof.rendezvous import StoreRendezvous

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(
        "127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    arrived = store.add(f"harness/{name}", 1)
    together = f"harness/{name}/{(arrived - 1) // world_size()}"  # no rank makes a second before all made one
    if arrived % world_size() == 0:
        store.set(together, "")
    store.wait([together], timedelta(seconds=30))
    return StoreRendezvous(_Connected(store), rank(), world_size(), deadline=deadline, name=name)


class _Connected:
    """A store whose clones are made beforehand: to connect can take longer than the deadlines tested."""

    def __init__(self, store: Any) -> None:
        from shardproof.engine.rendezvous.store_requests import new_client

        self.underlying_store = store
        # two in the foreground and two in the background, twice
        self._clones = [new_client(store) for _ in range(6)]

    def clone(self) -> Any:
        return self._clones.pop()


_groups: list[Any] = []
"""The process groups of this process, which end with it. `destroy_process_group` (torch 2.6), or a
DistributedDataParallel that outlives it, frees a group under the interpreter's lock; gloo's threads wait for
that lock, and the free waits for the threads (torch 2.13: 6 of 53 runs waited for ever)."""


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of all ranks, as under torchrun."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield
    finally:
        _groups.extend(dist.distributed_c10d._world.pg_map)  # those of meshes, too
        dist.destroy_process_group()


def _rank_main(
    pipe: Connection,
    environment: dict[str, str],
    timeout: float,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    began = time.monotonic()
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout * 0.95)
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # threads without Python too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # torch takes SIGINT for fatal
    torch.set_num_threads(1)
    gc.freeze()  # the preloaded modules: each walk over them would take 0.1 s or more
    _to_parent[:] = [pipe]
    result: Any = None
    error: BaseException | None = None
    try:
        result = target(*args)
    except BaseException as caught:
        error = caught
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    cause = error.__cause__ if error is not None else None
    content = (result, _sendable(error), _sendable(cause), trace, time.monotonic() - began)
    try:
        pipe.send(("done", content))
    except Exception as unpicklable:
        problem = TypeError(f"the result cannot be sent: {unpicklable}")
        pipe.send(("done", (None, problem, None, trace, content[-1])))
    faulthandler.cancel_dump_traceback_later()


def _sendable(error: BaseException | None) -> BaseException | None:
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2][0]

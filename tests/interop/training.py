"""Runs the ranks of a training script, such as an example, in an environment with its framework.

train("torch", "examples/lightning_fit.py", run, nproc=2, kill_in_save=4)  # every rank dies in its save
train("torch", "examples/lightning_fit.py", run, nproc=3)  # and resumes
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import shardproof as sp
from tests.interop.peer import python_of

__all__ = ["EXAMPLES", "SCRIPTS", "train"]

SCRIPTS = Path(__file__).resolve().parent / "peers"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(
    environment: str,
    script: Path,
    *args: object,
    nproc: int,
    kill_in_save: int = 0,
    timeout: float = 150.0,
    **variables: str,
) -> str:
    """Runs a script on some ranks, and returns what they wrote.

    Args:
        environment: name of a file in `tests/interop/environments`, without its ending.
        script: the script.
        args: for the script, as text.
        nproc: number of ranks, started as torchrun starts them.
        kill_in_save: number of the save in which every rank kills itself; 0 for none.
        timeout: seconds for everything.
        variables: more environment variables.

    Raises:
        AssertionError: a rank ended with another code than expected, or did not end in time.
    """
    starter = [str(python_of(environment)), str(SCRIPTS / "start_example.py"), str(kill_in_save)]
    command = [*starter, str(script), *map(str, args)]
    expected = -signal.SIGKILL if kill_in_save else 0
    with TemporaryDirectory(prefix="training-") as folder:
        outputs = [Path(folder) / f"output-{rank}" for rank in range(nproc)]
        port = _free_port()
        processes = []
        try:
            for rank, output in enumerate(outputs):
                shared = _variables(rank, nproc, port, Path(folder)) | variables
                with open(output, "wb") as file:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            cwd=folder,
                            env=shared,
                            start_new_session=True,
                        )
                    )
            codes = _codes(processes, expected, timeout)
        finally:
            for process in processes:
                _end(process)
        text = "\n".join(
            f"--- rank {rank}\n{output.read_text(errors='replace')[-6000:]}"
            for rank, output in enumerate(outputs)
        )
        assert codes == [expected] * nproc, f"{script} ended with {codes}, not {expected}\n{text}"
        return text


def _codes(processes: list[subprocess.Popen[bytes]], expected: int, timeout: float) -> list[int | None]:
    """The exit codes. Returns early if a rank ended otherwise than expected, or the time is up."""
    ends = time.monotonic() + timeout
    running = {os.pidfd_open(process.pid): process for process in processes}
    try:
        while running:
            ended = wait(list(running), timeout=max(ends - time.monotonic(), 0))
            if not ended:
                break
            for descriptor in ended:
                assert isinstance(descriptor, int)
                code = running.pop(descriptor).wait()
                os.close(descriptor)
                if code != expected:
                    return [process.poll() for process in processes]
    finally:
        for descriptor in running:
            os.close(descriptor)
    return [process.poll() for process in processes]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a rank and the processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _variables(rank: int, nproc: int, port: int, folder: Path) -> dict[str, str]:
    """The environment variables of a rank. Of our packages it sees the shardproof under test alone."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "COV_")) and name != "VIRTUAL_ENV"
    }
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(Path(sp.__file__).resolve().parents[1]), str(SCRIPTS)]),
        "PYTHONNOUSERSITE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

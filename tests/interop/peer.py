"""Runs a script of `tests/interop/peers` in an environment where a released package is installed.

    read = run_peer("torch", "read_dcp.py", "keys", checkpoint)
    assert_same_tensors(read.tensors, {"model.weight": weight})
    assert read.objects["step"] == 7

    wide = run_peer("torch", "read_dcp.py", "model", checkpoint, nproc=2)  # FSDP2 on two ranks

`make test-interop` builds the environments. A test whose environment is missing is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardproof as sp

__all__ = ["PeerFailed", "PeerResult", "PeerTimedOut", "assert_same_tensors", "python_of", "run_peer"]

FOLDER = Path(__file__).resolve().parent
VENVS = FOLDER / ".venvs"
_SHOWN = 6_000
"""How many characters of a peer's output an error shows."""


class PeerFailed(AssertionError):
    """A script ended with an error. The message has what each rank wrote to stderr."""


class PeerTimedOut(PeerFailed):
    """A script was still running when its time was up, and was ended."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What a peer read."""

    tensors: dict[str, torch.Tensor]
    """By key, every tensor whole, with the dtype and shape that the peer gave it."""
    objects: dict[str, Any]
    """By key, every other value, as `encoded` in `peers/peer_result.py` and `expected.json` write it."""
    facts: dict[str, Any]
    """Facts of the read: versions, missing keys, what the peer refused."""


def python_of(environment: str) -> Path:
    """The Python of an environment. Skips the test if `make test-interop` has not built it."""
    folder = VENVS / environment
    if not (folder / ".installed").exists():
        pytest.skip(f"no environment {environment!r} in {VENVS}: `make test-interop` builds it")
    return folder / "bin" / "python"


def run_peer(
    environment: str, script: str, *args: object, nproc: int = 1, timeout: float = 120.0
) -> PeerResult:
    """Runs a script of `tests/interop/peers` and returns what it read.

    Args:
        environment: name of a file in `tests/interop/environments`, without its ending.
        script: name of a file in `tests/interop/peers`.
        args: for the script, as text.
        nproc: number of processes, which become ranks of one gloo group if the script joins them.
        timeout: seconds for everything. After that every process of the script is ended.

    Raises:
        PeerFailed: a process ended with an error. The others are ended too.
        PeerTimedOut: a process was still running after `timeout` seconds.
    """
    python = python_of(environment)
    with tempfile.TemporaryDirectory(prefix="peer-") as name:
        folder = Path(name)
        command = [str(python), str(FOLDER / "peers" / script), *map(str, args)]
        ranks = _Ranks(command, nproc, folder, timeout)
        try:
            ranks.join()
        finally:
            ranks.end()
        return _read_result(folder, ranks)


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fails unless both have the same keys and every tensor the same dtype, shape and bits."""
    problems = [f"{key}: missing" for key in expected if key not in found]
    problems += [f"{key}: unexpected" for key in found if key not in expected]
    for key in found.keys() & expected.keys():
        ours, theirs = found[key], expected[key]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            wanted = f"{theirs.dtype} {list(theirs.shape)}"
            problems.append(f"{key}: expected {wanted}, found {ours.dtype} {list(ours.shape)}")
        elif not torch.equal(_bytes(ours), _bytes(theirs)):
            differ = int((_bytes(ours) != _bytes(theirs)).sum())
            problems.append(f"{key}: {differ} of {_bytes(ours).numel()} bytes differ")
    assert not problems, "\n".join(sorted(problems))


class _Ranks:
    """The processes of one script, each the leader of a process group of its own."""

    def __init__(self, command: list[str], nproc: int, folder: Path, timeout: float) -> None:
        self.what = " ".join(command[1:])
        self._ends = time.monotonic() + timeout
        self._timeout = timeout
        self._outputs = [folder / f"output-{rank}" for rank in range(nproc)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(self._outputs):
                with open(output, "wb") as file:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                        env=_variables(rank, nproc, folder, timeout),
                        start_new_session=True,
                    )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    def join(self) -> None:
        """Waits until all have ended without an error; raises at the first that has not."""
        running = {os.pidfd_open(process.pid): process for process in self._processes}
        try:
            while running:
                left = self._ends - time.monotonic()
                ended = wait(list(running), timeout=max(left, 0))
                if not ended:
                    raise PeerTimedOut(f"{self.what} still ran after {self._timeout} s\n{self.output()}")
                for descriptor in ended:
                    code = running.pop(descriptor).wait()
                    os.close(descriptor)
                    if code:
                        raise PeerFailed(f"{self.what} ended with exit code {code}\n{self.output()}")
        finally:
            for descriptor in running:
                os.close(descriptor)

    def end(self) -> None:
        """Ends every process, and the processes that it started."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def output(self) -> str:
        """The end of what each rank wrote to stdout and stderr."""
        texts = [output.read_text(errors="replace") for output in self._outputs]
        return "\n".join(f"--- rank {rank}\n{text[-_SHOWN:]}" for rank, text in enumerate(texts))


def _variables(rank: int, nproc: int, folder: Path, timeout: float) -> dict[str, str]:
    """The environment variables of a rank: those of this process that do not point Python to our packages.

    Of our packages, a script sees the shardproof under test alone.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "COV_")) and name != "VIRTUAL_ENV"
    }
    return inherited | {
        "PYTHONPATH": str(Path(sp.__file__).resolve().parents[1]),
        "PEER_RESULT": str(folder),
        "PEER_TIMEOUT": str(timeout),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "PYTHONNOUSERSITE": "1",
    }


def _read_result(folder: Path, ranks: _Ranks) -> PeerResult:
    if not (folder / "result.json").exists():
        raise PeerFailed(f"{ranks.what} wrote no result\n{ranks.output()}")
    content = json.loads((folder / "result.json").read_text())
    stored = load_file(folder / "tensors.safetensors")
    tensors = {}
    for key, (dtype, shape) in content["tensors"].items():
        kind = getattr(torch, dtype)
        tensors[key] = (
            stored[key].clone().view(kind).reshape(shape)
            if stored[key].numel()
            else torch.empty(shape, dtype=kind)
        )
    return PeerResult(tensors, content["objects"], content["facts"])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

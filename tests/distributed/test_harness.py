"""The harness reports every failed rank, and native stacks of threads that Python did not start."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.harness import Job, rank, reach, run_ranks
from tests.programs import run_program


def die(folder: str) -> None:
    """Rank 0 dies in a thread that Python did not start, rank 1 raises."""
    if rank() == 1:
        raise ValueError("mine")
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
    libc = ctypes.CDLL(None)
    nowhere = ctypes.c_void_p(8)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.strlen, nowhere)
    threading.Event().wait(50)


def test_a_dead_rank_is_reported_with_its_native_stack_and_the_ends_of_the_others(tmp_path: Path) -> None:
    outcomes = run_ranks(2, die, str(tmp_path))
    assert outcomes[0].exit_code == -signal.SIGSEGV
    with pytest.raises(AssertionError) as caught:
        _ = outcomes[0].value
    assert f"rank 0 ended with exit code {-signal.SIGSEGV} after []" in str(caught.value)
    assert "rank 1 raised ValueError('mine'), ended with exit code 0 after []" in str(caught.value)
    with pytest.raises(
        AssertionError, match=r"(?s)rank 1 raised .*in die\n.*rank 0 ended with exit code -11"
    ):
        _ = outcomes[1].value
    stacks = (tmp_path / "stderr").read_text()
    assert "libc.so" in stacks and "Fatal Python error: Segmentation fault" in stacks


def _reach_twice() -> None:
    reach("first")
    reach("second")


def test_a_rank_that_was_killed_at_a_point_has_its_exit_code() -> None:
    """The parent reads the point after the kill, and cannot answer."""

    def kill(job: Job) -> None:
        assert job.pipes[0].poll(60)
        job.kill(0)
        job.processes[0].join(60)

    (outcome,) = run_ranks(1, _reach_twice, script=kill)
    assert outcome.exit_code == -signal.SIGKILL and outcome.reached == ["first"]


def _fail() -> None:
    raise ValueError("mine")


def test_an_error_of_a_rank_ends_the_wait_of_a_script() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^rank 0:\n.*in _fail\n.*ValueError: mine"):
        run_ranks(1, _fail, script=lambda job: job.until(lambda: False))


def test_a_program_has_its_own_folder_for_temporary_files(tmp_path: Path) -> None:
    text = "import tempfile; print(tempfile.gettempdir())"
    done = run_program(text, environment=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.stdout == f"{tmp_path}\n"

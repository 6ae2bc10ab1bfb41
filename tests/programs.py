"""Programs, as `python -c` runs them, without the seconds in which an interpreter imports torch.

    done = run_program("import sys; print(sys.argv[1])", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\\n")

A program is forked from the server of the harness, which has imported torch. It ends as an interpreter does:
it joins threads, runs exit handlers, frees modules, and has the exit code of what it raised. Start programs
that need a new interpreter (its hash seed, what it imports, its command line) with `subprocess`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.harness import run_ranks

__all__ = ["become_program", "run_program"]


def run_program(
    text: str,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        text: the program.
        arguments: its `sys.argv[1:]`.
        folder: where it runs; by default the current folder.
        environment: all of its environment variables; by default those of this process.
        timeout: seconds; then it is killed and `RanksTimedOut` is raised.
    """
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as outputs:
        paths = [f"{outputs}/out", f"{outputs}/err"]
        (outcome,) = run_ranks(
            1, _run_alone, text, arguments, str(folder or Path.cwd()), variables, paths, timeout=timeout
        )
        if outcome.error is not None:
            raise outcome.error
        out, err = (Path(path).read_text() for path in paths)
    assert outcome.exit_code is not None
    return subprocess.CompletedProcess([text, *arguments], outcome.exit_code, out, err)


def _run_alone(
    text: str, arguments: Sequence[str], folder: str, variables: dict[str, str], outputs: list[str]
) -> NoReturn:
    os.environ.clear()  # it is no rank
    os.environ.update(variables)
    tempfile.tempdir = None  # the server has looked for one in its own environment
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    become_program(text, *arguments)


def become_program(text: str, *arguments: str) -> NoReturn:
    """Runs a program in this process, for which it is the main program, and ends the process."""
    multiprocessing.current_process().daemon = False  # it may have children
    faulthandler.cancel_dump_traceback_later()  # a child made by fork would wait for its thread for ever
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    code = 0
    try:
        exec(compile(text, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit returned")

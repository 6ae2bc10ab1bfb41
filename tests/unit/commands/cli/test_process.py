"""The command line as a process: what help imports, and what a terminal sees."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import shardproof as package
from shardproof.commands.cli.group import COMMANDS
from tests.unit.commands.cli.samples import SECONDS, Sample, rows_cut, shardproof, write

ONE = Sample({"w": np.arange(12, dtype=np.float32).reshape(4, 3)}, step=1)
SLOW = "asyncio,concurrent.futures,dataclasses,email,importlib.metadata,logging,multiprocessing,subprocess"
"""Parts of Python that take long to import."""

IMPORTED = """
import sys
print(*sys.modules, file=sys.stderr)
from shardproof.commands.cli.group import run
for command in eval(sys.argv[1]):
    assert run(command) == 0, command
    print(*sys.modules, file=sys.stderr)
"""


def modules_after(*commands: Sequence[object]) -> list[set[str]]:
    """What one process has imported before it runs the commands in turn, and after each of them."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, repr([[str(word) for word in command] for command in commands])],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stderr.splitlines()]


def imported(watched: str, *commands: Sequence[object]) -> dict[str, list[str]]:
    """Which of the watched modules are there after each command, if any."""
    there = [sorted(modules & set(watched.split(","))) for modules in modules_after(*commands)[1:]]
    return {str(command): found for command, found in zip(commands, there, strict=True) if found}


def test_help_needs_nothing_heavy() -> None:
    commands = ["--help"], ["--version"], ["ls", "--help"], ["verify", "--help"]
    assert imported(f"torch,numpy,rich,msgspec,xxhash,safetensors,{SLOW}", *commands) == {}


def test_help_needs_only_the_files_of_the_commands() -> None:
    """Help imports these modules of shardproof, and of other packages only click, so that it is fast."""
    before, after = modules_after(["--help"])
    new = after - before
    ours = {name for name in new if name.split(".")[0] == "shardproof"}
    others = {name.split(".")[0] for name in new - ours}
    assert sorted(ours - {f"shardproof.commands.cli.{name}" for name in COMMANDS.values()}) == [
        "shardproof",
        "shardproof._utils",
        "shardproof._utils.arguments",
        "shardproof._utils.humanize",
        "shardproof.commands",
        "shardproof.commands.cli",
        "shardproof.commands.cli.group",
        "shardproof.commands.cli.options",
        "shardproof.commands.cli.terminal",
        "shardproof.errors",
        "shardproof.version",
    ]
    assert others - sys.stdlib_module_names == {"click"}


def test_help_is_shown() -> None:
    done = shardproof("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: shardproof")


def test_commands_that_only_read_need_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", ONE)
    step = tmp_path / "step-00000001"
    cut = Sample(ONE.tensors, cuts={"w": rows_cut((4, 3), 2, 1)}, world_size=2)
    write(tmp_path / "other_layout", cut)
    commands: list[list[object]] = [
        ["ls", tmp_path],
        ["inspect", step],
        ["inspect", step, "w"],
        ["verify", step],
        ["diff", step, step],
        ["stats", step],
        ["diff", step, tmp_path / "other_layout"],
        ["doctor", tmp_path],
        ["doctor", tmp_path, "--scrub"],
        ["prune", tmp_path],
        ["page", tmp_path, "-o", "-"],
        ["page", step, "--verify", "-o", "-"],
        ["page", step, tmp_path / "other_layout", "-o", "-"],
    ]
    as_json = [[*command, "--json"] for command in commands]
    plain = [command for command in as_json if command[0] in ("inspect", "ls", "prune")]
    assert imported("torch,rich", *plain) == {}
    assert imported("torch", *commands, *as_json) == {}


def test_a_shell_can_complete_commands() -> None:
    words = {"_SHARDPROOF_COMPLETE": "bash_complete", "COMP_WORDS": "shardproof ver", "COMP_CWORD": "1"}
    done = shardproof(env=os.environ | words)
    assert done.stdout == "plain,verify\n"


def test_the_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    write(tmp_path / "a", ONE)
    write(tmp_path / "b", Sample({"w": np.zeros((4, 3), np.float32)}))
    assert shardproof("diff", tmp_path / "a", tmp_path / "a").returncode == 0
    assert shardproof("diff", tmp_path / "a", tmp_path / "b").returncode == 1
    assert shardproof("inspect", tmp_path).returncode == 1
    assert shardproof("inspect", tmp_path / "nowhere").returncode == 2
    assert shardproof("--version").stdout == f"shardproof {package.__version__}\n"


def test_a_closed_pipe_ends_the_command_without_an_error_message(tmp_path: Path) -> None:
    write(tmp_path, Sample({f"w{row}x": np.zeros(1, np.float32) for row in range(3000)}))
    command = [sys.executable, "-m", "shardproof", "inspect", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(SECONDS) == 141
        assert process.stderr.read() == b""


def on_a_terminal(*arguments: object) -> tuple[int, str, str]:
    """Runs a command with standard error on a terminal: exit code, standard output, what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardproof", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
        out, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return process.returncode, out.decode(), shown.decode()


def test_progress_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    array = np.zeros((512, 1024), np.float32)
    write(tmp_path / "a", Sample({"w": array}))
    write(tmp_path / "b", Sample({"w": array}, cuts={"w": rows_cut(array.shape, 4)}, world_size=4))
    code, out, shown = on_a_terminal("diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "the same state" in out
    assert "4.19 MB of 4.19 MB" in shown
    assert "B/s" in shown
    assert on_a_terminal("diff", tmp_path / "a", tmp_path / "b", "--json")[2] == ""
    done = shardproof("diff", tmp_path / "a", tmp_path / "b")
    assert (done.returncode, done.stderr) == (0, "")

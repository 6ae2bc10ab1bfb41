"""Runs a page of docs/tutorials as a reader does: its files, and its commands with their output."""

from __future__ import annotations

import doctest
import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "Command", "commands_for", "follow", "steps_of"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
SECONDS = 200
"""For one command."""


@dataclass(frozen=True)
class Command:
    """A command of a block ```` ```console ````, and its output, where ``...`` stands for any text."""

    text: str
    output: str


@dataclass(frozen=True)
class NewFile:
    """A block with a title, which is the name of a file."""

    name: str
    text: str


def steps_of(page: str) -> list[Command | NewFile]:
    """What a reader does, in order."""
    steps: list[Command | NewFile] = []
    for title, kind, body in re.findall(
        r'^```(?:python title="([^"]+)"|(console))\n(.*?)^```$', page, re.DOTALL | re.MULTILINE
    ):
        if kind != "console":
            steps.append(NewFile(title, body))
            continue
        assert body.startswith("$ "), body
        for part in body.removeprefix("$ ").split("\n$ "):
            text, _, output = part.partition("\n")
            steps.append(Command(text, output))
    return steps


def commands_for(folder: Path, **programs: list[str]) -> Path:
    """A folder with programs: each name runs a list of words, followed by the arguments."""
    folder.mkdir()
    for name, words in programs.items():
        path = folder / name
        path.write_text(
            f"#!{sys.executable}\nimport os, sys\nos.execv({words[0]!r}, {words!r} + sys.argv[1:])\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def follow(page: Path, folder: Path, programs: Path, **variables: str) -> list[str]:
    """Does what a page tells, in a folder, and returns the commands.

    Args:
        page: the page.
        folder: where the reader works.
        programs: the folder from `commands_for`, first on the path.
        variables: more environment variables.

    Raises:
        AssertionError: a command failed, or its output is not that of the page.
    """
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{programs}:{os.environ['PATH']}"} | variables
    )
    ran = []
    for step in steps_of(page.read_text()):
        if isinstance(step, NewFile):
            (folder / step.name).write_text(step.text)
            continue
        done = subprocess.run(
            ["bash", "-c", step.text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{page.name}: {step.text}: code {done.returncode}\n{done.stdout}"
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(step.output, done.stdout, flags), (
            f"{page.name}: {step.text}\n--- expected\n{step.output}--- found\n{done.stdout}"
        )
        ran.append(step.text)
    return ran

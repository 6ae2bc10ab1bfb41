"""The commit of a folder's git repository, and whether its tracked files were changed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_OF_ANOTHER = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
"""Variables that a hook of git sets for its own repository."""


def stored_commit(folder: Path) -> str | None:
    """The commit that is checked out, read from the files of git.

    Returns:
        40 or 64 hexadecimal digits; None if the folder is in no repository, or the files do not tell.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    for parent in (folder, *folder.parents):
        marker = parent / ".git"
        if marker.is_file():  # of a worktree or a submodule
            marker = parent / marker.read_text().removeprefix("gitdir:").strip()
        if (marker / "HEAD").is_file():
            return _commit_of(marker)
    return None


def _commit_of(place: Path) -> str | None:
    head = (place / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else None
    name = head.removeprefix("ref:").strip()
    shared = place / (place / "commondir").read_text().strip() if (place / "commondir").is_file() else place
    for folder in (place, shared):
        if (folder / name).is_file():
            commit = (folder / name).read_text().strip()
            return commit if _COMMIT.fullmatch(commit) else None
    if (shared / "packed-refs").is_file():
        with (shared / "packed-refs").open() as file:
            for line in file:
                commit, _, stored = line.strip().partition(" ")
                if stored == name and _COMMIT.fullmatch(commit):
                    return commit
    return None


def checked_commit(folder: Path, timeout: float) -> tuple[str, bool] | None:
    """The commit that is checked out, and whether a tracked file differs from it, by the program git.

    It changes nothing in the repository.

    Args:
        folder: a folder in the repository.
        timeout: seconds for git, at most.

    Returns:
        The commit and the difference; None if git does not tell: it is not installed, it takes too long, or
        the folder is in no repository that this user trusts.
    """
    settings = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    settings["GIT_TERMINAL_PROMPT"] = "0"
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "--no-optional-locks", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
    try:
        text = _output(command, settings, timeout)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = text.splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if not commits or not _COMMIT.fullmatch(commits[0]):
        return None
    return commits[0], any(not line.startswith("#") for line in lines)


def _output(command: list[str], settings: dict[str, str], timeout: float) -> str:
    """What a program prints. If it takes longer, it is killed with its children, such as filters of git.

    Raises:
        OSError, subprocess.SubprocessError: it cannot start, takes longer, or fails.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=settings,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return text

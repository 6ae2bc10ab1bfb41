"""The record of a save's origin: program, git commit, versions, hosts and layout.

The coordinator gathers it. It has no values of the environment.

Note "What is masked": arguments that look like secrets. The value is masked whose name has a word such as
``token`` or ``key``: what follows ``=``, ``:`` or a space in the argument, or the arguments up to the next
option. In a URL, the user with the password. A text with the form of a known token. Too much is masked rather
than too little: ``--num-key-value-heads 8`` also loses its value.

Note "No save waits for git": a thread reads the repository once in a process, from the creation of the first
saver on. The first commit waits for it for `_PATIENCE` at most. A commit that comes earlier records what
is known by then: the git commit from the files, without ``changed``.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from shardproof.version import __version__

VARIABLE = "SHARDPROOF_PROVENANCE"
"""The environment variable that turns the record off: 0."""
_PATIENCE = 0.25
"""Seconds that the first commit of a process waits for the state of git."""
_GIT_SECONDS = 10.0
_MOST_ARGUMENTS = 500

_FRAMEWORKS = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "megatron.core": "megatron-core",
    "megatron_fsdp": "megatron-fsdp",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "ray": "ray",
    "torchao": "torchao",
    "torchtitan": "torchtitan",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
    "trl": "trl",
    "verl": "verl",
}
"""Module to distribution, of the frameworks whose version is recorded if the program has imported them."""

_MEGATRON = {
    "tensor": "get_tensor_model_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "data": "get_data_parallel_world_size",
}
"""Functions of `megatron.core.parallel_state` that give the sizes of its groups."""

_log = logging.getLogger("shardproof")

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_OF_ANOTHER = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
"""Variables that a hook of git sets for its own repository."""

_MASK = "***"
_LONGEST = 1000
"""Characters of a masked argument that are kept, at most."""

_MOST_READ = 1 << 16
"""Characters of an argument that are read, at most."""


def is_allowed() -> bool:
    """False if the environment turns the record off.

    A value other than 0 and 1 is warned of. It is no error, because the ranks may have different values.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        _log.warning(
            "the environment variable %s is %r and has no effect: set it to 0 to save without a record of "
            "the program, its arguments and its versions, to 1 for the record, or unset it",
            VARIABLE,
            value,
        )
    return value != "0"


class ProcessFacts:
    """What stays the same in this process: its start, the versions of packages, and the state of git."""

    def __init__(self) -> None:
        self._process = -1
        self._is_read = threading.Event()
        self._is_waited_for = False
        self._git: dict[str, Any] = {}
        self._started: float | None = None
        self._versions = {"python": platform.python_version(), "shardproof": __version__}

    def begin(self) -> None:
        """Begins to read the state of git in a thread, once in a process; a forked child reads it again."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._is_read, self._is_waited_for, self._git = threading.Event(), False, {}
        self._started = _started()
        target, done = self._git, self._is_read

        def read() -> None:
            try:
                target.update(_git_state(target))
            except (OSError, ValueError) as error:
                _log.info("the state of the git repository cannot be read: %s", error)
            finally:
                done.set()

        try:
            threading.Thread(target=read, name="shardproof-provenance", daemon=True).start()
        except RuntimeError:  # no more threads
            done.set()

    def git(self, patience: float) -> dict[str, Any]:
        """The state of git, as far as it is known; only the first call waits, for `patience` seconds."""
        self.begin()
        if not self._is_waited_for:
            self._is_waited_for = True
            self._is_read.wait(patience)
        return dict(self._git)

    def started(self) -> float | None:
        """When this process began, Unix seconds; None if the system does not tell it."""
        self.begin()
        return self._started

    def versions(self) -> dict[str, str]:
        """The versions of Python, of shardproof, and of the frameworks that are imported by now."""
        for module, distribution in {"torch": "torch", **_FRAMEWORKS}.items():
            loaded = sys.modules.get(module)
            if loaded is None or distribution in self._versions:
                continue
            version = vars(loaded).get("__version__")  # no `getattr`, which may import
            if not isinstance(version, str):
                try:
                    version = metadata.version(distribution)
                except metadata.PackageNotFoundError:
                    version = "unknown"
            self._versions[distribution] = _text(version)
        return dict(self._versions)


facts = ProcessFacts()


def provenance(hosts: int, meshes: Sequence[Any]) -> dict[str, Any]:
    """The record of a save, as JSON; empty if it cannot be made. No error of it fails a save.

    Args:
        hosts: number of hosts of the ranks.
        meshes: the device meshes of the DTensors of this rank.
    """
    try:
        program, *arguments = sys.argv or [""]
        record: dict[str, Any] = {
            "program": _text(mask_arguments([program])[0]),
            "arguments": [_text(argument) for argument in mask_arguments(arguments[:_MOST_ARGUMENTS])],
        }
        if len(arguments) > _MOST_ARGUMENTS:
            record["arguments"].append(f"... {len(arguments) - _MOST_ARGUMENTS} more")
        if (started := facts.started()) is not None:
            record["started"] = started
        if git := facts.git(_PATIENCE):
            record["git"] = git
        record["versions"] = facts.versions()
        record["hosts"] = hosts
        if layout := _layout(meshes):
            record["layout"] = layout
    except Exception as error:
        _log.warning("the save has no record of its origin: %s: %s", type(error).__name__, error)
        return {}
    return record


def _text(text: str) -> str:
    """The text in valid Unicode: bytes of an argument that are not UTF-8 become escapes."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _started() -> float | None:
    with suppress(OSError, ValueError, IndexError):
        # Seconds of the boot, and ticks since then. The name in parentheses may have spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = Path("/proc/stat").read_text().partition("btime ")[2].split()[0]
        return int(boot) + ticks / os.sysconf("SC_CLK_TCK")
    return None


def _git_state(known: dict[str, Any]) -> dict[str, Any]:
    """The state of the repository of the program, else of the working directory.

    A program that is installed in the environment of Python has none: `python -m pytest`.

    `known` gets the commit from the files first: git may take longer.
    """
    folders = [Path.cwd()]
    program = Path(str(sys.argv[0])).resolve() if sys.argv and sys.argv[0] else folders[0]
    if program.is_file() and not program.is_relative_to(Path(sys.prefix).resolve()):
        folders.insert(0, program.parent)
    for folder in folders:
        if (commit := stored_commit(folder)) is not None:
            known["commit"] = commit
            if (found := checked_commit(folder, _GIT_SECONDS)) is not None:
                return dict(zip(("commit", "changed"), found, strict=True))
            return {}
    return {}


def _layout(meshes: Sequence[Any]) -> dict[str, Any]:
    """The meshes that are no part of another one, and the sizes of Megatron's groups."""
    found: dict[str, Any] = {}
    sizes: list[dict[str, int]] = []
    for mesh in meshes:
        names = mesh.mesh_dim_names or [f"dim{number}" for number in range(len(mesh.shape))]
        if (size := dict(zip(names, map(int, mesh.shape), strict=True))) not in sizes:
            sizes.append(size)
    whole = [mesh for mesh in sizes if not any(mesh.items() < other.items() for other in sizes)]
    if whole:
        found["meshes"] = whole
    groups = sys.modules.get("megatron.core.parallel_state")
    if groups is not None and groups.model_parallel_is_initialized():
        found["megatron"] = {}
        for name, function in _MEGATRON.items():
            with suppress(AssertionError, AttributeError, RuntimeError):
                found["megatron"][name] = int(getattr(groups, function)())
    return found


def stored_commit(folder: Path) -> str | None:
    """The commit that is checked out, read from the files of git.

    None if the folder is in no repository, or the files do not tell.

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


_NAME = (
    r"(?:token(?!i[sz])|key|secret|pass(?!es|age|ive|through)|pwd|cred|auth(?!or(?!i))|signature|sig(?![a-z]))"
    r"[^\s=:/]{0,200}"
)
"""The name of a secret, from its word on."""
_ENDS_IN_NAME = re.compile(rf"[^/]*{_NAME}\s*[=:]?\s*", re.IGNORECASE)
_KNOWN_TOKENS = (
    *("hf_", "gh[a-z]_", "github_pat_", "glpat-", "sk-", "gsk_", "r8_", "nvapi-", "wandb_v1_"),
    *("npm_", "pypi-", "dckr_pat_", "AKIA", "ASIA", "AIza", r"ya29\.", "xox[a-z]-", "xapp-", "eyJ"),
    r"hooks\.slack\.com/services/",
)
"""How tokens begin: those of Hugging Face, GitHub, GitLab, OpenAI, Groq, Replicate, NVIDIA, Weights & Biases,
npm, PyPI, Docker, AWS, Google and Slack, JSON web tokens, and the webhooks of Slack."""
_PATTERNS = (
    re.compile(rf"()(?<![A-Za-z0-9])(?:{'|'.join(_KNOWN_TOKENS)})[\w.-]{{8,}}(?s:.*)"),
    re.compile(r"(\b(?:bearer|basic)\s).+", re.IGNORECASE | re.DOTALL),
    # A user and a password with any characters, up to the last "@".
    re.compile(r"(?<!\S)((?:(?!://)\S)*://)[^\s:]*:\S*(?=@)"),
    re.compile(r"(://)[^/\s]*(?=@)"),
    re.compile(rf"({_NAME}(?:\s*[=:]|\s)).+", re.IGNORECASE | re.DOTALL),
)
"""Each keeps its group, and masks the rest."""


def mask_arguments(arguments: Iterable[object]) -> list[str]:
    """The arguments of a program without what looks like a secret; see "What is masked".

    Args:
        arguments: those of `sys.argv`, which a program may fill with objects that are no `str`.

    >>> mask_arguments(["lr=0.1", "wandb.api_key=abc", "--hf-token", "abc", "--tokenizer", "gpt2"])
    ['lr=0.1', 'wandb.api_key=***', '--hf-token', '***', '--tokenizer', 'gpt2']
    >>> mask_arguments(["--data", "https://me:abc@host/x", "https://host/x?sig=abc&b=1"])
    ['--data', 'https://***@host/x', 'https://host/x?sig=***']
    """
    found = []
    expects = False
    """The argument before is the name of a secret, or a value of one."""
    is_first = False
    """The argument is the first behind that name."""
    for argument in arguments:
        text = str(argument)[:_MOST_READ]
        if expects and not text.startswith("--" if is_first else "-"):
            found.append(_MASK)
            is_first = False
            continue
        expects = is_first = _ENDS_IN_NAME.fullmatch(text) is not None
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{_MASK}", text)
        found.append(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
    return found

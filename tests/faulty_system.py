"""Makes functions of `os` fail in this process, for calls that touch one folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

__all__ = ["Fault", "faulty_system", "path_of"]

_CHANGES = (
    "pwrite",
    "fsync",
    "fdatasync",
    "ftruncate",
    "link",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "close",
)
_LOOKS = ("stat", "fstat", "preadv", "scandir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fault:
    """Which calls fail. Counts the calls that change something, or the calls that only read.

    Attributes:
        at: the first call that fails, counted from 0; None: no call fails, only count.
        code: the error number.
        mode: "once"; "onward": all calls from there on, reads too if the code is EIO; "late": the call takes
            effect and then fails, once.
        looks: count calls that change nothing.
    """

    at: int | None = None
    code: int = errno.EIO
    mode: Literal["once", "onward", "late"] = "once"
    looks: bool = False


@contextmanager
def faulty_system(folder: Path, fault: Fault) -> Iterator[list[tuple[str, str]]]:
    """Installs the fault for calls that touch `folder`, what is below it, or the folder above.

    Yields:
        The calls that counted so far: name of the function and path.
    """
    calls = _Calls(str(folder), fault)
    with ExitStack() as stack:
        for name in ("open", *_CHANGES, *_LOOKS):
            stack.enter_context(mock.patch.object(os, name, calls.wrap(name, getattr(os, name))))
        yield calls.seen


def path_of(target: Any, options: Mapping[str, Any]) -> str:
    """The absolute path of the first path of a call, with the folder that its options name."""
    folder = options.get("dir_fd", options.get("src_dir_fd"))
    above = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.normpath(os.path.join(above, os.fspath(target)))


def _changes_files(flags: int) -> bool:
    """True if a file is opened for writing, or a folder for a flush."""
    return not flags & os.O_PATH and bool(flags & (_WRITES | os.O_DIRECTORY))


class _Calls:
    def __init__(self, folder: str, fault: Fault) -> None:
        self.seen: list[tuple[str, str]] = []
        self._folder = folder
        self._fault = fault
        self._paths: dict[int, tuple[str, bool]] = {}
        """Path of each descriptor that was opened, and whether it is for writing or of a folder."""
        self._lock = threading.Lock()
        self._failing = False

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            target = arguments[0] if arguments else "."
            if isinstance(target, int):
                path, changes = self._paths.get(target, ("", False))
            else:
                path = path_of(target, options)
                changes = name == "open" and _changes_files(arguments[1])
            if name in _CHANGES and name != "close":
                changes = True
            ends_a_read = name == "close" and not changes
            concerned = self._concerns(path) and not ends_a_read
            due = concerned and self._due(name, path, changes and name not in _LOOKS)
            if due and self._fault.mode != "late" and name != "close":
                raise self._error(path)
            result = call(*arguments, **options)
            if name == "open":
                self._paths[result] = path, changes
            elif name == "close":
                self._paths.pop(target, None)
            if due:
                if name == "open":
                    os.close(result)
                raise self._error(path)
            return result

        return wrapped

    def _concerns(self, path: str) -> bool:
        return path == os.path.dirname(self._folder) or path.startswith(self._folder)

    def _due(self, name: str, path: str, changes: bool) -> bool:
        with self._lock:
            if self._failing and self._fault.mode == "onward" and (changes or self._fault.code == errno.EIO):
                return True
            if changes == self._fault.looks:
                return False
            self.seen.append((name, path))
            if len(self.seen) - 1 != self._fault.at:
                return False
            self._failing = True
            return True

    def _error(self, path: str) -> OSError:
        return OSError(self._fault.code, os.strerror(self._fault.code), path)

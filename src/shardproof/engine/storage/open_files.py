"""The files that a storage and its siblings keep open for reading.

A checkpoint of an incremental save has files in many folders. All of them share one bound, which leaves most
of the descriptors of the process to the program.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from typing import Generic, TypeVar

from shardproof._utils import forks

F = TypeVar("F")
_MOST = 64
_SHARE = 8
"""One of this many descriptors may be an open file. A file has up to three: for reads through the page cache,
past it, and for its mapping."""


class OpenFiles(Generic[F]):
    """The open files of some folders. A file closes with the last reference to it.

    >>> files = OpenFiles[str]()
    >>> files.get(("folder", "name"), lambda: "opened"), files.get(("folder", "name"), lambda: "again")
    ('opened', 'opened')
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], F] = {}
        self._lock = forks.lock()
        forks.close_in_child(self)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST if limit < 0 else max(1, min(_MOST, limit // _SHARE))

    def get(self, key: tuple[str, str], open_file: Callable[[], F]) -> F:
        """The open file under a key: its folder and name. Opens it if it is not open.

        If the process has no descriptor left, closes the other files and tries once more.
        """
        found = self._files.get(key)
        if found is not None:
            return found
        try:
            opened = open_file()
        except Exception as error:
            if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close()
            opened = open_file()
        with self._lock:
            self._files[key] = opened
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]  # the oldest
        return opened

    def forget(self, key: tuple[str, str]) -> None:
        """Removes a file, which was replaced or deleted."""
        with self._lock:
            self._files.pop(key, None)

    def close(self) -> None:
        """Closes all files that no thread is reading."""
        with self._lock:
            self._files.clear()

"""Folders below the root of a storage, opened without symbolic links in between.

Note "No links below the root": the root may lead through links, because its user named it. A folder below it
may be a link that another user made, to any place. So every file is created, renamed and removed through the
descriptor of its folder, and each folder below the root is opened from the one above, without following a
link. Reads follow links, because a step may be moved to another disk.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardproof.engine.storage.file_modes import make_folder, make_folders
from shardproof.engine.storage.paths import printable

_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES = 100


class RealFolder:
    """A folder at or below a root, open for operations on the names in it. A context manager that closes it.

    Args:
        root: the root, which may be a link.
        path: the folder, at or below the root.
        make: True to make missing folders, those above the root, too.

    Raises:
        FileNotFoundError: a folder is missing.
        NotADirectoryError: a file stands where a folder is needed.
        OSError: a folder below the root is a link (ELOOP), or the system refused.
    """

    def __init__(self, root: Path, path: Path, *, make: bool = False) -> None:
        self.path = path
        self.made: list[Path] = []
        """The folders that were made."""
        if make:
            self.made += make_folders(root)
        self.number = os.open(root, _FLAGS)
        above = root
        for part in path.relative_to(root).parts:
            above = above / part
            try:
                inner = self._open(part, above, make=make)
            finally:
                os.close(self.number)
                self.number = -1
            self.number = inner

    def __enter__(self) -> RealFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the folder. Does nothing the second time."""
        number, self.number = getattr(self, "number", -1), -1
        if number >= 0:
            os.close(number)

    def _open(self, part: str, path: Path, *, make: bool) -> int:
        """Opens a folder in this one."""
        try:
            if not make:
                return os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=self.number)
            for attempt in range(_TRIES):  # a peer may remove the empty folder that was just made
                try:
                    return os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=self.number)
                except FileNotFoundError:
                    if attempt == _TRIES - 1:
                        raise
                try:
                    make_folder(part, self.number)
                    self.made.append(path)
                except FileExistsError:
                    pass
        except NotADirectoryError as error:
            is_link = False
            with suppress(OSError):
                is_link = stat.S_ISLNK(os.stat(part, dir_fd=self.number, follow_symlinks=False).st_mode)
            if is_link:
                text = f"{printable(path)} is a symbolic link, behind which no file is written or removed"
                raise OSError(errno.ELOOP, text, str(path)) from error
            raise
        raise AssertionError("unreachable")

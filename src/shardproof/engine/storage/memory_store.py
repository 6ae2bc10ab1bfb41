"""`MemoryStorage`: the folder of a run on a tmpfs, in the memory of a node. It outlives the training process.

Note: whose folder it is
    Every user may write to the tmpfs, and may have made the folder first, or a link in its place. So the
    folder of a run is used only if it is a real folder of this user that no other user can open. The sticky
    bit of the tmpfs then keeps other users from replacing it.

Note: files of ended processes
    Each storage that writes to a run holds a shared lock on its folder, which the kernel releases when the
    process ends. A process that gets the lock alone knows that no save is in progress. The files that no
    manifest names at that moment belong to saves that died. A run that was dropped under a job is a new
    folder, which the next write locks.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardproof._utils import forks
from shardproof._utils.topology import available_memory
from shardproof.engine.storage.base import FreeSpace, check_name
from shardproof.engine.storage.free_space import file_system_number, is_tmpfs
from shardproof.engine.storage.local import LocalStorage
from shardproof.engine.storage.paths import RealFolder, absolute, printable, storage_error, system_errors
from shardproof.engine.storage.sink import LocalSink
from shardproof.errors import StorageError

_Found = TypeVar("_Found")

MEMORY_SCHEME = "memory"

VARIABLE = "SHARDPROOF_TMPFS"
"""The environment variable that names another tmpfs than /dev/shm."""

_RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_FOLDER = re.compile(rf"shardproof-([0-9]+)-({_RUN_NAME})")
"""The folder of a run: the number of its user, and the name of the run."""

_ASKED = 5
"""Attempts to get the lock alone before a run counts as in use."""

_TRIES, _PAUSE = 100, 0.01
"""Attempts to remove a run, or to get the shared lock, which another process may hold alone for microseconds.
Seconds between two attempts to get the lock."""


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """A run in the memory of this node."""

    name: str
    user: int
    """Number of the user that it belongs to."""
    location: str
    """Path of its folder."""


class MemoryStorage(LocalStorage):
    """Files in the memory of this node; see `Storage` for the methods.

    The files of a run are in one folder of a tmpfs: ``/dev/shm/shardproof-USER-RUN``, with the number of the
    user. The environment variable SHARDPROOF_TMPFS names another tmpfs. The first file makes the folder, with
    the mode 0700. The files outlive the training process, and end with the node. Only processes of the same
    user on the same node see them. docs/memory_tier.md has what that means for a run.

    Args:
        url: ``memory://run``, or ``memory://run/folder``. The name of the run has letters, digits, ".", "-"
            and "_", at most 64.

    Raises:
        StorageError: the URL is not valid, there is no tmpfs, or the folder is not one that only this user
            can open.

    Example:
        >>> import os, shardproof as sp, torch
        >>> url = f"memory://example-{os.getpid()}"
        >>> storage = sp.storage.MemoryStorage(url)
        >>> checkpointer = sp.Checkpointer(storage, keep=sp.KeepLatest(1))
        >>> checkpointer.save(1, {"w": torch.ones(2)}).result().step
        1
        >>> sp.load(f"{url}/step-00000001", {"w": torch.zeros(2)}).bytes
        8
        >>> storage.drop()
        True
    """

    in_memory = True

    def __init__(self, url: str) -> None:
        scheme, _, rest = str(url).partition("://")
        run, _, inside = rest.partition("/")
        if scheme.lower() != MEMORY_SCHEME or not re.fullmatch(_RUN_NAME, run):
            raise StorageError(
                f"{url!r} names no run in memory. Give memory://RUN, where RUN begins with a letter or digit "
                'and has at most 64 letters, digits, ".", "-" and "_"',
                file=str(url),
            )
        inside = "/".join(part for part in inside.split("/") if part)
        self._tmpfs = _tmpfs()
        folder = self._tmpfs / f"shardproof-{os.geteuid()}-{run}"
        super().__init__(folder / check_name(inside, str(url)) if inside else folder, direct=False)
        self._base = self._run
        self._use = _Use()
        self._is_there()

    def __repr__(self) -> str:
        return f"MemoryStorage({self.location!r})"

    @property
    def _run(self) -> Path:
        """The folder of the run."""
        return self._tmpfs / self._root.relative_to(self._tmpfs).parts[0]

    def _at(self, path: Path) -> MemoryStorage:
        part = copy.copy(self)
        LocalStorage.__init__(part, path, direct=False)
        part._is_there()
        return part

    def make_folder(self) -> None:
        """Make the folder, and that of the run, unless they exist (note "whose folder it is").

        Raises:
            StorageError: the folder is not one that only this user can open, or the system refused.
        """
        self._make_run()
        with system_errors("make", self._root):
            RealFolder(self._run, self._root, make=True).close()

    def _make_run(self) -> None:
        try:
            os.mkdir(self._run, 0o700)
        except FileExistsError:
            self._is_there()
        except OSError as error:
            raise storage_error(error, "make", self._run) from error

    def _share_run(self) -> None:
        """Make the folder of the run, and hold the shared lock on it."""
        self._make_run()
        for _ in range(_TRIES):
            if self._use.lock is None or not self._use.lock.is_of(self._run):
                self._use.lock = _RunLock(self._run)
            if self._use.lock.get(fcntl.LOCK_SH):
                return
            time.sleep(_PAUSE)
        where = printable(self._run)
        raise StorageError(
            f"{where}: another process has locked the run alone for {_TRIES * _PAUSE:.0f} s. Is it stopped "
            "while it starts a Checkpointer? End it, and try again",
            file=where,
            missing=False,
            damaged=False,
        )

    def _is_there(self) -> bool:
        """True if the run has a folder. Refuses a folder of the name that is not this user's own."""
        try:
            found = os.lstat(self._run)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, "look at", self._run) from error
        where, fix = printable(self._run), "remove it, or choose another name for the run"
        if not stat.S_ISDIR(found.st_mode):
            fault = "it is a symbolic link" if stat.S_ISLNK(found.st_mode) else "it is no folder"
        elif found.st_uid != os.geteuid():
            fault, fix = f"it belongs to user {found.st_uid}", "choose another name for the run"
        elif found.st_mode & 0o077:
            fault = f"its mode is {stat.S_IMODE(found.st_mode):04o}, so other users may open it"
            fix = f"`chmod 700 {shlex.quote(where)}`, if no other user has written to it"
        else:
            return True
        raise StorageError(
            f"{where} cannot hold a run in memory: {fault}; {fix}", file=where, missing=False, damaged=False
        )

    def _sink(self, name: str, *, replace: bool) -> LocalSink:
        self._share_run()
        return super()._sink(name, replace=replace)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`, whole or not at all; see `Storage.publish`."""
        self._share_run()
        super().publish(name, data, replace=replace)

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders; for a run, the folders of all runs of this user."""
        if self._root != self._run:
            return super().siblings()
        runs = memory_runs()
        return sorted(os.path.basename(run.location) for run in runs if run.user == os.geteuid())

    def free_space(self) -> FreeSpace | None:
        """The space for new files: that of the tmpfs, and at most the available memory of the node."""
        found, available = super().free_space(), available_memory()
        drop = (
            "drop a run that has ended (`shardproof memory` lists the runs in the memory of a node, and "
            "`shardproof memory --drop RUN` drops one)"
        )
        if found is None or available < found.free:
            number = file_system_number(self._tmpfs)
            return FreeSpace(number, available, available, f"{drop}: the node has no more available memory")
        mount = next(above for above in (self._tmpfs, *self._tmpfs.parents) if os.path.ismount(above))
        enlarge = f"mount -o remount,size=SIZE {shlex.quote(printable(mount))}"
        return replace(
            found,
            advice=f"{drop}, or enlarge the tmpfs (as root, `{enlarge}`; of a container, --shm-size)",
        )

    def hold(self, look: Callable[[], list[_Found]]) -> list[_Found]:
        """Mark the run as in use by this process (note "files of ended processes").

        Args:
            look: called while no process uses the run.

        Returns:
            What `look` returned; an empty list if another process, or another storage here, uses the run.

        Raises:
            StorageError: the folder cannot be made or opened.
        """
        self._make_run()
        lock = self._use.lock = _RunLock(self._run)
        try:
            return look() if lock.get_alone() else []
        finally:
            self._share_run()

    def in_use(self) -> bool:
        """True if a process that saves to the run exists."""
        return self._is_there() and not _RunLock(self._run).get_alone()

    def drop(self) -> bool:
        """Remove the run, and so free the memory of all its files.

        Returns:
            False if there is none.

        Raises:
            StorageError: a file could not be removed.
        """
        if not self._is_there():
            return False
        self.close()
        self._use.lock = None
        for attempt in range(_TRIES):
            try:
                shutil.rmtree(self._run)
                break
            except OSError as error:
                if not os.path.lexists(self._run):
                    break
                # A process that uses the run adds or removes a file meanwhile.
                is_busy = error.errno in (errno.ENOENT, errno.ENOTEMPTY)
                if not is_busy or attempt == _TRIES - 1:
                    raise storage_error(error, "remove", self._run) from error
        return True


def memory_runs() -> list[MemoryRun]:
    """The runs of all users in the memory of this node, by name.

    Raises:
        StorageError: there is no tmpfs, or it cannot be listed.
    """
    tmpfs = _tmpfs()
    found = []
    with system_errors("list", tmpfs), os.scandir(tmpfs) as entries:
        for entry in entries:
            named = _FOLDER.fullmatch(entry.name)
            if named is None or not entry.is_dir(follow_symlinks=False):
                continue
            user = int(named[1])
            if entry.stat(follow_symlinks=False).st_uid == user:  # or another user made it
                found.append(MemoryRun(named[2], user, printable(entry.path)))
    return sorted(found, key=lambda run: (run.name, run.user))


def _tmpfs() -> Path:
    """The tmpfs for the folders of runs.

    Raises:
        StorageError: it does not exist, is no tmpfs, or lets other users replace folders.
    """
    folder = absolute(os.environ.get(VARIABLE) or "/dev/shm")
    where = printable(folder)
    try:
        found = os.stat(folder)
        mode = found.st_mode
        fault = "" if is_tmpfs(folder) else "is no tmpfs"
    except OSError as error:
        fault = f"cannot be used: {error.strerror or error}"
    else:
        if mode & 0o022 and not mode & stat.S_ISVTX:
            fault = fault or "lets other users replace folders (`chmod +t` sets its sticky bit)"
        if found.st_uid not in (0, os.geteuid()):
            fault = fault or f"belongs to user {found.st_uid}, who may replace folders in it"
    if fault:
        raise StorageError(
            f"no run can be in the memory of this node: {where} {fault}. Name a folder on a tmpfs in the "
            f"environment variable {VARIABLE}",
            file=where,
            damaged=False,
        )
    return folder


class _Use:
    """The lock that the parts of a storage share."""

    def __init__(self) -> None:
        self.lock: _RunLock | None = None


class _RunLock:
    """A lock on the folder of a run, which ends with this object or the process."""

    def __init__(self, folder: Path) -> None:
        self._number = -1
        with system_errors("open", folder):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._number = os.open(folder, flags)
        forks.close_in_child(self)

    def get(self, how: int) -> bool:
        """True if the lock is there: shared (`fcntl.LOCK_SH`), or alone (`fcntl.LOCK_EX`). Does not wait."""
        try:
            fcntl.flock(self._number, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def get_alone(self) -> bool:
        """Gets the lock alone. Asks again, because another caller of this has it for microseconds."""
        for _ in range(_ASKED):
            if self.get(fcntl.LOCK_EX):
                return True
            time.sleep(_PAUSE)
        return False

    def is_of(self, folder: Path) -> bool:
        """True if the folder is still the one that was opened, and a fork has not closed the lock."""
        try:
            return self._number >= 0 and os.path.samestat(os.fstat(self._number), os.lstat(folder))
        except OSError:
            return False

    def close(self) -> None:
        """Closes the descriptor. The second call does nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()

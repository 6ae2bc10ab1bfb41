"""The connections of this process to the keeper of a run (see `memory_keeper`). Starts a missing keeper.

Note: two kinds of connections
    A read connects for one request. So reads share no state, and no read delays a save. Writes share one
    connection. When it ends, the keeper knows that this process is gone. An interrupted request leaves its
    connection in an unknown state, so this process closes the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shardproof._utils import forks
from shardproof._utils.humanize import gigabytes
from shardproof._utils.topology import available_memory
from shardproof.errors import StorageError
from shardproof.storage import memory_keeper

__all__ = ["ANSWER_SECONDS", "IDLE_SECONDS", "RUN_NAME", "Connection", "MemoryLink", "keepers_here"]

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of the name of a run."""

IDLE_SECONDS = 4 * 3600.0
"""Seconds without a client after which a keeper ends, unless the storage names others."""
ANSWER_SECONDS = 60.0
"""Seconds that a keeper has for an answer. It takes microseconds, and seconds to free much memory."""
_START_SECONDS = 60.0
_SHARE = 2
"""A keeper takes at most half of the memory that is available when it starts."""

_log = logging.getLogger("shardproof")


class Connection:
    """A connection to a keeper, closed in forked children."""

    def __init__(self, to: socket.socket, location: str) -> None:
        self._to = to
        self.keeper, _ = memory_keeper.peer_of(to)
        """Process number of the keeper."""
        self._location = location
        self._lock = forks.lock()
        forks.close_in_child(self)

    @property
    def is_open(self) -> bool:
        """False if either end closed the connection."""
        if not self._lock.acquire(blocking=False):
            return True  # the request of another thread detects a closed connection
        try:
            if self.is_closed:
                return False
            poll = select.poll()
            poll.register(self._to, select.POLLIN)
            return not poll.poll(0)  # a keeper sends nothing without a request
        finally:
            self._lock.release()

    @property
    def is_closed(self) -> bool:
        """True if this end was closed: by `close`, by a failed request, or because this is a forked child."""
        return self._to.fileno() < 0

    def close(self) -> None:
        """Closes this end."""
        self._to.close()

    def __del__(self) -> None:
        self._to.close()

    def until_closed(self) -> None:
        """Waits until the keeper closes its end, at most `ANSWER_SECONDS`."""
        with contextlib.suppress(OSError):
            self._to.recv(1)

    def ask(self, do: str, descriptor: int | None = None, **facts: Any) -> tuple[dict[str, Any], int | None]:
        """Sends a request, and a descriptor with it; returns the answer, and the descriptor with it.

        Raises:
            StorageError: the keeper ended, does not answer in time, or cannot serve this process.
        """
        with self._lock:
            try:
                request = {"do": do, "protocol": memory_keeper.PROTOCOL, **facts}
                memory_keeper.send(self._to, request, descriptor)
                got = memory_keeper.receive(self._to)
                if got is None:
                    raise ConnectionResetError("the connection ended")
            except TimeoutError as error:
                self.close()
                raise StorageError(
                    f"{self._location}: the keeper process {self.keeper} does not answer within "
                    f"{ANSWER_SECONDS:.0f} s. If it is stopped, let it go on (SIGCONT), or end it and lose "
                    "what is in memory",
                    file=self._location,
                    damaged=False,
                ) from error
            except OSError as error:
                self.close()
                raise StorageError(
                    f"{self._location}: the keeper process {self.keeper} ended ({error}), and its files "
                    "are lost. The next save starts a new keeper",
                    file=self._location,
                    keeper_ended=True,
                ) from error
            except BaseException:
                self.close()  # see the note
                raise
        answer, with_it = got
        if with_it == memory_keeper.LOST:
            raise StorageError(
                f"{self._location}: this process cannot open more files. Raise its limit (`ulimit -n`)",
                file=self._location,
                errno="EMFILE",
                damaged=False,
            )
        if answer.get("error") == "threads":
            self.close()
            raise StorageError(
                f"{self._location}: the keeper process {self.keeper} cannot start a thread for this process. "
                "What is in memory stays. See the limits of processes of this user (`ulimit -u`) and of the "
                "control group of the keeper (pids.max)",
                file=self._location,
                errno="EAGAIN",
                damaged=False,
            )
        if answer.get("error") == "protocol":
            raise StorageError(
                f"{self._location}: the keeper process {self.keeper} is of another version of shardproof. "
                "Use that version, or end the keeper and lose its files: shardproof memory --drop",
                file=self._location,
                damaged=False,
            )
        return answer, with_it


class MemoryLink:
    """The connections of this process to the keeper of a run.

    A keeper that it starts gets the budget, or half of the available memory; and the idle timeout, or
    `IDLE_SECONDS`.
    """

    def __init__(self, name: str, budget: int | None = None, idle_timeout: float | None = None) -> None:
        self.name = name
        self.location = f"memory://{name}"
        self._budget, self._idle = budget, idle_timeout
        self._lock = forks.lock()
        self._writer: Connection | None = None

    def read(self, do: str, **facts: Any) -> tuple[dict[str, Any], int | None] | None:
        """Asks the keeper; None if there is none.

        Raises:
            StorageError: the keeper does not answer, or belongs to another user.
        """
        for last in (False, True):
            connection = self.connect()
            if connection is None:
                return None
            with contextlib.closing(connection):
                try:
                    return connection.ask(do, **facts)
                except StorageError as error:
                    if last or "keeper_ended" not in error.details:
                        raise  # otherwise it ended when this process connected
        raise AssertionError("unreachable")

    def writer(self) -> Connection:
        """The connection for writes. Starts a keeper if there is none.

        Raises:
            StorageError: a keeper cannot be started or reached.
        """
        with self._lock:
            if self._writer is not None:
                if self._writer.is_open:
                    return self._writer
                if not self._writer.is_closed:
                    _log.warning(
                        "%s: the keeper process %d ended, and its files are lost",
                        self.location,
                        self._writer.keeper,
                    )
                    self._writer.close()
            ends = time.monotonic() + _START_SECONDS
            while True:
                connection = self.connect()
                if connection is None:
                    self._start()
                else:
                    try:
                        connection.ask("hello", budget=self._budget, idle=self._idle)
                        self._writer = connection
                        return connection
                    except StorageError as error:
                        connection.close()
                        if "keeper_ended" not in error.details:
                            raise
                if time.monotonic() > ends:
                    raise StorageError(
                        f"{self.location}: no keeper process could be reached in {_START_SECONDS:.0f} s, and "
                        "those that were started ended at once: see the kernel log (`dmesg`)",
                        file=self.location,
                    )

    def drop(self) -> bool:
        """Ends the keeper, which frees all its files. False if there is none.

        Raises:
            StorageError: the keeper does not answer, or belongs to another user.
        """
        connection = self.connect()
        if connection is None:
            return False
        with contextlib.closing(connection):
            try:
                connection.ask("drop")
            except StorageError as error:
                if "keeper_ended" not in error.details:  # it ends before it answers
                    raise
            connection.until_closed()
        return True

    def close(self) -> None:
        """Closes the connection for writes. The keeper drops the files that this process did not publish."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def connect(self) -> Connection | None:
        """A new connection to the keeper; None if there is none.

        Raises:
            StorageError: the keeper cannot be reached. Or it belongs to another user, whose number is the
                detail ``user``.
        """
        if not hasattr(os, "memfd_create") or not memory_keeper.SEALS:
            raise StorageError(
                f"{self.location}: this system has no anonymous files (memfd_create of Linux)",
                file=self.location,
            )
        to = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            to.settimeout(ANSWER_SECONDS)
            to.connect(memory_keeper.address_of(self.name))
            process, user = memory_keeper.peer_of(to)
            if user != os.getuid():
                raise StorageError(
                    f"{self.location}: process {process} of user {user} has the socket of this run's keeper, "
                    f"and this process is of user {os.getuid()}. End that process, or name the run otherwise",
                    file=self.location,
                    damaged=False,
                    user=user,
                )
            return Connection(to, self.location)
        except ConnectionRefusedError:  # no process has the socket
            to.close()
            return None
        except BaseException as error:
            to.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"{self.location}: cannot connect to the keeper: {error}", file=self.location, damaged=False
            ) from error

    def _start(self) -> None:
        """Starts a keeper. Of several that start at once, one stays."""
        import subprocess  # slow to import, and most processes start no keeper

        budget = available_memory() // _SHARE if self._budget is None else self._budget
        idle = IDLE_SECONDS if self._idle is None else self._idle
        script = [memory_keeper.__file__, self.name, str(budget), str(idle)]
        try:
            code = subprocess.run(
                [sys.executable, "-I", "-S", *script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=_START_SECONDS,
                check=False,
            ).returncode
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise StorageError(
                f"{self.location}: cannot start a keeper process: {error}", file=self.location
            ) from error
        if code:
            raise StorageError(
                f"{self.location}: cannot start a keeper process: {' '.join(script)} exited with code {code}"
                + (f" ({os.strerror(code)})" if code > 0 else ""),
                file=self.location,
            )
        _log.info("%s: started a keeper process, which holds at most %s", self.location, gigabytes(budget))


def keepers_here() -> list[str]:
    """Names of the runs of this user that have a keeper on this node.

    A warning names each run whose socket belongs to another user.
    """
    pattern = re.compile(rf"@{re.escape(memory_keeper.address_of('')[1:])}({RUN_NAME})$", re.MULTILINE)
    try:  # names of other sockets are any bytes
        sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return []  # not Linux
    return [name for name in sorted(set(pattern.findall(sockets))) if not _is_of_another_user(name)]


def _is_of_another_user(name: str) -> bool:
    try:
        connection = MemoryLink(name).connect()
    except StorageError as error:
        if "user" not in error.details:
            return False  # the next request to this keeper raises the error
        _log.warning("%s. The list of runs omits it", error)
        return True
    if connection is not None:
        connection.close()
    return False

"""The keeper: the process that holds the files of one `MemoryStorage`, apart from the training processes.

    training process --anonymous file (memfd), over a Unix socket--> keeper --the same file--> next process

`memory_link` runs this file as a script that imports only the standard library, without torch, numpy or this
package. So the keeper needs about 10 MiB in addition to the files. It maps none of them.

Note: files of a connection
    A finished file belongs to the connection that made it, until a file is published in the folder above it.
    If the connection ends first, the keeper drops the file. So a process that dies in a save leaves no file.
    The publisher names the unpublished files that it has seen. The keeper refuses if it has dropped one of
    them. So no manifest is published that names files of a process that died meanwhile.

Note: the life of a keeper
    A keeper runs in a session of its own, and outlives the process that started it. A client can end it. It
    also ends after the idle time without a client, or after `EMPTY_SECONDS` if it holds no file.

Note: the limits of the keeper
    A file is a descriptor, and a client is a descriptor and a thread. The keeper refuses new files while some
    descriptors are left (`_SPARE`), so clients can still connect, read and delete. No limit ends the keeper.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from typing import Any

__all__ = ["LOST", "PROTOCOL", "SEALS", "address_of", "peer_of", "receive", "send"]

PROTOCOL = 1
"""Version of the messages between keeper and clients."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_SEAL_WRITE") else 0
"""The changes that the seals of a finished file forbid to every process that has it."""
LOST = -1
"""In place of a descriptor that came with a message, and for which this process has no number left."""
EMPTY_SECONDS = 60.0
_SPARE = 64
"""Descriptors that files leave free: for the keeper itself, for clients turned away, and for new clients."""
_CLIENT = 2
"""Descriptors of a client: its connection, and a file that it sends."""
_TURNED_AWAY = 16
_PAUSE_SECONDS = 0.1
"""Seconds without new clients after one could not be accepted."""
_LONGEST_WAIT = 3600.0
"""`select` takes no infinite time."""
_MOST_BYTES = 64 << 20
"""Bytes of a message, at most."""
_HEAD = struct.Struct("=I")
_CREDENTIALS = struct.Struct("=iII")


def address_of(name: str) -> str:
    """The abstract socket of the keeper of a run, of this user. It vanishes with the keeper."""
    return f"\0shardproof-memory-{os.getuid()}-{name}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a connection, as the kernel knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Sends a message, and a descriptor with it.

    Raises:
        OSError: the other end is gone, or a timeout.
    """
    text = json.dumps(message).encode("ascii")
    frame = _HEAD.pack(len(text)) + text
    sent = 0 if descriptor is None else socket.send_fds(connection, [frame], [descriptor])
    connection.sendall(memoryview(frame)[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The next message, and the descriptor that came with it; None if the other end closed the connection.

    The descriptor is `LOST` if this process cannot open more files.

    Raises:
        OSError: the other end is gone, or a timeout.
        ValueError: this is no message.
    """
    data, descriptors, flags, _ = socket.recv_fds(connection, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            return None
        (count,) = _HEAD.unpack(data + _exactly(connection, _HEAD.size - len(data)))
        if count > _MOST_BYTES:
            raise ValueError(f"a message of {count} bytes")
        message = json.loads(_exactly(connection, count))
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    if descriptors:
        return message, descriptors[0]
    return message, LOST if flags & socket.MSG_CTRUNC else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended within a message")
        data += part
    return bytes(data)


class _FinishedFile:
    """A finished file. Its descriptor closes with the last reference."""

    def __init__(self, descriptor: int, owner: object | None) -> None:
        self.descriptor = descriptor
        self.owner = owner
        """The connection that made it; None once it is published."""
        self.size = os.fstat(descriptor).st_size
        self.modified = time.time()

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Refused(Exception):
    """The answer to a failed request."""

    def __init__(self, error: str, **facts: Any) -> None:
        super().__init__(error)
        self.answer = {"error": error, **facts}


class Keeper:
    """The files of one run, and the connections of its clients.

    Args:
        budget: bytes of all files together, at most.
        idle: seconds without a client after which it ends; infinite for never.

    Raises:
        ValueError: idle is not positive.
    """

    def __init__(self, budget: int, idle: float) -> None:
        if not idle > 0:
            raise ValueError(f"idle is a positive number, not {idle!r}")
        self._budget, self._idle = budget, idle
        self._lock = threading.Lock()
        self._files: dict[str, _FinishedFile] = {}
        self._reserved: dict[str, tuple[object, int]] = {}
        """Unfinished files: the connection that makes each, and its bytes."""
        self._used = 0
        """Bytes of files and reservations."""
        self._clients: set[object] = set()
        self._writers: set[object] = set()
        """The clients that stay connected; see `memory_link`."""
        self._left_at = time.monotonic()
        self._turned_away: deque[socket.socket] = deque(maxlen=_TURNED_AWAY)
        """The last clients without a thread. Their connections stay open, so that they read the answer."""
        self._wake, self._woken = socket.socketpair()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit

    def serve(self, listener: socket.socket) -> None:
        """Accepts clients until the keeper has to end."""
        accepts = True
        while True:
            with self._lock:
                span = self._idle if self._files else min(self._idle, EMPTY_SECONDS)
                left = math.inf if self._clients else max(0.0, self._left_at + span - time.monotonic())
            watched = [self._woken, listener] if accepts else [self._woken]
            ready, _, _ = select.select(
                watched, [], [], min(left, _LONGEST_WAIT) if accepts else _PAUSE_SECONDS
            )
            if self._woken in ready:
                self._woken.recv(4096)
            if not accepts:
                accepts = True
            elif listener in ready:
                accepts = self._welcome(listener)
            elif not ready and left <= _LONGEST_WAIT:
                return  # no client connected in that time

    def _welcome(self, listener: socket.socket) -> bool:
        """Accepts a client. False if that is not possible now; the client waits meanwhile."""
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor or no memory is free
            return False
        if peer_of(connection)[1] != os.getuid():
            connection.close()
            return True
        with self._lock:
            self._clients.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except (RuntimeError, MemoryError):
            with self._lock:
                self._clients.discard(connection)
            self._turn_away(connection)
        return True

    def _turn_away(self, connection: socket.socket) -> None:
        """Answers a client for which no thread can be started."""
        connection.setblocking(False)
        try:
            send(connection, {"error": "threads"})
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it left
        self._turned_away.append(connection)

    def _serve(self, connection: socket.socket) -> None:
        """Answers one client until it leaves. Bytes that are no request end the connection."""
        try:
            while (got := receive(connection)) is not None:
                request, descriptor = got
                is_lost = descriptor == LOST
                file = None if descriptor is None or is_lost else _FinishedFile(descriptor, connection)
                del got, descriptor
                handed: _FinishedFile | None = None
                try:
                    if is_lost:
                        self._refuse_lost(connection, request)
                    answer, handed = self._answer(connection, request, file)
                except _Refused as refused:
                    answer = refused.answer
                del file
                send(connection, answer, None if handed is None else handed.descriptor)
                del handed  # a deleted file is closed here, outside of the lock
                if request["do"] == "drop":
                    os._exit(0)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the client died, or is no client
        finally:
            self._forget(connection)
            connection.close()

    def _forget(self, connection: object) -> None:
        """Drops the unpublished files that a connection made (note "Files of a connection")."""
        with self._lock:
            own = [name for name, file in self._files.items() if file.owner is connection]
            gone = [self._remove(name) for name in own]
            for name in [name for name, (owner, _) in self._reserved.items() if owner is connection]:
                self._used -= self._reserved.pop(name)[1]
            self._clients.discard(connection)
            self._writers.discard(connection)
            self._left_at = time.monotonic()
        gone.clear()  # closes the files, outside of the lock: to free much memory takes seconds
        self._wake.send(b".")

    def _answer(
        self, client: object, request: dict[str, Any], new: _FinishedFile | None
    ) -> tuple[dict[str, Any], _FinishedFile | None]:
        """The answer to a request, and the file to send with it. `new` is the file that came with it."""
        do, name = request["do"], request.get("name", "")
        if request["protocol"] != PROTOCOL and do != "drop":
            raise _Refused("protocol", process=os.getpid())
        gone: _FinishedFile | None = None
        with self._lock:
            file = self._files.get(name)
            if do == "open":
                if file is None:
                    return {}, None
                return {"size": file.size}, file
            if do == "size":
                if file is None:
                    return {}, None
                return {"size": file.size, "time": file.modified, "pending": file.owner is not None}, None
            if do == "names":
                return {"names": [name for name in self._files if name.startswith(request["prefix"])]}, None
            if do == "reserve":
                self._reserve(client, name, request["size"])
            elif do == "finish":
                self._finish(client, name, _sealed(new))
            elif do == "cancel":
                self._release(client, name)
            elif do == "publish":
                gone = self._publish(request, _sealed(new))
            elif do == "delete":
                gone = self._remove(name) if file is not None else None
            elif do == "hello":
                self._writers.add(client)
                self._budget = request.get("budget") or self._budget
                self._idle = request.get("idle") or self._idle
            elif do not in ("status", "drop"):
                raise ValueError(f"unknown request {do!r}")
            answer = {
                "process": os.getpid(),
                "budget": self._budget,
                "used": self._used,
                "files": len(self._files),
                "writers": len(self._writers),
            }
        del gone  # closes the file, outside of the lock
        return answer, None

    def _reserve(self, client: object, name: str, size: int) -> None:
        """Counts `size` bytes for an unfinished file, which begins with the first call."""
        owner, before = self._reserved.get(name, (client, 0))
        if name in self._files or owner is not client:
            raise _Refused("exists")
        if name not in self._reserved:
            self._count_file()
        self._count(size - before)
        self._reserved[name] = client, size

    def _count(self, more: int) -> None:
        if more > 0 and self._used + more > self._budget:
            raise _Refused("full", budget=self._budget, used=self._used, more=more, files=len(self._files))
        self._used += more

    def _count_file(self) -> None:
        """Refuses one more file if the descriptors would run short."""
        files = len(self._files) + len(self._reserved)
        if files + _CLIENT * len(self._clients) + _SPARE >= self._limit:
            raise self._short_of_descriptors()

    def _short_of_descriptors(self) -> _Refused:
        facts = {"limit": self._limit, "files": len(self._files), "clients": len(self._clients)}
        return _Refused("descriptors", **facts)

    def _refuse_lost(self, client: object, request: dict[str, Any]) -> None:
        """Refuses a request whose file did not fit into this process. Its reservation ends."""
        with self._lock:
            self._release(client, request.get("name", ""))
            raise self._short_of_descriptors()

    def _finish(self, client: object, name: str, file: _FinishedFile) -> None:
        owner, size = self._reserved[name]
        if owner is not client:
            raise KeyError(name)
        del self._reserved[name]
        self._used += file.size - size
        self._files[name] = file

    def _release(self, client: object, name: str) -> None:
        owner, size = self._reserved.get(name, (None, 0))
        if owner is client:
            del self._reserved[name]
            self._used -= size

    def _publish(self, request: dict[str, Any], file: _FinishedFile) -> _FinishedFile | None:
        """Gives a file its name, whole and at once. Returns the file that it replaces."""
        name, replaced = request["name"], self._files.get(request["name"])
        if name in self._reserved or (replaced is not None and not request["replace"]):
            raise _Refused("exists")
        missing = [seen for seen in request["seen"] if seen not in self._files]
        if missing:
            raise _Refused("gone", names=missing)
        if replaced is None:
            self._count_file()
        self._count(file.size - (0 if replaced is None else replaced.size))
        self._files[name] = file
        folder = name[: name.rfind("/") + 1]
        for other, each in self._files.items():
            if other.startswith(folder):
                each.owner = None
        return replaced

    def _remove(self, name: str) -> _FinishedFile:
        file = self._files.pop(name)
        self._used -= file.size
        return file


def _sealed(file: _FinishedFile | None) -> _FinishedFile:
    """The file that came with a request. No process can change it any more."""
    if file is None or fcntl.fcntl(file.descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("a request without a sealed file")
    return file


def main(name: str, budget: str, idle: str) -> None:
    """Starts the keeper of a run, unless there is one. Exits when there is; with a code if that fails."""
    ready, tell = os.pipe()
    if os.fork():  # the starter waits for this process, and the keeper is no child of the starter
        os.close(tell)
        os._exit((os.read(ready, 1) or b"\1")[0])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGHUP):  # for the terminal of the job that started it
            signal.signal(number, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file is a descriptor
        listener.bind(address_of(name))
        keeper = Keeper(int(budget), float(idle))
        listener.listen(1024)
    except (OSError, ValueError) as error:
        code = (error.errno or 1) if isinstance(error, OSError) else errno.EINVAL
        os.write(tell, bytes([0 if code == errno.EADDRINUSE else min(code, 255)]))
        return
    os.write(tell, b"\0")
    os.close(tell)
    os.close(ready)
    keeper.serve(listener)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Serves the run's folder on this node to the ranks of other nodes.

Each rank has such a service: a thread that accepts connections, and a thread for each connection. A request
takes one buffer of `PIECE_BYTES` at most, whatever the size of a file. The service has the files of one
folder and no others, because `LocalStorage` refuses names that lead out of it.

Note "Strangers": anyone who reaches the port may connect. A connection that has not proved that it knows the
secret takes a thread and a descriptor, and it may not take them from the ranks. So there are at most
`_MOST_UNPROVED` of them, each has `_PROOF_SECONDS`, and a new one takes the place of the oldest if that had
`_GRACE_SECONDS`.

Note "Files of a connection": a file that is being written belongs to its connection. If the connection ends
first, because its rank died, the file is removed.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

import xxhash

from shardproof._utils import forks
from shardproof.engine.storage import LocalStorage, Sink, Storage, aligned_buffer
from shardproof.errors import ShardproofError, StorageError
from shardproof.runs.checkpointer.nodes.peer_frames import (
    PIECE_BYTES,
    PeerAnswer,
    PeerConnection,
    PeerRequest,
    WrongPeer,
    name_from,
    name_to,
)

_log = logging.getLogger("shardproof")

_MOST_PUBLISHED = 4 << 30
"""Bytes of a published file, at most: those of the largest manifest."""


_MOST_UNPROVED = 64
"""Connections that have proved nothing yet, at most (note "Strangers")."""
_PROOF_SECONDS, _GRACE_SECONDS = 10.0, 0.5
"""Seconds that a connection has for its proof, and those that it has even if others wait."""

_ACCEPT_PAUSE = 0.01
"""Seconds until the next attempt to accept a connection after one that failed."""

_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` at a limit of the process or of the system."""


class FileService:
    """The service of one rank. It listens from the start, and answers after `start`.

    Args:
        root: the run's folder.
        patience: gives the seconds of one wait.
        address: numeric address to listen at; None for all of this machine.
    """

    def __init__(self, root: LocalStorage, patience: Callable[[], float], address: str | None = None) -> None:
        self.name = secrets.token_hex(8)
        """Distinguishes this service from others of the run."""
        self._root = root
        self._patience = patience
        self._secret = b""
        self._lock = forks.lock()
        self._connections: set[PeerConnection] = set()
        self._unproved: dict[PeerConnection, float] = {}
        """Connections that have proved nothing yet, the oldest first, and when they began."""
        self._room = threading.Event()
        """Set when a connection has proved itself or has ended."""
        self._stopped = False
        self._has_warned = False
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        forks.close_in_child(self)

    def start(self, secret: bytes) -> None:
        """Begins to answer the ranks that know the secret."""
        self._secret = secret
        threading.Thread(target=self._accept, name="shardproof-files", daemon=True).start()

    def close(self) -> None:
        """Closes the descriptor of the port. `stop` ends the service."""
        self._listener.close()

    def stop(self) -> None:
        """Ends the service and its connections."""
        with self._lock:
            self._stopped, connections = True, list(self._connections)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of `accept`
        except OSError:
            pass  # it was never started, or this is a forked child
        self._listener.close()
        for connection in connections:
            connection.shut_down()

    def _make_room(self) -> None:
        """Waits until one more connection may prove itself (note "Strangers")."""
        while True:
            self._room.clear()
            with self._lock:
                if len(self._unproved) < _MOST_UNPROVED or self._stopped:
                    return
                oldest, begun = next(iter(self._unproved.items()))
                wait = begun + _GRACE_SECONDS - time.monotonic()
            if wait <= 0:
                oldest.shut_down()  # its thread ends, and makes the room
                wait = _GRACE_SECONDS
            self._room.wait(wait)

    def _accept(self) -> None:
        while True:
            self._make_room()
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if self._stopped or self._listener.fileno() < 0:
                    return
                if error.errno in _NO_RESOURCES:
                    self._warn_of_limit(error)
                time.sleep(_ACCEPT_PAUSE)  # the caller left before it was accepted, or no descriptor is free
                continue
            try:
                connection = PeerConnection(accepted, self._patience())
                with self._lock:
                    self._unproved[connection] = time.monotonic()
                threading.Thread(
                    target=self._serve, args=(connection,), name="shardproof-file", daemon=True
                ).start()
            except OSError:
                accepted.close()  # the caller left
            except (RuntimeError, MemoryError) as error:
                self._proved(connection)
                accepted.close()
                self._warn_of_limit(error)

    def _warn_of_limit(self, error: Exception) -> None:
        """Logs the first connection that a limit of this process prevents."""
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s: this process cannot serve another rank: %s. Raise its limits of open files and threads "
            "(`ulimit -n`, `ulimit -u`, pids.max of its control group). This warning comes once",
            self._root.location,
            error,
        )

    def _proved(self, connection: PeerConnection) -> None:
        """A connection has proved itself, or has ended."""
        with self._lock:
            self._unproved.pop(connection, None)
        self._room.set()

    def _serve(self, connection: PeerConnection) -> None:
        """Answers one rank until it leaves. Bytes that are no request end the connection."""
        with self._lock:
            if self._stopped:
                self._unproved.pop(connection, None)
                connection.close()
                return
            self._connections.add(connection)
        try:
            seconds = min(_PROOF_SECONDS, self._patience())
            connection.prove(self._secret, self.name.encode(), asks=False, seconds=seconds)
            self._proved(connection)
            while (request := connection.receive(PeerRequest, idle=True)) is not None:
                connection.patience = self._patience()
                self._answer(connection, request)
        except WrongPeer as error:
            _log.warning("%s: a connection to this node was refused: %s", self._root.location, error)
        except OSError:
            pass  # the rank died, or its request was given up
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._proved(connection)
            connection.close()

    def _answer(self, connection: PeerConnection, request: PeerRequest) -> None:
        folder, name = name_from(request.folder), name_from(request.name)
        data = bytearray()
        if request.do == "publish":
            if not 0 <= request.count <= _MOST_PUBLISHED:
                raise WrongPeer(f"a file of {request.count} bytes to publish")
            data = bytearray(request.count)
            connection.receive_into(memoryview(data))
        try:
            # A new object, so that no file that is removed later stays open.
            place = self._root.within(folder) if folder else LocalStorage(self._root.path)
            if request.do == "create":
                sink = place.create(name)
                connection.send(PeerAnswer())
                _write(connection, sink)
                return
            if request.do == "read":
                _read(connection, place, request, name)
                return
            value = _CALLS[request.do](place, name, request, data)
        except ShardproofError as error:
            connection.send(PeerAnswer(error=error.to_wire()))
        except KeyError as error:
            raise WrongPeer(f"an unknown request {request.do!r}") from error
        else:
            connection.send(PeerAnswer(value))


def _names(names: list[str]) -> list[bytes]:
    return [name_to(name) for name in names]


_CALLS: dict[str, Callable[[LocalStorage, str, PeerRequest, bytearray], bool | int | list[bytes] | None]] = {
    "size": lambda place, name, request, data: place.size(name),
    "list": lambda place, name, request, data: _names(place.list(name)),
    "folders": lambda place, name, request, data: _names(place.folders()),
    "siblings": lambda place, name, request, data: _names(place.siblings()),
    "linked": lambda place, name, request, data: place.linked,
    "flush": lambda place, name, request, data: place.flush(name),
    "flush_names": lambda place, name, request, data: place.flush_names(),
    "delete": lambda place, name, request, data: place.delete(name),
    "publish": lambda place, name, request, data: place.publish(name, bytes(data), replace=request.replace),
}


def _read(connection: PeerConnection, place: Storage, request: PeerRequest, name: str) -> None:
    """Sends a range in pieces; the first answer has the number of all bytes."""
    start, stop = request.start, request.stop
    if stop is None:
        size = place.size(name)
        stop = start if size is None else max(size, start)
    memory, first = aligned_buffer(max(1, min(PIECE_BYTES, stop - start))), True
    while first or start < stop:
        piece = memory[: stop - start]
        if request.stop is None and first and start == stop:
            place.read(name, start)  # raises if the file is missing, a folder, or shorter than `start`
        else:
            place.read_into(name, start, piece)
        connection.send(PeerAnswer(stop - request.start if first else None, len(piece)), piece)
        start, first = start + len(piece), False


def _write(connection: PeerConnection, sink: Sink) -> None:
    """Writes the file of a connection until it is finished or aborted (note "Files of a connection")."""
    memory = aligned_buffer(PIECE_BYTES)
    try:
        while True:
            request = connection.receive(PeerRequest, idle=True)
            if request is None:
                raise ConnectionResetError("the connection ended before the file was finished")
            if request.do == "write":
                if not 0 <= request.count <= len(memory):
                    raise WrongPeer(f"{request.count} bytes to write")
                piece = memory[: request.count]
                connection.receive_into(piece)
                if xxhash.xxh3_128_digest(piece) != request.digest:
                    raise StorageError(
                        f"{request.count} bytes from byte {request.start} on changed on the way to this "
                        "node: check the network cards and the memory of both nodes"
                    )
                sink.write_at(request.start, piece)
                continue
            if request.do == "finish":
                sink.finish(request.start)
            elif request.do == "abort":
                sink.abort()
            else:
                raise WrongPeer(f"a request {request.do!r} within a file")
            connection.send(PeerAnswer())
            return
    except StorageError as error:
        sink.abort()
        connection.send(PeerAnswer(error=error.to_wire()))
        while (
            request := connection.receive(PeerRequest, idle=True)
        ) is not None:  # until the writer reads this
            connection.receive_into(memory[: min(request.count, len(memory))])
    finally:
        sink.abort()


def _listen(address: str | None) -> socket.socket:
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:
            pass  # the system has IPv6 switched off
    return socket.create_server(("", 0), backlog=1024)

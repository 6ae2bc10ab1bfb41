"""The run's folder on another node, as a `Storage`: each call is a request to the service of a rank there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from shardproof._utils import forks
from shardproof.engine.storage import Storage, check_folder, check_name
from shardproof.errors import ShardproofError, StorageError
from shardproof.runs.checkpointer.nodes.peer_frames import (
    PIECE_BYTES,
    PeerAnswer,
    PeerConnection,
    PeerRequest,
    name_from,
    name_to,
)

_MOST_IDLE = 4
"""Connections to a peer that stay open between requests."""


class Peer:
    """The service of a rank on another node.

    Its methods raise the error of the call there, or a `StorageError` if the other rank is gone or does not
    answer.

    Args:
        hosts: addresses of the node; the first that answers is used.
        port: port of the service.
        service: name of the service.
        secret: secret of the run.
        label: the node and the rank, for messages.
        patience: gives the seconds of one wait.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        service: str,
        secret: bytes,
        label: str,
        patience: Callable[[], float],
    ) -> None:
        self.label = label
        self._hosts, self._port = list(hosts), port
        self._service, self._secret = service.encode(), secret
        self._patience = patience
        self._lock = forks.lock()
        self._idle: list[PeerConnection] = []

    def ask(self, request: PeerRequest, data: bytes = b"") -> Any:
        """Sends a request, and the raw bytes after it. Returns the value of the answer."""
        with self.connection() as connection:
            connection.send(request, data)
            return self.answer(connection).value

    @contextmanager
    def connection(self) -> Iterator[PeerConnection]:
        """A connection for one request and its answer. After an `OSError` it is closed."""
        connection = self.take()
        is_whole = False
        try:
            yield connection
            is_whole = True
        except OSError as error:
            raise self.failure(error) from error
        except ShardproofError as error:
            is_whole = error.details.get("answered") is True
            raise
        finally:
            self.give_back(connection) if is_whole else connection.close()

    def take(self) -> PeerConnection:
        """An idle connection, or a new one. The caller calls `give_back`, or closes it."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed:
                    connection.patience = self._patience()
                    return connection
        return self._connect()

    def give_back(self, connection: PeerConnection) -> None:
        """Stores a connection for the next request. Its last answer must have been read."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def answer(self, connection: PeerConnection) -> PeerAnswer:
        """The answer to a request. An `OSError` of the connection is left to the caller."""
        answer = connection.receive(PeerAnswer)
        if answer is None:
            raise ConnectionResetError("the connection ended")
        if answer.error is not None:
            error = ShardproofError.from_wire(answer.error)
            raise type(error)(f"{self.label}: {error.message}", **{**error.details, "answered": True})
        return answer

    def failure(self, cause: OSError) -> StorageError:
        """The error for a peer that is gone or does not answer."""
        if isinstance(cause, TimeoutError):
            text = (
                f"{self.label} does not answer within {self._patience():.1f} s. Check that its process runs, "
                "and the network between the nodes"
            )
        else:
            text = (
                f"{self.label} cannot be reached ({cause}). Its process ended, or deleted its Checkpointer "
                "while other ranks still used theirs"
            )
        return StorageError(text, file=self.label, missing=False, damaged=False)

    def _connect(self) -> PeerConnection:
        patience = self._patience()
        cause: OSError = OSError("it has no address")
        for host in self._hosts:
            try:
                to = socket.create_connection((host, self._port), timeout=patience / len(self._hosts))
            except OSError as error:
                cause = error
                continue
            connection = PeerConnection(to, patience)
            try:
                connection.prove(self._secret, self._service, asks=True)
                return connection
            except OSError as error:
                connection.close()
                cause = error
        raise self.failure(cause) from cause


def ask_all(peers: Sequence[Peer], request: PeerRequest, data: bytes = b"") -> list[Any]:
    """Sends one request to several peers, and then reads all answers. Returns their values.

    Raises the first error of a call after all answers are read, and at once if a rank does not answer.
    """
    asked: list[tuple[Peer, PeerConnection]] = []
    values: list[Any] = []
    failed: ShardproofError | None = None
    try:
        for peer in peers:
            connection = peer.take()
            asked.append((peer, connection))
            try:
                connection.send(request, data)
            except OSError as error:
                raise peer.failure(error) from error
        while asked:
            peer, connection = asked[0]
            try:
                values.append(peer.answer(connection).value)
            except OSError as error:
                raise peer.failure(error) from error
            except ShardproofError as error:
                failed = failed or error
            del asked[0]
            peer.give_back(connection)
    finally:
        for _, connection in asked:
            connection.close()
    if failed is not None:
        raise failed
    return values


class PeerStorage(Storage):
    """The run's folder on another node, or the folder `path` in it. See `Storage` for the methods."""

    def __init__(self, peer: Peer, root: str, path: str = "") -> None:
        self.peer = peer
        self._root, self._path = root, path

    @property
    def location(self) -> str:
        """The node, and the folder there."""
        where = f"{self._root}/{self._path}" if self._path else self._root
        return f"{self.peer.label}:{where}"

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return (self._path or self._root).rpartition("/")[2]

    @property
    def linked(self) -> bool:
        """True if the folder is a symbolic link there."""
        return bool(self.peer.ask(self._request("linked")))

    def create(self, name: str) -> PeerSink:
        """Begin a new file there; see `Storage.create`."""
        request = self._request("create", name)
        connection = self.peer.take()
        try:
            connection.send(request)
            self.peer.answer(connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise self.peer.failure(error) from error
            raise
        return PeerSink(self.peer, connection, f"{self.location}/{name}")

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name` there; see `Storage.publish`."""
        self.peer.ask(self._request("publish", name, replace=replace, count=len(data)), data)

    def flush(self, name: str) -> None:
        """Make a file durable there; see `Storage.flush`."""
        self.peer.ask(self._request("flush", name))

    def flush_names(self) -> None:
        """Make durable which files are in the folder there; see `Storage.flush_names`."""
        self.peer.ask(self._request("flush_names"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file there; see `Storage.read`."""
        if stop is not None and not 0 <= start <= stop:
            raise StorageError(f"{self.location}/{name} has no bytes {start} to {stop}: too short", file=name)
        found = bytearray()
        self._read(self._request("read", name, start=start, stop=stop), found)
        return bytes(found)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        self._read(self._request("read", name, start=start, stop=start + len(data)), data)

    def _read(self, request: PeerRequest, into: bytearray | memoryview) -> None:
        with self.peer.connection() as connection:
            connection.send(request)
            answer = self.peer.answer(connection)
            total = answer.value
            assert isinstance(total, int)
            if isinstance(into, bytearray):
                into.extend(bytes(total))
            view, done = memoryview(into), 0
            while True:
                connection.receive_into(view[done : done + answer.count])
                done += answer.count
                if done >= total:
                    return
                answer = self.peer.answer(connection)

    def size(self, name: str) -> int | None:
        """Bytes of the file there; None if there is none."""
        found = self.peer.ask(self._request("size", name))
        assert found is None or isinstance(found, int)
        return found

    def folders(self) -> list[str]:
        """Sorted names of the folders there."""
        return [name_from(one) for one in self.peer.ask(self._request("folders"))]

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders there."""
        return [name_from(one) for one in self.peer.ask(self._request("siblings"))]

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of the files there."""
        return [name_from(one) for one in self.peer.ask(self._request("list", prefix))]

    def delete(self, name: str) -> None:
        """Remove the file there durably."""
        self.peer.ask(self._request("delete", name))

    def within(self, prefix: str) -> PeerStorage:
        """The folder `prefix` of this one."""
        check_name(prefix, self.location)
        return PeerStorage(self.peer, self._root, f"{self._path}/{prefix}" if self._path else prefix)

    def sibling(self, folder: str) -> PeerStorage:
        """The sibling folder of this name."""
        above = self._path.rpartition("/")[0]
        check_folder(folder, self.location)
        return PeerStorage(self.peer, self._root, f"{above}/{folder}" if above else folder)

    def close(self) -> None:
        """Close the idle connections. The storage stays usable."""
        self.peer.close()

    def _request(self, do: str, name: str = "", **facts: Any) -> PeerRequest:
        if name or do not in ("linked", "folders", "siblings", "list", "flush_names"):
            check_name(name, self.location)
        return PeerRequest(do, name_to(self._path), name_to(name), **facts)


class PeerSink:
    """A new file on another node. Each piece is compared there with its digest before it is written."""

    def __init__(self, peer: Peer, connection: PeerConnection, path: str) -> None:
        self._peer, self._connection, self._path = peer, connection, path
        self._lock = threading.Lock()
        self._is_open = True

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            digest = xxhash.xxh3_128_digest(piece)
            with self._lock, self._exchange():
                if self._connection.has_news():  # the other end has failed
                    self._peer.answer(self._connection)
                request = PeerRequest("write", start=start + at, count=len(piece), digest=digest)
                self._connection.send(request, piece)

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, and make it durable there."""
        self.begin_finish(size)
        self.end_finish()

    def begin_finish(self, size: int) -> None:
        """Begin what `finish` does. Does not wait for the flush."""
        with self._lock, self._exchange():
            self._connection.send(PeerRequest("finish", start=size))

    def end_finish(self) -> None:
        """Return when the file is durable there."""
        with self._lock:
            with self._exchange():
                self._peer.answer(self._connection)
            self._is_open = False
            self._peer.give_back(self._connection)

    def abort(self) -> None:
        """Close and remove the file there. Does nothing after `finish`."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._connection.send(PeerRequest("abort"))
                self._peer.answer(self._connection)
            except (OSError, ShardproofError):
                pass  # the end of the connection removes the file
            self._close()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        if not self._is_open:
            raise StorageError(f"cannot write {self._path}: the file is already finished or aborted")
        try:
            yield
        except OSError as error:
            self._close()
            raise self._peer.failure(error) from error
        except ShardproofError:
            self._close()
            raise

    def _close(self) -> None:
        self._is_open = False
        self._connection.close()

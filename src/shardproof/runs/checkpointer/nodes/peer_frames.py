"""Messages between the ranks of a run on local disks: a request, an answer, and raw bytes after either.

Note "Who may connect": both ends prove that they know the secret of the run (note "The secret of a run" in
`node_group.py`). Each end sends random bytes, and the other returns their keyed digest (HMAC-SHA256). The
secret itself is not sent. What follows is neither encrypted nor signed.

Note "Bounded waits": within a message, each wait for bytes ends after the patience of the connection. Only a
service waits longer, for the next request of a rank that is connected. The end of that rank ends the wait. If
its node loses power or the network, the keep-alive probes of the system end it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Any, TypeVar

import msgspec

from shardproof._utils import forks

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Bytes that a rank sends, hashes and writes at a time."""

_MOST_BYTES = 64 << 20
"""Bytes of a message, without the raw bytes after it. A listing of 500,000 files has less."""
_HEAD = struct.Struct("<I")
_NONCE = 32
_PROBES = 3
_LONGEST_IDLE = 32_767
"""Seconds without bytes before the first probe, at most: the limit of Linux."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of `Storage` or `Sink`."""

    do: str
    """Name of the method."""
    folder: bytes = b""
    """The folder in the run; empty for the run itself."""
    name: bytes = b""
    """Name of the file in that folder."""
    start: int = 0
    stop: int | None = None
    """First byte, and the byte after the last. For `finish`: the size is `start`."""
    replace: bool = False
    count: int = 0
    """Raw bytes after the request."""
    digest: bytes = b""
    """Digest (xxh3_128) of these bytes, if the receiver has to compare them."""


class PeerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call."""

    value: bool | int | list[bytes] | None = None
    count: int = 0
    """Raw bytes after the answer."""
    error: dict[str, Any] | None = None
    """The error of the call."""


class WrongPeer(OSError):
    """The other end does not know the secret of the run, or sent bytes that are no message."""


class PeerConnection:
    """A connection between two ranks. Each wait has `patience` seconds. A forked child does not have it."""

    def __init__(self, to: socket.socket, patience: float) -> None:
        self._to = to
        self._to.settimeout(patience)
        self._to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The system probes an idle other end (note "Bounded waits").
        self._to.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = min(max(1, round(patience)), _LONGEST_IDLE)
        options = {
            "TCP_KEEPIDLE": idle,
            "TCP_KEEPINTVL": max(1, idle // _PROBES),
            "TCP_KEEPCNT": _PROBES,
        }
        for name, value in options.items():
            if hasattr(socket, name):  # not on every system
                self._to.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.patience = patience
        forks.close_in_child(self)

    def __del__(self) -> None:
        self._to.close()

    @property
    def is_closed(self) -> bool:
        """True if this end was closed."""
        return self._to.fileno() < 0

    def close(self) -> None:
        """Closes this end."""
        self._to.close()

    def shut_down(self) -> None:
        """Ends the connection, also the wait of another thread for its bytes."""
        try:
            self._to.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end did so
        self._to.close()

    def prove(self, secret: bytes, who: bytes, *, asks: bool, seconds: float | None = None) -> None:
        """Proves to the other end that this one knows the secret of the run, and lets it prove the same.

        Args:
            secret: secret of the run.
            who: name of the service that is called.
            asks: True for the end that connected.
            seconds: until the other end has proved itself, at most; None to bound each wait alone.

        Raises:
            WrongPeer: the other end does not know it, or is another service.
        """
        until = None if seconds is None else time.monotonic() + seconds
        mine = secrets.token_bytes(_NONCE)
        self._to.sendall(mine)
        theirs = self._exactly(_NONCE, until)
        if mine == theirs:
            raise WrongPeer("the other end sends back what it gets")
        sides = (b"asks" + who, b"serves" + who)
        own, other = sides if asks else sides[::-1]
        self._to.sendall(_proof(secret, own, theirs))
        if not hmac.compare_digest(self._exactly(_NONCE, until), _proof(secret, other, mine)):
            raise WrongPeer(
                "the other end does not know the secret of this run. If SHARDPROOF_NODES_SECRET or "
                "SHARDPROOF_NODES_SECRET_FILE is set, give the same secret to all ranks"
            )

    def send(self, message: PeerRequest | PeerAnswer, data: bytes | memoryview = b"") -> None:
        """Sends a message, and the raw bytes after it."""
        text = msgspec.msgpack.encode(message)
        self._to.sendall(_HEAD.pack(len(text)) + text)
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            self._to.sendall(view[start : start + PIECE_BYTES])

    def receive(self, kind: type[T], *, idle: bool = False) -> T | None:
        """The next message; None if the other end closed the connection before it.

        With `idle`, it waits as long as the other end is connected.
        """
        if idle:
            self._to.settimeout(None)
        try:
            head = self._to.recv(1)
        finally:
            if idle and not self.is_closed:
                self._to.settimeout(self.patience)
        if not head:
            return None
        (count,) = _HEAD.unpack(head + self._exactly(_HEAD.size - 1))
        if count > _MOST_BYTES:
            raise WrongPeer(f"a message of {count} bytes")
        try:
            return msgspec.msgpack.decode(self._exactly(count), type=kind)
        except msgspec.MsgspecError as error:
            raise WrongPeer(f"bytes that are no message: {error}") from error

    def receive_into(self, memory: memoryview) -> None:
        """Fills memory with the raw bytes after a message."""
        done = 0
        while done < len(memory):
            count = self._to.recv_into(memory[done:])
            if not count:
                raise ConnectionResetError("the connection ended within a message")
            done += count

    def has_news(self) -> bool:
        """True if the other end has sent something, or has closed the connection. Does not wait."""
        self._to.settimeout(0.0)
        try:
            self._to.recv(1, socket.MSG_PEEK)
            return True
        except BlockingIOError:
            return False
        finally:
            self._to.settimeout(self.patience)

    def _exactly(self, count: int, until: float | None = None) -> bytes:
        """The next bytes, before a time of `time.monotonic` if one is given."""
        data = bytearray(count)
        if until is None:
            self.receive_into(memoryview(data))
            return bytes(data)
        try:
            for at in range(count):  # only for a few bytes
                self._to.settimeout(max(until - time.monotonic(), 0.001))
                self.receive_into(memoryview(data)[at : at + 1])
        finally:
            if not self.is_closed:
                self._to.settimeout(self.patience)
        return bytes(data)


def name_to(name: str) -> bytes:
    """A name as it is sent: a listed name may have bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def name_from(data: bytes) -> str:
    """The inverse of `name_to`."""
    return data.decode("utf-8", "surrogateescape")


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, hashlib.sha256)

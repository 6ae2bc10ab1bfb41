"""A TCP proxy before the S3 server, which cuts connections, stalls, or answers 503."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

__all__ = ["FaultyProxy"]

_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """Forwards connections to a server.

    Args:
        endpoint: of the server.
    """

    def __init__(self, endpoint: str) -> None:
        target = urlsplit(endpoint)
        self._target = (target.hostname or "", target.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refuse = 0
        """Connections to answer with 503 instead of forwarding them."""
        self.cut_after: int | None = None
        """Bytes of a connection to forward, before it is cut; None for all."""
        self.cuts = 0
        """Connections to cut. Later ones are forwarded."""
        self.stalled = threading.Event()
        """While it is set, no byte is forwarded."""
        self.stall_at: str | None = None
        """Sets `stalled` at the first request whose method and path contain this."""
        self.unanswered: list[str] = []
        """Method and path of each request that `stalled` held back."""
        self.sent = 0
        """Bytes forwarded to the server so far."""
        self.requests: list[str] = []
        """Method and path of the first request of each connection."""
        self.mark = 0
        """Number of bytes at which `reached` is set."""
        self.reached = threading.Event()
        self._release = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends the listener and stalled connections. Other connections end with their peers."""
        self._release.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refuse, self.refuse = self.refuse > 0, max(self.refuse - 1, 0)
            threading.Thread(
                target=self._refuse if refuse else self._serve, args=(client,), daemon=True
            ).start()

    def _refuse(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            client.sendall(_BUSY)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy, args=(server, client, None, False), daemon=True)
            back.start()
            self._copy(client, server, self._limit(), True)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _limit(self) -> int | None:
        with self._lock:
            if self.cut_after is None or self.cuts < 1:
                return None
            self.cuts -= 1
            return self.cut_after

    def _copy(
        self, source: socket.socket, target: socket.socket, limit: int | None, is_request: bool
    ) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_request and not moved:
                    with self._lock:
                        self.requests.append(" ".join(data.split(b"\r\n", 1)[0].decode().split()[:2]))
                        if self.stall_at is not None and self.stall_at in self.requests[-1]:
                            self.stalled.set()
                        if self.stalled.is_set():
                            self.unanswered.append(self.requests[-1])
                while self.stalled.is_set():
                    if self._release.wait(0.05):
                        return
                moved += len(data)
                if limit is not None and moved > limit:
                    source.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(data)
                if is_request:
                    with self._lock:
                        self.sent += len(data)
                        if self.mark and self.sent >= self.mark:
                            self.reached.set()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

"""One connection to the store, and the thread that runs its requests."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeAlias, TypeVar

from shardproof.engine.rendezvous.wire import WrongBytes

Answer = TypeVar("Answer")
Idle: TypeAlias = "tuple[Callable[[Any], None], Callable[[], float]]"


class LinkLost(Exception):
    """The store refused a request, closed the connection, or does not answer."""


class Link:
    """Runs requests on one connection, in order. No other thread enters the store's client.

    The client holds a lock while it waits for the server, and waits without limit for a stopped server. So
    callers wait for a future, which they can give up, and which Ctrl-C interrupts. The thread is a daemon: a
    request that never returns does not keep the process alive.

    Args:
        open_connection: makes the connection on the link's thread. The link then drops its reference to it.
        name: the name of the thread.
        idle: a function that runs on the connection between requests, and one that gives the seconds between
            two runs.
    """

    def __init__(self, open_connection: Callable[[], Any], name: str, idle: Idle | None = None) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=([open_connection], self._requests, idle), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, request: Callable[[Any], Answer]) -> Future[Answer]:
        """Run a request after the earlier ones. Does not wait."""
        future: Future[Answer] = Future()
        self._requests.put((request, future))
        return future

    def call(self, request: Callable[[Any], Answer], patience: float) -> Answer:
        """Run a request and wait for its result.

        Raises:
            LinkLost: the request failed, or had no result after `patience` seconds.
        """
        return wait_in_steps(self.submit(request), patience)

    def close(self, patience: float = 1.0) -> None:
        """End the thread after the earlier requests. Waits for it, at most `patience` seconds."""
        self._requests.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(patience)


_Request: TypeAlias = "tuple[Callable[[Any], Any], Future[Any]]"


_STEPS = 8
"""Steps of a wait."""


def wait_in_steps(future: Future[Answer], patience: float) -> Answer:
    """Waits for the future's result, in several steps.

    If this process is stopped meanwhile, at most one step expires.

    Raises:
        LinkLost: the request failed, or had no result after `patience` seconds.
        WrongBytes: the request read a value that this package does not write.
    """
    for _ in range(_STEPS):
        try:
            return future.result(patience / _STEPS)
        except Exception as error:
            if future.done() and future.exception() is error:
                if isinstance(error, WrongBytes):
                    raise
                text = str(error).strip().split("\n", 1)[0]
                raise LinkLost(f"{type(error).__name__}: {text}") from error
    raise LinkLost(f"no answer for {patience:.1f} s")


def is_over(waiting: Future[Any], seconds: float) -> bool:
    """True if the wait ends within so many seconds.

    Raises:
        LinkLost, WrongBytes: the request failed.
    """
    try:
        waiting.result(seconds)
    except NotYet:
        return False
    except Exception:
        wait_in_steps(waiting, seconds)  # raises the reason
    return True


def _serve(
    opener: list[Callable[[], Any]], requests: queue.SimpleQueue[_Request | None], idle: Idle | None
) -> None:
    connection = None
    last = time.monotonic()
    while True:
        try:
            item = requests.get(
                timeout=None if idle is None else max(last + idle[1]() - time.monotonic(), 0.0)
            )
        except queue.Empty:
            pass
        else:
            if item is None:
                return
            request, future = item
            try:
                if connection is None:
                    connection = opener[0]()
                    opener.clear()
                future.set_result(request(connection))
            except BaseException as error:
                future.set_exception(error)
            del item, request, future  # keep no object alive while this thread waits
        if idle is not None and time.monotonic() - last >= idle[1]():
            last = time.monotonic()
            if connection is not None:
                try:
                    idle[0](connection)
                except Exception:
                    pass  # the next request reports a lost connection to its caller

"""Contexts around a piece of work: without garbage collection, and with a log of how long it waits."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns the collector off until the context ends.

    A walk of a large state creates several small objects per tensor. Collections among them triple its time.
    Reference counting still runs: only reference cycles wait until the context ends.

    >>> with no_garbage_collection():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def logged_wait(log: logging.Logger, text: str, every: float) -> Iterator[None]:
    """Logs a text and the seconds so far, until the block ends.

    `every` is the seconds between two records. A shorter block logs nothing.

    Example:
        >>> with logged_wait(logging.getLogger("example"), "restore waits for s3://bucket/run", 60.0):
        ...     pass
    """
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            log.warning("%s, for %.0f s", text, time.monotonic() - begun)

    thread = threading.Thread(target=tell, name="shardproof-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

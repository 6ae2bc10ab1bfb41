"""The reads that a rank has in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from shardproof._utils.topology import processors

__all__ = ["in_threads", "reading_threads"]

_MOST = 8

_Item = TypeVar("_Item")


def reading_threads() -> int:
    """Reads in flight: this rank's share of the processors, between 1 and 8.

    Reading from the page cache, and hashing, keep a processor busy: more threads than processors only take
    turns. From a disk, the kernel reads ahead of each thread meanwhile.
    """
    return max(1, min(_MOST, int(processors())))


def in_threads(
    work: Callable[[_Item], None],
    items: Sequence[_Item],
    threads: int,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Does work on every item; each thread takes the next item, until one fails.

    Args:
        work: called with one item, in any thread.
        items: taken in their order.
        threads: how many at once; with 1, the caller's.
        within: what each thread but the caller's works in.

    Raises:
        BaseException: what the work on an item raised. No further item was begun, and none is under way.
    """
    if threads <= 1 or len(items) <= 1:
        for item in items:
            work(item)
        return
    lock = threading.Lock()
    left = iter(items)
    stopped = False

    def run() -> None:
        nonlocal stopped
        try:
            with within():
                while not stopped:
                    with lock:
                        item = next(left, None)
                    if item is None:
                        return
                    work(item)
        except BaseException:
            stopped = True
            raise

    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="shardproof-read") as pool:
        runs = [pool.submit(run) for _ in range(min(threads, len(items)))]
        try:
            for running in runs:
                running.result()
        finally:
            stopped = True

"""Reading threads: their number, how they share the work, and their scratch memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from shardproof._utils.topology import processors

__all__ = ["Scratch", "in_threads", "reading_threads"]

_MOST = 8
_LEAST_SCRATCH = 1 << 20

_Item = TypeVar("_Item")


def reading_threads() -> int:
    """Number of reads in flight: this rank's share of the processors, between 1 and 8.

    Reads from the page cache and digests keep a processor busy, so more threads than processors gain nothing.
    From a disk, the kernel reads ahead of each thread.
    """
    return max(1, min(_MOST, int(processors())))


def in_threads(
    work: Callable[[_Item], None],
    items: Sequence[_Item],
    threads: int,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Calls `work` for every item, in order. Each thread takes the next item, until a call fails.

    With one thread, the caller's thread does all work. Otherwise each thread works in a context that `within`
    makes.

    Raises:
        BaseException: `work` raised it. No call is running then, and none begins.
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


class Scratch:
    """Scratch memory, separate for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, count: int) -> tuple[torch.Tensor, memoryview]:
        """This thread's memory, at least `count` bytes, as a tensor and as bytes; the same at every call."""
        memory: tuple[torch.Tensor, memoryview] | None = getattr(self._local, "memory", None)
        if memory is None or len(memory[1]) < count:
            self._local.memory = memory = None  # frees the memory before more is taken
            tensor = torch.empty(max(count, _LEAST_SCRATCH), dtype=torch.uint8, device="cpu")
            memory = self._local.memory = tensor, memoryview(tensor.numpy().data)
        return memory

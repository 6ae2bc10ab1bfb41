"""Cold reads: drops files from the page cache, and measures the speed limit of the storage.

Pages are dropped file by file (`posix_fadvise`), which does not affect other programs. If pages remain (a
file system may ignore the advice), root drops the whole cache. If that fails too, the run ends with an
error, because a warm read must not count as a cold one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist
from common import rounds

from shardproof.storage import LocalStorage, aligned_buffer

DEPTHS = (1, 2, 4, 8, 16)
REQUESTS = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_LIMIT_PAGES = 64
"""A file with at most this many cached pages counts as cold: an open reads its headers again."""


def evict(*folders: Path) -> None:
    """Rank 0 drops the pages of all files in the folders; called by all ranks."""
    if dist.get_rank() == 0:
        drop_all(*folders)
    dist.barrier()


def drop_all(*folders: Path) -> None:
    """Drops the pages of all files in the folders, and checks that no page remains."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    for path in files:
        drop(path)
    if any(cached_pages(path) > _LIMIT_PAGES for path in files):
        Path("/proc/sys/vm/drop_caches").write_text("1")
    for path in files:
        if (pages := cached_pages(path)) > _LIMIT_PAGES:
            raise SystemExit(f"{path} still has {pages} pages in the cache: it cannot be read cold here")


def fill(folder: Path) -> None:
    """Reads all files of a folder into the page cache. Saves and loads that bypass the cache do not."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def drop(path: Path) -> None:
    """Asks the system to drop the clean pages of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> int:
    """Pages of a file that are in memory."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory:
        found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(memory, np.uint8)
        address = ctypes.c_void_p(view.__array_interface__["data"][0])
        library = ctypes.CDLL(None, use_errno=True)
        if library.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore: {path}")
        del view
    return int((found & 1).sum())


class RawReads:
    """Raw reads of this rank's share of some files into reused aligned buffers.

    Args:
        files: read by all ranks together; each rank reads one contiguous range of every file.
        latency: seconds that are added to every read.
    """

    def __init__(self, files: list[Path], latency: float = 0.0) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._latency = latency
        self._shares: list[tuple[Path, int, int]] = []
        for path in files:
            size = path.stat().st_size
            step = -(-size // world_size // (1 << 20)) << 20
            self._shares.append((path, min(rank * step, size), min(rank * step + step, size)))
        self._buffers = [aligned_buffer(max(REQUESTS)) for _ in range(max(DEPTHS))]

    def read(self, *, direct: bool, depth: int, request: int) -> None:
        """Reads the whole share, with `depth` requests of `request` bytes in flight."""
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        opened = [(os.open(path, flags), start, stop) for path, start, stop in self._shares]
        requests = self._requests(opened, request)
        lock = threading.Lock()
        failed: list[BaseException] = []

        def run(buffer: memoryview) -> None:
            try:
                while True:
                    with lock:
                        one = next(requests, None)
                    if one is None:
                        return
                    descriptor, start, count = one
                    if self._latency:
                        time.sleep(self._latency)
                    if os.preadv(descriptor, [buffer[:request]], start) < count:
                        raise OSError("a read was cut short")
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(self._buffers[at],)) for at in range(depth)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for descriptor, _, _ in opened:
                os.close(descriptor)
        if failed:
            raise failed[0]

    @staticmethod
    def _requests(opened: list[tuple[int, int, int]], request: int) -> Iterator[tuple[int, int, int]]:
        for descriptor, begin, stop in opened:
            for start in range(begin, stop, request):
                yield descriptor, start, min(request, stop - start)

    def best(self, *, direct: bool, evicted: Path, repeats: int = 2) -> tuple[int, int]:
        """Depth and request size with the shortest median. Rank 0 prints the sweep."""
        depths, requests = (DEPTHS[2:], REQUESTS[1:]) if self._latency else (DEPTHS, REQUESTS)
        ways = [(depth, request) for depth in depths for request in requests]
        measured = rounds(
            {
                f"{depth} {request}": (
                    lambda number, depth=depth, request=request: self.read(
                        direct=direct, depth=depth, request=request
                    )
                )
                for depth, request in ways
            },
            repeats,
            prepare=lambda name, number: evict(evicted),
        )
        medians = {way: statistics.median(measured[f"{way[0]} {way[1]}"].seconds) for way in ways}
        chosen = min(medians, key=lambda way: medians[way])
        if dist.get_rank() == 0:
            for depth in depths:
                cells = ", ".join(
                    f"{request >> 10} KiB {medians[depth, request]:.3f}" for request in requests
                )
                print(f"# {'direct' if direct else 'buffered'}, depth {depth}: {cells}", flush=True)
        return chosen


class Slow(LocalStorage):
    """A local storage with a latency: every read waits before it begins, as over a network.

    It reports no file as cached on this node.
    """

    latency = 0.0
    """Seconds."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Waits, then reads."""
        time.sleep(self.latency)
        super().read_into(name, start, buffer)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Waits, then reads."""
        time.sleep(self.latency)
        return super().read(name, start, stop)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """False: no file counts as cached."""
        return False

"""Requests to a storage with a latency: several at a time, the errors of those that fail, and its time.

Note: the upload of one object (`ObjectSink`)
    write_at (any order) --copy--> pieces in memory --in order--> multipart upload, several parts in flight

    A small object is one PUT. The upload of a larger one begins when its first part is complete. If callers
    write more than the memory limit before that, the object is written to a temporary file, which `finish`
    sends. After the upload began, pieces behind a gap stay in memory. Callers write in order, except for the
    buffers in flight. If no thread can be started for the upload, as at the end of the interpreter,
    `write_at` uses the temporary file, and `finish` sends in the calling thread.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any, TypeVar

from shardproof.engine.storage.base import Storage
from shardproof.engine.storage.durable import write_all
from shardproof.errors import StorageError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_IN_FLIGHT = 16
"""Requests for small files. A run of 500 steps needs 1,000 of them to list its steps."""
_SIZES_IN_FLIGHT = 32
"""Requests for sizes. They carry no bytes, so a server answers more of them at a time."""
_SIZES_OF_A_THREAD = 8
"""In a folder, a thread starts for this many sizes: on a local disk it costs more than they do."""

_PART_BYTES = 16 << 20
"""Bytes of a part. S3 allows 10,000 parts, so an object of unknown size that is sent in order has at most
156 GiB."""

_PARTS_IN_FLIGHT = 8
_MEMORY_BYTES = 64 << 20
"""Bytes in memory that wait for their upload, at most."""

_ZEROS = bytes(1 << 20)


def map_requests(
    storage: Storage, request: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """The results of a function for each item, in order. For a remote storage it is called in threads.

    If no thread can be started, as at the end of the interpreter, this thread makes the remaining calls (also
    those of `file_sizes`).

    Args:
        storage: the storage that `request` reads, or that contains it.
        request: reads little, and writes nothing. It may be called twice for an item. Its first error is
            raised, and later items are left out.
        items: its arguments.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> folder = LocalStorage(tempfile.mkdtemp())
        >>> list(map_requests(folder, folder.size, ["a", "b"]))
        [None, None]
    """
    if storage.is_remote:
        return _map_in_threads(request, items, _IN_FLIGHT)
    return map(request, items)


def file_sizes(files: Sequence[tuple[Storage, str]]) -> list[int | None]:
    """The size of each file in bytes, in order; None for a file that does not exist.

    Threads ask for the sizes in a remote storage, and for those of more than a few files in folders, because
    a shared file system may need milliseconds for each.

    Raises:
        StorageError: a storage cannot tell a size.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> folder = LocalStorage(tempfile.mkdtemp())
        >>> file_sizes([(folder, "a"), (folder, "b")])
        [None, None]
    """

    def sizes_of(share: Sequence[tuple[Storage, str]]) -> list[int | None]:
        return [storage.size(name) for storage, name in share]

    is_remote = bool(files) and files[0][0].is_remote
    threads = min(_SIZES_IN_FLIGHT, len(files) // (1 if is_remote else _SIZES_OF_A_THREAD))
    if threads <= 1:
        return sizes_of(files)
    bounds = [len(files) * thread // threads for thread in range(threads + 1)]
    shares = [files[start:stop] for start, stop in pairwise(bounds)]
    return list(chain.from_iterable(_map_in_threads(sizes_of, shares, threads)))


def _map_in_threads(
    request: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    remaining = iter(items)
    futures: deque[Future[_Result]] = deque()
    refused: list[_Item] = []
    failed = [math.inf]

    def ask(number: int, item: _Item) -> _Result:
        if number > failed[0]:  # the caller sees the error of the earlier item
            raise CancelledError
        try:
            return request(item)
        except BaseException:
            failed[0] = min(failed[0], number)
            raise

    with ThreadPoolExecutor(threads, "shardproof-requests") as pool:
        try:
            for number, item in enumerate(remaining):
                try:
                    futures.append(pool.submit(ask, number, item))
                except RuntimeError:
                    refused.append(item)
                    break
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()
    yield from map(request, chain(refused, remaining))


def request_error(message: str, file: str, *, missing: bool, unanswered: bool = False) -> StorageError:
    """The error of a request that the storage refused or did not answer. It is no sign of damage.

    With `unanswered`, the storage may have carried out the request.

    >>> request_error("cannot read s3://bucket/a: denied", "s3://bucket/a", missing=False).details
    {'file': 's3://bucket/a', 'missing': False, 'damaged': False}
    """
    if missing:
        error = StorageError(message, file=file, missing=True)
    else:
        error = StorageError(message, file=file, missing=False, damaged=False)
    if unanswered:
        error.details["unanswered"] = True
    return error


def short_remote_read(file: str, start: int, stop: int, end: int) -> StorageError:
    """The error of a read of bytes `start` to `stop` of a file that ends at byte `end`."""
    return StorageError(
        f"short read of {file}: expected bytes {start} to {stop}, it ends at byte {end}",
        file=file,
        missing=False,
    )


def time_at(storage: Storage) -> float:
    """The time now, Unix seconds, by the clock that dates the files of a storage. May write a file.

    The age of a file is the difference of this time and the time of its last write. The clock of this machine
    may differ from that of a store by hours.

    Raises:
        StorageError: the store does not tell its time.

    Example:
        >>> import tempfile, time
        >>> from shardproof.storage import LocalStorage
        >>> time_at(LocalStorage(tempfile.mkdtemp())) <= time.time()
        True
    """
    now = storage.now()
    if now is None:
        raise StorageError(f"{storage.location}: the store does not tell its time", file=storage.location)
    return now


class _Aborted(Exception):
    """The sink was aborted; ends the upload."""


class ObjectSink:
    """A new object that is being written; see `Sink`. Readers see it when `finish` returns.

    Args:
        put: uploads the object: its bytes, a file, or an iterator of pieces. Raises StorageError.
        file: URL of the object, for messages.
        size: bytes of the object, if they are known; they decide the bytes of a part.
    """

    def __init__(self, put: Callable[..., None], file: str, size: int = 0) -> None:
        self._put = put
        self._file = file
        self._expected = size
        self._changed = threading.Condition()
        self._pieces: dict[int, bytes] = {}
        """Pieces by first byte, not sent yet."""
        self._buffered = 0
        """Bytes of the pieces."""
        self._sent = 0
        """Bytes that the upload has taken. All before `_frontier` are there."""
        self._frontier = 0
        self._size: int | None = None
        """Bytes of the object, once `finish` was called."""
        self._state = "open"
        self._upload: threading.Thread | None = None
        self._error: BaseException | None = None
        self._spool: Any = None
        """Temporary file for bytes that exceed the memory before an upload can begin."""

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Take the bytes of `buffer`. Waits while more than the memory limit is ready and not sent."""
        data = bytes(buffer)
        with self._changed:
            self._check_open("write")
            if self._spool is not None:
                self._write_to_file(data, start)
                return
            if data:
                self._pieces[start] = data
                self._buffered += len(data)
                while self._frontier in self._pieces:  # a piece there is not sent yet
                    self._frontier += len(self._pieces[self._frontier])
            if self._upload is None and self._frontier >= _PART_BYTES:
                if not self._begin_upload():
                    self._move_to_file()
                    return
            elif self._upload is None and self._buffered > _MEMORY_BYTES:
                self._move_to_file()
            self._changed.notify_all()
            while self._frontier - self._sent > _MEMORY_BYTES and self._error is None:
                self._changed.wait()  # the upload advances, or fails at its deadline
            self._check_open("write")

    def finish(self, size: int) -> None:
        """Give the object `size` bytes, and wait until the store has it."""
        with self._changed:
            self._check_open("finish")
            self._state = "finished"
            sends_here = False
            if self._upload is None and self._spool is None and size > _PART_BYTES:
                sends_here = not self._begin_upload()
            self._size = size
            upload, sent = self._upload, self._sent
            if upload is not None and size < sent:
                self._error = StorageError(
                    f"cannot finish {self._file} with {size} bytes: {sent} are sent already", file=self._file
                )
            self._changed.notify_all()
        try:
            if upload is not None or sends_here:
                if upload is not None:
                    upload.join()  # ends at the deadline of its requests
                else:
                    self._send()
                if self._error is not None:
                    raise self._error
            elif self._spool is not None:
                os.ftruncate(self._spool.fileno(), size)
                self._spool.seek(0)
                self._put(self._spool, chunk_size=_part_bytes(size), max_concurrency=_PARTS_IN_FLIGHT)
            else:
                data = bytearray(size)  # a hole has zeros
                for start, piece in self._pieces.items():
                    if start < size:
                        data[start : start + len(piece)] = piece[: size - start]
                self._put(bytes(data), mode="create", use_multipart=False)
        finally:
            self._release()

    def abort(self) -> None:
        """Drop the object. Does nothing after `finish` or `abort`. Never raises."""
        with self._changed:
            if self._state != "open":
                return
            self._state = "aborted"
            self._changed.notify_all()
            upload = self._upload
        if upload is not None:
            upload.join()
        self._release()

    def _check_open(self, doing: str) -> None:
        if self._error is not None:
            raise self._error
        if self._state != "open":
            raise StorageError(
                f"cannot {doing} {self._file}: the file is already finished or aborted", file=self._file
            )

    def _begin_upload(self) -> bool:
        """Starts the thread of the upload. False if no thread can be started."""
        upload = threading.Thread(target=self._send, name="shardproof-upload", daemon=True)
        try:
            upload.start()
        except RuntimeError:
            return False
        self._upload = upload
        return True

    def _send(self) -> None:
        try:
            part_bytes = _part_bytes(self._expected)
            self._put(self._in_order(), chunk_size=part_bytes, max_concurrency=_PARTS_IN_FLIGHT)
        except BaseException as error:
            with self._changed:
                if self._state != "aborted" and self._error is None:
                    self._error = error
                self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        """The bytes of the object from its beginning, as they come; zeros for holes."""
        while True:
            with self._changed:
                while self._sent not in self._pieces and self._size is None and self._state == "open":
                    self._changed.wait()  # for the caller, who writes, finishes or aborts
                if self._state == "aborted" or self._error is not None:
                    raise _Aborted
                piece = self._pieces.pop(self._sent, None)
                if piece is None:
                    assert self._size is not None
                    later = min(self._pieces, default=self._size)
                    piece = _ZEROS[: max(min(later, self._size) - self._sent, 0)]
                else:
                    self._buffered -= len(piece)
                if self._size is not None:
                    piece = piece[: max(self._size - self._sent, 0)]
                self._sent += len(piece)
                self._changed.notify_all()
            if not piece:
                return
            yield piece

    def _move_to_file(self) -> None:
        """Moves all pieces to a temporary file, because the first part is still missing."""
        try:
            self._spool = tempfile.TemporaryFile(prefix="shardproof-upload-")  # noqa: SIM115 closed by `_release`
        except OSError as error:
            raise self._file_error(error) from error
        for start, piece in self._pieces.items():
            self._write_to_file(piece, start)
        self._pieces, self._buffered = {}, 0

    def _write_to_file(self, data: bytes, start: int) -> None:
        try:
            write_all(self._spool.fileno(), memoryview(data), start)
        except OSError as error:
            raise self._file_error(error) from error

    def _file_error(self, error: OSError) -> StorageError:
        folder = tempfile.gettempdir()
        return StorageError(
            f"cannot keep the upload of {self._file} in a temporary file in {folder}: {error}. Free space "
            "there, or set TMPDIR to another folder",
            file=self._file,
        )

    def _release(self) -> None:
        self._pieces, self._buffered = {}, 0
        spool, self._spool = self._spool, None
        if spool is not None:
            with suppress(OSError):  # its bytes are sent, or not needed
                spool.close()


def _part_bytes(size: int) -> int:
    """Bytes of a part, so that the object has at most 10,000 parts."""
    return max(_PART_BYTES, -(-size // 9_000))

"""Writes one new object of an object store.

    write_at (any order) --copy--> pieces in memory --in order--> multipart upload, several parts in flight

A small object is one PUT. The upload of a larger one begins when its first part is complete. If callers write
more than the memory limit before that, the object is written to a temporary file, which `finish` sends. After
the upload began, pieces behind a gap stay in memory. Callers write in order, except for the buffers in
flight. If no thread can be started for the upload, as at the end of the interpreter, `write_at` uses the
temporary file, and `finish` sends in the calling thread.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from shardproof.engine.storage.durable import write_all
from shardproof.errors import StorageError

_PART_BYTES = 16 << 20
"""Bytes of a part. S3 allows 10,000 parts, so an object of unknown size that is sent in order has at most
156 GiB."""
_PARTS_IN_FLIGHT = 8
_MEMORY_BYTES = 64 << 20
"""Bytes in memory that wait for their upload, at most."""
_ZEROS = bytes(1 << 20)


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

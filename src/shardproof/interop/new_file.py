"""Writes a new file of a checkpoint from its first byte to its last."""

from __future__ import annotations

from types import TracebackType

from shardproof.errors import StorageError
from shardproof.storage import Sink, Storage, aligned_buffer

__all__ = ["NewFile", "check_size"]

_BUFFER_BYTES = 8 << 20
"""Bytes that one write to the storage carries, but for the last. Small entries are written together."""


class NewFile:
    """A new file of a storage, as a context. It is durable when the context ends without an error.

    The bytes are gathered in one aligned buffer, so that a storage can write them past the page cache.

    Args:
        target: where the file is made.
        name: of the file. A file of this name is left from an interrupted attempt and is replaced.

    Raises:
        StorageError: the storage failed. The file is removed.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> with NewFile(storage, "a") as file:
        ...     file.append(b"one")
        ...     file.append(b"two")
        >>> file.size, storage.read("a")
        (6, b'onetwo')
    """

    def __init__(self, target: Storage, name: str) -> None:
        target.delete(name)
        self._sink: Sink = target.create(name)
        self._buffer = aligned_buffer(_BUFFER_BYTES)
        self._written = 0
        self._filled = 0

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._written + self._filled

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Adds bytes at the end.

        Raises:
            StorageError: the storage failed.
        """
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(rest):
            count = min(len(rest), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        self._sink.write_at(self._written, self._buffer[: self._filled])
        self._written += self._filled
        self._filled = 0

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._sink.abort()
            return
        try:
            if self._filled:
                self._flush()
            self._sink.finish(self._written)
        except BaseException:
            self._sink.abort()
            raise


def check_size(target: Storage, name: str, expected: int) -> None:
    """Checks that a file is as long as when it was written.

    Raises:
        StorageError: the file is missing, or its size is another.
    """
    found = target.size(name)
    if found != expected:
        path = f"{target.location}/{name}"
        raise StorageError(
            f"{path} has {found or 0} bytes, expected {expected}: it was cut or removed after it was "
            "written. Remove the new checkpoint and write it again",
            file=path,
            missing=found is None,
        )

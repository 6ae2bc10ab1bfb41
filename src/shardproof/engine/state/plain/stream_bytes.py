"""The content of an `io.BytesIO` as plain data."""

from __future__ import annotations

import io
from typing import Any


class StreamBytes(bytes):
    """The bytes of an `io.BytesIO`, with its position. It equals the bytes.

    Args:
        data: the content.
        position: the position of the stream in bytes, 0 or more.

    Raises:
        ValueError: the position is not a whole number of 0 or more.

    Example:
        >>> stored = StreamBytes.of(io.BytesIO(b"ab"))
        >>> stored, stored == b"ab", stored.stream().read()
        (StreamBytes(b'ab', 0), True, b'ab')
    """

    position: int

    def __new__(cls, data: bytes = b"", position: int = 0) -> StreamBytes:
        """Makes the bytes."""
        if type(position) is not int or position < 0:
            raise ValueError(f"{position!r} is not the position of a stream")
        made = super().__new__(cls, data)
        made.position = position
        return made

    @classmethod
    def of(cls, stream: io.BytesIO) -> StreamBytes:
        """The content of a stream."""
        return cls(stream.getvalue(), stream.tell())

    def stream(self) -> io.BytesIO:
        """A new stream with this content, at this position."""
        stream = io.BytesIO(self)
        stream.seek(self.position)
        return stream

    def __reduce__(self) -> Any:
        return StreamBytes, (bytes(self), self.position)

    def __repr__(self) -> str:
        return f"StreamBytes({bytes(self)!r}, {self.position})"

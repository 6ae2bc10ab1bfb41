"""The encoding of all values in the store, and the one decoder that checks them.

A record is a line of JSON, then bytes. Stores limit one value (8 MiB in the one that torchrun serves), and
a coordinator reads the records of many ranks in one request. So more than `INLINE` bytes go to keys of their
own, in parts. A rank writes the parts before the record that counts them.

Other programs may write to the same store. So `checked` or `unpack` decodes every value, and `checked_body`
checks the bytes of a record. They raise `WrongBytes` for a wrong value, and allocate no memory for a size
that a value only claims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import xxhash

from shardproof.errors import ShardproofError

BYTES, ERROR, ALL, EACH, GIVEN_UP = "bytes", "error", "all", "each", "given up"
"""Kinds of records. A post is BYTES or ERROR. A verdict is ALL (one answer), EACH (one answer per rank),
ERROR, or GIVEN_UP: an error that a rank decided before every rank had posted."""

INLINE = 64 << 10
"""Maximum number of bytes within a record."""
PART = 7 << 20
"""Bytes in one part, below the limit of the store that torchrun serves."""
_SHOWN = 40
"""Bytes of a wrong value that an error message shows."""

Value = TypeVar("Value")
Count = Annotated[int, msgspec.Meta(ge=0)]
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
"""The random name of a generation or of an incarnation."""


class WrongBytes(Exception):
    """A key has a value that this package does not write."""

    def __init__(self, key: str, expected: str, found: bytes | None) -> None:
        shown = "nothing" if found is None else f"{len(found)} bytes that begin with {found[:_SHOWN]!r}"
        super().__init__(f"key {key!r}: expected {expected}, found {shown}")


class Sign(msgspec.Struct):
    """A sign of life: the progress of a rank in its phase, and its current meeting."""

    beat: int
    phase: str
    done: int
    total: int
    meeting: Count | None = None


class RankKeys(msgspec.Struct):
    """The keys of a rank: its generation, its incarnation there, and its oldest and newest meeting."""

    generation: Token
    incarnation: Token
    first: Count
    last: Count
    took_part: bool
    """False if the rank only wrote its hello there, and nothing for a meeting."""
    others: list[str] = []
    """The prefixes of the rendezvous that this rank's process made from this one."""


class _Head(msgspec.Struct):
    operation: str
    phase: str
    kind: str
    parts: Count
    size: Count
    digest: str
    readers: Count
    renew: Count | None
    operation_position: tuple[str, Count] = msgspec.field(name="whole")


class _Error(msgspec.Struct):
    type: str
    message: str
    details: dict[str, object]


@dataclass(frozen=True, slots=True)
class Record:
    """One post, answer or verdict: purpose of the meeting, kind, and bytes or number of parts."""

    operation: str
    phase: str
    kind: str
    body: bytes
    parts: int = 0
    size: int = 0
    digest: str = ""
    readers: int = 0
    """Of a verdict: the number of ranks that acknowledge it. The coordinator waits for them."""
    renew: int | None = None
    """Of a verdict: the rank that tells all ranks to join a new generation; None if they stay."""
    operation_position: tuple[str, int] = ("", 0)
    """Of kind GIVEN_UP: name of the operation, and number of its earlier meetings."""


def checked(key: str, value: bytes | None, kind: type[Value]) -> Value:
    """Decode and validate the value of a key.

    Raises:
        WrongBytes: the value is not JSON of this type.

    >>> checked("job/announced", b'"0123456789abcdef"', Token)
    '0123456789abcdef'
    """
    try:
        return msgspec.json.decode(b"" if value is None else value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongBytes(key, f"JSON as this version of shardproof writes it ({error})", value) from error


def pack(
    operation: str,
    phase: str,
    kind: str,
    body: bytes,
    readers: int = 0,
    *,
    renew: int | None = None,
    operation_position: tuple[str, int] = ("", 0),
) -> bytes:
    """Encode a record. More than `INLINE` bytes go to parts, see `cut`.

    >>> record = unpack("key", pack("save", "plan", "bytes", b"hello"))
    >>> record.operation, record.phase, record.kind, record.body
    ('save', 'plan', 'bytes', b'hello')
    >>> unpack("key", pack("save", "plan", "bytes", bytes(20 << 20))).parts
    3
    """
    parts = 0 if len(body) <= INLINE else -(-len(body) // PART)
    head = _Head(operation, phase, kind, parts, len(body), _digest(body), readers, renew, operation_position)
    return msgspec.json.encode(head) + b"\n" + (b"" if parts else body)


def unpack(key: str, value: bytes) -> Record:
    """Decode a record that `pack` encoded.

    Raises:
        WrongBytes: the value is no record, or its bytes do not have the record's size and digest.
    """
    line, _, body = value.partition(b"\n")
    head = checked(key, line, _Head)
    if head.parts != (0 if head.size <= INLINE else -(-head.size // PART)):
        raise WrongBytes(key, f"parts for {head.size} bytes, not {head.parts}", value)
    record = Record(body=body, **msgspec.structs.asdict(head))
    if not head.parts:
        checked_body(key, record, body)
    return record


def checked_body(key: str, record: Record, body: bytes) -> bytes:
    """Check the bytes of a record against its size and digest, and return them.

    Raises:
        WrongBytes: they differ.
    """
    if len(body) != record.size or _digest(body) != record.digest:
        raise WrongBytes(key, f"{record.size} bytes with digest {record.digest}", body)
    return body


def unpack_error(key: str, body: bytes) -> ShardproofError:
    """Decode the error that a record carries, see `ShardproofError.to_wire`.

    Raises:
        WrongBytes: the bytes are no error.
    """
    wire = checked(key, body, _Error)
    if {"self", "message"} & wire.details.keys():
        raise WrongBytes(key, "an error with details of other names", body)
    return ShardproofError.from_wire({"type": wire.type, "message": wire.message, "details": wire.details})


def pack_error(error: ShardproofError) -> bytes:
    """An error as the body of a record."""
    return json.dumps(error.to_wire(), default=str).encode()


def part_keys(key: str, parts: int) -> Iterator[str]:
    """The keys of the parts of the record at `key`."""
    return (f"{key}/{part}" for part in range(parts))


def part_sizes(record: Record) -> Iterator[int]:
    """Bytes of each part of a record."""
    return (min(PART, record.size - start) for start in range(0, record.size, PART))


def cut(key: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """The keys and bytes of a record's parts; none if the record itself holds the bytes."""
    if len(body) > INLINE:
        for part, start in enumerate(range(0, len(body), PART)):
            yield f"{key}/{part}", body[start : start + PART]


def _digest(body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body)

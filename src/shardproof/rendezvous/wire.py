"""How posts, answers and other values look in the store, and the one decoder that checks them.

A record is a line of JSON, then bytes. Stores limit one value (8 MiB in the one that torchrun serves), and
a coordinator reads the records of many ranks in one request, so bytes beyond `INLINE` go to keys of their
own, cut in parts, which are written before the record that counts them.

Other programs may write to the same store. So every value that is read passes `checked` or `unpack`, and the
bytes of a record pass `checked_body`: what does not fit raises `WrongBytes`, and nothing is allocated for a
size that a value only claims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import xxhash

from shardproof.errors import ShardproofError

__all__ = [
    "ALL",
    "BYTES",
    "EACH",
    "ERROR",
    "GIVEN_UP",
    "INLINE",
    "PART",
    "Count",
    "Place",
    "Record",
    "Sign",
    "Token",
    "WrongBytes",
    "checked",
    "checked_body",
    "cut",
    "pack",
    "pack_error",
    "part_keys",
    "part_sizes",
    "unpack",
    "unpack_error",
]

BYTES, ERROR, ALL, EACH, GIVEN_UP = "bytes", "error", "all", "each", "given up"
"""Kinds of records. A post is BYTES or ERROR. A verdict is ALL (one answer), EACH (one answer a rank), ERROR,
or GIVEN_UP: an error that a rank decided before every rank had posted."""

INLINE = 64 << 10
"""Bytes that a record itself may hold."""
PART = 7 << 20
"""Bytes in one part, below the limit of the store that torchrun serves."""
_SHOWN = 40
"""Bytes of a wrong value that an error message shows."""

Value = TypeVar("Value")
Count = Annotated[int, msgspec.Meta(ge=0)]
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
"""Random name of a generation, or of one rank's life."""


class WrongBytes(Exception):
    """A value in the store is not what this package writes under its key."""

    def __init__(self, key: str, expected: str, found: bytes | None) -> None:
        shown = "nothing" if found is None else f"{len(found)} bytes that begin with {found[:_SHOWN]!r}"
        super().__init__(f"key {key!r}: expected {expected}, found {shown}")


class Sign(msgspec.Struct):
    """A sign of life: progress in the phase of a rank, and the meeting of its generation that it is in."""

    beat: int
    phase: str
    done: int
    total: int
    meeting: Count | None = None


class Place(msgspec.Struct):
    """Where a rank has keys: a generation, its own random name there, and its oldest and newest meeting."""

    generation: Token
    incarnation: Token
    first: Count
    last: Count
    took_part: bool
    """False: the rank said hello there, and wrote for no meeting."""


class _Head(msgspec.Struct):
    operation: str
    phase: str
    kind: str
    parts: Count
    size: Count
    digest: str
    readers: Count
    renew: Count | None
    whole: tuple[str, Count]


class _Error(msgspec.Struct):
    type: str
    message: str
    details: dict[str, object]


@dataclass(frozen=True, slots=True)
class Record:
    """One post or answer: what the meeting is for, the kind, and the bytes or the number of their parts."""

    operation: str
    phase: str
    kind: str
    body: bytes
    parts: int = 0
    size: int = 0
    digest: str = ""
    readers: int = 0
    """Of a verdict: how many ranks shall say that they have read it; the coordinator waits for them."""
    renew: int | None = None
    """Of a verdict: the rank that asks all ranks to join again, in a new generation."""
    whole: tuple[str, int] = ("", 0)
    """Of a meeting that was given up: its operation, and how many meetings that took before this one."""


def checked(key: str, value: bytes | None, kind: type[Value]) -> Value:
    """The value of a key, decoded and validated.

    Raises:
        WrongBytes: it is not JSON of this type.

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
    whole: tuple[str, int] = ("", 0),
) -> bytes:
    """The record's value. Bytes beyond `INLINE` are left to the parts, see `cut`.

    >>> record = unpack("key", pack("save", "plan", "bytes", b"hello"))
    >>> record.operation, record.phase, record.kind, record.body
    ('save', 'plan', 'bytes', b'hello')
    >>> unpack("key", pack("save", "plan", "bytes", bytes(20 << 20))).parts
    3
    """
    parts = 0 if len(body) <= INLINE else -(-len(body) // PART)
    head = _Head(operation, phase, kind, parts, len(body), _digest(body), readers, renew, whole)
    return msgspec.json.encode(head) + b"\n" + (b"" if parts else body)


def unpack(key: str, value: bytes) -> Record:
    """The record that `pack` wrote.

    Raises:
        WrongBytes: it is no record, or its bytes are not those that were packed.
    """
    line, _, body = value.partition(b"\n")
    head = checked(key, line, _Head)
    if head.parts != (0 if head.size <= INLINE else -(-head.size // PART)):
        raise WrongBytes(key, f"parts for {head.size} bytes, not {head.parts}", value)
    record = Record(
        head.operation,
        head.phase,
        head.kind,
        body,
        head.parts,
        head.size,
        head.digest,
        head.readers,
        head.renew,
        head.whole,
    )
    if not head.parts:
        checked_body(key, record, body)
    return record


def checked_body(key: str, record: Record, body: bytes) -> bytes:
    """The bytes of a record, compared with its size and digest.

    Raises:
        WrongBytes: they differ.
    """
    if len(body) != record.size or _digest(body) != record.digest:
        raise WrongBytes(key, f"{record.size} bytes with digest {record.digest}", body)
    return body


def unpack_error(key: str, body: bytes) -> ShardproofError:
    """The error that a record carries, see `ShardproofError.to_wire`.

    Raises:
        WrongBytes: it is none.
    """
    wire = checked(key, body, _Error)
    if {"self", "message"} & wire.details.keys():
        raise WrongBytes(key, "an error with details of other names", body)
    return ShardproofError.from_wire({"type": wire.type, "message": wire.message, "details": wire.details})


def pack_error(error: ShardproofError) -> bytes:
    """An error as the body of a record."""
    return json.dumps(error.to_wire(), default=str).encode()


def part_keys(key: str, parts: int) -> Iterator[str]:
    """The keys of the parts that belong to the record at `key`."""
    return (f"{key}/{part}" for part in range(parts))


def part_sizes(record: Record) -> Iterator[int]:
    """Bytes of each part of a record."""
    return (min(PART, record.size - start) for start in range(0, record.size, PART))


def cut(key: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """The parts of a record's bytes with their keys; none when the record itself holds them."""
    if len(body) > INLINE:
        for part, start in enumerate(range(0, len(body), PART)):
            yield f"{key}/{part}", body[start : start + PART]


def _digest(body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body)

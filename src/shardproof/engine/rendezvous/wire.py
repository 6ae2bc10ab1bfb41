"""The keys of the store, the encoding of all values, and the one decoder that checks them.

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


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """Keys with which ranks join a generation of meetings. See the note in `membership`.

    >>> JoinKeys("shardproof/4").hello("0123456789abcdef", 3)
    'shardproof/4/0123456789abcdef/hello/3'
    """

    base: str

    @property
    def announced(self) -> str:
        """The newest generation, written by the coordinator."""
        return f"{self.base}/announced"

    @property
    def opened(self) -> str:
        """Set after the first announcement.

        Ranks wait for this key, because they peek at `announced` (see `store_requests.peek`).
        """
        return f"{self.base}/opened"

    def root(self, generation: str) -> str:
        """The prefix of the keys of a generation."""
        return f"{self.base}/{generation}"

    def hello(self, generation: str, rank: int) -> str:
        """The incarnation of the rank that asks to join."""
        return f"{self.base}/{generation}/hello/{rank}"

    def welcome(self, generation: str, incarnation: str) -> str:
        """Set by the coordinator once it has read the hello of this incarnation."""
        return f"{self.base}/{generation}/welcome/{incarnation}"

    def joined(self, generation: str) -> str:
        """The number of hellos. Only a hint to read them, because a dead incarnation counts, too."""
        return f"{self.base}/{generation}/joined"

    def all_joined(self, generation: str) -> str:
        """Set with the last hello of all other ranks. It wakes the coordinator."""
        return f"{self.base}/{generation}/all joined"

    def trace(self, rank: int) -> str:
        """The locations of a rank's keys, for the rank that replaces it."""
        return f"{self.base}/trace/{rank}"


@dataclass(frozen=True, slots=True)
class MeetingKeys:
    """Keys of one meeting. The parts of a record are below the record's key, see `wire.cut`.

    >>> MeetingKeys("shardproof/4/0123456789abcdef", 7).post(3)
    'shardproof/4/0123456789abcdef/7/post/3'
    """

    root: str
    number: int

    def post(self, rank: int) -> str:
        """The post of a rank."""
        return f"{self.root}/{self.number}/post/{rank}"

    def answer(self, rank: int) -> str:
        """The answer of a rank, if each rank has its own answer."""
        return f"{self.root}/{self.number}/answer/{rank}"

    def beat(self, rank: int) -> str:
        """The signs of life of a rank, under one key for all meetings."""
        return f"{self.root}/beat/{rank}"

    @property
    def shared(self) -> list[str]:
        """The keys that all ranks share."""
        return [self.count, self.ready, self.verdict, self.wake, self.read, self.all_read]

    @property
    def count(self) -> str:
        """The number of ranks that have posted."""
        return f"{self.root}/{self.number}/count"

    @property
    def ready(self) -> str:
        """Set by the rank that posts last. It wakes the coordinator."""
        return f"{self.root}/{self.number}/ready"

    @property
    def verdict(self) -> str:
        """The result of the meeting. Set once, by compare-and-set."""
        return f"{self.root}/{self.number}/verdict"

    @property
    def read(self) -> str:
        """The number of ranks that have read the verdict."""
        return f"{self.root}/{self.number}/read"

    @property
    def all_read(self) -> str:
        """Set by the rank that reads the verdict last. Now the coordinator may end, and the store with it."""
        return f"{self.root}/{self.number}/all read"

    @property
    def wake(self) -> str:
        """Set after the verdict. It wakes all ranks, because compare-and-set wakes none on some servers.

        A rank that leaves the meeting early sets it, too, to end its own wait. So a woken rank reads the
        verdict key, which may still be empty.
        """
        return f"{self.root}/{self.number}/wake"


BYTES, ERROR, ALL, EACH, GIVEN_UP = "bytes", "error", "all", "each", "given up"
"""Kinds of records. A post is BYTES or ERROR. A verdict is ALL (one answer), EACH (one answer per rank),
ERROR, or GIVEN_UP: an error that a rank decided before every rank had posted."""

INLINE = 64 << 10
"""Maximum number of bytes within a record."""
PART = 7 << 20
"""Bytes in one part, below the limit of the store that torchrun serves."""
_SHOWN = 40
"""Bytes of a wrong value that an error message shows."""

_Value = TypeVar("_Value")
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


def checked(key: str, value: bytes | None, kind: type[_Value]) -> _Value:
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

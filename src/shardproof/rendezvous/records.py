"""How posts and answers look in the store.

A record is a line of JSON, then bytes. Stores limit one value (8 MiB in the one that torchrun serves), and a
leader reads the records of many ranks in one request, so bytes beyond `INLINE` go to keys of their own, cut
in parts, which are written before the record that counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["INLINE", "PART", "Record", "cut", "pack", "part_keys", "unpack"]

INLINE = 64 << 10
PART = 7 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One post or answer: what the meeting is for, the kind, and the bytes or the number of their parts."""

    operation: str
    phase: str
    kind: str
    body: bytes
    parts: int = 0
    size: int = 0
    readers: int = 0
    """Of a verdict: how many ranks shall say that they have read it; the leader waits for them."""
    whole: tuple[str, int] = ("", 0)
    """Of a meeting that was given up: its operation, and the number of the operation's first meeting."""


def pack(
    operation: str, phase: str, kind: str, body: bytes, readers: int = 0, whole: tuple[str, int] = ("", 0)
) -> bytes:
    """The record's value. Bytes beyond `INLINE` are left to the parts, see `cut`.

    >>> unpack(pack("save", "plan", "bytes", b"hello"))  # doctest: +NORMALIZE_WHITESPACE
    Record(operation='save', phase='plan', kind='bytes', body=b'hello', parts=0, size=5, readers=0,
    whole=('', 0))
    >>> unpack(pack("save", "plan", "bytes", bytes(20 << 20))).parts
    3
    """
    parts = 0 if len(body) <= INLINE else -(-len(body) // PART)
    head: dict[str, Any] = {
        "operation": operation,
        "phase": phase,
        "kind": kind,
        "parts": parts,
        "size": len(body),
    }
    head["readers"] = readers
    head["whole"] = whole
    return json.dumps(head).encode() + b"\n" + (b"" if parts else body)


def unpack(value: bytes) -> Record:
    """The record that `pack` wrote."""
    line, _, body = value.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    name, first = head["whole"]
    whole = str(name), int(first)
    counts = head["parts"], head["size"], head["readers"]
    return Record(head["operation"], head["phase"], head["kind"], body, *counts, whole)


def part_keys(key: str, parts: int) -> list[str]:
    """The keys of the parts that belong to the record at `key`."""
    return [f"{key}/{part}" for part in range(parts)]


def cut(key: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """The parts of a record's bytes with their keys; none when the record itself holds them."""
    if len(body) > INLINE:
        for part, start in enumerate(range(0, len(body), PART)):
            yield f"{key}/{part}", body[start : start + PART]

"""Writes plain data as a pickle, opcode by opcode: the inverse of `read_pickle`.

Nothing that the pickle names is imported. A class or function is a `Named`, and an object that the reader of
the pickle makes is a `PickledCall`. The opcodes are those that Python's own pickler writes for protocols 2
and 4, without frames.

Reference: ``Lib/pickletools.py`` of CPython, which documents every opcode.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_LEVELS = 200
_BATCH = 2000
"""Items that one opcode adds to a container, at most. The limit bounds the reader's stack."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, referred to by name."""

    module: str
    name: str
    """Qualified name in the module."""


@dataclass(eq=False, slots=True)
class PickledCall:
    """An object that the reader of the pickle makes. Two references to one `PickledCall` are one object."""

    function: Named
    args: tuple[Any, ...] = ()
    state: Any = None
    """The argument of ``__setstate__``, or a dict of attributes; None for no state."""
    pairs: Iterable[tuple[Any, Any]] = ()
    """Items that the reader sets in the object, which is a dict."""
    is_new: bool = False
    """True if the reader makes the object by ``__new__``, False if by a call."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent identifier, which the reader of the pickle resolves."""

    identifier: Any


def write_pickle(value: Any, protocol: int, *, describe: Callable[[Any], Any] | None = None) -> bytes:
    """Pickles a value.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, dicts, sets, `Named`, `PickledCall` and
            `Persistent`.
        protocol: 2 or 4.
        describe: returns a value of these kinds for an object of another class, or None to refuse it.

    Raises:
        TypeError: the value holds an object of a class that cannot be written.
        ValueError: the value is nested deeper than 200 levels.

    Example:
        >>> import pickle
        >>> pickle.loads(write_pickle({"step": 3, "betas": (0.9, 0.99)}, 4))
        {'step': 3, 'betas': (0.9, 0.99)}
        >>> pickle.loads(write_pickle(PickledCall(Named("builtins", "complex"), (1.0, 2.0)), 2))
        (1+2j)
    """
    if protocol not in (2, 4):
        raise ValueError(f"the protocol is 2 or 4, not {protocol}")
    return _Writer(protocol, describe).written(value)


class _Writer:
    def __init__(self, protocol: int, describe: Callable[[Any], Any] | None) -> None:
        self._protocol = protocol
        self._describe = describe
        self._parts: list[bytes] = [b"\x80", bytes([protocol])]
        self._memo: dict[Any, int] = {}
        """Memo number of each value: strings and names by value, others by identity."""
        self._alive: list[Any] = []
        """Values whose identities the memo has. The list keeps them alive."""

    def written(self, value: Any) -> bytes:
        self._save(value, 0)
        self._parts.append(b".")
        return b"".join(self._parts)

    def _save(self, value: Any, depth: int) -> None:
        if isinstance(value, str):
            value = str(value)  # a name of a class or function
        kind = type(value)
        if value is None or kind is bool:
            self._parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif kind is int:
            self._integer(value)
        elif kind is float:
            self._parts.append(b"G" + struct.pack(">d", value))
        elif kind is tuple and not value:
            self._parts.append(b")")
        elif depth > _MOST_LEVELS:
            raise ValueError(f"the value is nested deeper than {_MOST_LEVELS} levels")
        elif kind is Persistent:
            self._save(value.identifier, depth + 1)
            self._parts.append(b"Q")
        else:
            key = value if kind is str or kind is Named else id(value)
            if (number := self._memo.get(key)) is not None:
                self._parts.append(_reference(number, b"h", b"j"))
                return
            save: _Save = _SAVERS.get(kind, _Writer._described)
            save(self, value, key, depth + 1)
            if key not in self._memo:  # containers enter the memo before their items
                self._remember(key, value)

    def _described(self, value: Any, key: int, depth: int) -> None:
        """Writes an object of another class."""
        described = None if self._describe is None else self._describe(value)
        if described is None:
            raise TypeError(
                f"an object of {type(value).__module__}.{type(value).__qualname__} is not plain data"
            )
        self._alive.append(value)
        if isinstance(described, PickledCall):
            self._called(described, key, depth)
        else:
            self._save(described, depth)

    def _remember(self, key: Any, value: Any) -> None:
        number = self._memo[key] = len(self._memo)
        self._alive.append(value)
        if self._protocol >= 4:
            self._parts.append(b"\x94")
        else:
            self._parts.append(_reference(number, b"q", b"r"))

    def _text(self, value: str, key: str, depth: int) -> None:
        data = value.encode("utf-8", "surrogatepass")
        if self._protocol >= 4 and len(data) < 256:
            self._parts.append(b"\x8c" + bytes([len(data)]))
        else:
            self._parts.append(_header(len(data), b"X", b"\x8d" if self._protocol >= 4 else b""))
        self._parts.append(data)

    def _named(self, value: Named, key: Named, depth: int) -> None:
        if self._protocol >= 4:
            self._save(value.module, depth)
            self._save(value.name, depth)
            self._parts.append(b"\x93")
        elif "\n" in value.module + value.name:
            raise ValueError(f"a class cannot be named {value.name!r}")
        else:
            self._parts.append(f"c{value.module}\n{value.name}\n".encode())

    def _integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._parts.append(struct.pack("<BB", ord("K"), value))
        elif 0 <= value < 1 << 16:
            self._parts.append(struct.pack("<BH", ord("M"), value))
        elif -(1 << 31) <= value < 1 << 31:
            self._parts.append(struct.pack("<Bi", ord("J"), value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            small = len(data) < 256
            self._parts.append(
                b"\x8a" + bytes([len(data)]) if small else b"\x8b" + struct.pack("<i", len(data))
            )
            self._parts.append(data)

    def _blob(self, value: bytes, key: int, depth: int) -> None:
        if self._protocol < 4:
            self._called(
                PickledCall(Named("_codecs", "encode"), (value.decode("latin-1"), "latin1")), key, depth
            )
        elif len(value) < 256:
            self._parts += [b"C", bytes([len(value)]), value]
        else:
            self._parts += [_header(len(value), b"B", b"\x8e"), value]

    def _bytearray(self, value: bytearray, key: int, depth: int) -> None:
        self._called(PickledCall(Named("builtins", "bytearray"), (bytes(value),)), key, depth)

    def _tuple(self, value: tuple[Any, ...], key: int, depth: int) -> None:
        opcode = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value))
        if opcode is None:
            self._parts.append(b"(")
        for item in value:
            self._save(item, depth)
        self._parts.append(opcode or b"t")

    def _list(self, value: list[Any], key: int, depth: int) -> None:
        self._parts.append(b"]")
        self._remember(key, value)
        self._add(value, depth, b"e", b"a" if len(value) == 1 else None)

    def _dict(self, value: dict[Any, Any], key: int, depth: int) -> None:
        self._parts.append(b"}")
        self._remember(key, value)
        self._set_items(value.items(), depth)

    def _set_items(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> None:
        items = [item for pair in pairs for item in pair]
        self._add(items, depth, b"u", b"s" if len(items) == 2 else None)

    def _add(self, items: Sequence[Any], depth: int, many: bytes, single: bytes | None) -> None:
        """Writes items, and the opcodes that add them to the container below them."""
        for begin in range(0, len(items), _BATCH):
            if single is None:
                self._parts.append(b"(")
            for item in items[begin : begin + _BATCH]:
                self._save(item, depth)
            self._parts.append(single or many)

    def _set(self, value: set[Any], key: int, depth: int) -> None:
        if self._protocol < 4:
            self._called(PickledCall(Named("builtins", "set"), (list(value),)), key, depth)
            return
        self._parts.append(b"\x8f")
        self._remember(key, value)
        self._add(list(value), depth, b"\x90", None)

    def _frozenset(self, value: frozenset[Any], key: int, depth: int) -> None:
        if self._protocol < 4:
            self._called(PickledCall(Named("builtins", "frozenset"), (list(value),)), key, depth)
            return
        self._parts.append(b"(")
        for item in value:
            self._save(item, depth)
        self._parts.append(b"\x91")

    def _called(self, value: PickledCall, key: int, depth: int) -> None:
        self._save(value.function, depth)
        self._save(value.args, depth)
        self._parts.append(b"\x81" if value.is_new else b"R")
        self._remember(key, value)
        self._set_items(value.pairs, depth)
        if value.state is not None:
            self._save(value.state, depth)
            self._parts.append(b"b")


_Save = Callable[[_Writer, Any, Any, int], None]
_SAVERS: dict[type, _Save] = {
    str: _Writer._text,
    Named: _Writer._named,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    set: _Writer._set,
    frozenset: _Writer._frozenset,
    bytes: _Writer._blob,
    bytearray: _Writer._bytearray,
    PickledCall: _Writer._called,
}


def _reference(number: int, short: bytes, long: bytes) -> bytes:
    """An opcode with a memo number."""
    return short + bytes([number]) if number < 256 else long + struct.pack("<I", number)


def _header(count: int, short: bytes, long: bytes) -> bytes:
    """The opcode and length of a text or of bytes."""
    if count < 1 << 32:
        return short + struct.pack("<I", count)
    if not long:
        raise ValueError(f"{count} bytes in one value are too many for protocol 2")
    return long + struct.pack("<Q", count)

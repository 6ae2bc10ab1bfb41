"""Reads a pickle as data. Nothing that the pickle names is imported or called.

The reader interprets the opcodes of protocols 0 to 5 itself. A pickle refers to classes and functions by
name. The caller gives two tables: names with functions that build a plain value, and names that stand for a
value. A name in neither table becomes an `Opaque`, which records the name and the arguments and does nothing.

The length of the pickle bounds the memory and the time. An opcode makes at most one object, and lengths are
checked against the bytes that are left. The memo is a dict, so a large memo index needs no more memory. What
calls copy, and what keys cost, is charged to a `ReadBudget`.

Reference: ``Lib/pickletools.py`` of CPython, which documents every opcode.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, overload

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Opaque, ReadBudget
from shardproof.errors import FormatError

_MOST_KEY_TUPLES = 200
"""Tuples inside a key of a dict or an element of a set, at most. Python hashes them recursively, and hashes a
tuple as often as it occurs in the key."""
_MOST_EQUAL_HASHES = 32
"""Keys with one hash in a dict or set, at most. Python compares a new key with each of them. Texts, bytes and
integers below 2^60 do not count: no file can choose their hashes to be equal."""
_DAMAGES = (
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
)
"""Errors of Python, numpy and torch that the content of a pickle can cause."""


class Bytes(Protocol):
    """Bytes that are read on demand."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> bytes | bytearray | memoryview: ...

    @overload
    def __getitem__(self, index: int, /) -> int: ...


@dataclass(eq=False, slots=True)
class Unfinished:
    """A value that a builder returns if the pickle may set its state afterwards.

    Example:
        >>> import argparse, pickle
        >>> def namespace():
        ...     return Unfinished({}, lambda state: state)
        >>> data = pickle.dumps([argparse.Namespace(lr=0.1), argparse.Namespace()])
        >>> read_pickle(data, {"argparse.Namespace": namespace}, file="example").value
        [{'lr': 0.1}, {}]
    """

    value: Any
    """The value if the pickle sets no state."""
    with_state: Callable[[Any], Any]
    """Returns the value for a state. It may raise the same errors as a builder."""


@dataclass(frozen=True, slots=True)
class Pickle:
    """One pickle of a byte string."""

    value: Any
    end: int
    """Offset of the first byte after the pickle."""


class _Reference:
    """A class or function that the pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_FREE_KEYS = frozenset((str, bytes, float, bool, type(None)))
_LARGE_KEY = 1 << 60
_MARK = object()
_NUMBERS = {code: struct.Struct(code) for code in ("<B", "<H", "<i", "<I", "<Q")}
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_SIZED: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    ord("U"): ("<B", lambda raw: raw.decode("latin-1")),
    ord("T"): ("<i", lambda raw: raw.decode("latin-1")),
    ord("X"): ("<I", lambda raw: raw.decode("utf-8", "surrogatepass")),
    0x8C: ("<B", lambda raw: raw.decode("utf-8", "surrogatepass")),
    0x8D: ("<Q", lambda raw: raw.decode("utf-8", "surrogatepass")),
    ord("B"): ("<I", bytes),
    ord("C"): ("<B", bytes),
    0x8E: ("<Q", bytes),
    0x96: ("<Q", bytearray),
    0x8A: ("<B", lambda raw: int.from_bytes(raw, "little", signed=True)),
    0x8B: ("<i", lambda raw: int.from_bytes(raw, "little", signed=True)),
}
"""Opcodes that a length and as many bytes follow: the format of the length, and a decoder of the bytes."""
_LINE_BYTES = 64
"""Bytes of a line that one read fetches. Most names of classes are shorter."""
_RECONSTRUCTORS = ("copyreg._reconstructor", "copy_reg._reconstructor")
"""Functions that protocols below 2 call to make an instance, with a class, its base and the base's value."""
_PLACEHOLDERS = frozenset((_Reference, Unfinished, object))
"""Types of items on the stack that are not values. `object` is the type of a mark."""
_EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord("}"): dict, ord(")"): tuple, 0x8F: set}


def read_pickle(
    data: bytes | bytearray | memoryview | Bytes,
    builders: Mapping[str, Callable[..., Any]],
    *,
    file: str,
    start: int = 0,
    persistent: Callable[[Any], Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Pickle:
    """Reads one pickle as data.

    Args:
        data: bytes that hold the pickle.
        builders: by module and qualified name, a function of the arguments that the pickle passes. It returns
            the value to use instead of the object, or an `Unfinished`.
        file: name of the file in error messages.
        start: offset of the pickle in `data`.
        persistent: returns the value of a persistent identifier; None to refuse persistent identifiers.
        constants: by module and qualified name, the value of a name that the pickle does not call.

    Returns:
        The value and the offset after it.

    Raises:
        FormatError: the bytes are not a whole pickle, or it uses an opcode that plain data does not need.

    Example:
        >>> import os, pickle
        >>> read_pickle(pickle.dumps({"step": 3, "shape": (2, 3)}), {}, file="example").value
        {'step': 3, 'shape': (2, 3)}
        >>> class Evil:
        ...     def __reduce__(self):
        ...         return os.system, ("touch /tmp/owned",)
        >>> value = read_pickle(pickle.dumps(Evil()), {}, file="example").value
        >>> value, value.args
        (<posix.system, not imported>, ('touch /tmp/owned',))
    """
    whole = memoryview(data) if isinstance(data, (bytearray, memoryview)) else data
    return _Reader(whole, builders, file, start, persistent, constants or {}).read()


def check_keys(keys: Iterable[Any], hashes: dict[int, int] | None = None) -> list[Any]:
    """Refuses keys whose hash would overflow the stack of the process or take forever.

    Args:
        keys: keys of a dict, or elements of a set.
        hashes: by hash, the number of earlier keys of the same container. It is updated.

    Returns:
        The keys whose hash the file can choose. Their hashes and comparisons cost as much as they are long.

    Raises:
        ValueError: a key has more than 200 tuples in it, or more than 32 keys have one hash.
        TypeError: a key has no hash.
    """
    found = [
        key
        for key in keys
        if type(key) not in _FREE_KEYS and not (type(key) is int and -_LARGE_KEY < key < _LARGE_KEY)
    ]
    if not found:
        return found
    counts = {} if hashes is None else hashes
    for key in found:
        pending = [key] if isinstance(key, (tuple, frozenset)) else []
        count = 0
        while pending:
            count += 1
            if count > _MOST_KEY_TUPLES:
                raise ValueError(f"a key has more than {_MOST_KEY_TUPLES} tuples in it")
            pending.extend(item for item in pending.pop() if isinstance(item, (tuple, frozenset)))
        value = hash(key)
        counts[value] = counts.get(value, 0) + 1
        if counts[value] > _MOST_EQUAL_HASHES:
            raise ValueError(f"more than {_MOST_EQUAL_HASHES} keys of one dict or set have the same hash")
    return found


class _Reader:
    def __init__(
        self,
        data: bytes | memoryview | Bytes,
        builders: Mapping[str, Callable[..., Any]],
        file: str,
        start: int,
        persistent: Callable[[Any], Any] | None,
        constants: Mapping[str, Any],
    ) -> None:
        self._data = data
        self._start = self._at = start
        self._builders = builders
        self._file = file
        self._persistent = persistent
        self._constants = constants
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._budget = ReadBudget()
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        """By id of a dict or set: itself, and by hash the number of its keys that `check_keys` counts."""

    def read(self) -> Pickle:
        try:
            return Pickle(self._run(), self._at)
        except _DAMAGES as error:
            raise FormatError(
                f"{self._file}: the pickle is damaged at byte {self._at} ({brief(error)})", file=self._file
            ) from error

    def _run(self) -> Any:
        """Interprets all opcodes and returns the value.

        The loop handles the most frequent opcodes of ``.metadata`` files and of pickled tensors inline, and
        keeps the offset in a local variable. Both make a large DCP checkpoint open fast
        (benchmarks/interop.py).
        """
        data, stack, memo, size = self._data, self._stack, self._memo, len(self._data)
        push, pop, at = stack.append, stack.pop, self._at
        while at < size:
            opcode = data[at]
            at += 1
            if opcode == 0x94:
                memo[len(memo)] = stack[-1]
            elif opcode == 0x68 and at < size:
                push(memo[data[at]])
                at += 1
            elif opcode == 0x4B and at < size:
                push(data[at])
                at += 1
            elif opcode == 0x6A and at + 3 < size:
                push(memo[data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24])
                at += 4
            elif opcode == 0x28:
                push(_MARK)
            elif opcode == 0x85:
                last = pop()
                push((self._as_value(last) if type(last) in _PLACEHOLDERS else last,))
            elif opcode in _EMPTY:
                push(_EMPTY[opcode]())
            elif opcode == 0x86:
                last, first = pop(), pop()
                if type(last) in _PLACEHOLDERS or type(first) in _PLACEHOLDERS:
                    first, last = self._as_value(first), self._as_value(last)
                push((first, last))
            elif opcode == 0x71 and at < size:
                memo[data[at]] = stack[-1]
                at += 1
            elif opcode in _CONSTANTS:
                push(_CONSTANTS[opcode])
            elif opcode == 0x2E:
                self._at = at
                return self._value()
            else:
                self._at = at
                if opcode in _VALUES:
                    push(_VALUES[opcode](self))
                elif opcode in _CHANGES:
                    _CHANGES[opcode](self)
                else:
                    self._fault(f"the pickle has the opcode {opcode:#04x}, which plain data does not need,")
                at = self._at
        self._at = at
        return self._fault("the pickle ends early: 1 bytes expected, 0 left,")

    def _fault(self, text: str) -> NoReturn:
        raise FormatError(f"{self._file}: {text} at byte {self._at}", file=self._file)

    def _take(self, count: int) -> bytes | bytearray | memoryview:
        if not 0 <= count <= len(self._data) - self._at:
            self._fault(f"the pickle ends early: {count} bytes expected, {len(self._data) - self._at} left,")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, code: str) -> int:
        found = _NUMBERS[code]
        (number,) = found.unpack(self._take(found.size))
        return int(number)

    def _line(self, encoding: str = "utf-8") -> str:
        parts: list[bytes] = []
        while True:
            begin = self._at
            part = bytes(self._data[begin : begin + _LINE_BYTES])
            end = part.find(b"\n")
            if end >= 0:
                self._at = begin + end + 1
                return b"".join([*parts, part[:end]]).decode(encoding)
            parts.append(part)
            self._take(max(len(part), 1))

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            self._fault("the pickle takes a value where it has set a mark,")
        return value

    def _pop_to_mark(self) -> list[Any]:
        stack = self._stack
        mark = self._last_mark()
        items = stack[mark + 1 :]
        del stack[mark:]
        if not _PLACEHOLDERS.isdisjoint(map(type, items)):
            items = [self._as_value(item) for item in items]
        return items

    def _last_mark(self) -> int:
        """Index of the last mark on the stack."""
        stack, at = self._stack, len(self._stack) - 1
        while stack[at] is not _MARK:
            at -= 1  # without a mark, this ends with an IndexError
        return at

    def _value(self) -> Any:
        """Pops a value that goes into a container."""
        value = self._stack.pop()
        return self._as_value(value) if type(value) in _PLACEHOLDERS else value

    def _as_value(self, item: Any) -> Any:
        """An item of the stack as a value. A name becomes its constant or an `Opaque`."""
        if isinstance(item, _Reference):
            return self._constants[item.name] if item.name in self._constants else Opaque(item.name)
        if item is _MARK:
            self._fault("the pickle takes a value where it has set a mark,")
        return item.value if isinstance(item, Unfinished) else item

    def _sized(self, code: str, convert: Callable[[bytes], Any]) -> Any:
        return convert(bytes(self._take(self._number(code))))

    def _checked_items(self, step: int = 1) -> list[Any]:
        """The items after the last mark. Every `step`-th one is a key."""
        items = self._pop_to_mark()
        self._check_keys(items[::step])
        return items

    def _check_keys(self, keys: Sequence[Any], into: Any = None) -> None:
        """Checks keys that go into a container, or into a new one, before they are hashed."""
        _, hashes = self._hashes.get(id(into), (into, {}))
        checked = check_keys(keys, hashes)
        if checked:
            self._budget.charge_arguments(checked, self._at - self._start)
            if into is not None:
                self._hashes[id(into)] = into, hashes

    def _dict(self) -> dict[Any, Any]:
        items = self._checked_items(2)
        return dict(zip(items[::2], items[1::2], strict=True))

    def _global(self) -> _Reference:
        return _Reference(f"{self._line()}.{self._line()}")

    def _stack_global(self) -> _Reference:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            self._fault("the pickle names a class by something that is not text,")
        self._budget.charge(len(module) + len(name), self._at - self._start)
        return _Reference(f"{module}.{name}")

    def _reduced(self) -> Any:
        """An object of a class and a tuple of arguments, or the result of a function."""
        args, reference = self._stack.pop(), self._stack.pop()
        return self._built(reference, args, {})

    def _with_options(self) -> Any:
        options, args = self._pop(), self._pop()
        return self._built(self._pop(), args, options)

    def _resolved(self, identifier: Any) -> Any:
        if self._persistent is None:
            self._fault("the pickle has a persistent identifier")
        return self._persistent(identifier)

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _check_protocol(self) -> None:
        if self._number("<B") > 5:
            self._fault("the pickle has a protocol above 5")

    def _check_frame(self) -> None:
        if self._number("<Q") > len(self._data) - self._at:
            self._fault("the pickle ends early: a frame is longer than the file,")

    def _build(self) -> None:
        """Sets the state of the object on top of the stack."""
        state, into = self._value(), self._stack[-1]
        if type(into) is Opaque:
            into.state = state
        elif isinstance(into, Unfinished):
            self._budget.charge_arguments([state], self._at - self._start)
            into.value = into.with_state(state)
        elif into is _MARK or isinstance(into, _Reference):
            self._fault("the pickle changes a class, or a mark,")

    def _text_value(self, opcode: int) -> Any:
        line = self._line("latin-1")
        if opcode == ord("I") and line in ("00", "01"):
            return line == "01"
        if opcode in (ord("I"), ord("L")):
            return int(line.rstrip("L"))
        if opcode == ord("F"):
            return float(line)
        if opcode == ord("V"):
            return line.encode("latin-1").decode("raw-unicode-escape")
        if len(line) < 2 or line[0] != line[-1] or line[0] not in "'\"":
            self._fault("a string of the pickle has no quotes")
        raw, _ = codecs.escape_decode(line[1:-1].encode("ascii"))
        return raw.decode("latin-1")

    def _add(self, items: Sequence[Any]) -> None:
        into = self._inside()
        if isinstance(into, list):
            into.extend(items)
        elif isinstance(into, set):
            self._check_keys(items, into)
            into.update(items)
        elif isinstance(into, Opaque):
            into.items.extend(items)
        else:
            self._fault(f"the pickle appends to a {type(into).__name__}")

    def _inside(self) -> Any:
        """The container on top of the stack that the pickle fills."""
        into = self._stack[-1]
        return into.value if isinstance(into, Unfinished) else into

    def _set(self, items: Sequence[Any]) -> None:
        into, keys = self._inside(), items[::2]
        pairs = zip(keys, items[1::2], strict=True)
        if isinstance(into, dict):
            self._check_keys(keys, into)
            into.update(pairs)
        elif isinstance(into, Opaque):
            into.items.extend(pairs)
        else:
            self._fault(f"the pickle sets items of a {type(into).__name__}")

    def _built(self, reference: Any, args: Any, options: Any) -> Any:
        if not isinstance(reference, (_Reference, Opaque)):
            self._fault("the pickle calls something that is not a class or a function by name,")
        if not isinstance(args, tuple) or not isinstance(options, dict):
            self._fault(f"the pickle calls {reference.name} with arguments that are not a tuple,")
        if reference.name in _RECONSTRUCTORS and len(args) == 3 and isinstance(args[0], Opaque):
            reference, args = _Reference(args[0].name), ()
        builder = self._builders.get(reference.name) if isinstance(reference, _Reference) else None
        if options or builder is not None:
            values = (*args, *options.values()) if options else args
            self._budget.charge_arguments(values, self._at - self._start)
        if builder is None:
            return Opaque(reference.name, args + tuple(options.items()))
        return builder(*args, **options)


_VALUES: dict[int, Callable[[_Reader], Any]] = {
    ord("K"): lambda reader: reader._number("<B"),
    ord("M"): lambda reader: reader._number("<H"),
    ord("J"): lambda reader: reader._number("<i"),
    ord("G"): lambda reader: struct.unpack(">d", reader._take(8))[0],
    ord("g"): lambda reader: reader._memo[int(reader._line())],
    ord("2"): lambda reader: reader._stack[-1],
    0x87: lambda reader: tuple([reader._value() for _ in range(3)][::-1]),
    ord("t"): lambda reader: tuple(reader._pop_to_mark()),
    ord("l"): _Reader._pop_to_mark,
    0x91: lambda reader: frozenset(reader._checked_items()),
    ord("d"): _Reader._dict,
    ord("c"): _Reader._global,
    0x93: _Reader._stack_global,
    ord("R"): _Reader._reduced,
    0x81: _Reader._reduced,
    0x92: _Reader._with_options,
    ord("o"): lambda reader: reader._built(
        reader._stack.pop(reader._last_mark() + 1), tuple(reader._pop_to_mark()), {}
    ),
    ord("i"): lambda reader: reader._built(reader._global(), tuple(reader._pop_to_mark()), {}),
    ord("Q"): lambda reader: reader._resolved(reader._value()),
    ord("P"): lambda reader: reader._resolved(reader._line()),
    **{code: partial(_Reader._text_value, opcode=code) for code in b"ILFSV"},
    **{code: partial(_Reader._sized, code=size, convert=convert) for code, (size, convert) in _SIZED.items()},
}
"""Opcodes that push a value."""
_CHANGES: dict[int, Callable[[_Reader], Any]] = {
    ord("r"): lambda reader: reader._memoize(reader._number("<I")),
    ord("p"): lambda reader: reader._memoize(int(reader._line())),
    ord("0"): lambda reader: reader._stack.pop(),
    ord("1"): _Reader._pop_to_mark,
    ord("a"): lambda reader: reader._add([reader._value()]),
    ord("e"): lambda reader: reader._add(reader._pop_to_mark()),
    0x90: lambda reader: reader._add(reader._pop_to_mark()),
    ord("s"): lambda reader: reader._set([reader._value(), reader._value()][::-1]),
    ord("u"): lambda reader: reader._set(reader._pop_to_mark()),
    ord("b"): _Reader._build,
    0x80: _Reader._check_protocol,
    0x95: _Reader._check_frame,
    **{
        code: lambda reader: reader._fault("the pickle ends early within the index of a memo,")
        for code in b"hqj"
    },
}
"""Opcodes that change the memo, the stack, or the object on top of it."""

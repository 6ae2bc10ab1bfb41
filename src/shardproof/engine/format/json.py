"""Strict JSON: no duplicate names, bounded nesting, and only one way to read a text.

Note: How duplicates are found
------------------------------
A JSON parser that keeps the last of two equal names hides the first. In a valid text every member has exactly
one colon outside strings. So a text with a duplicate has more such colons than the encoding of the value that
was parsed from it. Counting colons, and brackets for the nesting, is one pass over bytes without a parser. It
is fast on hundreds of megabytes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from shardproof.errors import FormatError

MAX_DEPTH = 200
"""Levels of nested arrays and objects in a text, at most."""

_BLOCK = 1 << 22
_QUOTE, _OPEN, _CLOSE, _COLON = 1, 2, 3, 4
_CLASSES = bytes.maketrans(b'"[{]}:', bytes([_QUOTE, _OPEN, _OPEN, _CLOSE, _CLOSE, _COLON]))
_OTHERS = bytes(set(range(256)) - set(b'"[{]}:'))
_STEP = np.array([0, 0, 1, -1, 0], np.int64)

T = TypeVar("T")


def decode_strictly(decoder: msgspec.json.Decoder[T], text: bytes, file: str) -> T:
    """Decodes a JSON text and refuses what a lenient parser would accept.

    Args:
        decoder: decoder of a type that requires all its fields and forbids others, so that encoding the value
            gives every member of the text again.
        text: JSON in UTF-8.
        file: name of the file in error messages.

    Raises:
        FormatError: the text is not JSON, not of the type, nested too deeply, or an object has one name
        twice.

    >>> decode_strictly(msgspec.json.Decoder(dict[str, int]), b'{"a": 1}', "f")
    {'a': 1}
    >>> decode_strictly(msgspec.json.Decoder(dict[str, int]), b'{"a": 1, "a": 2}', "f")
    Traceback (most recent call last):
    ...
    shardproof.errors.FormatError: f: an object has the same name twice. It was not written by shardproof, \
or was edited.
    """
    depth, members = shape_of_text(text)
    if depth > MAX_DEPTH:
        raise FormatError(
            f"{file}: nested {depth} levels deep, more than the {MAX_DEPTH} allowed.", file=file
        )
    try:
        value = decoder.decode(text)
        again = msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{file}: {error}.", file=file) from error
    if again != text and shape_of_text(again)[1] != members:
        raise FormatError(
            f"{file}: an object has the same name twice. It was not written by shardproof, or was edited.",
            file=file,
        )
    return value


def shape_of_text(text: bytes) -> tuple[int, int]:
    """Levels of nesting in a JSON text, and the number of members of all its objects.

    For bytes that are not JSON the result means nothing, but the time is the same.

    >>> shape_of_text(b'{"a": [[], {"b:]": ":"}]}')
    (3, 2)
    """
    deepest = depth = members = 0
    inside = False  # a string
    if b"\\" in text:
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    for begin in range(0, len(text), _BLOCK):
        classes = np.frombuffer(text[begin : begin + _BLOCK].translate(_CLASSES, _OTHERS), np.uint8)
        quotes = classes == _QUOTE
        outside = np.logical_xor.accumulate(quotes) == inside
        inside ^= bool(quotes.sum() & 1)
        classes = classes[outside]
        members += int(np.count_nonzero(classes == _COLON))
        depths = depth + np.cumsum(_STEP[classes])
        if len(depths):
            deepest = max(deepest, int(depths.max()))
            depth = int(depths[-1])
    return deepest, members

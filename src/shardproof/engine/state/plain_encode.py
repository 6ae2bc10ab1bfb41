"""Encodes plain data as JSON values. `shardproof.engine.state.plain_decode` is the inverse.

None, booleans, integers of 64 bits, finite floats, strings, lists, and dicts with string keys are encoded as
themselves. Every other value is an object with one member whose name starts with ``$``:

=============================================  =====================================================
``{"$tuple": [...]}``                          tuple
``{"$float": "nan" | "inf" | "-inf"}``         float that JSON lacks
``{"$int": "-0x1f..."}``                       integer beyond 64 bits
``{"$complex": [re, im]}``                     complex
``{"$bytes": base64}``, ``{"$bytearray": ..}`` bytes
``{"$stream": [base64, position]}``            `StreamBytes`, if it is stored inline
``{"$set": [...]}``, ``{"$frozenset": [...]}`` sets, in the order of their elements' text
``{"$dict": [[k, v], ...]}``                   dict with other keys
``{"$ordered": [[k, v], ...]}``                OrderedDict
``{"$counter": [[k, v], ...]}``                Counter
``{"$defaultdict": [factory, [[k, v], ...]]}`` defaultdict of a builtin type, or of nothing
``{"$scalar": [dtype, base64]}``               numpy scalar
``{"$array": [dtype, shape, base64]}``         numpy array
``{"$strings": [dtype, array]}``               numpy array of texts or bytes of fixed width, as "<U3" or
                                               "|S3"; its bytes are an array with one more dimension
``{"$value": [dtype, shape, base64]}``         small tensor, stored inline
``{"$dtype": name}``, ``{"$size": [...]}``     torch dtype, torch size
``{"$device": text}``                          torch device
``{"$named": name}``                           a class or function of an option (`ByName`)
``{"$enum": [name, member]}``                  member of a registered enum
``{"$dataclass": [name, {field: value}]}``     registered dataclass
``{"$tensor": key, "digest": xxh3_64}``        tensor, stored as one under this key; the digest only of a
                                               plain one in host memory
``{"$tensor": key, "kind": kind,               array, bytes, bytearray, long text, or long list of only ints
"digest": xxh3_64}``                           or only floats, stored as a tensor
``{"$tensor": key, "kind": "bytes",            `StreamBytes`
"digest": xxh3_64, "position": n}``
=============================================  =====================================================

Dicts are written in insertion order. Ranks compare them in sorted order (`canonical_json`), except for an
OrderedDict, whose order is a part of its value. A value outside the JSON leaves its digest in the JSON, so
that a comparison of ranks still finds different values. A DTensor has no digest, because ranks have parts of
it. A tensor on a device has none, because computing it would make the program wait.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from shardproof.engine.state.plain_types import ByName, StreamBytes, by_name, name_of
from shardproof.engine.state.tensors import array_dtype, as_bytes, check_memory, is_in_host_memory
from shardproof.errors import PlainDataError

INLINE_BYTES = 64
"""Maximum size of arrays and bytes in the JSON. Larger ones become tensors, if there is a `Hoist`."""

LONG_TEXT = 1 << 16
"""Maximum number of characters of a text in the JSON. Longer ones become tensors."""
LONG_LIST = 1000
"""Maximum number of items of a list of numbers in the JSON. Longer ones become tensors."""

Hoist = Callable[[str, str, Any], str]
"""Stores a value as a tensor. Arguments: its path, its kind, and the value (a tensor, a numpy array, or
bytes). Returns its key."""

DEPTH = 190
"""Maximum number of JSON arrays and objects around a container. The format allows 200. The difference is for
the levels around the value (the manifest, an optimizer's options) and the tags of the innermost value."""
FACTORIES: dict[str, Any] = {cls.__name__: cls for cls in (list, dict, set, int, float, str, tuple, bool)}
"""Supported factories of a defaultdict."""
TEXT_KINDS = ("U", "S")
"""Kinds of numpy's dtypes of texts and of bytes, both of fixed width."""
_NATIVE = (type(None), bool)


def encode(value: Any, path: str = "value", hoist: Hoist | None = None) -> Any:
    """Encodes a value.

    Args:
        value: plain data.
        path: path of the value, for errors.
        hoist: stores tensors and large arrays outside the JSON. Without it, arrays of any size and tensors
            are stored inline (for the few options of an optimizer that are tensors).

    Raises:
        PlainDataError: the value contains something that is not plain data. The message says where.

    >>> encode((1, float("inf"), {"b": 2, "a": {3}}))
    {'$tuple': [1, {'$float': 'inf'}, {'b': 2, 'a': {'$set': [3]}}]}
    """
    return _Encoder(path, hoist).encode(value, "", 0)


class _Encoder:
    def __init__(self, path: str, hoist: Hoist | None) -> None:
        self.path = path
        self.hoist = hoist
        self.hoists = hoist is not None and hoist is not _no_tensors

    def refuse(self, inner: str, why: str) -> PlainDataError:
        path = f"{self.path}.{inner}" if inner else self.path
        return PlainDataError(f"{path}: {why}", path=path)

    def encode(self, value: Any, at: str, depth: int) -> Any:
        kind = type(value)
        if kind in _NATIVE:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is str:
            text = self.text(value, at)
            return self.outside("str", at, text.encode()) if len(text) > LONG_TEXT and self.hoists else text
        if depth >= DEPTH:
            raise self.refuse(at[:80], f"nested deeper than {DEPTH} levels of JSON, or contains itself")
        encoder = _ENCODERS.get(kind)
        return self.other(value, at, depth) if encoder is None else encoder(self, value, at, depth)

    def text(self, value: str, at: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise self.refuse(at, f"the text is not valid Unicode ({error})") from error
        return value

    def outside(self, kind: str, at: str, value: bytes | bytearray | np.ndarray[Any, Any]) -> Any:
        """Stores a value as a tensor. Returns the reference."""
        assert self.hoist is not None
        raw = np.frombuffer(value, np.uint8) if isinstance(value, (bytes, bytearray)) else value
        return {"$tensor": self.hoist(at, kind, value), "kind": kind, "digest": _digest(raw)}

    def sequence(self, value: list[Any], at: str, depth: int) -> Any:
        kinds = set(map(type, value)) if self.hoists and len(value) > LONG_LIST else set()
        if kinds == {float}:
            return self.outside("floats", at, np.array(value, np.float64))
        if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
            return self.outside("ints", at, np.array(value, np.int64))
        return self.items(value, at, depth + 1)

    def items(self, value: Any, at: str, depth: int) -> list[Any]:
        """The items of a JSON array. `depth` counts the arrays and objects around them."""
        return [self.encode(item, _join(at, index), depth) for index, item in enumerate(value)]

    def pairs(self, value: Any, at: str, depth: int) -> list[Any]:
        """Pairs of key and value as JSON arrays. `depth` counts the arrays and objects around their items."""
        keys = [self.whole(key, at, depth) for key in value]
        entries = list(zip(value.items(), keys, strict=True))
        encoded: dict[Any, Any] = {}
        # The order of the keys' text, so that tensors have the same names on all ranks.
        for (key, item), _ in sorted(entries, key=lambda entry: _text(entry[1])):
            encoded[key] = self.encode(item, _join(at, key), depth)
        return [[stored, encoded[key]] for (key, _), stored in entries]

    def whole(self, value: Any, at: str, depth: int) -> Any:
        """Encodes a key, or an element of a set. It may not contain tensors."""
        if value != value:
            raise self.refuse(at, "NaN cannot be a key of a dict or an element of a set: it equals nothing")
        return _Encoder(self.path, _no_tensors).encode(value, at, depth)

    def mapping(self, value: dict[Any, Any], at: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            items = {key: self.encode(value[key], _join(at, key), depth + 1) for key in sorted(value)}
            return {self.text(key, at): items[key] for key in value}
        return {"$dict": self.pairs(value, at, depth + 3)}

    def default(self, value: defaultdict[Any, Any], at: str, depth: int) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise self.refuse(
                at, f"a defaultdict of {factory!r} cannot be stored, only one of {', '.join(FACTORIES)}"
            )
        return {"$defaultdict": [name, self.pairs(value, at, depth + 4)]}

    def unordered(self, value: Any, at: str, depth: int) -> list[Any]:
        return sorted((self.whole(item, at, depth + 2) for item in value), key=_text)

    def blob(self, value: bytes | bytearray, at: str, depth: int) -> Any:
        kind = type(value).__name__
        if self.hoists and len(value) > INLINE_BYTES:
            return self.outside(kind, at, value)
        return {f"${kind}": base64.b64encode(value).decode()}

    def stream(self, value: StreamBytes, at: str, depth: int) -> Any:
        """Bytes of any size outside the JSON, if possible: a reader that knows no streams takes the bytes."""
        if self.hoists:
            return {**self.outside("bytes", at, value), "position": value.position}
        return {"$stream": [base64.b64encode(value).decode(), value.position]}

    def array(self, value: np.ndarray[Any, Any], at: str, depth: int) -> Any:
        name = array_dtype(value)
        if value.dtype.kind in TEXT_KINDS:
            return self.strings(value, at, depth)
        if name is None:
            raise self.refuse(at, f"arrays of dtype {value.dtype} cannot be stored")
        if self.hoists and value.nbytes > INLINE_BYTES:
            return self.outside("array", at, value)
        return {"$array": [name, list(value.shape), base64.b64encode(value.tobytes()).decode()]}

    def strings(self, value: np.ndarray[Any, Any], at: str, depth: int) -> Any:
        little = value.dtype.newbyteorder("<") if value.dtype.itemsize else np.dtype(f"<{value.dtype.kind}1")
        raw = np.ascontiguousarray(value.astype(little)[..., None]).view(np.uint8)
        return {"$strings": [little.str, self.array(raw, at, depth + 2)]}

    def tensor(self, value: torch.Tensor, at: str) -> Any:
        if self.hoist is not None:
            reference = {"$tensor": self.hoist(at, "tensor", value)}
            if is_in_host_memory(value):
                reference["digest"] = _digest(as_bytes(value.detach()).numpy())
            return reference
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
            raise self.refuse(at, f"a {type(value).__name__} on {value.device} cannot be stored inline")
        check_memory(value, _join(self.path, at) if at else self.path)
        host = value.detach().cpu()
        text = base64.b64encode(as_bytes(host).numpy().tobytes()).decode()
        return {"$value": [str(host.dtype).removeprefix("torch."), list(host.shape), text]}

    def registered(self, value: Any, kind: str, at: str) -> str:
        """The registered name of a value's class."""
        name = name_of(type(value))
        if name is None:
            raise self.refuse(
                at, f"the {kind} {_full_name(type(value))} is not registered: shardproof.register_{kind}"
            )
        return name

    def other(self, value: Any, at: str, depth: int) -> Any:
        if getattr(type(value), "__stored_as__", None) is int:  # our own `RestoredStep`
            return self.encode(int(value), at, depth)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, at)
        if isinstance(value, (np.str_, np.bytes_)):
            return self.encode(value.item(), at, depth)
        if isinstance(value, np.generic) and array_dtype(np.asarray(value)) is not None:
            return {"$scalar": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, enum.Enum):
            name, member = self.registered(value, "enum", at), value.name
            if member is None or type(value).__members__.get(member) is not value:
                raise self.refuse(
                    at, f"{value!r} is not a single member of its enum, so it has no name. Store its value"
                )
            return {"$enum": [name, member]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            name = self.registered(value, "dataclass", at)
            names = sorted(field.name for field in dataclasses.fields(value))
            fields = {one: self.encode(getattr(value, one), _join(at, one), depth + 3) for one in names}
            return {"$dataclass": [name, fields]}
        raise self.refuse(at, _not_plain(value))


def _digest(array: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _no_tensors(path: str, kind: str, value: Any) -> str:
    raise PlainDataError(f"{path}: a {kind} cannot be a key of a dict or an element of a set", path=path)


_ENCODERS: dict[type, Callable[[_Encoder, Any, str, int], Any]] = {
    list: _Encoder.sequence,
    dict: _Encoder.mapping,
    tuple: lambda e, value, at, depth: {"$tuple": e.items(value, at, depth + 2)},
    set: lambda e, value, at, depth: {"$set": e.unordered(value, at, depth)},
    frozenset: lambda e, value, at, depth: {"$frozenset": e.unordered(value, at, depth)},
    OrderedDict: lambda e, value, at, depth: {"$ordered": e.pairs(value, at, depth + 3)},
    Counter: lambda e, value, at, depth: {"$counter": e.pairs(value, at, depth + 3)},
    defaultdict: _Encoder.default,
    bytes: _Encoder.blob,
    bytearray: _Encoder.blob,
    StreamBytes: _Encoder.stream,
    complex: lambda e, value, at, depth: {"$complex": e.items((value.real, value.imag), at, depth)},
    np.ndarray: _Encoder.array,
    torch.dtype: lambda e, value, at, depth: {"$dtype": str(value).removeprefix("torch.")},
    torch.Size: lambda e, value, at, depth: {"$size": list(value)},
    torch.device: lambda e, value, at, depth: {"$device": str(value)},
    ByName: lambda e, value, at, depth: {"$named": e.text(str(value), at)},
}


def _join(path: str, segment: Any) -> str:
    return f"{path}.{segment}" if path else str(segment)


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _not_plain(value: Any) -> str:
    """What a value is that cannot be stored, and what to do."""
    refused = "cannot be stored: it is not plain data"
    name = by_name(value)
    if name is not None:
        kind = "class" if isinstance(value, type) else "function"
        advice = "Store its name. Of an optimizer, store the optimizer itself, not its state_dict()"
        return f"the {kind} {name} {refused}, but code. {advice}"
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    advice = ". Store its state_dict()" if has_state else " and has no state_dict and load_state_dict"
    return f"a value of {_full_name(type(value))} {refused}{advice}"


_PAIRS = ("$dict", "$counter")
_TAGS = tuple(f'"{tag}"'.encode() for tag in (*_PAIRS, "$defaultdict"))


def canonical_json(data: Any) -> bytes:
    """Encoded plain data as JSON, with every dict in the order of its keys. An OrderedDict keeps its order.

    >>> canonical_json({"b": 1, "a": {"$dict": [[2, "y"], [1, "x"]]}})
    b'{"a":{"$dict":[[1,"x"],[2,"y"]]},"b":1}'
    """
    text = msgspec.json.encode(data, order="deterministic")
    return (
        msgspec.json.encode(_sorted(data), order="deterministic")
        if any(map(text.__contains__, _TAGS))
        else text
    )


def _sorted(data: Any) -> Any:
    if isinstance(data, list):
        return [_sorted(item) for item in data]
    if not isinstance(data, dict):
        return data
    data = {key: _sorted(item) for key, item in data.items()}
    tag = next(iter(data), "")
    if tag in _PAIRS:
        return {tag: sorted(data[tag], key=_key)}
    if tag == "$defaultdict":
        factory, pairs = data[tag]
        return {tag: [factory, sorted(pairs, key=_key)]}
    return data


def _key(pair: list[Any]) -> str:
    return json.dumps(pair[0], sort_keys=True)

"""Decodes JSON values to plain data. `shardproof.engine.state.plain_encode` documents the encoding.

A checkpoint cannot make the decoder run code: it uses only classes that the program has registered.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shardproof._utils.mappings import objects_with
from shardproof.engine.state.plain_encode import DEPTH, FACTORIES
from shardproof.engine.state.plain_types import ByName, StreamBytes, registered
from shardproof.engine.state.tensors import array_dtype, torch_dtype
from shardproof.errors import PlainDataError

_STRINGS = re.compile("<U[1-9][0-9]{0,8}|\\|S[1-9][0-9]{0,8}")
_LAST_CODE_POINT = 0x10FFFF
_KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "array": lambda array: array,
    "bytes": lambda array: array.tobytes(),
    "bytearray": lambda array: bytearray(array.tobytes()),
    "str": lambda array: array.tobytes().decode(),
    "ints": lambda array: _numbers(array, np.int64),
    "floats": lambda array: _numbers(array, np.float64),
}
"""Converts the array of a reference to its value, by kind. The kind "tensor" needs no conversion."""


def decode(data: Any, tensors: Callable[[str], torch.Tensor] | None = None, path: str = "value") -> Any:
    """Decodes a value.

    `tensors` returns the tensor stored under a key (see `references`).

    Raises:
        PlainDataError: `data` is not a valid result of `encode`.

    >>> decode({"$tuple": [1, {"$float": "inf"}]})
    (1, inf)
    """
    return _Decoder(path, tensors).decode(data, 0)


def references(data: Any) -> Iterator[tuple[str, str]]:
    """Key and kind of every tensor that encoded data refers to.

    >>> list(references({"a": {"$tensor": "object.a", "kind": "bytes"}}))
    [('object.a', 'bytes')]
    """
    for item in objects_with(data, "$tensor"):
        key, kind = item["$tensor"], item.get("kind", "tensor")
        if type(key) is not str or type(kind) is not str or (kind != "tensor" and kind not in _KINDS):
            raise PlainDataError(f"malformed reference to a tensor: {str(item)[:200]}")
        yield key, kind


class _Decoder:
    def __init__(self, path: str, tensors: Callable[[str], torch.Tensor] | None) -> None:
        self.path = path
        self.tensors = tensors

    def decode(self, data: Any, depth: int) -> Any:
        if depth > DEPTH + 10:
            raise PlainDataError(f"{self.path}: nested too deeply", path=self.path)
        if isinstance(data, list):
            return [self.decode(item, depth + 1) for item in data]
        if not isinstance(data, dict):
            return data
        if "$tensor" in data:
            return self.reference(data)
        tag = next(iter(data), "")
        if not tag.startswith("$"):
            return {key: self.decode(item, depth + 1) for key, item in data.items()}
        decoder = _DECODERS.get(tag)
        if decoder is None or len(data) != 1:
            raise PlainDataError(
                f"{self.path}: this version of shardproof does not support plain data of kind {tag!r}",
                path=self.path,
            )
        try:
            return decoder(self, data[tag], depth + 1)
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
            raise PlainDataError(f"{self.path}: malformed {tag!r}: {error}", path=self.path) from error

    def pairs(self, data: Any, depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(key, depth), self.decode(item, depth)) for key, item in data]

    def default(self, data: Any, depth: int) -> Any:
        name, pairs = data
        return defaultdict(None if name is None else FACTORIES[name], self.pairs(pairs, depth))

    def array(self, data: Any, depth: int) -> Any:
        name, shape, text = data
        raw = np.frombuffer(base64.b64decode(text, validate=True), _numpy_dtype(name))
        return raw.reshape(_shape(shape)).copy()

    def strings(self, data: Any, depth: int) -> Any:
        name, stored = data
        if type(name) is not str or not _STRINGS.fullmatch(name):
            raise ValueError(f"{name!r} is not a dtype of texts")
        dtype, raw = np.dtype(name), self.decode(stored, depth)
        if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.ndim == 0:
            raise ValueError("the bytes of the texts are not an array of uint8")
        if not raw.size:  # also while a load checks the value, before it reads the bytes
            if math.prod(raw.shape[:-1]):
                raise ValueError(f"texts of shape {raw.shape[:-1]} have no bytes")
            return np.zeros(raw.shape[:-1], dtype)
        if raw.shape[-1] != dtype.itemsize or (
            dtype.kind == "U" and raw.view("<u4").max() > _LAST_CODE_POINT
        ):
            raise ValueError(f"{raw.shape[-1]} bytes are not a text of dtype {name}")
        return raw.view(dtype).reshape(raw.shape[:-1])

    def scalar(self, data: Any, depth: int) -> Any:
        name, text = data
        (value,) = np.frombuffer(base64.b64decode(text, validate=True), _numpy_dtype(name))
        return value

    @torch.inference_mode(False)
    def value(self, data: Any, depth: int) -> torch.Tensor:
        name, shape, text = data
        buffer = bytearray(base64.b64decode(text, validate=True))
        # torch.frombuffer rejects an empty buffer.
        raw = (
            torch.frombuffer(buffer, dtype=torch.uint8)
            if buffer
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return raw.clone().view(torch_dtype(name)).reshape(_shape(shape))

    def member(self, data: Any, depth: int) -> Any:
        name, member = data
        return registered("enum", name, self.path)[member]

    def record(self, data: Any, depth: int) -> Any:
        name, stored = data
        cls = registered("dataclass", name, self.path)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if stored.keys() - fields.keys():
            raise ValueError(f"{name} has no field {', '.join(sorted(stored.keys() - fields.keys()))}")
        instance = cls.__new__(cls)
        for field in fields.values():
            if field.name in stored:
                value = self.decode(stored[field.name], depth)
            elif field.default is not dataclasses.MISSING:
                value = field.default
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            else:
                raise ValueError(f"the field {field.name} of {name} is not stored and has no default")
            object.__setattr__(instance, field.name, value)
        return instance

    def reference(self, data: Any) -> Any:
        ((key, kind),) = references(data)
        if self.tensors is None:
            raise PlainDataError(
                f"{self.path}: the value refers to the tensor {key}, and none is available here",
                path=self.path,
            )
        tensor = self.tensors(key)
        if kind == "tensor":
            return tensor
        try:
            value = _KINDS[kind](tensor.detach().cpu().numpy())
            return StreamBytes(value, data["position"]) if "position" in data else value
        except (ValueError, TypeError) as error:
            raise PlainDataError(f"{self.path}: {key} is not stored as {kind}: {error}", path=key) from error


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if array_dtype(np.empty(0, dtype)) != name:
        raise ValueError(f"{name!r} is not the dtype of an array that can be stored")
    return dtype


def _numbers(array: np.ndarray[Any, Any], dtype: Any) -> list[Any]:
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"found {array.dtype} of {array.ndim} dimensions, expected 1-D {np.dtype(dtype)}")
    numbers: list[Any] = array.tolist()
    return numbers


def _shape(shape: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    return tuple(shape)


def _name(text: Any) -> ByName:
    if type(text) is not str:
        raise ValueError(f"{text!r} is not a name")
    return ByName(text)


_DECODERS: dict[str, Callable[[_Decoder, Any, int], Any]] = {
    "$tuple": lambda d, data, depth: tuple([d.decode(item, depth) for item in data]),
    "$float": lambda d, data, depth: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[data],
    "$int": lambda d, data, depth: int(data, 16),
    "$complex": lambda d, data, depth: complex(d.decode(data[0], depth), d.decode(data[1], depth)),
    "$bytes": lambda d, data, depth: base64.b64decode(data, validate=True),
    "$bytearray": lambda d, data, depth: bytearray(base64.b64decode(data, validate=True)),
    "$stream": lambda d, data, depth: StreamBytes(base64.b64decode(data[0], validate=True), data[1]),
    "$set": lambda d, data, depth: {d.decode(item, depth) for item in data},
    "$frozenset": lambda d, data, depth: frozenset([d.decode(item, depth) for item in data]),
    "$dict": lambda d, data, depth: dict(d.pairs(data, depth)),
    "$ordered": lambda d, data, depth: OrderedDict(d.pairs(data, depth)),
    "$counter": lambda d, data, depth: Counter(dict(d.pairs(data, depth))),
    "$defaultdict": _Decoder.default,
    "$scalar": _Decoder.scalar,
    "$array": _Decoder.array,
    "$strings": _Decoder.strings,
    "$value": _Decoder.value,
    "$dtype": lambda d, data, depth: torch_dtype(data),
    "$size": lambda d, data, depth: torch.Size(_shape(data)),
    "$device": lambda d, data, depth: torch.device(data),
    "$named": lambda d, data, depth: _name(data),
    "$enum": _Decoder.member,
    "$dataclass": _Decoder.record,
}

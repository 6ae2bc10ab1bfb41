"""Plain values of the classes that state dicts hold beside tensors: containers, numpy, torch's small types.

The tables are arguments of `read_pickle`. A builder allocates no more than its arguments hold, and calls no
name of the pickle.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from shardproof._utils.humanize import brief
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Opaque, Unreadable, shape_of
from shardproof.engine.state import StreamBytes
from shardproof.formats.pickles.pickle_data import Unfinished, check_keys

CONSTANTS: Mapping[str, Any] = {
    f"torch.{name}": getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""The dtypes of torch by their names in pickles."""

_FACTORIES: Mapping[str, type] = {
    f"{module}.{kind.__name__}": kind
    for module in ("builtins", "__builtin__")
    for kind in (list, dict, set, int, float, str, tuple, bool)
}
"""Factories that a defaultdict may have."""

_NUMPY_KINDS = {"O": "object", "M": "datetime64", "m": "timedelta64", "V": "a structure"}
_NUMPY_REMEDY = "Load it with torch.load, and save an array of numbers or texts, or a list of plain values"
_SIMPLE_DTYPE = re.compile(r"[<>|=]?[biufcSUa?][0-9]*")


@cache
def plain_builders() -> Mapping[str, Callable[..., Any]]:
    """Builders by name.

    A Namespace is a dict, a path is a string, and a deque is a list. A BytesIO is `StreamBytes`, which are
    bytes.

    Example:
        >>> import argparse, pickle
        >>> from shardproof.formats.pickles.pickle_data import read_pickle
        >>> data = pickle.dumps({"args": argparse.Namespace(lr=0.1), "rng": np.arange(3)}, 2)
        >>> read_pickle(data, plain_builders(), file="example").value
        {'args': {'lr': 0.1}, 'rng': array([0, 1, 2])}
    """
    builders: dict[str, Callable[..., Any]] = {
        "torch.Size": _size,
        "torch.device": _device,
        "collections.OrderedDict": _ordered,
        "collections.defaultdict": _default,
        "collections.Counter": lambda items=(): Counter(_ordered(items)),
        "collections.deque": lambda items=(), most=None: _items(items),
        "argparse.Namespace": _namespace,
        "types.SimpleNamespace": _namespace,
        "_io.BytesIO": _bytes_io,
        "io.BytesIO": _bytes_io,
        "_codecs.encode": _encode,
        "numpy.dtype": _numpy_dtype,
    }
    for module in ("builtins", "__builtin__"):
        builders |= {
            f"{module}.set": lambda items=(): set(_hashable(items)),
            f"{module}.frozenset": lambda items=(): frozenset(_hashable(items)),
            f"{module}.complex": complex,
            f"{module}.bytes": _bytes,
            f"{module}.bytearray": lambda *args: bytearray(_bytes(*args)),
        }
    for module in ("numpy.core", "numpy._core"):
        builders |= {
            f"{module}.multiarray._reconstruct": _array,
            f"{module}.multiarray.scalar": _scalar,
            f"{module}.numeric._frombuffer": _array_of_buffer,
        }
    for module in ("pathlib", "pathlib._local"):
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            builders[f"{module}.{kind}"] = lambda *parts: str(PurePosixPath(*parts))
    return builders


def _size(sizes: Any = ()) -> torch.Size:
    if any(type(size) is not int for size in sizes):
        raise ValueError("a torch.Size has values that are not integers")
    return torch.Size(sizes)


def _device(kind: str, index: int | None = None) -> Any:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise ValueError("a device is a name and a number")
    text = kind if index is None else f"{kind}:{index}"
    try:
        return torch.device(text)
    except RuntimeError:  # this version of torch does not know this kind of device
        return text


def _items(items: Any) -> list[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):  # the characters of a text need more memory
        raise ValueError(f"the items of a container are a {type(items).__name__}")
    return list(items)


def _hashable(items: Any) -> list[Any]:
    keys = _items(items)
    check_keys(keys)
    return keys


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = list(items.items()) if isinstance(items, Mapping) else _items(items)
    check_keys(key for key, _ in pairs)
    return OrderedDict(pairs)


def _default(factory: Any = None, items: Any = ()) -> Any:
    made = _FACTORIES.get(factory.name) if isinstance(factory, Opaque) else None
    if factory is not None and made is None:
        return _ordered(items)
    return defaultdict(made, _ordered(items))


def _namespace(**attributes: Any) -> Unfinished:
    return Unfinished(attributes, dict)


def _bytes_io(data: Any = b"") -> Unfinished:
    return Unfinished(StreamBytes(_bytes(data)), lambda state: StreamBytes(_bytes(state[0]), state[1]))


def _bytes(data: Any = b"", encoding: str = "latin-1") -> bytes:
    if isinstance(data, str):
        return _encode(data, encoding)
    if not isinstance(data, (bytes, bytearray)):  # bytes(10 ** 12) would allocate as many bytes
        raise ValueError(f"bytes are made of a {type(data).__name__}")
    return bytes(data)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"the encoding {brief(encoding)} is not the one of pickled bytes")
    return text.encode("latin-1")


def _numpy_dtype(code: Any, *options: Any) -> Unfinished | Opaque:
    if not isinstance(code, str) or not _SIMPLE_DTYPE.fullmatch(code):
        return Opaque("numpy.dtype", (code, *options))
    dtype = np.dtype(code)

    def ordered(state: Any) -> Any:
        if any(field is not None for field in state[2:5]):
            return Opaque("numpy.dtype", (code, *options), state)
        return dtype.newbyteorder(state[1])

    return Unfinished(dtype, ordered)


def _array(kind: Any, shape: Any, code: Any) -> Unfinished:
    def filled(state: Any) -> Any:
        shape, dtype, is_fortran, data = state[-4:]
        if not isinstance(dtype, np.dtype):
            return _unreadable(dtype)
        return _filled(_bytes(data), dtype, shape, "F" if is_fortran else "C")

    return Unfinished(np.empty(0), filled)


def _array_of_buffer(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    if not isinstance(dtype, np.dtype):
        return _unreadable(dtype)
    return _filled(_bytes(data), dtype, shape, order)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, np.dtype):
        return _unreadable(dtype)
    return _filled(_bytes(data), dtype, (), "C")[()]


def _unreadable(dtype: Any) -> Unreadable:
    code = dtype.args[0] if isinstance(dtype, Opaque) and dtype.args else None
    name = _NUMPY_KINDS.get(str(code)[:1], "unknown")
    return Unreadable(f"a numpy value of dtype {name}", _NUMPY_REMEDY)


def _filled(data: bytes, dtype: np.dtype[Any], shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """An array from its bytes, in the byte order of this machine."""
    sizes = shape_of(shape)
    if prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {sizes} and dtype {dtype} has {len(data)} bytes")
    native = dtype.newbyteorder("=")
    if not data:
        return np.empty(sizes, native)
    return np.array(np.frombuffer(data, dtype).reshape(sizes, order=order), native, order="K")

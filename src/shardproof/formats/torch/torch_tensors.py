"""What the classes in pickles of ``torch.save`` give: descriptions of tensors and storages, and plain values.

The tables are arguments of `read_pickle`. A builder allocates no more than its arguments hold, and calls no
name of the pickle.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from shardproof.errors import FormatError
from shardproof.formats.pickle_data import Bytes, Pickle, Unfinished, check_keys, read_pickle

STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}


_QUANTISED = {"QInt8": 1, "QUInt8": 1, "QInt32": 4, "QUInt4x2": 1, "QUInt2x4": 1}
"""Kinds of the storages of quantised tensors, and bytes of an element of the storage."""
CONVERT = "Load it with torch, convert it to a dtype that can be stored, and save it again"
"""Remedy for a tensor of a dtype that cannot be held."""
_DEQUANTISE = (
    "Load it with torch.load, and save its dequantize(), or its int_repr() with the scales and zero points"
)
_TO_DENSE = "Load it with torch.load, and save its to_dense(), or its indices and values"
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


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """A storage that a pickle refers to."""

    key: str
    dtype: str
    """Dtype of the elements, "uint8" for an untyped storage. Names outside of `DTYPES` are those of storages
    that are not read."""
    numel: int
    itemsize: int | None
    """Bytes of an element; None if they are not known."""

    @property
    def nbytes(self) -> int | None:
        """Bytes of the elements; None if they are not known."""
        return None if self.itemsize is None else self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor in a file of ``torch.save``, not read yet."""

    storage: str
    """Key of the storage; tensors with one key share memory."""
    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """First element, counted from the start of the storage in elements of this dtype."""
    is_conjugated: bool = False
    """True if the storage holds the complex conjugates."""
    is_negated: bool = False
    """True if the storage holds the negative values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def torch_storage(path: str, identifier: Any) -> TorchStorage:
    """The storage of a persistent identifier: ("storage", class, key, device, number of elements)."""
    match identifier:
        case ("storage", Opaque(name=name), str(key), str(), int(numel), *view) if 0 <= numel < 1 << 62:
            kind = name.removeprefix("torch.").removeprefix("cuda.").removesuffix("Storage")
        case str():
            raise FormatError(
                f"{path}: it was saved with pickle_protocol=0, which loses the storages. torch.load cannot "
                "read it either: save it again with another protocol",
                file=path,
            )
        case _:
            raise FormatError(f"{path}: a persistent identifier is not a storage", file=path)
    if any(part is not None for part in view):
        return TorchStorage(key, f"{name}, a view of another storage as in torch before 1.0", numel, None)
    if name in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return TorchStorage(key, "uint8", numel, 1)
    if kind in STORAGE_DTYPES:
        dtype = STORAGE_DTYPES[kind]
        return TorchStorage(key, dtype, numel, DTYPES[dtype].itemsize)
    return TorchStorage(key, name, numel, _QUANTISED.get(kind))


def read_torch_pickle(
    data: bytes | Bytes, persistent: Callable[[Any], TorchStorage], *, file: str, start: int = 0
) -> Pickle:
    """Reads a pickle with tensors; see `read_pickle`."""
    return read_pickle(
        data, torch_builders(), file=file, start=start, persistent=persistent, constants=CONSTANTS
    )


def _tensor(
    storage: TorchStorage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: str,
    metadata: Mapping[str, bool] | None,
) -> TorchTensor | Unreadable:
    """A tensor whose elements all lie in its storage."""
    shape, stride = shape_of(shape), shape_of(stride)
    if dtype not in DTYPES or storage.itemsize is None:
        return Unreadable(f"a tensor of {dtype} and shape {list(shape)}", CONVERT)
    (offset,) = shape_of((offset,))
    if len(shape) != len(stride):
        raise ValueError("shape, strides or offset of a tensor are not valid")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * DTYPES[dtype].itemsize > storage.numel * storage.itemsize:
        raise ValueError(f"a tensor of shape {shape} does not fit into its storage {brief(storage.key)}")
    flags = metadata or {}
    if not flags.keys() <= {"conj", "neg"}:
        raise ValueError(f"the tensor flags {brief(list(flags))} are unknown")
    is_conjugated, is_negated = bool(flags.get("conj")), bool(flags.get("neg"))
    return TorchTensor(storage.key, dtype, shape, stride, offset, is_conjugated, is_negated)


def _rebuild_v2(
    storage: TorchStorage,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
) -> TorchTensor | Unreadable:
    return _tensor(storage, offset, shape, stride, storage.dtype, metadata)


def _rebuild_v3(
    storage: TorchStorage,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: torch.dtype | Opaque,
    metadata: Any = None,
) -> TorchTensor | Unreadable:
    name = dtype.name if isinstance(dtype, Opaque) else str(dtype).removeprefix("torch.")
    return _tensor(storage, offset, shape, stride, name, metadata)


def _without_elements(what: str, remedy: str) -> Callable[..., Unreadable]:
    """A builder of tensors whose elements are not in one dense storage of a dtype that can be held."""
    return lambda *args: Unreadable(what, remedy)


def _quantised(storage: TorchStorage, offset: Any, shape: Any, *args: Any) -> Unreadable:
    return Unreadable(f"a quantised tensor of {storage.dtype} and shape {list(shape_of(shape))}", _DEQUANTISE)


def _rebuild_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Builds a tensor with attributes, or a tensor subclass that has the elements of a plain tensor."""
    builder = _REBUILDERS.get(function.name) if isinstance(function, Opaque) else None
    if builder is None or not isinstance(args, tuple):
        return Opaque("torch._tensor._rebuild_from_type_v2", (function, kind, args, state))
    return builder(*args)


_REBUILDERS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
}


_NOT_DENSE: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _without_elements("a sparse tensor", _TO_DENSE),
    "torch._utils._rebuild_nested_tensor": _without_elements(
        "a nested tensor", "Load it with torch.load, and save the list of its unbind()"
    ),
    "torch._utils._rebuild_meta_tensor_no_storage": _without_elements(
        "a tensor on the device meta, which has no elements", "Save the real tensor"
    ),
}
"""Builders of tensors that are not read."""


@cache
def torch_builders() -> Mapping[str, Callable[..., Any]]:
    """Builders of the values in a state dict. None of them allocates more than its arguments hold."""
    return {
        **plain_builders(),
        **_REBUILDERS,
        **_NOT_DENSE,
        "torch._tensor._rebuild_from_type_v2": _rebuild_subclass,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    }


@cache
def plain_builders() -> Mapping[str, Callable[..., Any]]:
    """Builders by name.

    A Namespace is a dict, a path is a string, and a deque is a list. A BytesIO is `StreamBytes`, which are
    bytes.

    Example:
        >>> import argparse, pickle
        >>> from shardproof.formats.pickle_data import read_pickle
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

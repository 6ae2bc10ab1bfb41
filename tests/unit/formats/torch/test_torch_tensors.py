"""Objects of common classes are read from pickles as plain data, in any protocol, and damage is an error."""

from __future__ import annotations

import argparse
import io
import pickle  # noqa: TID251 the pickles to read as data
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.engine.foreign import Opaque, Unreadable
from shardproof.engine.state import StreamBytes
from shardproof.errors import FormatError
from shardproof.formats.pickle_data import read_pickle
from shardproof.formats.torch.torch_tensors import CONSTANTS, plain_builders


def read(data: bytes) -> Any:
    return read_pickle(data, plain_builders(), file="a", constants=CONSTANTS).value


VALUES = [
    (OrderedDict(z=1, a=2), OrderedDict(z=1, a=2)),
    (defaultdict(list, a=[1]), defaultdict(list, a=[1])),
    (Counter("aab"), Counter("aab")),
    (deque([1, 2], maxlen=3), [1, 2]),
    (argparse.Namespace(lr=0.1, more=argparse.Namespace()), {"lr": 0.1, "more": {}}),
    (SimpleNamespace(a=(1, 2)), {"a": (1, 2)}),
    (io.BytesIO(b"\0\xff"), StreamBytes(b"\0\xff")),
    (PosixPath("/a/b"), "/a/b"),
    (torch.Size([2, 3]), torch.Size([2, 3])),
    (torch.device("cuda", 1), torch.device("cuda", 1)),
    ({(torch.float32, torch.bfloat16): torch.int8}, {(torch.float32, torch.bfloat16): torch.int8}),
    (b"\0\xff", b"\0\xff"),
    (bytearray(b"\0\xff"), bytearray(b"\0\xff")),
    (1 - 2j, 1 - 2j),
    ({1, 2}, {1, 2}),
    (frozenset("ab"), frozenset("ab")),
    (random.Random(3).getstate(), random.Random(3).getstate()),
]
ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
    np.array([["a", "bc"]]),
    np.array(1 + 2j),
    np.empty((0, 3), np.uint8),
]


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_common_classes_are_plain_data(protocol: int) -> None:
    for value, expected in VALUES:
        if protocol < 2 and isinstance(value, io.BytesIO):  # these protocols cannot pickle it
            continue
        found = read(pickle.dumps(value, protocol))
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_and_scalars_are_those_of_numpy_1_and_2(protocol: int, module: str) -> None:
    values: list[Any] = [*ARRAYS, np.float32(1.5), np.int64(-7), np.bool_(True), np.str_("ab")]
    for value in values:
        data = pickle.dumps([value, value], protocol)
        if protocol < 4:  # a name has no length here
            data = data.replace(b"numpy._core.multiarray", module.encode())
        found, again = read(data)
        assert np.array_equal(found, value), value
        assert (found.shape, found.dtype) == (value.shape, value.dtype.newbyteorder("="))
        assert again is found


def test_arrays_of_objects_and_records_are_named_and_not_read() -> None:
    values = {
        "object": np.array([{}, ()], object),
        "a structure": np.zeros(2, [("a", int)]),
        "datetime64": np.array(3, "M8[s]"),
    }
    for kind, value in values.items():
        found = read(pickle.dumps(value, 2))
        assert isinstance(found, Unreadable)
        assert found.kind == f"a numpy value of dtype {kind}"


def test_a_class_that_shares_a_module_with_a_known_one_is_inert() -> None:
    assert isinstance(read(pickle.dumps(argparse.ArgumentTypeError("a"))), Opaque)
    assert isinstance(read(b"cbuiltins\neval\n(X\x01\x00\x00\x00atR."), Opaque)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"cbuiltins\nbytes\n(J\xff\xff\xff\x7ftR.", "bytes are made of a int"),
        (b"ctorch\nSize\n((J\xff\xff\xff\xfftltR.", "damaged"),
        (b"cnumpy\ndtype\n(X\x02\x00\x00\x00f8tR(K\x03X\x01\x00\x00\x00?NNNtb.", "damaged"),
        (b"(" * 1 + b")" + b"\x85" * 5000 + b"K\x01d.", "tuples"),
        (b"})" + b"2\x86" * 200 + b"K\x01s.", "tuples"),
        (b"cbuiltins\nset\n(()" + b"2\x86" * 200 + b"ltR.", "too often"),
    ],
)
def test_bombs_are_refused_at_once(data: bytes, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        read(data)


def test_an_array_of_a_false_size_is_refused() -> None:
    data = pickle.dumps(np.arange(6, dtype=np.int64).reshape(2, 3), 2)
    assert b"K\x02K\x03\x86" in data
    for lie in (b"K\x02K\x04\x86", b"K\x02J\xff\xff\xff\x7f\x86", b"K\x02J\xff\xff\xff\xff\x86"):
        with pytest.raises(FormatError, match="damaged"):
            read(data.replace(b"K\x02K\x03\x86", lie))


def test_every_changed_byte_is_a_value_or_a_format_error() -> None:
    values = [value for value, _ in VALUES[:-1]]
    for protocol in (2, 5):
        whole = pickle.dumps([values, ARRAYS, np.float32(1)], protocol)
        for at in range(0, len(whole), 3):
            for mask in (0x01, 0xFF):
                damaged = bytearray(whole)
                damaged[at] ^= mask
                try:
                    read(bytes(damaged))
                except FormatError:
                    pass

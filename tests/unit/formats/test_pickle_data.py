"""Pickles read as data equal what pickle reads, and no code runs."""

from __future__ import annotations

import argparse
import pickle  # noqa: TID251 the pickles to read as data
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.foreign.reader import Opaque
from shardproof.errors import FormatError
from shardproof.formats.pickle_data import read_pickle

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=30,
)
PROTOCOLS = st.integers(0, 5)


def builders() -> dict[str, Any]:
    """The builders that protocols below 4 need for bytes and sets."""
    return {
        "_codecs.encode": lambda text, encoding: text.encode(encoding),
        "__builtin__.bytes": bytes,
        "builtins.bytes": bytes,
        "__builtin__.set": set,
        "builtins.set": set,
        "__builtin__.frozenset": frozenset,
        "builtins.frozenset": frozenset,
    }


@given(VALUES, PROTOCOLS)
def test_plain_values_equal_those_that_pickle_reads(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found = read_pickle(data + b"more", builders(), file="a")
    assert found.value == pickle.loads(data)
    assert found.end == len(data)


@given(VALUES, PROTOCOLS, st.data())
def test_a_cut_pickle_is_an_error(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FormatError):
        read_pickle(whole[:cut], builders(), file="a")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_format_error(data: bytes) -> None:
    try:
        read_pickle(data, {}, file="a")
    except FormatError:
        pass


@given(VALUES, PROTOCOLS, st.data())
def test_a_changed_byte_is_a_value_or_a_format_error(value: Any, protocol: int, data: st.DataObject) -> None:
    damaged = bytearray(pickle.dumps(value, protocol))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(damaged), builders(), file="a")
    except FormatError:
        pass


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_runs(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": Touches(tmp_path / "ran")}, protocol)
    value = read_pickle(data, {}, file="a").value
    assert isinstance(value["a"], Opaque)
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists()  # the same bytes run code under pickle


def test_unknown_classes_keep_their_name_and_state() -> None:
    data = pickle.dumps([argparse.Namespace(lr=0.1), argparse.Namespace])
    made, kind = read_pickle(data, {}, file="a").value
    assert (made.name, made.args, made.state) == ("argparse.Namespace", (), {"lr": 0.1})
    assert (kind.name, kind.args) == ("argparse.Namespace", None)
    assert repr(kind) == "<argparse.Namespace, not imported>"


def test_known_classes_are_made_by_their_builders() -> None:
    data = pickle.dumps(OrderedDict(a=1, b=[2]))
    assert read_pickle(data, {"collections.OrderedDict": dict}, file="a").value == {"a": 1, "b": [2]}


def test_lists_that_contain_themselves_are_read() -> None:
    value: list[Any] = [1]
    value.append(value)
    found = read_pickle(pickle.dumps(value), {}, file="a").value
    assert found[1] is found


def test_persistent_identifiers_go_to_the_caller() -> None:
    data = b"\x80\x02(X\x07\x00\x00\x00storageK\x05tQ."
    assert read_pickle(data, {}, file="a", persistent=lambda found: found).value == ("storage", 5)
    with pytest.raises(FormatError, match="persistent identifier"):
        read_pickle(data, {}, file="a")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"a.", "ends early"),
        (b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.", "longer than the file"),
        (b"\x80\x06N.", "protocol above 5"),
        (b"\x82\x01.", "opcode 0x82"),
        (b"]}R.", "not a class or a function"),
        (b"cos\nsystem\n}b.", "changes a class"),
        (b"cos\nsystem\n]R.", "not a tuple"),
        (b"K\x01K\x02a.", "appends to a int"),
        (b"h\x07.", "damaged"),
        (b"(.", "mark"),
        (b"}]Ns.", "damaged"),
    ],
)
def test_opcodes_that_plain_data_does_not_need_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        read_pickle(data, {}, file="a")


def test_a_builder_that_fails_is_a_format_error() -> None:
    data = pickle.dumps(argparse.Namespace)
    called = data[:-1] + b"X\x01\x00\x00\x00a\x85R."
    with pytest.raises(FormatError, match="AttributeError"):
        read_pickle(called, {"argparse.Namespace": lambda text: text.nothing}, file="a")


def test_a_large_memo_index_costs_nothing() -> None:
    data = b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b"."
    assert read_pickle(data, {}, file="a").value is None

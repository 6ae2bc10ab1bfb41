"""Pickles that are written opcode by opcode: Python's pickle and `read_pickle` read the same value."""

from __future__ import annotations

import argparse
import math
import pickle  # noqa: TID251 the reader that others use
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.foreign.reader import Opaque
from shardproof.formats.pickle_data import read_pickle
from shardproof.formats.pickle_writer import Named, Persistent, PickledCall, write_pickle
from tests.unit.formats.test_pickle_data import VALUES, builders

PROTOCOLS = st.sampled_from([2, 4])


@given(VALUES, PROTOCOLS)
def test_values_are_read_as_they_were_written(value: Any, protocol: int) -> None:
    data = write_pickle(value, protocol)
    assert pickle.loads(data) == value
    found = read_pickle(data, builders(), file="a")
    assert found.value == value
    assert found.end == len(data)


@given(VALUES)
def test_types_are_those_that_were_written(value: Any) -> None:
    """1, 1.0 and True are equal, and so are sets and frozen sets."""
    assert repr(pickle.loads(write_pickle([value], 4))) == repr(pickle.loads(pickle.dumps([value], 4)))


@pytest.mark.parametrize("protocol", [2, 4])
def test_numbers_of_every_width(protocol: int) -> None:
    numbers = [sign * (1 << bits) + by for bits in range(70) for sign in (1, -1) for by in (-1, 0, 1)]
    values = [*numbers, 1 << 3000, -(1 << 3000), 0.0, -0.0, math.inf, math.pi, sys.float_info.min]
    found = pickle.loads(write_pickle(values, protocol))
    assert found == values
    assert math.copysign(1, found[-4]) == -1
    assert math.isnan(pickle.loads(write_pickle(math.nan, protocol)))


@pytest.mark.parametrize("protocol", [2, 4])
def test_long_texts_bytes_and_containers(protocol: int) -> None:
    value = {
        "text": ["é" * 127, "é" * 128, "x" * 100_000, ""],
        "bytes": [bytes(255), bytes(256), bytes(range(256)) * 500, bytearray(range(256))],
        "list": list(range(5001)),
        "dict": {number: str(number) for number in range(3001)},
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "one": {"a": [1]},
    }
    assert pickle.loads(write_pickle(value, protocol)) == value
    assert read_pickle(
        write_pickle(value, protocol), {**builders(), "builtins.bytearray": bytearray}, file="a"
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_two_references_to_an_object_stay_one_object(protocol: int) -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    first, second = pickle.loads(write_pickle([shared, shared], protocol))
    assert first is second
    assert first[1] is first


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_names_and_references(protocol: int) -> None:
    """References beyond the 256th take four bytes."""
    made = [PickledCall(Named("argparse", "Namespace"), state={"number": number}) for number in range(400)]
    found = pickle.loads(write_pickle([made, made], protocol))
    assert [item.number for item in found[0]] == list(range(400))
    assert found[0] is found[1] or all(one is other for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_are_named_and_not_imported(protocol: int) -> None:
    value = [
        PickledCall(Named("argparse", "Namespace"), state={"lr": 0.1}, is_new=True),
        PickledCall(Named("collections", "OrderedDict"), pairs=[("b", 1), ("a", 2)]),
        Named("no.such", "Module.inner"),
    ]
    data = write_pickle(value, protocol)
    assert "no" not in sys.modules
    made, ordered, reference = read_pickle(data, {}, file="a").value
    assert (made.name, made.args, made.state) == ("argparse.Namespace", (), {"lr": 0.1})
    assert (ordered.name, ordered.items) == ("collections.OrderedDict", [("b", 1), ("a", 2)])
    assert isinstance(reference, Opaque)
    assert reference.name == "no.such.Module.inner"
    read = pickle.loads(write_pickle(value[:2], protocol))
    assert read[0] == argparse.Namespace(lr=0.1)
    assert list(read[1].items()) == [("b", 1), ("a", 2)]


def test_persistent_identifiers() -> None:
    data = write_pickle([Persistent(("storage", 5))], 2)
    assert read_pickle(data, {}, file="a", persistent=lambda found: found).value == [("storage", 5)]


def test_other_objects_are_described_by_the_caller() -> None:
    inner = argparse.Namespace(a=1)

    def describe(value: Any) -> Any:
        return PickledCall(Named("argparse", "Namespace"), state=vars(value)) if value is inner else None

    first, second = pickle.loads(write_pickle([inner, inner], 4, describe=describe))
    assert first == inner
    assert first is second
    with pytest.raises(TypeError, match="object of builtins.object"):
        write_pickle([object()], 4, describe=describe)
    with pytest.raises(TypeError, match="object of builtins.object"):
        write_pickle(object(), 2)


def test_values_that_cannot_be_written_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(ValueError, match="200 levels"):
        write_pickle(nested, 4)
    with pytest.raises(ValueError, match="protocol is 2 or 4"):
        write_pickle(1, 3)
    with pytest.raises(ValueError, match="cannot be named"):
        write_pickle(Named("os", "a\nb"), 2)

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.state.plain_decode import references
from shardproof.errors import PlainDataError
from shardproof.state import (
    canonical_json,
    collect,
    decode_plain,
    encode_plain,
    register_dataclass,
    register_enum,
)
from tests.unit.engine.state.fake_checkpoint import saved


@register_enum
class Phase(enum.Enum):
    WARMUP = 1
    DECAY = "x"


@register_enum
class Level(enum.IntEnum):
    LOW = 1


@register_enum
class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4
    BOTH = 3


@register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    tokens: int
    history: list[float]
    phase: Phase = Phase.WARMUP
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise AssertionError("must not run on load")


def there_and_back(value: Any) -> Any:
    return decode_plain(json.loads(json.dumps(encode_plain(value), allow_nan=False)))


def equal(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if isinstance(a, dict):
        keys = list(a) == list(b) if isinstance(a, OrderedDict) else a.keys() == b.keys()
        return keys and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


VALUES: list[Any] = [
    None,
    True,
    1,
    -(2**63),
    2**63,
    -(2**5000),
    0.1,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    5e-324,
    "",
    "é\n\u2028\x00",
    b"",
    b"\xff" * 200,
    bytearray(b"ab"),
    1 + 2j,
    complex(-0.0, math.nan),
    (),
    (1, [2, (3,)]),
    {},
    {"$tuple": [1]},
    {"a": {"$x": 1, "b": 2}},
    {1: "a", "1": "b", None: 3, (1, 2): 4, 1.5: 5, False: 6},
    set(),
    {1, "a", (2, 3), frozenset({4})},
    frozenset({1}),
    OrderedDict([("b", 1), ("a", 2)]),
    OrderedDict([(2, 1), (1, 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    Counter("abca"),
    np.float32(0.1),
    np.int64(2**62),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.zeros((0, 3), np.float16),
    np.array(1.5),
    np.array([["a", "b\u00fcc"], ["", "\U0001f600"]]),
    np.array([b"a", b"\xff\x00b"]),
    np.array("x" * 50),
    np.zeros((0, 2), "U3"),
    torch.bfloat16,
    torch.Size((2, 3)),
    torch.device("cuda", 1),
    Phase.DECAY,
    Level.LOW,
    Progress(3, [math.nan]),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{type(value).__name__}-{row}" for row, value in enumerate(VALUES)]
)
def test_values_are_restored_as_they_were(value: Any) -> None:
    back = there_and_back([value, {"in": value}])
    assert equal(back[0], value) or (isinstance(value, Progress) and repr(back[0]) == repr(value))
    assert repr(back[1]["in"]) == repr(value) or equal(back[1]["in"], value)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=100),
)
hashable = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.dictionaries(hashable, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=20,
)


@given(anything)
def test_any_plain_value_is_restored(value: Any) -> None:
    assert equal(there_and_back(value), value)


@given(st.dictionaries(hashable, st.integers(), max_size=6), st.randoms())
def test_equal_values_have_one_canonical_form_in_any_order(value: dict[Any, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    for kind in (dict, Counter, partial(defaultdict, int)):
        one, other = ({"deep": [kind(dict(pairs))]} for pairs in (items, value))
        assert canonical_json(encode_plain(one)) == canonical_json(encode_plain(other))
        assert list(decode_plain(encode_plain(one))["deep"][0].items()) == items
    if items != list(value.items()):
        one, other = (canonical_json(encode_plain(OrderedDict(pairs))) for pairs in (items, value))
        assert one != other
    keys = list(value)
    random.shuffle(keys)
    assert json.dumps(encode_plain(set(keys))) == json.dumps(encode_plain(set(value)))


def test_tensors_are_encoded_inline_where_no_tree_collects_them() -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    back = there_and_back({"lr": tensor, "scalar": torch.tensor(3), "one": torch.arange(9)[::4][1:2]})
    assert back["one"].tolist() == [4]
    assert torch.equal(back["lr"], tensor) and back["lr"].dtype == torch.bfloat16
    assert back["scalar"].shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (), (2, 3)], ids=str)
def test_inline_tensors_are_restored_with_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    back = there_and_back(value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back.to(torch.complex128), value.to(torch.complex128))
    back.zero_()  # the tensor owns its memory


def test_a_registered_dataclass_with_a_tensor_in_the_tree() -> None:
    @register_dataclass
    @dataclasses.dataclass
    class Running:
        mean: torch.Tensor
        count: int

    tree: dict[str, Any] = {"r": Running(torch.ones(3), 4)}
    checkpoint = saved(tree)
    assert set(checkpoint.catalogue.tensors) == {"r.mean"}
    assert list(references(checkpoint.objects["r"])) == [("r.mean", "tensor")]
    target: dict[str, Any] = {"r": Running(torch.zeros(3), 0)}
    checkpoint.load(target)
    assert target["r"].count == 4 and torch.equal(target["r"].mean, torch.ones(3))


def test_new_fields_take_their_defaults_and_unknown_ones_are_refused() -> None:
    data = encode_plain(Progress(3, []))
    stored = data["$dataclass"][1]
    del stored["phase"]
    assert decode_plain(data).phase is Phase.WARMUP
    stored["future"] = 1
    with pytest.raises(PlainDataError, match="future"):
        decode_plain(data)


class Unregistered(enum.Enum):
    A = 1


@dataclasses.dataclass
class NotRegistered:
    a: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Unregistered.A, "register_enum"),
        (NotRegistered(1), "register_dataclass"),
        (defaultdict(lambda: 1), "defaultdict"),
        ([{"deep": (1, object())}], "x.0.deep.1"),
        (type, "class"),
        (print, "function"),
        (np.array([{}], object), "dtype"),
    ],
)
def test_other_values_are_refused_with_path_and_advice(value: Any, text: str) -> None:
    with pytest.raises(PlainDataError, match="x") as caught:
        encode_plain(value, "x")
    assert text in str(caught.value)
    assert caught.value.details["path"].startswith("x")


def test_two_classes_of_one_name_are_refused() -> None:
    @dataclasses.dataclass
    class Progress:
        a: int

    with pytest.raises(ValueError, match="name="):
        register_dataclass(Progress, name="Progress")
    with pytest.raises(TypeError):
        register_enum(Progress)


@pytest.mark.parametrize(
    "data",
    [
        {"$unknown": 1},
        {"$tuple": [1], "more": 2},
        {"$tuple": 5},
        {"$float": "1e5"},
        {"$int": "x"},
        {"$bytes": "%%"},
        {"$set": [[1]]},
        {"$dict": [[1]]},
        {"$defaultdict": ["eval", []]},
        {"$scalar": ["float32", "AAAAAAAAAAA="]},
        {"$array": ["object", [1], "AAAAAAAAAAA="]},
        {"$array": ["float32", [-1], "AAAA"]},
        {"$array": ["float32", [10**12], "AAAAAA=="]},
        {"$value": ["float32", [2], "AAAAAA=="]},
        {"$value": ["nn", [2], "AAAAAA=="]},
        {"$dtype": "save"},
        {"$size": [-1]},
        {"$device": "moon"},
        {"$enum": ["Nobody", "A"]},
        {"$enum": ["Phase", "NONE"]},
        {"$enum": ["Progress", "tokens"]},
        {"$dataclass": ["Phase", {}]},
        {"$dataclass": ["Progress", {"tokens": 1}]},
        {"$tensor": 5},
        {"$tensor": "a", "kind": "code"},
        {"$tensor": "a"},
    ],
    ids=str,
)
def test_malformed_data_raises_an_error_of_shardproof(data: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        decode_plain({"a": [data]})
    assert type(caught.value).__name__ in ("PlainDataError", "StructureError")


def test_nesting_is_bounded_in_encoding_and_decoding() -> None:
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(PlainDataError, match="nested"):
        encode_plain(deep)
    with pytest.raises(PlainDataError, match="nested"):
        decode_plain(deep)


@register_dataclass
@dataclasses.dataclass
class Nest:
    inner: Any


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


NESTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"k": value},
    "keyed": lambda value: {1: value},
    "ordered": lambda value: OrderedDict(a=value),
    "counter": lambda value: Counter({"a": value}),
    "defaultdict": lambda value: defaultdict(list, a=value),
    "frozenset": lambda value: frozenset([value]),
    "dataclass": Nest,
}


def _accepted(value: Any) -> bool:
    try:
        collect({"x": Holder([value])})
    except PlainDataError:
        return False
    return True


@pytest.mark.parametrize("kind", sorted(NESTS))
def test_the_deepest_accepted_value_can_be_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    import shardproof

    deepest: Any = 2**64
    while _accepted(value := NESTS[kind](deepest)):
        deepest = value
    with pytest.raises(PlainDataError, match="nested"):
        collect({"x": Holder([value])})
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([("p", parameter)], lr=0.1)
    optimizer.state[parameter] = {"slot": [deepest]}
    shardproof.save(tmp_path / "c", {"x": Holder([deepest]), "o": optimizer})
    target = Holder(None)
    shardproof.load(tmp_path / "c", {"x": target, "o": optimizer})
    assert repr(target.value) == repr([deepest])


def test_members_of_a_flag_without_a_name_are_refused() -> None:
    assert there_and_back(Access.READ) is Access.READ
    assert there_and_back(Access.BOTH) is Access.BOTH
    for value in (Access.READ | Access.RUN, Access(0)):
        with pytest.raises(PlainDataError, match="not a single member"):
            encode_plain({"mode": value})


def test_large_bytes_and_arrays_leave_the_json() -> None:
    tree = {"blob": b"x" * 65, "list": [np.arange(100), 1], "odd": {(1,): b"y" * 65}, "short": b"x" * 64}
    collected = collect(tree)
    assert [entry.key for entry in collected.tensors] == ["blob.@data", "list.0", "odd.(1,)"]
    target = {"blob": None, "list": [np.zeros(100, np.int64), 0], "odd": 1, "short": 2}
    saved(tree).load(target)
    assert repr(target) == repr(tree)


LONG: dict[str, tuple[Any, str]] = {
    "text": ("ä" * (1 << 17), "uint8"),
    "ints": ([-(2**63), *range(2000), 2**63 - 1], "int64"),
    "floats": ([-0.0, 5e-324, math.inf, *[0.1] * 2000], "float64"),
}


@pytest.mark.parametrize("kind", sorted(LONG))
def test_long_texts_and_numbers_leave_the_json(kind: str) -> None:
    value, dtype = LONG[kind]
    checkpoint = saved({"x": value, "y": {(1,): [value]}})
    assert checkpoint.catalogue.tensors["x.@data"][0] == dtype
    assert len(json.dumps(checkpoint.objects)) < 500
    target: dict[str, Any] = {"x": None, "y": None}
    checkpoint.load(target)
    assert equal(target, {"x": value, "y": {(1,): [value]}})


@pytest.mark.parametrize("value", [[True, *[1] * 2000], [2**63, *[1] * 2000], [1.0, *[1] * 2000]])
def test_lists_that_fit_no_dtype_stay_in_the_json(value: list[Any]) -> None:
    checkpoint = saved({"x": value, "inline": {("t" * (1 << 17),): 1}})
    assert not checkpoint.catalogue.tensors
    target: dict[str, Any] = {"x": None, "inline": None}
    checkpoint.load(target)
    assert equal(target["x"], value)


OUTSIDE: dict[str, tuple[Callable[[], Any], Any]] = {
    "array": (lambda: np.arange(100), np.arange(100) + 1),
    "bytes": (lambda: b"a" * 100, b"b" * 100),
    "bytearray": (lambda: bytearray(100), bytearray(b"b" * 100)),
    "text": (lambda: "a" * (1 << 17), "b" * (1 << 17)),
    "ints": (lambda: list(range(2000)), list(range(1, 2001))),
    "floats": (lambda: [0.5] * 2000, [0.25] * 2000),
    "tensor": (lambda: torch.zeros(2, 1), torch.tensor([[0.0], [-0.0]])),
    "bool": (lambda: torch.tensor([True, False]), torch.tensor([False, True])),
    "bfloat16": (lambda: torch.ones(4, dtype=torch.bfloat16)[::2], torch.zeros(2, dtype=torch.bfloat16)),
    "scalar": (lambda: torch.tensor(1), torch.tensor(2)),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))),
    "conjugate": (lambda: torch.tensor([1j]).conj(), torch.tensor([1j])),
}


@pytest.mark.parametrize("kind", sorted(OUTSIDE))
def test_a_change_outside_of_the_json_changes_the_objects(kind: str) -> None:
    value, other = OUTSIDE[kind]
    objects = collect({"x": Holder(value())}).objects
    assert objects == collect({"x": Holder(value())}).objects
    assert objects != collect({"x": Holder(other)}).objects


def test_a_change_of_a_torch_generator_changes_the_objects() -> None:
    def collected(seed: int) -> Any:
        return collect({"gen": torch.Generator().manual_seed(seed)}).objects

    assert collected(1) == collected(1)
    assert collected(1) != collected(2)


def test_references_to_tensors_load_without_a_digest() -> None:
    checkpoint = saved({"x": Holder([torch.ones(2), torch.empty(0)])})
    without = {"value": [{"$tensor": "x.value.0"}, {"$tensor": "x.value.1"}]}
    assert checkpoint.objects["x"] != without
    checkpoint.objects["x"] = without
    target = Holder(None)
    checkpoint.load({"x": target})
    assert torch.equal(target.value[0], torch.ones(2)) and target.value[1].shape == (0,)


def test_undecodable_objects_are_refused_before_anything_is_changed() -> None:
    class Unknown(enum.Enum):
        A = 1

    register_enum(Unknown, name="only while saving")
    checkpoint = saved({"a": torch.ones(2), "z": [Unknown.A], "arr": Holder(np.arange(100))})
    for malformed in (
        {"$enum": ["never registered", "A"]},
        {"$enum": ["only while saving", "B"]},
        {"$tuple": 3},
        {"$tensor": "arr.value", "kind": "floats"},
        {"$dict": [[{"$tensor": "arr.value", "kind": "array"}, 1]]},
    ):
        checkpoint.objects["z"] = [malformed]
        with pytest.raises(PlainDataError, match="z"):
            checkpoint.bind({"a": torch.zeros(2), "z": None, "arr": Holder(None)})


@pytest.mark.parametrize(
    "data",
    [
        ["<U3"],
        ["O", {"$array": ["uint8", [1, 8], "AAAAAAAAAAA="]}],
        ["<U3", {"$array": ["uint8", [1, 4], "AAAAAA=="]}],
        ["<U1", {"$array": ["uint8", [1, 4], "////fw=="]}],
        ["<U1", {"$array": ["int32", [1, 1], "AAAAAA=="]}],
        ["<U1", "abcd"],
        ["<U9", {"$array": ["uint8", [1_000_000_000_000, 0], ""]}],
    ],
)
def test_malformed_texts_are_refused(data: Any) -> None:
    with pytest.raises(PlainDataError, match="malformed"):
        decode_plain({"$strings": data})


def test_texts_of_the_other_byte_order_become_those_of_this_machine() -> None:
    value = np.array(["ab", "c"]).astype(">U2")
    assert np.array_equal(there_and_back(value), value)

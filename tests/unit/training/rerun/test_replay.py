"""Microbatches that an iterator gives twice, and how they are packed for a checkpoint."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from shardproof.errors import PlainDataError, StructureError
from shardproof.rerun import ReplayableIterator
from shardproof.training.rerun.step_start import pack, unpack


def test_a_replay_gives_the_microbatch_without_the_writes_of_the_step() -> None:
    data = ReplayableIterator(iter([{"x": torch.ones(3)}, {"x": torch.full((3,), 2.0)}]))
    for _ in range(3):
        data.rewind()
        batch = next(data)
        assert batch["x"].tolist() == [1.0, 1.0, 1.0]
        batch["x"].zero_()


def test_without_copies_the_same_objects_are_given() -> None:
    batch = torch.ones(2)
    data = ReplayableIterator(iter([batch]), copy=False)
    assert next(data) is batch
    data.rewind()
    assert next(data) is batch


def test_advance_drops_the_microbatches_of_the_step() -> None:
    data = ReplayableIterator(range(10))
    assert [next(data), next(data)] == [0, 1]
    data.advance()
    assert data.microbatches == ()
    assert [next(data)] == [2]
    data.rewind()
    assert [next(data), next(data)] == [2, 3]


@pytest.mark.parametrize("draws", [True, False])
def test_a_replay_sets_generators_as_the_draws_of_the_iterator_left_them(draws: bool) -> None:
    data = ReplayableIterator((torch.rand(1) for _ in range(9)), draws=draws)
    for noted in (True, False):
        data.advance(generators=noted)
        torch.manual_seed(4)
        next(data)
        after = torch.get_rng_state()
        torch.manual_seed(4)
        data.rewind()
        next(data)
        assert torch.equal(torch.get_rng_state(), after) == (noted and draws)
        assert [one is not None for one in data.generators] == [noted and draws]


def test_loaded_microbatches_left_over_come_in_the_next_step_without_generators() -> None:
    data, seen = ReplayableIterator(range(10)), ReplayableIterator(torch.rand(1) for _ in range(2))
    seen.advance(generators=True)
    next(seen), next(seen)
    data.load([7, 8], seen.generators)
    assert next(data) == 7
    data.advance(generators=True)
    before = torch.get_rng_state()
    torch.rand(1)
    moved = torch.get_rng_state()
    assert [next(data), next(data)] == [8, 0]
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(before, moved)


def test_copies_reuse_the_memory_of_the_previous_step() -> None:
    data = ReplayableIterator({"x": (torch.full((3,), float(at)), at)} for at in range(10))
    addresses = []
    for step in range(3):
        data.advance()
        given = [next(data), next(data)]
        given[0]["x"][0].zero_()  # the step gets a copy of its own
        assert [item["x"][0].tolist() for item in data.microbatches] == [
            [2.0 * step] * 3,
            [2.0 * step + 1] * 3,
        ]
        assert [item["x"][1] for item in data.microbatches] == [2 * step, 2 * step + 1]
        addresses.append([item["x"][0].data_ptr() for item in data.microbatches])
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_microbatch_of_another_shape_or_type_gets_new_memory() -> None:
    batches = [
        torch.ones(2),
        torch.ones(3),
        torch.ones(3, dtype=torch.int64),
        [torch.ones(3)],
        torch.eye(3).t(),
    ]
    data = ReplayableIterator(batches)
    for batch in batches:
        data.advance()
        next(data)
        (item,) = data.microbatches
        assert torch.equal(*(one[0] if isinstance(one, list) else one for one in (item, batch)))
        assert type(item) is type(batch)


def test_loaded_microbatches_are_not_overwritten() -> None:
    loaded = [torch.ones(2), torch.ones(2)]
    data = ReplayableIterator(torch.zeros(2) for _ in range(5))
    data.load(loaded)
    for _ in range(4):
        data.advance()
        next(data)
    assert [one.tolist() for one in loaded] == [[1.0, 1.0]] * 2


def test_loaded_microbatches_come_first_and_the_rest_of_them_in_the_next_step() -> None:
    data = ReplayableIterator(range(100, 110))
    data.load([7, 8])
    assert next(data) == 7
    data.advance()
    assert [next(data), next(data)] == [8, 100]


def test_the_end_of_the_data_is_replayed_too() -> None:
    data = ReplayableIterator([1])
    next(data)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(data)
        data.rewind()
        assert next(data) == 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.complex128,
    ],
)
def test_tensors_of_every_dtype_are_packed_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (2, 3, 16), dtype=torch.uint8)
    tensor = bits.view(torch.uint8 if dtype is torch.bool else dtype)
    tensor = tensor.bool() if dtype is torch.bool else tensor
    found = unpack(pack([tensor, tensor[0, 0, 0], tensor[:0]], "batch"))
    for before, after in zip([tensor, tensor[0, 0, 0], tensor[:0]], found, strict=True):
        assert after.dtype is dtype and after.shape == before.shape
        assert after.reshape(-1).view(torch.uint8).tolist() == before.reshape(-1).view(torch.uint8).tolist()


def test_views_and_plain_data_are_packed() -> None:
    value = {
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "rows": [(1, None, float("inf")), {"deep": [torch.zeros(1)]}],
        "text": "x" * 100_000,
        "array": np.arange(50.0),
        "ordered": OrderedDict(b=1, a=2),
        "numbers": list(range(5000)),
        3: b"raw" * 100,
    }
    found = unpack(pack(value, "batch"))
    assert torch.equal(found["transposed"], value["transposed"])
    assert torch.equal(found["conjugate"], value["conjugate"])
    assert found["rows"][0] == (1, None, float("inf")) and found["rows"][1]["deep"][0].tolist() == [0.0]
    assert np.array_equal(found["array"], value["array"])
    assert list(found["ordered"]) == ["b", "a"]
    assert all(found[name] == value[name] for name in ("text", "numbers", 3))


def test_a_value_that_cannot_be_packed_is_named() -> None:
    class Shade(enum.Enum):
        DARK = 1

    with pytest.raises(PlainDataError, match=r"batch\.x\.1: the enum .*Shade is not registered"):
        pack({"x": [1, Shade.DARK]}, "batch")
    with pytest.raises(PlainDataError, match=r"batch\.x: .*sparse.* cannot be saved for a rerun"):
        pack({"x": torch.eye(2).to_sparse()}, "batch")
    with pytest.raises(PlainDataError, match="meta"):
        pack({"x": torch.ones(2, device="meta")}, "batch")


def test_packed_data_is_a_safetensors_file() -> None:
    values = [torch.arange(3, dtype=torch.uint8), torch.arange(4.0), torch.ones(2, dtype=torch.complex128)]
    found = load(pack(values, "batch").numpy().tobytes())
    assert found["0"].tolist() == [0, 1, 2] and found["1"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["2"].tolist() == [[1.0, 0.0], [1.0, 0.0]]


class Named(NamedTuple):
    tokens: torch.Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    tokens: torch.Tensor
    inner: Any


@dataclass
class Fields:
    tokens: torch.Tensor
    inner: Any
    size: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self.size = len(self.tokens)


class Encoding(UserDict):
    """As `transformers.BatchEncoding`, whose constructor takes the content."""

    def __init__(self, tokens: torch.Tensor, inner: Any) -> None:
        super().__init__({"tokens": tokens, "inner": inner})
        self.kind = "padded"

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("data", {}):
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("kind", [Named, Slotted, Fields, Encoding])
def test_batches_of_collators_are_copied_and_packed(kind: Any) -> None:
    data = ReplayableIterator(kind(torch.full((3,), 1.0 * k), [kind(torch.ones(1), (k,))]) for k in range(4))
    for number in range(2):
        data.advance()
        for _ in range(2):
            data.rewind()
            batch = next(data)
            assert type(batch) is kind and batch.tokens.tolist() == [1.0 * number] * 3
            batch.tokens.zero_()
    found = unpack(pack({"batches": list(data.microbatches), 3: "three"}, "step"))
    assert found[3] == "three"
    (batch,) = found["batches"]
    assert type(batch) is kind and type(batch.inner[0]) is kind
    assert batch.tokens.tolist() == [1.0] * 3 and batch.inner[0].inner == (1,)
    if kind is Fields:
        assert batch.size == 3
    if kind is Encoding:
        assert batch.kind == "padded"


def test_a_class_without_a_place_in_a_module_is_refused_when_packed() -> None:
    local = namedtuple("local", "tokens")
    with pytest.raises(PlainDataError, match=r"batch\.0: a local cannot be saved .* at the top of a module"):
        pack([local(torch.ones(1))], "batch")


def test_a_class_that_the_program_has_not_imported_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(Named(torch.ones(1), 0), "batch")
    monkeypatch.delattr(f"{__name__}.Named")
    with pytest.raises(StructureError, match=rf"import {__name__} before"):
        unpack(packed)
    monkeypatch.setattr(f"{__name__}.Named", Suit, raising=False)  # a class of another kind
    with pytest.raises(StructureError, match="not imported as it was"):
        unpack(packed)


class Suit(dict):  # type: ignore[type-arg]
    pass


class Positioned:
    """A loader whose state applies to the next `iter`, as that of torchdata's `StatefulDataLoader`."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 10))


def test_a_restore_before_the_first_microbatch_reaches_the_loader() -> None:
    loader = Positioned()
    data = ReplayableIterator(loader)
    loader.start = 4
    assert [next(data), next(data)] == [4, 5]
    loader.start = 8
    assert next(data) == 6

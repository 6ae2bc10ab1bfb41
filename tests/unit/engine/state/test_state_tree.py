from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import PlainDataError, StructureError
from shardproof.state import Catalogue, FlatShard, LocalShards, PerRank, RandomState, bind, collect
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint, saved, saved_by_ranks

Pair = namedtuple("Pair", "left right")


def test_containers_at_any_depth_are_restored_with_their_types() -> None:
    def tree(value: float) -> dict[str, Any]:
        return {
            "tensor": torch.full((2, 3), value),
            "deep": [{"a": (torch.full((2,), value), value, None)}, [np.full((2, 2), value)]],
            "plain": [1, (2, {"x": value}), {3}],
            "ordered": OrderedDict(b=value, a=torch.full((1,), value)),
            "default": defaultdict(list, x=[value]),
            "count": Counter({"a": int(value)}),
            "pair": Pair(torch.full((1,), value), value),
            "text": f"é {value}",
            "bytes": bytes([int(value)]) * 1000,
            "none": None,
            "empty": {},
            "odd keys": {None: "x", (1, 2): value},
            3: value,
        }

    source, target = tree(7.0), tree(1.0)
    inner, array = target["deep"][0]["a"][0], target["deep"][1][0]
    saved(source).load(target)
    assert repr(target) == repr(source)
    assert target["deep"][0]["a"][0] is inner, "tensors are filled in place"
    assert target["deep"][1][0] is array
    assert type(target["pair"]) is Pair
    assert type(target["default"]) is defaultdict


def test_key_order_does_not_matter() -> None:
    assert (
        saved({"a": 1, "b": {"x": 2, "y": [3]}}).objects == saved({"b": {"y": [3], "x": 2}, "a": 1}).objects
    )
    assert [entry.key for entry in collect({"b": torch.ones(1), "a": torch.ones(1)}).tensors] == ["a", "b"]


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {0: torch.ones(1), "0": torch.ones(1)}])
def test_two_values_of_one_key_are_refused_with_both_paths(tree: Any) -> None:
    with pytest.raises(StructureError) as caught:
        collect(tree)
    first, second = ("state['a.b']", "state['a']['b']") if "a" in tree else ("state[0]", "state['0']")
    assert first in str(caught.value) and second in str(caught.value)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    count = 6 * DTYPES[name].itemsize
    source = torch.arange(count, dtype=torch.uint8).remainder(2).view(dtype).reshape(2, 3)
    (entry,) = collect({"x": source}).tensors
    assert (entry.dtype, entry.shape, entry.pieces[0].offsets) == (name, (2, 3), (0, 0))
    assert entry.pieces[0].view.data_ptr() == source.data_ptr()
    target = torch.zeros(count, dtype=torch.uint8).view(dtype).reshape(2, 3)
    binding = bind({"x": target}, Catalogue({"x": (name, (2, 3))}, {}, {}, 1))
    binding.tensors[0].pieces[0].view.view(torch.uint8).copy_(source.view(torch.uint8))
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_views_of_every_kind_are_collected_as_they_are() -> None:
    base = torch.arange(24.0).to(torch.complex64).reshape(4, 6) * (1 + 2j)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conjugate": base.conj(),
        "negative": base.conj().imag,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    checkpoint = saved(views)
    for key, view in views.items():
        assert torch.equal(checkpoint.full[key], view.detach()), key
    assert {entry.key: len(entry.pieces) for entry in collect(views).tensors}["empty"] == 0
    assert all(not piece.view.requires_grad for entry in collect(views).tensors for piece in entry.pieces)


def test_non_contiguous_targets_are_filled() -> None:
    source = torch.arange(12.0).reshape(3, 4)
    target = torch.zeros(4, 3).t()
    read_only = np.arange(6.0)[::-1]
    backwards = np.zeros(6)[::-1]
    saved({"t": source, "a": read_only}).load({"t": target, "a": backwards})
    assert torch.equal(target, source)
    assert np.array_equal(backwards, read_only)


class _Subclass(torch.Tensor):
    pass


class _OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


class _List(list):  # type: ignore[type-arg]
    pass


def _refused() -> dict[str, tuple[Any, str]]:
    return {
        "sparse": (torch.eye(3).to_sparse(), "to_dense"),
        "csr": (torch.eye(3).to_sparse_csr(), "to_dense"),
        "quantised": (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "int_repr"),
        "meta": (torch.empty(2, device="meta"), "to_empty"),
        "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        "jagged": (
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "subclass",
        ),
        "subclass": (torch.ones(2).as_subclass(_Subclass), "_Subclass"),
        "function": (lambda: 1, "function"),
        "class": (dict, "class"),
        "unknown": (object(), "builtins.object"),
        "half": (_OnlySaves(), "no state_dict and load_state_dict"),
        "in a list": ([1, [object()]], "in a list.1.0"),
        "list subclass": (_List([torch.ones(1)]), "plain list"),
        "set of tensors": ({torch.ones(1)}, "list"),
        "dates": (np.array(["2026-01-01"], "datetime64[D]"), "datetime64"),
        "objects": (np.array([object()]), "object"),
        "bad text": ("\ud800", "Unicode"),
        "nan key": ({math.nan: 1}, "NaN"),
        "tensor under a tuple": ({(1, 2): torch.ones(1)}, "(1, 2)"),
        "lazy": (torch.nn.LazyLinear(2), "lazy"),
        "ours": ({"@x": 1}, "@"),
        "enum": (pytest.MonkeyPatch, "class"),
    }


@pytest.mark.parametrize("kind", sorted(_refused()))
def test_values_that_cannot_be_stored_are_refused_with_their_path(kind: str) -> None:
    value, text = _refused()[kind]
    with pytest.raises((StructureError, PlainDataError)) as caught:
        collect({"a": {kind: value}})
    assert f"a.{kind}" in str(caught.value) or f"['a'][{kind!r}]" in str(caught.value)
    assert text in str(caught.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (tree, {"x": cycle}):
        with pytest.raises(StructureError, match="contains itself"):
            collect(value)


def test_targets_that_cannot_be_filled_are_refused() -> None:
    checkpoint = saved({"x": torch.ones(5, 3)})
    overlapping = torch.zeros(20).as_strided((5, 3), (1, 1))
    for target in (torch.ones(1, 3).expand(5, 3), overlapping, torch.empty(5, 3, device="meta")):
        with pytest.raises(StructureError, match="x: "):
            checkpoint.bind({"x": target})
    frozen = np.ones((5, 3), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(StructureError, match="read-only"):
        checkpoint.bind({"x": frozen})
    assert not checkpoint.bind({"x": frozen}, selected=lambda key: False).tensors
    with pytest.raises(StructureError, match="a state tree is a dict"):
        bind(3, Catalogue({}, {}, {"": 4}, 1))
    with pytest.raises(StructureError, match="in no mutable container"):
        bind((3, torch.ones(1)), Catalogue({}, {}, {"0": 4}, 1))


def test_binding_reports_everything_and_touches_nothing() -> None:
    checkpoint = saved({"same": torch.ones(2), "shape": torch.ones(3), "plain": 4, "tensor": torch.ones(1)})
    target = {"same": torch.zeros(2), "shape": torch.zeros(4), "plain": torch.zeros(1), "tensor": 5, "new": 6}
    binding = checkpoint.bind(target)
    assert binding.missing == ["new"]
    assert {item.key: (item.expected, item.found) for item in binding.mismatched} == {
        "shape": ("tensor float32 [4]", "tensor float32 [3]"),
        "plain": ("tensor float32 [1]", "a plain value"),
        "tensor": ("a plain value", "tensor float32 [1]: give the target a tensor like it, or exclude it"),
    }
    assert binding.used == {"same", "shape", "plain", "tensor", "new"}
    assert [entry.key for entry in binding.tensors] == ["same"]
    assert target["tensor"] == 5 and not target["same"].any()  # type: ignore[attr-defined]


def test_only_selected_keys_are_loaded() -> None:
    target = {"a": torch.zeros(1), "b": torch.zeros(1), "c": 0, "d": 0}
    saved({"a": torch.ones(1), "b": torch.ones(1), "c": 1, "d": 1}).load(
        target, exact=False, selected=lambda key: key in "ac"
    )
    assert repr(target) == "{'a': tensor([1.]), 'b': tensor([0.]), 'c': 1, 'd': 0}"


def test_tied_tensors_are_stored_once_under_the_first_key() -> None:
    shared, empty = torch.arange(4.0), torch.empty(0)
    tree = {"b": shared, "a": shared, "view": shared[:2], "e1": empty, "e2": empty, "e3": torch.empty(0)}
    tree |= {"conj": torch.ones(1, dtype=torch.complex64)}
    tree["conj2"] = tree["conj"].conj()
    aliases = {entry.key: entry.alias_of for entry in collect(tree).tensors}
    assert aliases == {
        "a": None,
        "b": "a",
        "view": None,
        "e1": None,
        "e2": "e1",
        "e3": None,
        "conj": None,
        "conj2": None,
    }
    tied = torch.zeros(4)
    binding = saved({"a": shared, "b": shared}).load({"a": tied, "b": tied})
    assert [entry.alias_of for entry in binding.tensors] == [None, "a"]
    assert torch.equal(tied, shared)
    untied = {"a": torch.zeros(4), "b": torch.zeros(4)}
    saved({"a": shared, "b": shared}).load(untied)
    assert torch.equal(untied["a"], shared) and torch.equal(untied["b"], shared)


def test_per_rank_values_load_with_another_number_of_ranks() -> None:
    def tree(rank: int) -> dict[str, Any]:
        return {"mine": PerRank({"id": rank, "t": torch.full((1,), float(rank))}), "all": 1}

    checkpoint = saved_by_ranks(tree, 3)
    for rank in range(3):
        target = tree(9)
        checkpoint.load(target, rank=rank, world_size=3)
        assert target["mine"].value == {"id": rank, "t": torch.tensor([float(rank)])}
    more = tree(9)
    binding = checkpoint.load(more, rank=3, world_size=4)
    assert binding.unchanged == ["mine.@rank-3"] and more["mine"].value["id"] == 9
    strict = {"mine": PerRank(0, missing="error"), "all": 1}
    assert checkpoint.bind(strict, rank=3, world_size=4).missing == ["mine.@rank-3"]
    assert checkpoint.bind({"other": PerRank(0)}, rank=5, world_size=6).missing == ["other"]
    leaf = {"mine": PerRank(0)}
    FakeCheckpoint([collect({"mine": PerRank(5)})]).load(leaf)
    assert leaf["mine"].value == 5
    with pytest.raises(StructureError, match="inside a per-rank"):
        collect({"a": PerRank({"b": RandomState()})})


def test_random_generators_continue_their_sequences() -> None:
    import random

    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(2).tolist(),
        ]

    random.gauss(0, 1)
    own = {"t": torch.Generator(), "n": np.random.default_rng(3), "p": random.Random(4), "m": RandomState()}
    legacy = [np.random.RandomState(5), torch.ones(1)]
    legacy[0].randn()
    before = torch.get_rng_state()
    own["l"] = legacy
    checkpoint = saved(own)
    assert torch.equal(torch.get_rng_state(), before)

    def draw_own() -> list[Any]:
        return [
            torch.rand(2, generator=own["t"]).tolist(),
            own["n"].random(),
            own["p"].random(),
            legacy[0].randn(),
        ]

    expected = draw(), draw_own()
    draw(), draw_own()
    checkpoint.load(own)
    assert (draw(), draw_own()) == expected
    assert "m.@rank-0" in checkpoint.objects


def test_local_shards_and_flat_shards_are_saved_and_loaded() -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    flat = whole.reshape(-1)
    cuts = [0, 3, 17, 17, 30, 35]

    def sharded(rank: int) -> dict[str, Any]:
        buffer = flat[cuts[rank] : cuts[rank + 1]].clone()
        box = whole[rank : rank + 1] if rank < 4 else whole[4:]
        return {
            "flat": FlatShard(buffer, (5, 7), cuts[rank], cuts[rank + 1]),
            "boxes": LocalShards((5, 7), [(box[:, :2].clone(), (rank, 0)), (box[:, 2:].clone(), (rank, 2))]),
        }

    checkpoint = saved_by_ranks(sharded, 5)
    for key in ("flat", "boxes"):
        assert torch.equal(checkpoint.full[key], whole)
        assert (checkpoint.holders(key) == 1).all()
    target = {"flat": torch.zeros(5, 7), "boxes": FlatShard(torch.zeros(20), (5, 7), 10, 30)}
    checkpoint.load(target)
    assert torch.equal(target["flat"], whole)  # type: ignore[arg-type]
    assert torch.equal(target["boxes"].buffer, flat[10:30])  # type: ignore[union-attr]


def test_a_flat_shard_of_a_fused_tensor_parallel_weight() -> None:
    from shardproof.geometry import Boxes, IndexMap

    whole = torch.arange(24.0).reshape(8, 3)
    # Rank 1 of 2: rows 2, 3 (gate) and 6, 7 (up) as one local weight of 4 rows; a flat range of it.
    fused = IndexMap((4, 3), (8, 3), Boxes.of(((0, 0), (2, 3)), ((2, 0), (2, 3))), np.array([[2, 0], [6, 0]]))
    local = torch.cat([whole[2:4], whole[6:8]]).reshape(-1)
    shard = FlatShard(local[2:11].clone(), (8, 3), 2, 11, fused)
    (entry,) = collect({"w": shard}).tensors
    covered = torch.zeros(8, 3)
    for piece in entry.pieces:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.view.shape, strict=True))
        assert torch.equal(piece.view, whole[box])
        covered[box] += 1
    assert torch.equal(torch.cat([covered[2:4], covered[6:8]]).reshape(-1)[2:11], torch.ones(9))
    assert covered.sum() == 9


def test_invalid_shards_are_refused_with_the_reason() -> None:
    with pytest.raises(StructureError, match="dtype"):
        LocalShards((2,), [])
    with pytest.raises(StructureError, match="does not lie within"):
        LocalShards((2,), [(torch.ones(2), (1,))])
    with pytest.raises(StructureError, match=r"\[3\]"):
        FlatShard(torch.ones(2), (4,), 0, 3)
    with pytest.raises(StructureError, match="flat shard"):
        collect({"x": FlatShard(torch.ones(3), (2,), 0, 3)})


def test_an_empty_target_for_keys_of_the_checkpoint_is_a_mismatch(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"hist": {"loss": [0.5], "w": torch.ones(2)}, "l": [torch.ones(1)], "best": torch.ones(2)}
    tree["rng"] = PerRank(3)
    checkpoint = saved(tree)
    target = {"hist": {}, "l": [], "best": None, "rng": None}
    binding = checkpoint.bind(target)
    assert (binding.missing, binding.tensors) == ([], [])
    assert {*checkpoint.catalogue.tensors, *checkpoint.objects} <= binding.used
    assert {item.key: (item.expected, item.found) for item in binding.mismatched} == {
        "hist": (
            "an empty dict",
            "2 keys below it (hist.loss, hist.w): give the target the same keys, or exclude it",
        ),
        "l": ("an empty list", "a key below it (l.0): give the target the same keys, or exclude it"),
        "best": ("None", "tensor float32 [2]: give the target a tensor like it, or exclude it"),
        "rng": (
            "None",
            "per-rank values: wrap the target's value in shardproof.PerRank, or exclude it",
        ),
    }
    lenient = checkpoint.bind({"hist": {}, "l": []}, strict=False)
    assert (lenient.missing, lenient.mismatched) == (["hist", "l"], [])
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "hist is left as it is: expected an empty dict, found 2 keys below it",
        "l is left as it is: expected an empty list, found a key below it",
    ]
    excluded = checkpoint.bind({"hist": {}}, selected=lambda key: not key.startswith("hist."))
    assert (excluded.missing, excluded.mismatched) == (["hist"], [])
    saved({"hist": {}}).load({"hist": {}})


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"": torch.ones(1)}, "state['']"),
        ({"": 3}, "state['']"),
        ({"": {"x": 1}}, "state['']"),
        ({"a": {"\ud800": torch.ones(1)}}, "state['a']['\\ud800']"),
        ({"a": {"\ud800": 1}}, "state['a']['\\ud800']"),
        ({"m": torch.nn.ParameterDict({"\ud800": torch.ones(1)})}, "'\\ud800'"),
    ],
)
def test_keys_that_cannot_be_written_are_refused_with_their_path(tree: Any, path: str) -> None:
    with pytest.raises(StructureError) as caught:
        collect(tree)
    assert path in str(caught.value)
    str(caught.value).encode()
    msgspec.msgpack.encode(caught.value.to_wire())

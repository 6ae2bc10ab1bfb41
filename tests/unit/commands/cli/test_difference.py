"""Comparing checkpoints: structure, plain values, and bits under any pair of layouts."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.commands.report import difference
from shardproof.engine.foreign import foreign_of
from shardproof.errors import CorruptChunkError, NotCommittedError, StorageError
from shardproof.report import Difference, describe, diff, spelled, summarise
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.commands.cli.samples import Sample, model, rows_cut, write

STATE = model(2)


def compare(folder: Path, a: Sample, b: Sample, **options: Any) -> Difference:
    write(folder / "a", a)
    write(folder / "b", b)
    return diff(LocalStorage(folder / "a"), LocalStorage(folder / "b"), **options)


def cut(state: dict[str, np.ndarray[Any, Any]], parts: int, dim: int = 0, **options: Any) -> Sample:
    cuts = {key: rows_cut(array.shape, parts, dim) for key, array in state.items() if array.ndim > dim}
    return Sample(state, cuts=cuts, world_size=parts, **options)


def test_equal_layouts_are_compared_without_reading(tmp_path: Path) -> None:
    found = compare(tmp_path, cut(STATE, 3, step=1), cut(STATE, 3, step=2, metadata={"x": 1}, attempt="b"))
    assert found.same
    assert (found.same_tensors, found.by_digest, found.by_reading, found.bytes_read) == (
        len(STATE),
        len(STATE),
        0,
        0,
    )
    json.dumps(found.to_json())


@pytest.mark.parametrize(("parts", "dim"), [(1, 0), (3, 0), (2, 1), (5, 1)])
def test_other_layouts_of_the_same_bits_are_equal(tmp_path: Path, parts: int, dim: int) -> None:
    seen: list[tuple[int, int]] = []
    found = compare(tmp_path, cut(STATE, 2), cut(STATE, parts, dim), on_progress=lambda *at: seen.append(at))
    assert found.same
    assert found.by_reading == len(STATE)
    total = 2 * sum(array.nbytes for array in STATE.values())
    assert found.bytes_read == total
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("parts", [2, 3])
def test_one_bit_is_found(tmp_path: Path, parts: int) -> None:
    other = {key: array.copy() for key, array in STATE.items()}
    other["model.layers.1.wq"].view(np.uint32)[7, 7] ^= 1
    found = compare(tmp_path, cut(STATE, 2), cut(other, parts))
    assert not found.same
    (value,) = found.values
    how = ("digest", 1, 2) if parts == 2 else ("read", 1, 64)
    assert (value.key, value.how, value.different, value.total) == ("model.layers.1.wq", *how)
    assert found.same_tensors == len(STATE) - 1


@pytest.mark.parametrize("parts", [1, 2])
def test_bits_are_compared_and_not_numbers(tmp_path: Path, parts: int) -> None:
    nan, zero = np.full((4, 2), np.nan, np.float32), np.zeros((4, 2), np.float32)
    other_nan = nan.copy()
    other_nan.view(np.uint32)[3, 1] |= 1
    a = cut({"nan": nan, "other_nan": nan, "zero": zero}, 1)
    b = cut({"nan": nan, "other_nan": other_nan, "zero": -zero}, parts)
    found = compare(tmp_path, a, b)
    assert [value.key for value in found.values] == ["other_nan", "zero"]


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "float32", "float64", "complex64", "complex128"]
)
def test_every_width_of_element(tmp_path: Path, dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype)
    other = array.copy()
    other[2, 5] = not other[2, 5] if dtype == "bool" else 99
    other[0, 0] = not other[0, 0] if dtype == "bool" else 77
    found = compare(tmp_path, cut({"x": array, "y": array}, 2), cut({"x": array, "y": other}, 4, 1))
    assert [(value.key, value.different, value.total) for value in found.values] == [("y", 2, 24)]


def test_tensors_without_elements_or_dimensions(tmp_path: Path) -> None:
    state = {"empty": np.zeros((3, 0), np.float32), "step": np.array(3, np.int64)}
    assert compare(tmp_path, Sample(state), Sample(state, world_size=2)).same
    other = state | {"step": np.array(4, np.int64)}
    found = compare(tmp_path / "2", Sample(state), Sample(other))
    assert [value.key for value in found.values] == ["step"]


def test_differences_of_structure_are_listed(tmp_path: Path) -> None:
    one = np.ones((2, 2), np.float32)
    a = Sample({"gone": one, "dtype": one, "shape": one, "same": one, "w": one}, objects={"kind": 1})
    b = Sample(
        {
            "new": one,
            "dtype": one.astype(np.float16),
            "shape": one.reshape(4),
            "same": one,
            "w": one,
            "kind": one,
        },
    )
    found = compare(tmp_path, a, b)
    assert (found.only_a, found.only_b) == (("gone",), ("new",))
    assert {change.key: (change.a, change.b) for change in found.changed} == {
        "dtype": ("float32 [2, 2]", "float16 [2, 2]"),
        "kind": ("plain value", "float32 [2, 2]"),
        "shape": ("float32 [2, 2]", "float32 [4]"),
    }
    assert found.values == ()
    assert found.same_tensors == 2


def test_a_tie_is_structure_and_its_values_are_compared_too(tmp_path: Path) -> None:
    one = np.ones((2, 2), np.float32)
    tied = Sample({"embed": one}, aliases={"head": "embed"})
    assert compare(tmp_path / "1", tied, tied).same
    found = compare(tmp_path / "2", tied, Sample({"embed": one, "head": 2 * one}))
    assert [change.key for change in found.changed] == ["head"]
    assert [value.key for value in found.values] == ["head"]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        ([1, 2], [2, 1], False),
        (None, 0, False),
    ],
)
def test_plain_values(tmp_path: Path, a: object, b: object, same: bool) -> None:
    found = compare(tmp_path, Sample({}, objects={"v": a}), Sample({}, objects={"v": b}))
    assert found.same is same
    assert [change.key for change in found.objects] == ([] if same else ["v"])


def test_a_damaged_chunk_is_no_difference_but_an_error(tmp_path: Path) -> None:
    manifest = write(tmp_path / "a", cut(STATE, 1))
    write(tmp_path / "b", cut(STATE, 2))
    file = tmp_path / "a" / manifest.files[0].name
    data = bytearray(file.read_bytes())
    data[manifest.files[0].data_start] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptChunkError, match=r"model\.embed\.weight") as caught:
        diff(LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b"))
    assert caught.value.details["file"] == manifest.files[0].name
    assert caught.value.details["byte_start"] == manifest.files[0].data_start


def test_damage_comes_before_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A bucket refuses the request for the first file, without an errno. The second file is missing."""
    manifest = write(tmp_path / "a", cut(STATE, 2))
    first, second = (record.name for record in manifest.files)
    (tmp_path / "a" / second).unlink()

    def refuse(operation: str, name: str) -> None:
        if name == first:
            raise StorageError("403 Forbidden", missing=False, damaged=False)

    storage = FaultyStorage(LocalStorage(tmp_path / "a"), lambda: True, refuse)
    with pytest.raises(StorageError, match="missing") as caught:
        diff(storage, storage)
    assert caught.value.details["missing"]


def test_an_uncommitted_checkpoint_cannot_be_compared(tmp_path: Path) -> None:
    write(tmp_path / "a", Sample(STATE))
    write(tmp_path / "b", Sample(STATE), commit=False)
    with pytest.raises(NotCommittedError):
        diff(LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b"))


@pytest.mark.parametrize("box_bytes", [256, 1 << 20])
def test_memory_is_bounded_by_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box_bytes: int
) -> None:
    monkeypatch.setattr(difference, "BOX_BYTES", box_bytes)
    array = np.random.default_rng(0).integers(0, 1 << 30, (64, 64), np.int32)
    other = array.copy()
    other[3, 5] ^= 1
    write(LocalStorage(tmp_path / "a"), cut({"w": array}, 16, 0))
    write(LocalStorage(tmp_path / "b"), cut({"w": other}, 16, 1))
    places = [LocalStorage(tmp_path / name) for name in "ab"]
    seen = [0]
    found = diff(*places, on_progress=lambda done, total: seen.append(done))
    assert len(seen) == 1 + max(array.nbytes // box_bytes, 1)
    assert max(after - before for before, after in pairwise(seen)) <= 2 * max(box_bytes, 256)
    assert [(value.different, value.total) for value in found.values] == [(1, array.size)]


def test_parts_of_values_that_are_stored_as_tensors_differ_as_values(tmp_path: Path) -> None:
    ids = list(range(2000))
    sp.save(tmp_path / "a", {"loader": sp.PerRank({"ids": ids}), "ids": ids, "kind": ids})
    other = [*ids[:-1], 0]
    sp.save(tmp_path / "b", {"loader": sp.PerRank({"ids": ids}), "ids": other, "kind": [*map(float, ids)]})
    found = diff(LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b"))
    assert [change.key for change in found.objects] == ["ids", "kind"]
    assert found.objects[0].a.startswith("[0, 1, 2, ")
    assert len(found.objects[0].a) < 2100
    assert (found.only_a, found.only_b, found.changed, found.values) == ((), (), (), ())


def test_keys_of_parts_of_values_are_not_shown(tmp_path: Path) -> None:
    state = {"ids": list(range(2000)), "w": torch.ones(2)}
    sp.save(tmp_path / "a", state)
    with sp.open(tmp_path / "a") as checkpoint:
        assert checkpoint.keys() == list(checkpoint) == ["ids", "w"]
        assert len(checkpoint) == 2
        assert "ids.@data" not in checkpoint
        assert checkpoint["ids"] == state["ids"]
    stored = describe(LocalStorage(tmp_path / "a"))
    summary = summarise("a", stored.manifest, stored.table)
    assert (summary.tensors, [row.key for row in summary.rows], summary.objects) == (1, ["w"], ("ids",))
    assert summary.bytes == 16_008
    assert spelled(stored.manifest.objects["ids"]) == "<long list of int>"
    assert diff(LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "a")).same_tensors == 1
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "a", {"w": torch.zeros(2)})
    assert caught.value.details["unexpected"] == ["ids"]
    assert "@data" not in caught.value.message
    report = sp.load(tmp_path / "a", {"w": torch.zeros(2)}, strict=False)
    assert report.unexpected == ("ids",)


def test_values_that_cannot_be_read_are_listed_and_the_rest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    state = {"w": torch.ones(2), "q": quantised, "strange": re.compile("a")}
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        torch.save({**state, "n": number}, tmp_path / f"{name}.pt")
    a, b, c = (foreign_of(tmp_path / f"{name}.pt") for name in "abc")
    found = diff(a, b)
    assert [value.key for value in found.uncompared] == ["q", "strange"]
    assert "q is a quantised tensor" in found.uncompared[0].reason
    assert (found.same, found.differs, found.same_tensors) == (False, False, 1)
    assert [change.key for change in diff(a, c).objects] == ["n"]
    code = run(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    shown = capsys.readouterr().out
    assert "the same state, apart from what could not be compared" in shown
    assert "not compared: q: " in shown
    assert code == 3
    assert run(["diff", str(tmp_path / "a.pt"), str(tmp_path / "c.pt")]) == 1


def test_parts_of_a_value_that_are_null_are_compared(tmp_path: Path) -> None:
    whole, split = {"o": {"a": None, "b": 1}}, {"o.a": None, "o.b": 2}
    found = compare(tmp_path, Sample(STATE, objects=whole), Sample(STATE, objects=split))
    assert [(change.key, change.a, change.b) for change in found.objects] == [("o.b", "1", "2")]


def _export(folder: Path) -> tuple[str, str]:
    """A step with an optimizer, and its export as in README.md."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    sp.save(folder / "step", {"model": model, "optimizer": optimizer, "rng": sp.RandomState()})
    weights = folder / "model-1.safetensors"
    sp.convert(folder / "step", weights, to="safetensors", include="model", rename={"model": ""})
    return str(folder / "step"), str(weights)


KEYS_OF_THE_EXPORT = ("--include", "model", "--rename", "model=")


@pytest.mark.parametrize("measure", [(), ("--measure",)])
def test_an_export_with_renamed_keys_is_compared_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: tuple[str, ...]
) -> None:
    step, weights = _export(tmp_path)
    assert run(["diff", step, weights, *measure, "--json"]) == 1
    assert "model.0.weight" in json.loads(capsys.readouterr().out)["only_a"]
    assert run(["diff", step, weights, *KEYS_OF_THE_EXPORT, *measure, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["same_tensors"], found["by_reading"]) == (4, 4)
    (tmp_path / "names.toml").write_text('model = ""\n')
    from_file = ("--exclude", "rng", "--exclude", "optim*", "--rename", str(tmp_path / "names.toml"))
    assert run(["diff", step, weights, *from_file, *measure]) == 0
    back = ("--rename", "0=model.0", "--rename", "2=model.2", "--exclude", "optimizer", "--exclude", "rng")
    assert run(["diff", weights, step, *back, *measure]) == 0

    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors["2.bias"][1] += 1
    tensors["extra"] = tensors.pop("0.bias")
    save_file(tensors, weights)
    capsys.readouterr()
    assert run(["diff", step, weights, *KEYS_OF_THE_EXPORT, *measure, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["only_a"], found["only_b"]) == (["0.bias"], ["extra"])
    (value,) = found["values"]
    assert (value["key"], value["different"], value["total"]) == ("2.bias", 1, 4)
    assert (value["measured"] is None) == (not measure)


def test_keys_of_two_steps_are_selected_by_the_same_patterns(tmp_path: Path) -> None:
    other = {key: array + 1 if key.startswith("opt") else array for key, array in STATE.items()}
    other["optimizer.new"] = np.zeros(3)
    assert not compare(tmp_path, Sample(STATE), Sample(other)).same
    a, b = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    assert diff(a, b, include="model").same
    assert diff(a, b, exclude=["opt*"]).same
    assert diff(a, b, include="optimizer").only_b == ("optimizer.new",)


def test_a_key_that_the_rename_leaves_counts_under_its_own_name(tmp_path: Path) -> None:
    one, opt = np.ones(2), np.zeros(2)
    a = Sample({"model.a": one, "opt.lr": opt, "a.b": opt})
    b = Sample({"a": one, "zzz": one, "opt.lr": opt + 1, "a.b": opt})
    found = compare(tmp_path / "excluded", a, b, exclude="opt", rename={"model": ""})
    assert (found.only_a, found.only_b, found.values, found.same_tensors) == ((), ("zzz",), (), 2)
    found = compare(tmp_path / "included", a, b, include=["model", "opt"], rename={"model": "", "opt": "opt"})
    assert (found.only_b, [value.key for value in found.values]) == (("zzz",), ["opt.lr"])


@pytest.mark.parametrize("option", ["include", "exclude", "rename"])
@pytest.mark.parametrize("value", [5, {"a": 5}, [5]])
def test_an_option_of_a_wrong_type_is_named(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"\b{option}\b"):
        compare(tmp_path, Sample(STATE), Sample(STATE), **{option: value})


def test_tied_tensors_and_references_in_values_follow_a_renaming(tmp_path: Path) -> None:
    w, ids = torch.randn(4, 4), list(range(2000))
    sp.save(tmp_path / "a", {"old": {"w": w, "tied": w, "ids": ids, "part": sp.PerRank({"t": w + 1})}})
    sp.save(tmp_path / "b", {"new": {"w": w, "tied": w, "ids": ids, "part": sp.PerRank({"t": w + 1})}})
    a, b = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    found = diff(a, b, rename={"old": "new"})
    assert found.same, found
    assert found.same_tensors == 2
    sp.save(
        tmp_path / "c",
        {"new": {"w": w, "tied": w.clone(), "ids": [*ids[1:], 0], "part": sp.PerRank({"t": w + 2})}},
    )
    found = diff(a, LocalStorage(tmp_path / "c"), rename={"old": "new"})
    assert [change.key for change in found.objects] == ["new.ids"]
    assert [(change.a, change.b) for change in found.changed] == [
        ("float32 [4, 4], tied to new.tied", "float32 [4, 4]")
    ]
    assert len(found.values) == 1


def test_a_renamed_tensor_is_measured_box_by_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "MOST_NUMBERS", 16)
    array = np.arange(600, dtype=np.float32).reshape(20, 30)[:, :8].copy()
    write(tmp_path / "a", Sample({"model.a": array}))
    write(tmp_path / "b", Sample({"a": array + 1}))
    seen: list[int] = []
    found = diff(
        LocalStorage(tmp_path / "a"),
        LocalStorage(tmp_path / "b"),
        rename={"model": ""},
        measure=True,
        on_progress=lambda done, _total: seen.append(done),
    )
    (value,) = found.values
    assert value.key == "a"
    assert value.measured is not None
    assert value.measured.largest == 1.0
    assert max(after - before for before, after in pairwise(seen)) == 2 * 16 * array.itemsize


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--include", "modle"), "include: no key matches ['modle']; near it: model"),
        (("--exclude", "modle"), "exclude: no key matches ['modle']"),
        (("--rename", "modle="), "rename: no key matches ['modle']"),
        (("--include", "model", "--exclude", "model"), "leave no key"),
        (("--rename", "model=a", "--rename", "model=b"), "'model' would be both 'a' and 'b'"),
        (("--rename", "model"), "model cannot be read"),
        (("--rename", ""), "'' names no key. Give OLD=NEW or a TOML file"),
        (("--rename", "=model"), "'=model' names no key. Give OLD=NEW or a TOML file"),
        (("--rename", "{latin}"), "latin.toml cannot be read: 'utf-8' codec can't decode"),
        (("--rename", "model=modal"), "would both be 'modal'"),
    ],
)
def test_a_pattern_or_rename_without_a_key_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    write(tmp_path / "a", Sample({"model": np.ones(2), "modal": np.ones(2)}))
    latin = tmp_path / "latin.toml"
    latin.write_bytes('"modèle" = "model"'.encode("latin-1"))
    options = tuple(option.replace("{latin}", str(latin)) for option in options)
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "a"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())

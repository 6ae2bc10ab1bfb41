"""Which keys a load selects, and how it renames them."""

from __future__ import annotations

import ast
import fnmatch
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import shardproof as sp
from shardproof.engine.loading.matching import MatchReport, agree, renamed
from shardproof.engine.planning import casts, check_patterns, selects
from shardproof.errors import KeyMismatchError, StructureError
from shardproof.state import Catalogue

KEYS = [
    "model.0.weight",
    "model.0.bias",
    "model.1.weight",
    "modelx",
    "optimizer.model.0.weight.exp_avg",
    "epoch",
]


def _chosen(include: Any, exclude: Any) -> list[str]:
    selected = selects(include, exclude)
    return [key for key in KEYS if selected(key)]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, KEYS),
        ("model", None, KEYS[:3]),
        ("model.0", None, KEYS[:2]),
        ("model*", None, KEYS[:4]),
        (["epoch", "modelx"], None, ["modelx", "epoch"]),
        (None, "model", KEYS[3:]),
        (None, ["*.bias", "optimizer"], [KEYS[0], KEYS[2], "modelx", "epoch"]),
        ("model", "*.weight", [KEYS[1]]),
        ("model.[0-1].weight", None, [KEYS[0], KEYS[2]]),
        ("Model", None, []),
        ((), None, []),
        (None, (), KEYS),
        ("*", "*", []),
    ],
)
def test_a_pattern_selects_a_key_and_all_below_it(include: Any, exclude: Any, expected: list[str]) -> None:
    assert _chosen(include, exclude) == expected


@given(st.text("ab.*?", max_size=5), st.text("ab.", min_size=1, max_size=8))
def test_a_pattern_selects_a_key_if_fnmatch_matches_it_or_a_key_above(pattern: str, key: str) -> None:
    above = [key[:at] for at, character in enumerate(key) if character == "."]
    expected = any(fnmatch.fnmatchcase(name, pattern) for name in (key, *above))
    assert selects(pattern, None)(key) == expected
    assert selects(None, pattern)(key) != expected


def test_casts_are_all_none_or_by_pattern() -> None:
    assert casts(True)("w") and not casts(False)("w")
    assert [key for key in KEYS if casts("model.1")(key)] == ["model.1.weight"]
    assert [key for key in KEYS if casts(["epoch", "*.bias"])(key)] == ["model.0.bias", "epoch"]
    assert not casts(())("w")


def _catalogue(**more: Any) -> Catalogue:
    tensors = {"net.w": ("float32", (2,)), "net.w.x": ("float32", (3,)), "net.b": ("float32", (4,))}
    tensors |= {"net.tied": ("float32", (2,)), "blob.@data": ("uint8", (100,))}
    objects = {"epoch": 3, "blob": {"$tensor": "blob.@data", "kind": "bytes"}} | more
    return Catalogue(tensors, {"net.tied": "net.w"}, objects, 2)


def test_no_rename_changes_nothing() -> None:
    catalogue = _catalogue()
    assert renamed(catalogue, None) == (catalogue, {}) == renamed(catalogue, {})


def test_a_rename_applies_to_a_key_and_all_below_it_and_the_longest_wins() -> None:
    view, stored = renamed(_catalogue(), {"model": "net", "special": "net.w"})
    assert view.tensors.keys() == {"special", "special.x", "model.b", "model.tied", "blob.@data"}
    assert view.tensors["special.x"] == ("float32", (3,)) and view.tensors["model.b"] == ("float32", (4,))
    assert view.aliases == {"model.tied": "special"}
    assert view.objects == _catalogue().objects and view.world_size == 2
    assert stored["special.x"] == "net.w.x" and stored["model.b"] == "net.b" and stored["epoch"] == "epoch"


def test_a_rename_never_matches_part_of_a_name() -> None:
    catalogue = Catalogue({"net.w": ("float32", ()), "network.w": ("float32", ())}, {}, {}, 1)
    view, _ = renamed(catalogue, {"m": "net"})
    assert view.tensors.keys() == {"m.w", "network.w"}


def test_two_names_can_be_exchanged() -> None:
    view, stored = renamed(_catalogue(), {"net.w": "net.b", "net.b": "net.w"})
    assert view.tensors["net.w"] == ("float32", (4,)) and view.tensors["net.b.x"] == ("float32", (3,))
    assert (stored["net.w"], stored["net.b"]) == ("net.b", "net.w")


def test_references_in_objects_are_renamed_too() -> None:
    inner = {"$tuple": [{"x": {"$tensor": "blob.@data"}}, ["blob.@data", {"$tensor": "blob.@data"}]]}
    view, _ = renamed(_catalogue(more=inner), {"bytes": "blob", "all": "more"})
    assert view.objects["bytes"] == {"$tensor": "bytes.@data", "kind": "bytes"}
    to = {"$tensor": "bytes.@data"}
    assert view.objects["all"] == {"$tuple": [{"x": to}, ["blob.@data", to]]}
    assert inner["$tuple"][0] == {"x": {"$tensor": "blob.@data"}}, "the catalogue itself is as it was"


def test_a_name_that_the_checkpoint_lacks_is_refused() -> None:
    with pytest.raises(StructureError, match=r"no key matches \['net.w.y', 'nett'\]; near it: .*net\.w\.x"):
        renamed(_catalogue(), {"a": "nett", "b": "net.w.y", "c": "net.b"})
    with pytest.raises(StructureError, match=r"include: no key matches \['epoc'\]; near it: epoch;"):
        check_patterns("include", ["net", "epoc"], [*_catalogue().tensors, "epoch"])


def test_a_rename_displaces_the_stored_keys_of_its_new_name() -> None:
    """A key of the target comes from the place that `rename` names, and from no other."""
    view, stored = renamed(_catalogue(), {"net": "blob"})
    assert view.tensors == {"net.@data": ("uint8", (100,))} and stored == {
        "net.@data": "blob.@data",
        "net": "blob",
        "epoch": "epoch",
    }
    assert view.objects == {"net": {"$tensor": "net.@data", "kind": "bytes"}, "epoch": 3} and not view.aliases
    view, _ = renamed(_catalogue(), {"net.w": "net.b"})
    assert view.tensors["net.w"] == ("float32", (4,)) and "net.w.x" not in view.tensors, "below the new name"
    assert view.tensors["net.tied"] == ("float32", (2,)), "the other name of a displaced tensor stays"
    view, _ = renamed(_catalogue(w=1, lr=2), {"": "net"})
    assert view.tensors["w"] == ("float32", (2,)) and view.objects["lr"] == 2 and "w" not in view.objects


def test_two_keys_of_the_checkpoint_under_one_name_are_refused() -> None:
    with pytest.raises(StructureError, match="would both be 'net.b'"):
        renamed(_catalogue(), {"net": "net", "net.b": "epoch", "x": "net.w"})


def test_averaged_weights_load_into_the_model(tmp_path: Path) -> None:
    model, averaged, target = (torch.nn.Linear(2, 2) for _ in range(3))
    sp.save(tmp_path / "step", {"model": model, "ema": {"module": averaged}, "epoch": 3})
    state = {"model": target, "epoch": 0}
    sp.load(tmp_path / "step", state, rename={"model": "ema.module"})
    assert torch.equal(target.weight, averaged.weight) and state["epoch"] == 3


def test_a_rename_of_a_key_that_the_target_lacks_is_an_error_or_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the typo, the load would take other weights."""
    sp.save(tmp_path / "step", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.full((2,), 2.0)}})
    target = {"model": {"w": torch.zeros(2)}}
    text = "rename has keys that the target does not have: {'modle': 'ema'}"
    with pytest.raises(StructureError, match=re.escape(text)):
        sp.load(tmp_path / "step", target, rename={"modle": "ema"}, include="model")
    assert not target["model"]["w"].any() and not caplog.records
    sp.load(tmp_path / "step", target, rename={"modle": "ema"}, strict=False)
    assert target["model"]["w"].tolist() == [1, 1] and text in caplog.text
    sp.load(tmp_path / "step", target, rename={"model": "ema"})
    assert target["model"]["w"].tolist() == [2, 2]


def test_one_key_of_the_checkpoint_under_two_names_is_refused() -> None:
    with pytest.raises(StructureError, match="both 'a' and 'b' would be 'net.w' of the checkpoint"):
        renamed(_catalogue(), {"a": "net.w", "b": "net.w"})


def test_a_mapping_in_the_wrong_direction_is_refused_with_the_right_one(tmp_path: Path) -> None:
    """Each mapping that one call takes is refused by the other, which prints the mapping that it takes."""
    sp.save(tmp_path / "step", {"net": {"w": torch.arange(3.0)}, "epoch": 3, "more": 1})
    written = {"net": "", "epoch": "at"}  # for a conversion
    target = {"w": torch.zeros(3), "at": 0, "more": 0}
    with pytest.raises(
        StructureError, match="direction is reversed.*load maps a key of the target"
    ) as caught:
        sp.load(tmp_path / "step", target, rename=written)
    wanted = ast.literal_eval(caught.value.message.partition("Swap both sides: ")[2])
    assert wanted == {"": "net", "at": "epoch"} and not target["w"].any()
    sp.load(tmp_path / "step", target, rename=wanted)
    assert target["w"].tolist() == [0, 1, 2] and (target["at"], target["more"]) == (3, 1)

    with pytest.raises(StructureError, match="direction is reversed.*conversion maps a stored key") as caught:
        sp.convert(tmp_path / "step", tmp_path / "there", to="shardproof", rename=wanted)
    assert ast.literal_eval(caught.value.message.partition("Swap both sides: ")[2]) == written
    sp.convert(tmp_path / "step", tmp_path / "there", to="shardproof", rename=written)
    assert sp.open(tmp_path / "there").keys() == ["at", "more", "w"]


def test_a_wrong_direction_is_reported_if_no_mapping_can_be_suggested() -> None:
    with pytest.raises(StructureError, match=r"direction is reversed.*has \['net', 'blob'\] and no \[''\]"):
        renamed(_catalogue(), {"net": "", "blob": ""})
    with pytest.raises(StructureError, match=r"no key matches \['nett'\]"):  # one stored key is right
        renamed(_catalogue(), {"net": "nett", "b": "epoch"})
    with pytest.raises(StructureError, match="'epoch' would have an empty name"):
        renamed(_catalogue(), {"": "epoch"})


def _saved(tmp_path: Path) -> Path:
    sp.save(tmp_path / "step", {"w": torch.ones(2), "b": torch.ones(3), "epoch": 3})
    return tmp_path / "step"


def test_a_rename_with_a_key_that_the_target_lacks_says_so(tmp_path: Path) -> None:
    target = {"w": torch.zeros(2), "b": torch.zeros(3), "epoch": 0}
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(_saved(tmp_path), target, rename={"typo": "w"})
    text = caught.value.message
    assert "rename has keys that the target does not have" in text and "'typo': 'w'" in text
    assert "missing in the checkpoint" not in text and "not asked for" not in text
    del target["w"]  # no key of the target is missing
    with pytest.raises(sp.KeyMismatchError, match="rename has keys that the target does not have"):
        sp.load(tmp_path / "step", target, rename={"typo": "w"})
    sp.load(tmp_path / "step", target, rename={"typo": "w"}, strict=False)
    assert target["epoch"] == 3


def test_a_rename_of_the_target_is_not_blamed_for_other_keys(tmp_path: Path) -> None:
    target = {"other": {"w": torch.zeros(2)}, "b": torch.zeros(3), "more": 0}
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(_saved(tmp_path), target, rename={"other.w": "w"})
    assert (caught.value.details["missing"], caught.value.details["unexpected"]) == (["more"], ["epoch"])
    assert "rename has" not in caught.value.message


@pytest.mark.parametrize("strict", [True, False])
def test_an_exclude_that_matches_nothing_is_named(
    strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key of the target alone, or of the checkpoint alone, matches."""
    target = {"w": torch.zeros(2), "new": torch.zeros(1), "epoch": 0}
    sp.load(_saved(tmp_path), target, exclude=["typo", "new", "b"], strict=strict)
    assert target["epoch"] == 3
    (record,) = caplog.records
    assert "exclude: no key matches ['typo']" in record.getMessage()
    caplog.clear()
    sp.load(tmp_path / "step", target, exclude=["new", "b"], strict=strict)
    assert not caplog.records


def test_an_exclude_may_match_on_one_rank_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A stage of a pipeline may have the only key."""
    matching = MatchReport("a", True, False)
    other = MatchReport("a", True, False, unused_excludes=("head",))
    agree("step", [matching, other], list)
    assert not caplog.records
    agree("step", [other] * 2, list)
    assert "exclude: no key matches ['head']" in caplog.text


@pytest.mark.parametrize("include", [[], (), ""])
def test_an_empty_include_is_refused(include: Any, tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="include: it is empty"):
        sp.load(_saved(tmp_path), {"w": torch.zeros(2)}, include=include, strict=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("exclude", ["*", ["w", "part.*", "items*"]])
def test_an_exclude_that_leaves_no_key_of_the_target_is_refused(
    exclude: Any, strict: bool, tmp_path: Path
) -> None:
    tree = {"w": torch.ones(2), "part": sp.PerRank(1), "items": {"a": 1}}
    sp.save(tmp_path / "all", tree)
    checkpointer = sp.Checkpointer(tmp_path / "run")
    checkpointer.save(1, tree).result()
    target = {"w": torch.zeros(2), "part": sp.PerRank(0), "items": {"a": 0}}
    with pytest.raises(StructureError, match="exclude leaves no key of the target"):
        sp.load(tmp_path / "all", target, exclude=exclude, strict=strict)
    with pytest.raises(StructureError, match="exclude leaves no key of the target"):
        checkpointer.restore(target, exclude=exclude, strict=strict)
    assert sp.load(tmp_path / "all", target, exclude=["part", "items"], strict=strict).tensors == 1
    assert sp.load(tmp_path / "all", {}, exclude="*").tensors == 0


def test_a_rank_may_have_only_excluded_keys() -> None:
    """A stage of a pipeline may have no other key."""
    without = MatchReport("a", True, False)
    excluded, other = (MatchReport("a", True, False, excludes_all=all_of) for all_of in (True, False))
    agree("step", [excluded, other], list)
    with pytest.raises(StructureError, match="exclude leaves no key"):
        agree("step", [excluded, without], list)


@pytest.mark.parametrize(
    ("stored", "wraps"),
    [("module.", False), ("module.", True), ("model.module.", True), ("module.inner.", True)],
)
def test_the_keys_of_a_wrapper_are_an_error_with_the_rename(tmp_path: Path, stored: str, wraps: bool) -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    torch.save({f"{stored}{key}": item for key, item in weights.items()}, tmp_path / "ddp.pt")
    model = torch.nn.Linear(2, 2)
    inside = torch.nn.ModuleDict({"inner": model}) if "inner" in stored else model
    target = {"model": inside} if wraps else inside
    with pytest.raises(
        KeyMismatchError, match="prefix of a wrapper such as DistributedDataParallel"
    ) as caught:
        sp.load(tmp_path / "ddp.pt", target)
    rename = ast.literal_eval(caught.value.message.partition("rename=")[2].partition(" loads them")[0])
    sp.load(tmp_path / "ddp.pt", target, rename=rename)
    assert torch.equal(model.weight, weights["weight"]) and torch.equal(model.bias, weights["bias"])


def test_other_keys_are_an_error_without_a_rename(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for keys in (("module.weight", "module.bia"), ("other.weight", "other.bias")):
        torch.save(dict.fromkeys(keys, torch.ones(2)), tmp_path / "other.pt")
        with pytest.raises(KeyMismatchError) as caught:
            sp.load(tmp_path / "other.pt", model)
        assert "rename" not in caught.value.message
    stored = ("module.w",)
    shown = MatchReport("a", True, False, missing=("w",), unexpected=stored)
    other = MatchReport("a", True, False, missing=("v",), unexpected=stored)
    renaming = MatchReport("a", True, False, missing=("w",), unexpected=stored, unused_renames={})
    for reports, is_shown in (([shown], True), ([shown, other], False), ([renaming], False)):
        with pytest.raises(KeyMismatchError) as caught:
            agree("step", reports, list)
        assert ("rename={'': 'module'}" in caught.value.message) is is_shown


def test_an_empty_stored_key_is_an_error_that_names_the_target(tmp_path: Path) -> None:
    model, saved = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.save(saved.state_dict(), tmp_path / "sd.pt")
    with pytest.raises(
        StructureError, match=r"stored key of \['model'\] is empty.* as in sp.load\(path, model\)"
    ):
        sp.load(tmp_path / "sd.pt", {"model": model}, rename={"model": ""})
    sp.load(tmp_path / "sd.pt", model)
    assert torch.equal(model.weight, saved.weight)


def test_a_rename_of_the_parts_of_an_optimizer_in_the_form_of_torch_is_used(tmp_path: Path) -> None:
    """The load reads them under the names of parameters."""
    model = torch.nn.Linear(2, 2)
    optimizer, target = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    halves = optimizer.state_dict()
    torch.save(
        {"model": model.state_dict(), "slots": halves["state"], "groups": halves["param_groups"]},
        tmp_path / "last.pt",
    )
    rename = {"optimizer.state": "slots", "optimizer.param_groups": "groups"}
    sp.load(tmp_path / "last.pt", {"model": model, "optimizer": target}, rename=rename)
    for parameter in model.parameters():
        assert torch.equal(target.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])

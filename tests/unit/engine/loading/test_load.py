"""Filling a state in place: all kinds of destination, partial loads, one report of all mismatches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import load_from, read_executor
from shardproof.engine.saving import Saver
from shardproof.errors import KeyMismatchError, ShardproofError, StructureError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.small_blocks import blocks_of

STORED = torch.arange(6 * 10, dtype=torch.float32).reshape(6, 10)


@pytest.fixture(scope="module", params=[64, 1 << 20], ids=["many chunks", "one chunk"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "step"
    saver = Saver(LocalRendezvous(), chunk_bytes=request.param)
    state = {"w": STORED, "b": {"x": torch.arange(5), "y": torch.ones(2, 2)}, "epoch": 4, "tags": ["a", "b"]}
    saver.save(LocalStorage(place), state, step=9)
    return place


def _state(w: Any) -> dict[str, Any]:
    return {
        "w": w,
        "b": {"x": torch.zeros(5, dtype=torch.int64), "y": torch.zeros(2, 2)},
        "epoch": 0,
        "tags": [],
    }


DESTINATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(6, 10),
    "transposed": lambda: torch.zeros(10, 6).t(),
    "every other column": lambda: torch.zeros(6, 20)[:, ::2],
    "rows of a larger one": lambda: torch.zeros(9, 10)[2:8],
    "columns of a larger one": lambda: torch.zeros(6, 13)[:, 1:11],
    "permuted from four": lambda: torch.zeros(10, 1, 6).permute(1, 2, 0)[0],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(6, 10)),
}


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_destinations_are_filled_in_place(folder: Path, kind: str) -> None:
    target = DESTINATIONS[kind]()
    state = _state(target)
    report = sp.load(folder, state)
    assert state["w"] is target and torch.equal(target.detach(), STORED)
    assert state["epoch"] == 4 and state["tags"] == ["a", "b"]
    assert torch.equal(state["b"]["x"], torch.arange(5)) and torch.equal(state["b"]["y"], torch.ones(2, 2))
    assert (report.step, report.tensors, report.bytes) == (9, 3, 6 * 10 * 4 + 5 * 8 + 2 * 2 * 4)
    assert (report.missing, report.unexpected, report.unchanged) == ((), (), ())


@pytest.mark.parametrize("kind", ["every other column", "rows of a larger one", "columns of a larger one"])
def test_memory_around_a_destination_stays_as_it_was(folder: Path, kind: str) -> None:
    view = DESTINATIONS[kind]()
    base = view._base
    assert base is not None
    base.fill_(-5)
    sp.load(folder, _state(view))
    assert torch.equal(view, STORED)
    view.fill_(-5)
    assert bool((base == -5).all())


def test_an_expanded_destination_is_refused_and_nothing_changes(folder: Path) -> None:
    state = _state(torch.zeros(1, 10).expand(6, 10))
    with pytest.raises(ShardproofError, match="'?w'?"):
        sp.load(folder, state)
    assert not state["w"].any() and not state["b"]["y"].any() and state["epoch"] == 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.complex64]
)
@pytest.mark.parametrize("kind", ["contiguous", "transposed"])
def test_a_dtype_is_converted_only_with_cast(folder: Path, dtype: torch.dtype, kind: str) -> None:
    target = DESTINATIONS[kind]().to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(KeyMismatchError, match=f"w: expected .*{name}.*float32"):
        sp.load(folder, _state(target))
    assert not target.any()
    for cast in (True, "w", ["b", "w"]):
        state = _state(target.clone())
        sp.load(folder, state, cast=cast)  # type: ignore[arg-type]
        assert state["w"].dtype == dtype and torch.equal(state["w"], STORED.to(dtype))
    with pytest.raises(KeyMismatchError):
        sp.load(folder, _state(target), cast="b")


@pytest.mark.parametrize("kind", ["whole", "converted", "transposed"])
def test_tensors_of_inference_mode_are_filled_outside_of_it(tmp_path: Path, kind: str) -> None:
    stored = torch.randn(300, 300)
    sp.save(tmp_path / "ckpt", {"w": stored})
    with torch.inference_mode():
        target = torch.zeros(300, 300, dtype=torch.float64 if kind == "converted" else None)
        target = target.t() if kind == "transposed" else target
    sp.load(tmp_path / "ckpt", {"w": target}, cast=True)
    assert target.is_inference() and torch.equal(target.to(stored.dtype), stored)


def test_new_memory_that_a_tensor_gets_during_a_load_is_not_written(tmp_path: Path) -> None:
    """The load writes to the memory that the tensor had at the call, which must still be allocated."""
    stored = torch.randn(3000, 300)
    sp.save(tmp_path / "ckpt", {"w": stored})
    held = torch.nn.Parameter(torch.zeros(3000, 300))
    other = torch.zeros(3000, 300)

    def give(event: sp.events.Event) -> None:
        if (event.kind, event.phase) == ("begin", "read"):
            held.data = other

    with sp.events.subscribe(give):
        sp.load(tmp_path / "ckpt", {"w": held})
    assert held.data_ptr() == other.data_ptr() and not other.any()


@pytest.mark.parametrize("kind", ["whole", "converted", "transposed", "a view", "worked out"])
def test_tensors_that_require_gradients_are_filled_and_keep_their_graph(tmp_path: Path, kind: str) -> None:
    stored = torch.randn(300, 300)
    sp.save(tmp_path / "ckpt", {"w": stored})
    leaf = torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.float64 if kind == "converted" else None))
    if kind == "transposed":
        leaf = torch.nn.Parameter(torch.zeros(300, 300).t())
    graph = {"a view": lambda: leaf[:, :], "worked out": lambda: leaf * 1}
    held = graph[kind]() if kind in graph else leaf
    before = held._version
    sp.load(tmp_path / "ckpt", {"w": held}, cast=True)
    assert torch.equal(held.detach().to(stored.dtype), stored)
    assert held.requires_grad and held.is_leaf == (kind not in graph) and held._version > before
    held.sum().backward()
    assert leaf.grad is not None and leaf.grad.sum() == stored.numel()


def test_a_shape_never_changes_with_a_cast(folder: Path) -> None:
    for shape in ((10, 6), (6, 10, 1), (60,), (7, 10), (0, 10)):
        with pytest.raises(KeyMismatchError, match="w: expected"):
            sp.load(folder, _state(torch.zeros(shape)), cast=True, strict=False)


def _unfitting() -> dict[str, Any]:
    return {
        "w": torch.zeros(6, 11),
        "b": {"x": torch.zeros(5), "new": torch.zeros(3)},
        "epoch": 0,
        "lr": 0.5,
    }


def test_one_error_reports_every_mismatch_and_nothing_is_changed(folder: Path) -> None:
    state = _unfitting()
    with pytest.raises(KeyMismatchError) as caught:
        sp.load(folder, state)
    details, text = caught.value.details, caught.value.message
    assert details["missing"] == ["b.new", "lr"]
    assert details["unexpected"] == ["b.y", "tags"]
    assert [key for key, _, _ in details["mismatched"]] == ["b.x", "w"]
    assert "nothing was changed" in text
    for words in ("b.new", "lr", "b.y", "tags", "[6, 11]", "[6, 10]", "float32", "int64"):
        assert words in text, text
    assert not state["w"].any() and not state["b"]["x"].any() and state["epoch"] == 0 and state["lr"] == 0.5


def test_a_long_report_is_cut_but_its_details_are_not(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {"x": 1})
    state = {"x": 0, "deep": {f"k{number:03d}": torch.zeros(1) for number in range(50)}}
    with pytest.raises(
        KeyMismatchError, match=r"missing in the checkpoint \(50; .*\n(.*\n)*.*30 more"
    ) as caught:
        sp.load(tmp_path / "a", state)
    assert len(caught.value.details["missing"]) == 50


def test_a_load_that_is_not_strict_fills_common_keys_and_reports_the_others(folder: Path) -> None:
    state = {"w": torch.zeros(6, 10), "b": {"new": torch.full((3,), 8.0)}, "epoch": 0, "lr": 0.5}
    report = sp.load(folder, state, strict=False)
    assert torch.equal(state["w"], STORED) and state["epoch"] == 4  # type: ignore[arg-type]
    assert state["lr"] == 0.5 and state["b"]["new"].tolist() == [8.0, 8.0, 8.0]  # type: ignore[index]
    assert report.missing == ("b.new", "lr") and report.unexpected == ("b.x", "b.y", "tags")


def _layers(prefix: str, value: float) -> dict[str, Any]:
    layers = {f"{prefix}{number}": torch.full((2,), value) for number in range(9)}
    return {"model": layers, "epoch": int(value)}


def test_a_load_that_is_not_strict_refuses_a_target_without_a_stored_key(tmp_path: Path) -> None:
    run = sp.Checkpointer(tmp_path / "run")
    run.save(1, {"model": _layers("h.", 3.0)["model"]}).result()
    target = {"model": _layers("module.h.", 0.0)["model"]}
    with pytest.raises(KeyMismatchError, match="fills 0 of 9 keys of the target") as caught:
        run.restore(target, strict=False)
    for name in ("'model.module.h.0'", "'model.h.0'", "rename= maps them"):
        assert name in caught.value.message
    with pytest.raises(KeyMismatchError, match="fills 0 of 9 keys"):
        sp.load(tmp_path / "run/step-00000001", target, strict=False)
    report = sp.load(tmp_path / "run/step-00000001", target, rename={"model.module": "model"}, strict=False)
    assert report.missing == () and target["model"]["module.h.8"].tolist() == [3.0, 3.0]


def test_a_load_that_is_not_strict_warns_if_few_keys_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sp.save(tmp_path / "a", _layers("h.", 3.0))
    target = _layers("module.h.", 0.0)
    sp.load(tmp_path / "a", target, strict=False)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "fills 1 of 10 keys of the target, from 1 of 10 keys of the checkpoint" in warning
    assert "'model.module.h.0', 'model.module.h.1', 'model.module.h.2', ..." in warning
    assert target["epoch"] == 3


def test_a_load_of_a_part_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A few keys of a large checkpoint into a small target, and of a small one into a large target."""
    sp.save(tmp_path / "large", _layers("h.", 3.0))
    sp.save(tmp_path / "small", {"epoch": 5})
    sp.load(tmp_path / "large", {"epoch": 0}, strict=False)
    sp.load(tmp_path / "small", _layers("h.", 0.0), strict=False)
    sp.load(tmp_path / "small", {}, strict=False)
    assert not caplog.records


def test_a_load_that_is_not_strict_refuses_mismatched_keys(folder: Path) -> None:
    state = _unfitting()
    with pytest.raises(KeyMismatchError) as caught:
        sp.load(folder, state, strict=False)
    assert caught.value.details["missing"] == [] == caught.value.details["unexpected"]
    assert [key for key, _, _ in caught.value.details["mismatched"]] == ["b.x", "w"]
    assert not state["w"].any() and state["epoch"] == 0


def test_a_tensor_in_place_of_a_plain_value_is_a_mismatch_and_vice_versa(folder: Path) -> None:
    state = {"w": 3, "b": {"x": torch.zeros(5, dtype=torch.int64), "y": torch.zeros(2, 2)}, "tags": []}
    with pytest.raises(KeyMismatchError) as caught:
        sp.load(folder, {**state, "epoch": torch.zeros(1)})
    assert [key for key, _, _ in caught.value.details["mismatched"]] == ["epoch", "w"]
    assert state["tags"] == []


def test_only_included_keys_are_loaded(folder: Path) -> None:
    state = _state(torch.zeros(6, 10))
    report = sp.load(folder, state, include=["b", "epoch"], exclude="*.y")
    assert not state["w"].any() and not state["b"]["y"].any() and state["tags"] == []
    assert torch.equal(state["b"]["x"], torch.arange(5)) and state["epoch"] == 4
    assert report.tensors == 1 and report.bytes == 40 and report.unexpected == ()


def test_excluded_keys_need_not_fit(folder: Path) -> None:
    state = _unfitting()
    sp.load(folder, state, include="epoch")
    assert state["epoch"] == 4 and not state["w"].any()
    sp.load(folder, state, exclude=["w", "b", "lr", "tags"])


def test_a_load_of_a_part_reads_only_its_chunks(tmp_path: Path) -> None:
    """One piece of a tensor of many chunks."""
    Saver(LocalRendezvous(), chunk_bytes=40).save(LocalStorage(tmp_path), {"w": STORED})
    piece = torch.zeros(2, 4)
    state = {"w": sp.LocalShards((6, 10), [(piece, (3, 5))], dtype=torch.float32)}
    report = sp.load(tmp_path, state)
    assert torch.equal(piece, STORED[3:5, 5:9])
    assert report.bytes == 2 * 40, "two chunks of one row each"


def test_renamed_keys_are_loaded_and_reported_under_the_targets_names(folder: Path) -> None:
    state = {
        "weight": torch.zeros(6, 10),
        "c": {"x": torch.zeros(5, dtype=torch.int64)},
        "epoch": 0,
        "tags": 0,
    }
    rename = {"weight": "w", "c": "b"}
    with pytest.raises(KeyMismatchError) as caught:
        sp.load(folder, state, rename=rename)
    assert caught.value.details["unexpected"] == ["c.y"]
    sp.load(folder, state, rename=rename, exclude="c.y")
    assert torch.equal(state["weight"], STORED) and state["epoch"] == 4  # type: ignore[arg-type]
    with pytest.raises(StructureError, match=r"no key matches \['v'\]"):
        sp.load(folder, state, rename={"weight": "v"})


def test_tied_targets_take_equal_values_and_refuse_different_ones(tmp_path: Path) -> None:
    one = torch.arange(4.0)
    sp.save(tmp_path / "tied", {"a": one, "b": one})
    sp.save(tmp_path / "equal", {"a": one, "b": one.clone()})
    sp.save(tmp_path / "apart", {"a": one, "b": one + 1})
    for saved in ("tied", "equal"):
        target = torch.zeros(4)
        sp.load(tmp_path / saved, {"a": target, "b": target})
        assert torch.equal(target, one)
        apart = {"a": torch.zeros(4), "b": torch.zeros(4)}
        sp.load(tmp_path / saved, apart)
        assert torch.equal(apart["a"], one) and torch.equal(apart["b"], one)
    target = torch.zeros(4)
    with pytest.raises(KeyMismatchError, match="two tensors in the checkpoint whose chunks differ"):
        sp.load(tmp_path / "apart", {"a": target, "b": target})
    assert not target.any()
    sp.load(tmp_path / "apart", {"a": target, "b": target}, exclude="b")
    assert torch.equal(target, one)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("direct", [1, 1 << 40], ids=["in place", "through scratch"])
def test_every_way_of_reading_gives_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, direct: int
) -> None:
    monkeypatch.setattr(read_executor, "LARGE_BYTES", direct)
    monkeypatch.setattr(read_executor, "_BATCH_BYTES", 1 << 12)
    monkeypatch.setattr("shardproof.engine.loading.load_protocol.reading_threads", lambda: threads)
    state = {f"t{n}": torch.randn(n * 37 % 50 + 1, n % 9 + 1) for n in range(60)}
    state |= {f"u{n}": torch.randint(0, 255, (n * 3 + 1,), dtype=torch.uint8) for n in range(20)}
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    strided = {key: torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 1] for key, value in state.items()}
    with blocks_of(100):
        Saver(LocalRendezvous(), chunk_bytes=500).save(LocalStorage(tmp_path), state)
        for filled in (target, strided):
            report = sp.load(tmp_path, filled)
            assert report.bytes == sum(value.nbytes for value in state.values())
            assert all(torch.equal(filled[key], value) for key, value in state.items())


def test_every_dtype_is_loaded_at_any_alignment(tmp_path: Path) -> None:
    from shardproof.dtypes import DTYPES

    state = {}
    for name, dtype in DTYPES.items():
        if hasattr(torch, name):
            raw = torch.randint(0, 2 if name == "bool" else 255, (7 * dtype.itemsize,), dtype=torch.uint8)
            state[name] = raw.view(getattr(torch, name))
    Saver(LocalRendezvous(), chunk_bytes=16).save(LocalStorage(tmp_path), state)
    target = {
        key: torch.zeros(7 * value.element_size(), dtype=torch.uint8).view(value.dtype)
        for key, value in state.items()
    }
    sp.load(tmp_path, target)
    for key, value in state.items():
        assert torch.equal(target[key].view(torch.uint8), value.view(torch.uint8)), key
        with sp.open(tmp_path) as opened:
            assert torch.equal(opened[key].read().view(torch.uint8), value.view(torch.uint8)), key
            assert torch.equal(opened[key][3:6].view(torch.uint8), value[3:6].view(torch.uint8)), key


def test_memory_that_two_keys_share_takes_equal_values_only(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    sp.save(tmp_path / "agree", {"a": base, "b": base[:4]})
    sp.save(tmp_path / "differ", {"a": base, "b": base[:4] + 100})
    memory = torch.zeros(8)
    target = {"a": memory, "b": memory[:4]}
    sp.load(tmp_path / "agree", target)
    assert torch.equal(memory, base)
    with pytest.raises(sp.StructureError, match="shares memory") as caught:
        sp.load(tmp_path / "differ", target)
    assert "partly overwritten" in str(caught.value)
    sp.load(tmp_path / "differ", target, exclude="b")


@pytest.mark.parametrize("rows", [slice(0, 100), slice(100, 200), slice(900, 1000)])
def test_memory_that_two_keys_share_is_found_in_any_chunk(tmp_path: Path, rows: slice) -> None:
    """The bytes of the larger tensor are never read straight into place. There the bytes of the smaller one
    could overwrite them before they are hashed."""
    base = torch.randn(1000, 1000)
    state = {"a": base, "b": base[rows] + 100}
    Saver(LocalRendezvous(), chunk_bytes=1 << 20).save(LocalStorage(tmp_path), state)
    memory = torch.zeros(1000, 1000)
    into: list[int] = []

    class Watched(LocalStorage):
        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            into.append(np.frombuffer(buffer, np.uint8).ctypes.data)
            super().read_into(name, start, buffer)

        def is_cached(self, name: str, start: int, count: int) -> bool:
            return True

    with pytest.raises(sp.StructureError, match="shares memory"):
        load_from(Watched(tmp_path), {"a": memory, "b": memory[rows]}, LocalRendezvous())
    assert into and not any(0 <= at - memory.data_ptr() < memory.nbytes for at in into)


def test_interleaved_views_of_one_memory_are_no_conflict(tmp_path: Path) -> None:
    memory = torch.arange(8.0)
    sp.save(tmp_path / "c", {"even": memory[::2], "odd": memory[1::2]})
    other = torch.zeros(8)
    sp.load(tmp_path / "c", {"even": other[::2], "odd": other[1::2]})
    assert torch.equal(other, memory)


def test_one_element_of_a_strided_view_round_trips(tmp_path: Path) -> None:
    """Its only stride is that of the view it was taken from."""
    memory, other = torch.arange(64.0).view(8, 8), torch.zeros(8, 8)
    sp.save(tmp_path / "c", {"all": memory, "one": memory[::3, 1][1:2]})
    sp.load(tmp_path / "c", {"all": other, "one": other[::3, 1][1:2]})
    assert torch.equal(other, memory)


class _Moving:
    """Moves the memory of a tensor that was collected before it, as handing it to another process does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, int]:
        self.tensor.share_memory_().mul_(2)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"n": 1}


def test_memory_that_moves_while_the_state_is_collected_is_saved(tmp_path: Path) -> None:
    value = torch.arange(1 << 20).float()
    sp.save(tmp_path, {"a": value, "b": _Moving(value)})
    with sp.open(tmp_path) as opened:
        assert torch.equal(opened["a"].read(), torch.arange(1 << 20).float() * 2)


class _Merging(torch.nn.Module):
    """Computes a tensor when it is saved or loaded, and keeps it for its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.low = torch.nn.Parameter(torch.ones(2, 2))

    def get_extra_state(self) -> dict[str, int]:
        self.merged = self.low @ self.low
        return {"rank": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"rank": 2}


def test_tensors_that_a_module_computes_during_a_save_or_load_require_gradients(tmp_path: Path) -> None:
    module = _Merging()
    sp.save(tmp_path / "c", {"m": module})
    assert module.merged.requires_grad
    del module.merged
    sp.load(tmp_path / "c", {"m": module})
    assert module.merged.requires_grad


@pytest.mark.parametrize("option", ["include", "cast"])
def test_a_pattern_that_names_nothing_is_refused(option: str, tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"model": {"w": torch.ones(2)}})
    with pytest.raises(sp.StructureError, match=rf"{option}: no key matches \['modle.\*'\]"):
        sp.load(tmp_path / "c", {"model": {"w": torch.zeros(2)}}, **{option: ["modle.*"]})


@pytest.mark.parametrize(
    ("stored", "target", "warns"),
    [
        (torch.int64, torch.int16, True),
        (torch.float32, torch.uint8, True),
        (torch.int8, torch.uint8, True),
        (torch.int64, torch.bool, True),
        (torch.uint8, torch.int16, False),
        (torch.bool, torch.int8, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
    ],
)
def test_a_cast_to_integers_that_may_change_numbers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: torch.dtype, target: torch.dtype, warns: bool
) -> None:
    sp.save(tmp_path / "c", {"w": torch.ones(2, dtype=stored)})
    sp.load(tmp_path / "c", {"w": torch.zeros(2, dtype=target)}, cast=True)
    text = f"numbers that do not fit: 'w ({stored} to {target})'".replace("torch.", "")
    assert [text in record.getMessage() for record in caplog.records] == [True] * warns


def test_complex_values_are_never_cast_to_real_ones(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"w": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(sp.KeyMismatchError, match="imaginary"):
        sp.load(tmp_path / "c", {"w": torch.zeros(2)}, cast=True)


def test_an_error_of_load_state_dict_notes_that_the_target_is_partly_overwritten(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("boom")

    sp.save(tmp_path / "c", {"w": torch.ones(2), "x": Refuses()})
    with pytest.raises(ValueError, match="boom") as caught:
        sp.load(tmp_path / "c", {"w": torch.zeros(2), "x": Refuses()})
    assert [note for note in caught.value.__notes__ if "partly overwritten" in note]
    assert [note for note in caught.value.__notes__ if "key 'x'" in note]


def test_per_rank_values_that_the_target_lacks_are_unexpected(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"w": torch.ones(2), "rng": sp.RandomState()})
    with pytest.raises(sp.KeyMismatchError, match="not asked for"):
        sp.load(tmp_path / "c", {"w": torch.zeros(2)})


def test_garbage_collection_is_enabled_while_objects_load_their_state(tmp_path: Path) -> None:
    class Keeper:
        enabled: bool | None = None

        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.enabled = gc.isenabled()

    sp.save(tmp_path, {"keeper": Keeper(), "w": torch.ones(3)})
    keeper = Keeper()
    sp.load(tmp_path, {"keeper": keeper, "w": torch.zeros(3)})
    assert keeper.enabled is True


class RefusingSampler:
    """Raises an error that says nothing about its place in the state."""

    def state_dict(self) -> dict[str, int]:
        return {"seed": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("position")


def test_an_error_of_load_state_dict_names_the_object(tmp_path: Path) -> None:
    state = {"data": {"sampler": RefusingSampler()}}
    sp.save(tmp_path / "saved", state)
    with pytest.raises(KeyError, match="position") as caught:
        sp.load(tmp_path / "saved", state)
    assert "raised by the RefusingSampler at state['data']['sampler'], key 'data.sampler'" in [
        note for note in caught.value.__notes__ if "sampler" in note
    ]

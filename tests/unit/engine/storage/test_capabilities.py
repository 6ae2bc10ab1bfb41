"""The optional methods of `Storage`: their defaults, and what storages that wrap others do with them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.foreign import Foreign
from shardproof.maintenance import verify, verify_any
from shardproof.runs.checkpointer.nodes import NodeStorage
from shardproof.runs.checkpointer.nodes.peer_storage import PeerStorage
from shardproof.runs.checkpointer.tiers import TieredRun
from shardproof.storage import LocalStorage, Storage, UncachedStorage
from shardproof.storage.conformance import StorageConformance
from tests.faulty_storage import FaultyStorage

OPTIONAL = {name for name in vars(Storage) if not name.startswith("_")} - Storage.__abstractmethods__

FORWARDED: Mapping[type[Storage], set[str]] = {
    TieredRun: {"bounds_reads", "is_cached", "nearest", "read_at_most", "read_buffer"},
    NodeStorage: {
        *("bounds_reads", "is_cached", "nearest", "read_at_most", "read_buffer"),
        *("flush_names", "free_space"),
    },
    PeerStorage: {"flush_names"},
    FaultyStorage: {"replace"},
}
"""What each storage that wraps others, or stands for one elsewhere, does not leave to the base class."""

DEFAULT: Mapping[type[Storage], dict[str, str]] = {
    TieredRun: {
        "path direct past_cache in_memory": "its files are in several places: `nearest` has that of a file",
        "is_remote with_contents with_one_wait": "its tiers differ: each is asked, or made, alone",
        "modified now": "each tier has a clock of its own",
        "replace free_space uploads abort_upload hold": "each tier is written alone",
        "flush_names": "`flush` of the nearest copy",
    },
    NodeStorage: {
        "path direct past_cache in_memory": "its files are on several nodes; `own` is the folder of this one",
        "is_remote with_contents with_one_wait": "its places are folders",
        "modified now": "each node has a clock of its own",
        "replace uploads abort_upload hold": "it is no second tier, and the folder of the node is held",
    },
    PeerStorage: {
        "path direct past_cache in_memory is_cached": "its folder is on another machine",
        "is_remote bounds_reads read_at_most read_buffer with_contents with_one_wait": "it is a folder",
        "modified now": "no request for times",
        "replace free_space uploads abort_upload hold": "a rank of that node does it",
        "nearest": "it has one copy",
    },
    FaultyStorage: {
        "path direct past_cache in_memory is_cached nearest": "no operation goes around the fault",
        "is_remote bounds_reads read_at_most read_buffer with_contents with_one_wait": "all are its reads",
        "modified now": "no test needs them",
        "free_space uploads abort_upload hold flush_names": "all are its operations",
    },
}
"""What they leave to it, and why."""


@pytest.mark.parametrize("kind", FORWARDED)
def test_a_storage_that_wraps_others_decides_about_each_capability(kind: type[Storage]) -> None:
    """A new optional method fails here, until each of them forwards it or has a reason not to."""
    reasons = {name for names in DEFAULT[kind] for name in names.split()}
    assert reasons | FORWARDED[kind] == OPTIONAL and not reasons & FORWARDED[kind]
    above = kind.__mro__[: kind.__mro__.index(Storage)]
    assert {name for name in OPTIONAL if any(name in vars(part) for part in above)} == FORWARDED[kind]


class Capable(LocalStorage):
    """A folder with an answer of its own for each method that a run of several tiers forwards."""

    bounds_reads = True

    def read_at_most(self, name: str, most: int) -> bytes:
        return super().read_at_most(name, most) + b" at most"

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        return memoryview(bytes(super().read_buffer(name, start, count)) + b" buffer")

    def is_cached(self, name: str, start: int, count: int) -> bool:
        super().is_cached(name, start, count)
        return True

    def within(self, prefix: str) -> Capable:
        return Capable(self.path / prefix)


def test_tiers_pass_the_requests_on_to_the_tier_that_has_the_file(tmp_path: Path) -> None:
    for near, far in ((Capable, LocalStorage), (LocalStorage, Capable)):
        run = tmp_path / near.__name__
        first, second = near(run / "near"), far(run / "far")
        folder = TieredRun([first, second]).within("step")
        for tier, name in ((first, "a"), (second, "b")):
            tier.within("step").publish(name, b"bytes")
        for tier, name in ((first, "a"), (second, "b")):
            is_capable = isinstance(tier, Capable)
            assert folder.read_at_most(name, 5) == b"bytes" + b" at most" * is_capable
            assert bytes(folder.read_buffer(name, 0, 5)) == b"bytes" + b" buffer" * is_capable
            assert folder.is_cached(name, 0, 5) or not is_capable
        (first if near is Capable else second).within("step").publish("manifest.json", b"{}")
        assert TieredRun([first, second]).within("step").bounds_reads


def _delegate(name: str) -> Any:
    if isinstance(vars(Storage)[name], property):
        return property(lambda self: getattr(self.inner, name))
    if name in ("within", "sibling"):
        return lambda self, folder: type(self)(getattr(self.inner, name)(folder))
    return lambda self, *args, **options: getattr(self.inner, name)(*args, **options)


def _init(self: Any, inner: Storage) -> None:
    self.inner = inner


_REQUIRED: dict[str, Any] = {
    "__init__": _init,
    **{name: _delegate(name) for name in Storage.__abstractmethods__},
}

Least: Callable[[Storage], Any] = type("Least", (Storage,), _REQUIRED)
"""A storage with the abstract methods alone."""

Unrelated: Callable[[Storage], Any] = type("Unrelated", (), _REQUIRED)
"""The same methods without the base class."""


class TestLeast(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        least: Storage = Least(LocalStorage(tmp_path / "root"))
        return least


def test_a_run_needs_the_abstract_methods_alone(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(Least(LocalStorage(tmp_path)), keep=sp.KeepLatest(2), incremental=True)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.full((4,), float(step))}).result()
    loaded = {"w": torch.zeros(4)}
    assert checkpointer.restore(loaded) == 3 and loaded["w"].eq(3).all()
    assert verify(Least(LocalStorage(tmp_path / "step-00000003"))).ok
    with pytest.raises(
        sp.StorageError, match=r"does not tell when its files were written.*`modified` in Least"
    ):
        Least(LocalStorage(tmp_path)).modified("step-00000003/manifest.json")


def test_by_default_a_file_that_is_still_there_is_flushed_for_the_names(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), 0, sp.StorageError("gone", missing=True), only=("flush",))
    for name in ("a/deep", "b", "c"):
        storage.publish(name, b"bytes")
    Least(storage).flush_names()
    assert storage.operations == [("flush", "b"), ("flush", "c")]


def test_a_file_that_cannot_be_flushed_does_not_stop_the_default_flush_of_names(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), 0, sp.StorageError("a link to nothing"), only=("flush",))
    for name in ("a", "b"):
        storage.publish(name, b"bytes")
    Least(storage).flush_names()
    assert storage.operations == [("flush", "a"), ("flush", "b")]
    (tmp_path / "b").unlink()
    storage = FaultyStorage(LocalStorage(tmp_path), 0, sp.StorageError("a link to nothing"), only=("flush",))
    with pytest.raises(sp.StorageError, match="a link to nothing"):
        Least(storage).flush_names()


def test_a_storage_with_a_path_is_no_disk_of_a_node(tmp_path: Path) -> None:
    """Its files would be in one place, and the user would believe that there are copies."""

    class Wrapper(Least):
        @property
        def path(self) -> Path | None:
            return tmp_path

    wrapper = Wrapper(LocalStorage(tmp_path))
    for replicas in (0, 1):
        with pytest.raises(ValueError, match="node_local needs a folder on the disk of each node"):
            sp.Checkpointer(wrapper, node_local=sp.NodeLocal(replicas=replicas))


def test_a_subclass_of_a_folder_is_verified_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(LocalStorage):
        pass

    seen: list[type] = []
    module = importlib.import_module("shardproof.runs.maintenance.verify")
    monkeypatch.setattr(module, "verify", lambda storage, on_progress: seen.append(type(storage)))
    sp.save(tmp_path / "c", {"w": torch.ones(2)})
    verify_any(Foreign(Mine(tmp_path / "c")))
    assert seen == [UncachedStorage]


def _doors(tmp_path: Path) -> Iterator[Callable[[Any], object]]:
    state = {"w": torch.zeros(4)}
    yield lambda storage: sp.save(storage, state)
    yield lambda storage: sp.load(storage, state)
    yield sp.open
    yield sp.Checkpointer
    yield lambda storage: sp.Checkpointer(tmp_path / "run", second_tier=storage)
    yield lambda storage: sp.Checkpointer(tmp_path / "run").restore(state, step=storage)


def test_a_class_with_the_methods_of_a_storage_is_told_to_derive_from_it(tmp_path: Path) -> None:
    for use in _doors(tmp_path):
        with pytest.raises(TypeError, match=r"write `class Unrelated\(shardproof\.storage\.Storage\)`"):
            use(Unrelated(LocalStorage(tmp_path)))


def test_the_docstring_of_each_optional_method_states_its_default() -> None:
    for name in OPTIONAL:
        assert "Default: " in (inspect.getdoc(vars(Storage)[name]) or ""), name

"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A TCPStore client looks up the name of its peer when it connects. Where no name server answers, each
# connection would take 5 or 10 seconds, more than the deadlines that are tested: ask once, for a second.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Hypothesis examples share the cores with ranks and other tests, so they have no time limit. A failure in CI
# must repeat.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("local"), max_examples=500)  # make test-all
settings.load_profile("ci" if os.environ.get("CI") else "local")


INTEROP = Path(__file__).resolve().parent / "interop"
UNIT = Path(__file__).resolve().parent / "unit"

# Files of tests/unit that start other processes. All tests outside of tests/unit do.
PROCESSES = {
    *("test_forks", "test_hybrid_shards", "test_node_plan", "test_perfetto", "test_process"),
    *("test_memory_store", "test_public_names", "test_simulated_device", "test_state_slot_order"),
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector off the half a million objects that the collection of tests makes.

    They live until the end. With the collector on, its walks over them take a quarter of the collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that start other processes, and tests that need an environment of tests/interop."""
    for item in items:
        if item.path.stem in PROCESSES or item.name.startswith("test_python_blocks_of_a_page"):
            item.add_marker("processes")
        if _is_below(INTEROP, item.path):
            item.add_marker("interop")
    items.sort(key=_is_short)


def _is_short(item: pytest.Item) -> bool:
    """True for tests that start no process. They run last, so that the workers end at the same time."""
    return _is_below(UNIT, item.path) and item.get_closest_marker("processes") is None


@cache
def _is_below(folder: Path, path: Path) -> bool:
    return folder in path.parents


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where there is no accelerator.

    `tests/unit/test_simulated_device.py` runs them on a simulated one.
    """
    if item.get_closest_marker("gpu") is not None and not torch.accelerator.is_available():
        pytest.skip("no accelerator on this machine")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh(process_group: None) -> DeviceMesh:
    """A mesh of only this process."""
    return init_device_mesh("cpu", (1,))

"""The rule of the page cache: each line of it, and that saves and loads follow it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof._utils import topology
from shardproof.engine.loading import load_from
from shardproof.engine.saving import Saver
from shardproof.engine.storage import LocalSink, LocalStorage, UncachedStorage, cache_rule, choose_cache
from shardproof.rendezvous import LocalRendezvous

GIB = 1 << 30


@pytest.fixture(autouse=True)
def eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with 8 GiB of available memory and two ranks, and a user who chose nothing."""
    monkeypatch.delenv(cache_rule.VARIABLE, raising=False)
    monkeypatch.setattr(cache_rule, "available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(cache_rule, "ranks_here", lambda: 2)


@pytest.mark.parametrize(
    ("arguments", "variable", "through", "reason"),
    [
        ({"direct": True}, "0", False, "direct=True"),
        ({"direct": False, "beside_training": True}, "1", True, "direct=False"),
        ({}, "1", False, "SHARDPROOF_DIRECT=1"),
        ({"beside_training": True}, "0", True, "SHARDPROOF_DIRECT=0"),
        ({"beside_training": True}, "", False, "beside training"),
        ({}, "", True, "at most half: 4.29 GB of 8.59 GB of available memory"),
    ],
)
def test_the_lines_of_the_rule_come_in_order(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], variable: str, through: bool, reason: str
) -> None:
    monkeypatch.setenv(cache_rule.VARIABLE, variable)
    assert choose_cache(2 * GIB, **arguments) == (through, reason)


def test_bytes_that_take_more_than_half_of_the_memory_go_past_the_cache() -> None:
    past = choose_cache(2 * GIB + 1)
    assert not past.through and str(past).startswith("past: more than half: 4.29 GB of 8.59 GB")


def test_ranks_that_read_the_same_files_take_their_pages_once() -> None:
    assert not choose_cache(3 * GIB).through
    assert choose_cache(3 * GIB, most=3 * GIB).through
    assert not choose_cache(5 * GIB, most=5 * GIB).through


@pytest.mark.parametrize("value", ["yes", "2", "-1"])
def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(cache_rule.VARIABLE, value)
    with pytest.raises(ValueError, match="SHARDPROOF_DIRECT is .*set it to 1"):
        choose_cache(1)


def phases(run: Any) -> dict[str, Any]:
    """The `cache` fact of each phase during a call."""
    found: dict[str, Any] = {}

    def listen(event: Any) -> None:
        if "cache" in event.facts:
            found[event.phase] = event.facts["cache"]

    with events.subscribe(listen):
        run()
    return found


def test_a_waiting_caller_writes_through_the_cache_and_a_background_save_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past: list[bool] = []
    create = LocalStorage.create

    def created(storage: LocalStorage, name: str) -> LocalSink:
        if name.startswith("shards/"):
            past.append(isinstance(storage, UncachedStorage))
        return create(storage, name)

    monkeypatch.setattr(LocalStorage, "create", created)
    state = {"w": torch.ones(1 << 20)}
    noted = phases(lambda: Saver(LocalRendezvous()).save(LocalStorage(tmp_path / "a"), state))
    assert noted["write"].startswith("through: at most half") and past == [False]
    noted = phases(lambda: Saver(LocalRendezvous()).begin(LocalStorage(tmp_path / "b"), state).result())
    assert noted == {"write": "past: beside training"} and past == [False, True]


def test_a_load_of_more_than_half_of_the_memory_reads_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sp.save(tmp_path, {"w": torch.arange(1 << 20)})
    target = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
    reads: list[int] = []
    read_into = UncachedStorage.read_into

    def counted(storage: UncachedStorage, name: str, start: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read_into(storage, name, start, buffer)

    monkeypatch.setattr(UncachedStorage, "read_into", counted)
    noted = phases(lambda: load_from(LocalStorage(tmp_path), target, LocalRendezvous()))
    assert noted["read"].startswith("through: at most half") and not reads
    monkeypatch.setattr(cache_rule, "available_memory", lambda: 1 << 20)
    target["w"].zero_()
    noted = phases(lambda: load_from(LocalStorage(tmp_path), target, LocalRendezvous()))
    assert noted["read"].startswith("past: more than half") and sum(reads) >= 8 << 20
    assert torch.equal(target["w"], torch.arange(1 << 20))


def test_a_restore_of_two_tiers_follows_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sp.Checkpointer(tmp_path / "near", second_tier=tmp_path / "far")
    run.save(1, {"w": torch.ones(1 << 16)}).durable(60)
    monkeypatch.setattr(cache_rule, "available_memory", lambda: 1 << 16)
    noted = phases(lambda: run.restore({"w": torch.zeros(1 << 16)}))
    assert noted["read"].startswith("past: more than half")


def test_a_file_system_without_direct_writes_is_an_error_only_if_the_user_asked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    state = {"w": torch.ones(1 << 20)}
    with pytest.raises(sp.StorageError, match="unbuffered"):
        Saver(LocalRendezvous()).save(LocalStorage(tmp_path / "a", direct=True), state)
    Saver(LocalRendezvous()).begin(LocalStorage(tmp_path / "a"), state).result()


def group(root: Path, path: str, limit: str, used: int, cached: int, version: int = 2) -> None:
    """Writes the files of a control group."""
    names = (
        ("memory.max", "memory.current", "active_file {}\ninactive_file 0\n")
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_active_file {}\ntotal_inactive_file 0\n",
        )
    )
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(names[2].format(cached))


def test_limits_of_the_control_groups_above_count_and_pages_of_files_are_left(tmp_path: Path) -> None:
    """As Slurm nests them: the limit is on the job, and the process is in a step below it."""
    mount, groups = tmp_path / "cgroup", tmp_path / "groups"
    left = topology._left_in_groups
    groups.write_text("0::/job/step\n")
    group(mount, "", "max", 10, 0)
    group(mount, "job", "1000", 900, 300)
    group(mount, "job/step", "max", 900, 300)
    assert left(groups, mount) == [400]
    groups.write_text("4:memory:/job\n2:cpu:/other\n")
    group(mount, "memory/job", "700", 600, 50, version=1)
    group(mount, "memory", str(1 << 62), 600, 50, version=1)
    assert left(groups, mount) == [150]
    assert left(tmp_path / "none", mount) == []


def test_the_available_memory_of_this_machine_is_known() -> None:
    if not os.path.exists("/proc/meminfo"):
        pytest.skip("the system does not tell")
    assert 0 < topology.available_memory() < 1 << 50

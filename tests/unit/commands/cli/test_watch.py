"""`shardproof watch`: the states of a run's saves, on a terminal and in a pipe."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.runs.checkpointer import RunWatch, plan_prune
from shardproof.runs.checkpointer.retention import times_of
from shardproof.runs.maintenance import whole_attempts
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.commands.cli.samples import SECONDS, Sample, cut, write
from tests.unit.commands.cli.test_commands import STATE, call, make_old

__all__ = ["call"]


def test_a_save_is_seen_while_it_grows_until_it_is_committed(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", Sample(STATE, step=1))
    write(tmp_path / "step-00000002", Sample(STATE, step=2), commit=False)
    watch = RunWatch(LocalStorage(tmp_path), older_than=3600.0)
    now = time.time()
    first, second = watch.look(now)
    assert (first.state, first.speed, second.state, second.speed) == ("committed", None, "writing", None)

    (shard,) = (tmp_path / "step-00000002" / "shards").iterdir()
    with open(shard, "ab") as file:
        file.write(bytes(5000))
    _, again = watch.look(now + 2.0)
    assert (again.bytes, again.speed) == (second.bytes + 5000, 2500.0)
    assert again.share == again.bytes / first.bytes

    assert [save.state for save in watch.look(now + 7200)] == ["committed", "leftover"]
    write(tmp_path / "step-00000002", Sample(STATE, step=2, attempt="a2"))
    states = [(save.state, save.note) for save in watch.look(now + 4.0)]
    assert states[1:] == [("committed", ""), ("writing", "in the folder of a committed checkpoint")]


class _Dated(FaultyStorage):
    """Counts the requests for times, too."""

    def modified(self, name: str) -> float | None:
        return self._do("modified", name, lambda: self._inner.modified(name))


def test_a_watch_and_a_plan_of_prune_read_the_files_of_a_dead_save_once(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", Sample(STATE, step=1))
    write(tmp_path / "step-00000002", Sample(STATE, step=2, attempt="a1"), commit=False)
    write(tmp_path / "step-00000003", Sample(STATE, step=3, attempt="a1"), commit=False)
    cut(tmp_path / "step-00000003")
    make_old(tmp_path)
    run = _Dated(LocalStorage(tmp_path))
    watch = RunWatch(run, older_than=3600.0)
    now = time.time()

    def requests(look: Callable[[], object]) -> list[Counter[str]]:
        """The requests that a call makes for the shard files of both dead saves."""
        run.arm(None)
        look()
        ours = [(kind, name[:13]) for kind, name in run.operations if "/shards/" in name]
        return [Counter(kind for kind, folder in ours if folder == f"step-0000000{n}") for n in (2, 3)]

    def prune() -> None:
        plan_prune(run, run.modified, older_than=3600.0, now=now)

    def states() -> list[str]:
        return [save.state for save in watch.look(now)]

    headers = requests(lambda: whole_attempts(run.within("step-00000002")))[0]["read"]
    assert headers
    first = requests(states)
    assert first[0]["read"] == headers
    assert requests(states) == [{"modified": 1, "size": 2}] * 2, "only a change is looked into"
    assert states() == ["committed", "repairable", "leftover"]
    plan = requests(prune)
    assert (plan[0]["modified"], plan[0]["read"]) == (1, headers)
    assert plan[1]["modified"] == 1 and plan[1]["read"] <= first[1]["read"]

    (shard,) = (tmp_path / "step-00000002" / "shards").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    make_old(tmp_path)
    assert states() == ["committed", "leftover", "leftover"]


def test_files_that_other_steps_need_are_shown_beside_those_of_a_dead_save(tmp_path: Path) -> None:
    with sp.Checkpointer(tmp_path, incremental=True) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.ones(1 << 18), "step": step}).result()
    (tmp_path / "step-00000001" / MANIFEST_NAME).unlink()
    (shard,) = (tmp_path / "step-00000001" / "shards").iterdir()
    shutil.copy(shard, shard.with_name("00000-0bad.safetensors"))
    rows = RunWatch(LocalStorage(tmp_path), older_than=3600.0).look(time.time())
    assert rows[0].state == "referenced" and rows[0].note.endswith("stay for step-00000002")
    assert [save.state for save in rows[1:]] == ["writing"] * (len(rows) - 2) + ["committed"]
    assert "0bad" in [save.attempt for save in rows]


def test_a_folder_that_cannot_be_read_is_shown_beside_its_dead_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "step-00000001", Sample(STATE, step=1), commit=False)
    make_old(tmp_path)
    watch = RunWatch(LocalStorage(tmp_path), older_than=3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _refused(os.open, str(tmp_path / "step-00000001" / "shards")))
        assert [save.state for save in watch.look(time.time())] == ["unreadable", "leftover"]
    assert [save.state for save in watch.look(time.time())] == ["repairable"], "it can be read again"


def test_a_bucket_tells_the_times_of_several_files_at_once(tmp_path: Path) -> None:
    pairs = threading.Barrier(2)

    class Remote(LocalStorage):
        is_remote = True

    def modified(name: str) -> float | None:
        pairs.wait(timeout=SECONDS)
        return 1.0

    assert times_of(Remote(tmp_path), modified, ["shards/a", "shards/b", "shards/c"]) == [1.0] * 4


def test_a_step_without_permission_is_shown_and_the_watch_goes_on(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-0000000{step}", Sample(STATE, step=step))
    write(tmp_path / "step-00000003", Sample(STATE, step=3), commit=False)
    for name in ("open", "scandir", "stat", "lstat"):
        monkeypatch.setattr(os, name, _refused(getattr(os, name), str(tmp_path / "step-00000001")))
    code, out, _ = call("watch", tmp_path, "--once", "--json")
    assert code == 0
    saves = json.loads(out)["saves"]
    assert [save["state"] for save in saves] == ["unreadable", "committed", "writing"]
    assert "EACCES" in saves[0]["note"]


def _refused(real: Any, folder: str) -> Any:
    """A function of `os` to which a folder has no permission: it can be looked at, and nothing in it."""

    def function(path: Any, *arguments: Any, **options: Any) -> Any:
        text = os.fsdecode(path) if not isinstance(path, int) else ""
        if text.startswith(f"{folder}/") or (text == folder and real.__name__ in ("open", "scandir")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)
        return real(path, *arguments, **options)

    return function


def test_once_prints_one_table(call: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path / f"step-0000000{step}", Sample(STATE, step=step))
    (tmp_path / "step-00000002" / MANIFEST_NAME).write_text("{}")
    for step in (3, 4):
        (tmp_path / f"step-0000000{step}" / MANIFEST_NAME).unlink()
    cut(tmp_path / "step-00000003")
    make_old(tmp_path)
    code, out, _ = call("watch", tmp_path, "--once")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows if row[1] in ("committed", "repairable", "leftover")] == [
        ["1", "committed"],
        ["2", "repairable"],
        ["3", "leftover"],
        ["4", "repairable"],
    ]
    report = json.loads(call("watch", tmp_path, "--once", "--json")[1])
    states = [save["state"] for save in report["saves"]]
    assert states == ["committed", "repairable", "leftover", "repairable"]
    assert report["saves"][1]["bytes"] > report["saves"][0]["bytes"], "its files are there"
    code, _, err = call("watch", tmp_path, "--every", "0s")
    assert code == 2 and "it is more than 0" in err


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Ctrl-C ends the processes that a test starts, also if this process was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started(run: Path, output: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shardproof", "watch", str(run), "--every", "0.05s", *options]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def read_until(descriptor: int, text: str) -> str:
    """What a process writes, up to a text."""
    ends, found = time.monotonic() + SECONDS, ""
    while text not in found:
        left = ends - time.monotonic()
        assert left > 0 and select.select([descriptor], [], [], left)[0], f"{text!r} did not come: {found!r}"
        found += os.read(descriptor, 1 << 16).decode()
    return found


def interrupted(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """The exit code and standard error after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    return process.returncode, error


def test_a_pipe_gets_a_line_for_each_change(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", Sample(STATE, step=1))
    reader, writer = os.pipe()
    with started(tmp_path, writer) as process:
        try:
            assert "step-00000001 committed" in read_until(reader, "\n")
            write(tmp_path / "step-00000002", Sample(STATE, step=2))
            read_until(reader, "step-00000002 committed")
            for file in (MANIFEST_NAME, "index-a1.safetensors", "shards/00000-a1.safetensors"):
                (tmp_path / "step-00000001" / file).unlink()
            read_until(reader, "step-00000001 gone")
            assert interrupted(process) == (0, b"")
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_a_terminal_gets_a_table_that_is_drawn_again(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", Sample(STATE, step=1))
    terminal, end = pty.openpty()
    with started(tmp_path, end) as process:
        try:
            read_until(terminal, "1 committed, ")
            write(tmp_path / "step-00000002", Sample(STATE, step=2))
            read_until(terminal, "2 committed, ")
            assert interrupted(process) == (0, b"")
        finally:
            process.kill()
            os.close(terminal)
            os.close(end)

"""MemoryStorage: the conformance suite, and what only a keeper process can do."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.cli.group import run
from shardproof.errors import AlreadyCommittedError, StorageError
from shardproof.storage import MemoryStorage, keepers_here, memory_keeper, memory_link, storage_at
from shardproof.storage.conformance import StorageConformance
from tests.harness import open_files

LIMIT = 60.0
BUDGET = 64 << 20


@pytest.fixture
def url() -> Iterator[str]:
    url = f"memory://test-{os.getpid()}"
    yield url
    MemoryStorage(url).drop()


@pytest.fixture
def storage(url: str) -> MemoryStorage:
    return MemoryStorage(url, budget=BUDGET, idle_timeout=120)


def write(storage: MemoryStorage, name: str, data: bytes) -> None:
    sink = storage.create(name)
    sink.write_at(0, memoryview(data))
    sink.finish(len(data))


def keeper_of(storage: MemoryStorage) -> int:
    usage = storage.usage()
    assert usage is not None
    return usage.keeper


def until(true: Callable[[], bool], what: str) -> None:
    """Waits for another process, for `LIMIT` seconds at most."""
    ends = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


def kill(process: int) -> None:
    """SIGKILL; returns when the process is gone."""
    watched = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    until_gone(watched)


def until_gone(watched: int) -> None:
    poll = memory_link.select.poll()
    poll.register(watched)
    assert poll.poll(LIMIT * 1000), "the keeper does not end"
    os.close(watched)


def in_another_process(code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from shardproof.storage import MemoryStorage\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=check)


class TestConformance(StorageConformance):
    @pytest.fixture
    def storage(self, storage: MemoryStorage) -> MemoryStorage:
        return storage


def test_urls(url: str) -> None:
    storage = storage_at(f"{url}/steps/1/")
    assert isinstance(storage, MemoryStorage)
    assert (storage.location, storage.folder) == (f"{url}/steps/1", "1")
    assert (
        MemoryStorage("MEMORY://gpt").location == "memory://gpt" and MemoryStorage("memory://a").folder == "a"
    )
    for wrong in (
        "memory://",
        "memory:///run",
        "memory://a b",
        f"memory://{'a' * 65}",
        "s3://a",
        "memory:/a",
    ):
        with pytest.raises(StorageError, match="memory"):
            MemoryStorage(wrong)
    with pytest.raises(StorageError, match="memory://"):
        storage_at("memory:/run")  # as pathlib joins it
    with pytest.raises(StorageError, match="storage_options"):
        storage_at(url, {"budget": 1})
    for budget in (0, -1):
        with pytest.raises(ValueError, match="budget"):
            MemoryStorage(url, budget=budget)
    for wrong in (True, 0.5 * 2**30, math.inf, math.nan):
        with pytest.raises(TypeError, match="budget"):
            MemoryStorage(url, budget=wrong)  # type: ignore[arg-type]
    for idle in (0, -1, math.nan):
        with pytest.raises(ValueError, match="idle_timeout"):
            MemoryStorage(url, idle_timeout=idle)
    with pytest.raises(StorageError):
        MemoryStorage("memory://run/../other")


def test_without_a_keeper_the_tier_is_empty(storage: MemoryStorage, caplog: pytest.LogCaptureFixture) -> None:
    """Reads start no keeper."""
    with caplog.at_level(logging.INFO, "shardproof"):
        assert storage.list() == storage.folders() == []
    assert "no keeper process on this node" in caplog.text
    assert storage.size("a") is None and storage.usage() is None and not storage.drop()
    storage.delete("a")
    with pytest.raises(StorageError, match="no such file in the memory of this node") as error:
        storage.read("a")
    assert error.value.details["missing"]
    checkpointer = sp.Checkpointer(storage)
    assert checkpointer.steps() == [] and checkpointer.restore({"w": torch.zeros(2)}) is None
    assert storage.usage() is None


def test_files_outlive_their_process_and_the_keeper_is_small(storage: MemoryStorage, url: str) -> None:
    code = """
import sys, os, shardproof as sp, torch
run = MemoryStorage(sys.argv[1], budget=64 << 20, idle_timeout=120)
pending = sp.Checkpointer(run).save(3, {"w": torch.arange(1 << 18)})
assert pending.result().step == 3
os.kill(os.getpid(), 9)
"""
    assert in_another_process(code, url, check=False).returncode == -signal.SIGKILL
    state = {"w": torch.zeros(1 << 18, dtype=torch.int64)}
    assert sp.Checkpointer(url).restore(state) == 3
    assert torch.equal(state["w"], torch.arange(1 << 18))
    usage = storage.usage()
    assert usage is not None and usage.files == 3 and 2 << 20 < usage.used < 3 << 20
    status = Path(f"/proc/{usage.keeper}/status").read_text()
    anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert anonymous is not None and int(anonymous[1]) < 20 << 10
    assert os.getsid(usage.keeper) != os.getsid(0), "a signal to the job would end it"
    mapped = Path(f"/proc/{usage.keeper}/maps").read_text()
    assert "torch" not in mapped and "numpy" not in mapped and "memfd" not in mapped


def test_unpublished_files_of_a_killed_process_are_removed(storage: MemoryStorage, url: str) -> None:
    write(storage, "step-1/shard", b"1")
    storage.publish("step-1/manifest", b"{}")
    before = storage.usage()
    assert before is not None
    code = """
import sys, os
run = MemoryStorage(sys.argv[1])
sink = run.create("step-2/finished"); sink.write_at(0, memoryview(bytes(4096))); sink.finish(4096)
sink = run.create("step-2/unfinished"); sink.write_at(0, memoryview(bytes(4096)))
print(*run.list())
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""
    shown = in_another_process(code, url, check=False).stdout.split()
    assert shown == ["step-1/manifest", "step-1/shard", "step-2/finished"]
    until(lambda: storage.usage() == before, "the files of a dead process stay")
    assert storage.list() == ["step-1/manifest", "step-1/shard"]
    write(storage, "step-2/finished", b"the names are free")


def test_a_commit_fails_after_a_file_went_with_its_process(storage: MemoryStorage, url: str) -> None:
    """A rank dies between its report and the commit, after the coordinator has seen its file."""
    code = """
import sys
run = MemoryStorage(sys.argv[1])
run.create("step-1/1").finish(0)
print(flush=True)
sys.stdin.read()
"""
    write(storage.within("step-1"), "0", b"0")
    command = [sys.executable, "-c", f"from shardproof.storage import MemoryStorage\n{code}", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"\n"
        place = storage.within("step-1")
        assert place.size("0") == 1 and place.size("1") == 0
        rank.kill()
    until(lambda: "step-1/1" not in storage.list(), "the file of a dead process stays")
    with pytest.raises(StorageError, match="step-1/1 went before the commit"):
        place.publish("manifest", b"{}")
    assert storage.list() == ["step-1/0"]
    write(place, "next-attempt", b"")
    place.publish("manifest", b"{}")
    assert storage.list() == ["step-1/0", "step-1/manifest", "step-1/next-attempt"]


def test_a_killed_keeper_fails_the_save_and_the_next_save_starts_another(
    storage: MemoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    write(storage, "step-1/shard", b"0123")
    storage.publish("step-1/manifest", b"{}")
    buffer = bytearray(2)
    storage.read_into("step-1/shard", 0, memoryview(buffer))
    place = storage.within("step-2")
    write(place, "shard", b"0123")
    sink = place.create("index")
    dead = keeper_of(storage)
    kill(dead)
    with pytest.raises(StorageError, match=f"the keeper process {dead} ended"):
        sink.finish(0)
    sink.abort()
    storage.read_into("step-1/shard", 2, memoryview(buffer))  # a load that is under way goes on
    assert buffer == b"23"
    assert storage.list() == [] and storage.size("step-1/manifest") is None
    with pytest.raises(StorageError, match=r"step-2/shard went .* or with the keeper"):
        place.publish("manifest", b"{}")
    write(place, "shard", b"0123")
    kill(keeper_of(storage))
    with pytest.raises(StorageError, match=r"look at .*step-2/shard went .* or with the keeper"):
        place.size("shard")
    write(storage, "step-3/shard", b"0")
    assert keeper_of(storage) != dead and storage.list() == ["step-3/shard"]
    kill(keeper_of(storage))
    caplog.clear()
    write(storage, "step-4/shard", b"0")
    assert "ended, and its files are lost" in caplog.text


def test_a_keeper_that_does_not_answer_is_an_error_and_no_empty_tier(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = sp.Checkpointer(storage)
    checkpointer.save(1, {"w": torch.ones(2)}).result()
    keeper = keeper_of(storage)
    os.kill(keeper, signal.SIGSTOP)
    monkeypatch.setattr(memory_link, "ANSWER_SECONDS", 0.2)
    try:
        with pytest.raises(StorageError, match=rf"keeper process {keeper} does not answer .*SIGCONT"):
            checkpointer.restore({"w": torch.ones(2)})
    finally:
        os.kill(keeper, signal.SIGCONT)
    monkeypatch.undo()
    assert checkpointer.restore({"w": torch.ones(2)}) == 1


def test_the_budget_is_not_exceeded(storage: MemoryStorage) -> None:
    write(storage, "a", bytes(BUDGET // 2))
    sink = storage.create("b")
    sink.write_at(0, memoryview(bytes(BUDGET // 4)))
    with pytest.raises(StorageError, match=r"0\.0168 GB are missing in the memory budget") as error:
        sink.write_at(BUDGET // 4, memoryview(bytes(BUDGET // 2)))
    assert error.value.details["missing_bytes"] == BUDGET // 4
    assert error.value.details["errno"] == "ENOSPC"
    sink.abort()
    usage = storage.usage()
    assert usage is not None and (usage.used, usage.budget, usage.files) == (BUDGET // 2, BUDGET, 1)
    with pytest.raises(StorageError, match="are missing"):
        storage.publish("c", bytes(BUDGET))
    storage.delete("a")
    write(storage, "b", bytes(BUDGET))
    storage.publish("b", bytes(BUDGET), replace=True)  # replaces as many bytes
    MemoryStorage(storage.location, budget=2 * BUDGET).publish("c", b"a larger budget, given later")
    assert storage.list() == ["b", "c"]


def test_a_save_beyond_the_budget_loses_nothing(url: str) -> None:
    checkpointer = sp.Checkpointer(
        MemoryStorage(url, budget=3 << 20, idle_timeout=120), keep=sp.KeepLatest(1)
    )
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.full((1 << 18,), float(step))}).result()
    with pytest.raises(StorageError, match="are missing in the memory budget"):
        checkpointer.save(4, {"w": torch.ones(1 << 19)}).result()
    state = {"w": torch.zeros(1 << 18)}
    assert checkpointer.restore(state) == 3 and state["w"][0] == 3
    checkpointer.save(5, state).result()
    assert checkpointer.steps() == [5]


def test_an_idle_keeper_ends(url: str) -> None:
    storage = MemoryStorage(url, budget=BUDGET, idle_timeout=0.2)
    storage.publish("a", b"1")
    watched = os.pidfd_open(keeper_of(storage))
    poll = memory_link.select.poll()
    poll.register(watched)
    assert not poll.poll(1000), "it ended while a process was connected"
    del storage  # closes the connection
    until_gone(watched)
    assert MemoryStorage(url).usage() is None


def test_an_infinite_idle_timeout_keeps_the_steps_of_an_ended_process(url: str) -> None:
    code = """
import math, sys
MemoryStorage(sys.argv[1], budget=64 << 20, idle_timeout=math.inf).publish("a", b"1")
"""
    in_another_process(code, url)
    storage = MemoryStorage(url)
    keeper = os.pidfd_open(keeper_of(storage))
    poll = memory_link.select.poll()
    poll.register(keeper)
    assert not poll.poll(500), "it ended with its last client"
    os.close(keeper)
    assert storage.list() == ["a"]


@pytest.mark.parametrize(("budget", "idle"), [("536870912.0", "1"), ("1", "nan"), ("1", "-1")])
def test_a_keeper_tells_that_its_arguments_are_wrong(budget: str, idle: str) -> None:
    script = [memory_keeper.__file__, f"test-{os.getpid()}-wrong", budget, idle]
    started = subprocess.run([sys.executable, "-I", "-S", *script], timeout=LIMIT, check=False)
    assert started.returncode == errno.EINVAL


LITTLE_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
run = MemoryStorage(sys.argv[1], budget=64 << 20, idle_timeout=120)
"""


def test_a_keeper_without_descriptors_refuses_files_and_keeps_what_it_has(
    storage: MemoryStorage, url: str
) -> None:
    code = """
try:
    for number in range(200):
        run.publish(str(number), b"")
except Exception as error:
    print(error)
"""
    refusal = in_another_process(LITTLE_FILES + code, url).stdout
    assert re.search(r"cannot write .*may have 160 open files, and has 9\d files .*ulimit -Hn", refusal)
    usage = storage.usage()
    assert usage is not None and len(storage.list()) == usage.files > 90
    with pytest.raises(StorageError, match="may have 160 open files") as error:
        storage.create("one more")
    assert error.value.details["errno"] == "EMFILE" and error.value.details["limit"] == 160
    storage.publish("0", b"replaced", replace=True)
    for number in range(1, 7):  # a test in another process may list all keepers, as a client of this one
        storage.delete(str(number))
    write(storage, "one more", b"1")
    assert storage.read("0") == b"replaced" and storage.read("one more") == b"1"


def test_clients_beyond_the_descriptors_of_the_keeper_wait(storage: MemoryStorage, url: str) -> None:
    in_another_process(LITTLE_FILES + "run.publish('a', b'1')", url)
    keeper = keeper_of(storage)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for each in waiting:
            each.connect(memory_keeper.address_of(storage.folder))
        until(lambda: len(os.listdir(f"/proc/{keeper}/fd")) == 160, "the keeper has descriptors left")
        watched, poll, before = os.pidfd_open(keeper), memory_link.select.poll(), _processor_seconds(keeper)
        poll.register(watched)
        assert not poll.poll(500), "it ended"
        os.close(watched)
        assert _processor_seconds(keeper) - before < 0.2, "the keeper is in a busy loop"
    finally:
        for each in waiting:
            each.close()
    assert storage.read("a") == b"1" and keeper_of(storage) == keeper


def test_a_file_that_the_keeper_cannot_take_is_refused(storage: MemoryStorage, url: str) -> None:
    """Its last descriptors go to connections between the request for room and the file."""
    in_another_process(LITTLE_FILES + "run.publish('a', b'1')", url)
    keeper, sink = keeper_of(storage), storage.create("b")
    before = storage.usage()
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for each in waiting:
            each.connect(memory_keeper.address_of(storage.folder))
        until(lambda: len(os.listdir(f"/proc/{keeper}/fd")) == 160, "the keeper has descriptors left")
        sink.write_at(0, memoryview(b"0123"))
        with pytest.raises(StorageError, match="may have 160 open files"):
            sink.finish(4)
    finally:
        for each in waiting:
            each.close()
    assert storage.usage() == before and storage.list() == ["a"]
    write(storage, "b", b"0123")


def test_a_reader_without_descriptors_says_so(storage: MemoryStorage) -> None:
    storage.publish("a", b"1")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    link = memory_link.MemoryLink(storage.folder)
    connection = link.writer()
    taken = os.dup(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, before[1]))
        with pytest.raises(StorageError, match="this process cannot open more files") as error:
            connection.ask("open", name="a")
        assert "keeper_ended" not in error.value.details
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(taken)
    assert storage.read("a") == b"1"


def test_a_keeper_that_cannot_start_a_thread_turns_the_client_away() -> None:
    """The keeper is a thread of the client's process: no limit of threads applies to root."""
    code = """
import os, socket, threading
from shardproof.errors import StorageError
from shardproof.storage import memory_keeper

def refuse(thread):
    raise RuntimeError("can't start new thread")

name = f"test-{os.getpid()}-threads"
listener = socket.socket(socket.AF_UNIX)
listener.bind(memory_keeper.address_of(name))
listener.listen()
serving = threading.Thread(target=memory_keeper.Keeper(1 << 20, 120.0).serve, args=(listener,), daemon=True)
serving.start()
storage = MemoryStorage(f"memory://{name}")
storage.publish("a", b"1")
start, threading.Thread.start = threading.Thread.start, refuse
for number in range(20):
    for use in (storage.list, storage.usage, MemoryStorage(f"memory://{name}").drop):
        try:
            use()
            print("no error")
        except StorageError as error:
            if "cannot start a thread for this process" not in str(error):
                print(error)
storage.publish("b", b"2")  # over the connection that it has
threading.Thread.start = start
print(storage.list(), serving.is_alive())
"""
    assert in_another_process(code).stdout == "['a', 'b'] True\n"


def test_drop_ends_the_keeper(storage: MemoryStorage, url: str) -> None:
    write(storage, "a", b"1")
    watched = os.pidfd_open(keeper_of(storage))
    assert url.removeprefix("memory://") in keepers_here()
    assert MemoryStorage(url).drop()
    until_gone(watched)
    assert storage.usage() is None and url.removeprefix("memory://") not in keepers_here()


def test_sockets_of_other_programs_may_have_any_name(
    storage: MemoryStorage, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = memory_keeper.address_of("").encode()
    names = [b"\0other-program-\xff\xfe", ours + b"\xff", ours + "\u00e9".encode(), ours + b"a" * 70]
    others = [socket.socket(socket.AF_UNIX) for _ in names]
    try:
        for other, name in zip(others, names, strict=True):
            other.bind(name)
        for step in (1, 2):
            sp.save(storage, {"w": torch.ones(2)}, step=step, overwrite=True)
        assert storage.folder in keepers_here()
        assert not any("\u00e9" in name or len(name) > 64 for name in keepers_here())
        assert run(["memory"]) == 0 and storage.folder in capfd.readouterr().out
    finally:
        for other in others:
            other.close()


def test_storages_that_start_at_once_share_one_keeper(url: str) -> None:
    ready = threading.Barrier(8)

    def start(number: int) -> tuple[int, MemoryStorage]:
        storage = MemoryStorage(url, budget=BUDGET, idle_timeout=120)
        ready.wait(LIMIT)
        write(storage, str(number), b"")
        return keeper_of(storage), storage

    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(start, range(8)))
    assert len({keeper for keeper, _ in started}) == 1
    assert started[0][1].list() == [str(number) for number in range(8)]


def test_one_publisher_of_many_storages_wins(storage: MemoryStorage, url: str) -> None:
    """Each with a connection of its own, as ranks have."""
    others = [MemoryStorage(url) for _ in range(8)]
    storage.publish("there", b"")
    ready = threading.Barrier(len(others))

    def publish(number: int) -> bool:
        ready.wait(LIMIT)
        try:
            others[number].publish("manifest", b"%d" % number)
        except AlreadyCommittedError:
            return False
        return True

    with ThreadPoolExecutor(len(others)) as pool:
        won = list(pool.map(publish, range(len(others))))
    assert won.count(True) == 1 and storage.read("manifest") == b"%d" % won.index(True)


def test_a_finished_file_cannot_be_changed(storage: MemoryStorage) -> None:
    write(storage, "a", b"0123")
    answer = memory_link.MemoryLink(storage.folder).read("open", name="a")
    assert answer is not None and answer[1] is not None
    descriptor = answer[1]
    try:
        for change in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 2),
            lambda: os.ftruncate(descriptor, 8),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(descriptor)


def test_a_client_that_sends_no_sealed_file_is_cut_off(storage: MemoryStorage) -> None:
    storage.publish("a", b"1")
    keeper = keeper_of(storage)
    writer = memory_link.MemoryLink(storage.folder).writer()
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(StorageError, match="ended"):
            writer.ask("publish", unsealed, name="b", replace=False, seen=[])
    finally:
        os.close(unsealed)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT)
        raw.connect(memory_keeper.address_of(storage.folder))
        raw.sendall(b"\xff" * 64)
        with suppress(ConnectionResetError):  # it closed the connection with bytes unread
            assert raw.recv(1) == b""
    assert storage.list() == ["a"] and keeper_of(storage) == keeper


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user")
def test_other_users_get_no_answer(storage: MemoryStorage) -> None:
    storage.publish("a", b"1")
    address = repr(memory_keeper.address_of(storage.folder))
    ask = f"""
import os, socket
from shardproof.storage import memory_keeper
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(30)
os.setuid(int(os.environ["AS"]))
connection.connect({address})
try:
    memory_keeper.send(connection, dict(do="names", prefix="", protocol=memory_keeper.PROTOCOL))
    print(memory_keeper.receive(connection))
except (BrokenPipeError, ConnectionResetError):
    print(None)
"""

    def answer(user: int) -> str:
        command, environment = [sys.executable, "-c", ask], os.environ | {"AS": str(user)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
        ).stdout

    assert "'names': ['a']" in answer(0) and answer(65534) == "None\n"
    assert storage.list() == ["a"]


@contextmanager
def socket_of_another_user(run_name: str) -> Iterator[int]:
    """A process of another user that has the socket of a run's keeper."""
    take = f"""
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind({memory_keeper.address_of(run_name)!r})
listener.listen()
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", take]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        try:
            yield other.pid
        finally:
            other.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user")
def test_a_socket_of_another_user_is_refused(storage: MemoryStorage) -> None:
    with socket_of_another_user(storage.folder) as process:
        for use in (storage.list, lambda: storage.create("a")):
            with pytest.raises(StorageError, match=f"process {process} of user 65534 has the socket"):
                use()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user")
def test_a_list_of_runs_skips_the_socket_of_another_user(
    storage: MemoryStorage, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    storage.publish("a", b"1")
    other_run = f"{storage.folder}-x"
    with socket_of_another_user(other_run) as process:
        assert run(["memory", "--json"]) == 0
        listed = [each["run"] for each in json.loads(capfd.readouterr().out)]
        assert storage.folder in listed and other_run not in listed
        assert f"memory://{other_run}: process {process} of user 65534 has the socket" in caplog.text
        assert other_run not in storage.siblings()
        for _ in range(2):
            sp.save(storage, {"w": torch.ones(2)}, overwrite=True)
        assert len(storage.list("shards")) == 1, "the files of the replaced save are removed"


def test_a_forked_child_holds_no_file(storage: MemoryStorage) -> None:
    write(storage, "a", b"0123")
    storage.read_into("a", 0, memoryview(bytearray(4)))
    sink = storage.create("b")
    sockets = len(os.listdir("/proc/self/fd")) - len(open_files())
    child = os.fork()
    if not child:
        code = 1
        try:
            held = [name for name in open_files() if "memfd:shardproof" in name]
            left = len(os.listdir("/proc/self/fd")) - len(open_files())
            buffer = bytearray(2)
            storage.read_into("a", 2, memoryview(buffer))  # by a connection of its own
            write(storage, "c", bytes(buffer))
            code = 0 if not held and left < sockets and buffer == b"23" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: storage.list() == ["a"], "unpublished files of the child stay")
    sink.write_at(0, memoryview(b"the parent's is open"))
    sink.finish(20)
    assert storage.list() == ["a", "b"]


def test_commands(storage: MemoryStorage, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def shardproof(*arguments: str) -> tuple[int, str]:
        return run([*arguments]), capsys.readouterr().out

    sp.Checkpointer(storage).save(1, {"w": torch.ones(2)}).result()
    storage.within("step-00000002").create("shards/00000-1111111111111111.safetensors").finish(0)
    code, listed = shardproof("memory", "--json")
    mine = [each for each in json.loads(listed) if each["run"] == storage.folder]
    usage = storage.usage()
    assert usage is not None and code == 0
    assert mine == [{"run": storage.folder, **asdict(usage)}] and mine[0]["files"] == 4
    assert shardproof("verify", f"{url}/step-00000001")[0] == 0
    assert shardproof("watch", url, "--once")[0] == 0
    code, examined = shardproof("doctor", url)
    assert code in (0, 1) and f"{url}: 1 committed step" in examined
    code, pruned = shardproof("prune", url, "--yes", "--older-than", "0s")
    assert code == 0 and "step-00000002" in pruned and storage.folders() == ["step-00000001"]
    assert url in shardproof("memory")[1]
    assert shardproof("memory", "--drop", f"{url}/step-00000001")[0] == 2, "not the whole run"
    assert shardproof("memory", "--drop", "-x")[0] == 2
    assert shardproof("memory", "--drop", storage.folder)[0] == 0
    assert url not in shardproof("memory")[1]
    assert shardproof("memory", "--drop", storage.folder)[0] == 1
    write(storage, "a", b"1")
    assert shardproof("memory", "--drop", url, "--json")[0] == 0, "as `memory` prints it"
    assert url not in shardproof("memory")[1]


@pytest.mark.parametrize(
    "command",
    [
        ("ls", "{run}"),
        ("prune", "{run}"),
        ("watch", "{run}", "--once"),
        ("doctor", "{run}"),
        ("doctor", ".", "--then", "{run}"),
        ("verify", "{run}/step-00000001"),
        ("inspect", "{run}/step-00000001"),
        ("diff", "{run}/step-00000001", "{run}/step-00000001"),
        ("repair", "{run}/step-00000001"),
        ("convert", "{run}/step-00000001", "copy", "--to", "hf"),
        ("convert", "{run}/step-00000001", "copy", "--standalone"),
    ],
)
def test_a_command_on_a_run_without_a_keeper_is_bad_usage(
    url: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([word.format(run=url) for word in command])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "there is no keeper of this run on this node" in captured.err


def test_a_request_under_way_is_not_taken_for_the_end_of_the_keeper() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT)
    connection = memory_link.Connection(ours, "memory://run")
    with ThreadPoolExecutor(1) as pool, theirs:
        asked = pool.submit(connection.ask, "publish", text="x" * (8 << 20))  # more than a socket holds
        assert select.select([theirs], [], [], LIMIT)[0]
        memory_keeper.send(theirs, {"size": 1})  # stays unread until the request is sent
        assert connection.is_open
        assert memory_keeper.receive(theirs) is not None
        assert asked.result(LIMIT) == ({"size": 1}, None)
        assert connection.is_open
    assert not connection.is_open


def test_reads_keep_few_files_open(storage: MemoryStorage) -> None:
    for number in range(80):
        write(storage, str(number), b"1")
        storage.read_into(str(number), 0, memoryview(bytearray(1)))
    assert sum("memfd:shardproof" in name for name in open_files()) <= 64
    storage.close()
    assert not any("memfd:shardproof" in name for name in open_files())


@pytest.mark.parametrize("saves", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_long_run_does_not_grow(storage: MemoryStorage, saves: int) -> None:
    checkpointer = sp.Checkpointer(storage, keep=sp.KeepLatest(2))
    state = {"w": torch.zeros(1000)}

    def measured() -> tuple[int, int, int, int]:
        usage = storage.usage()
        assert usage is not None
        # One connection, that of `usage`, may still be closing.
        until(lambda: _threads(usage.keeper) <= 2, "a thread of a client that left stays")
        open_by_keeper = len(os.listdir(f"/proc/{usage.keeper}/fd"))
        return usage.used, usage.files, open_by_keeper, len(os.listdir("/proc/self/fd"))

    for step in range(10):
        checkpointer.save(step, state).result()
    before = measured()
    resident = _resident(keeper_of(storage))
    for step in range(10, saves):
        checkpointer.save(step, state).result()
    assert checkpointer.restore(state) == saves - 1
    after = measured()
    assert abs(after[0] - before[0]) < 1000 and after[1:] == before[1:]
    assert _resident(keeper_of(storage)) < resident + (1 << 20)


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _threads(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/task"))


def _resident(process: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) << 10

"""MemoryStorage: the conformance suite, whose folder it uses, its space, and the files of dead saves."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.engine.saving import coordinator
from shardproof.engine.storage import LocalStorage, MemoryStorage, memory_runs, memory_store, storage_at
from shardproof.errors import AlreadyCommittedError, NotCommittedError, PlainDataError, StorageError
from shardproof.storage.conformance import StorageConformance
from tests.harness import open_files
from tests.in_memory import VARIABLE, private_tmpfs
from tests.programs import run_program
from tests.small_disk import small_disk

LIMIT = 60.0
URL = "memory://run"
FOLDER = f"shardproof-{os.geteuid()}-run"
OTHER = 65534
"""Number of another user."""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user")


@pytest.fixture
def tmpfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with private_tmpfs(monkeypatch) as folder:
        yield folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_WAIT_SECONDS", 0.1)


@pytest.fixture
def storage(tmpfs: Path) -> MemoryStorage:
    return MemoryStorage(URL)


def write(storage: LocalStorage, name: str, data: bytes) -> None:
    sink = storage.create(name)
    sink.write_at(0, memoryview(data))
    sink.finish(len(data))


def state(value: float, count: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((count,), float(value))}


def in_another_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    before = "import os, signal, sys\nimport torch\nimport shardproof as sp\n"
    return run_program(before + code, *arguments, timeout=LIMIT)


class TestConformance(StorageConformance):
    @pytest.fixture
    def storage(self, storage: MemoryStorage) -> MemoryStorage:
        return storage


def test_urls(tmpfs: Path) -> None:
    storage = storage_at(f"{URL}/steps/1/")
    assert isinstance(storage, MemoryStorage)
    assert (storage.location, storage.folder) == (f"{tmpfs}/{FOLDER}/steps/1", "1")
    assert MemoryStorage("MEMORY://run").location == str(tmpfs / FOLDER)
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
        storage_at(URL, {"budget": 1})
    with pytest.raises(StorageError, match=r'"\.\."'):
        MemoryStorage("memory://run/../other")


def test_the_default_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    assert MemoryStorage(URL).location == f"/dev/shm/{FOLDER}"


def test_only_a_tmpfs_that_keeps_folders_of_its_users_is_used(
    tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmpfs / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder, fault in (
        (tmp_path, "is no tmpfs"),
        (tmpfs / "missing", "No such file"),
        (open_to_all, r"lets other users replace folders \(`chmod \+t`"),
    ):
        monkeypatch.setenv(VARIABLE, str(folder))
        with pytest.raises(StorageError, match=f"{folder} .*{fault}.* {VARIABLE}"):
            MemoryStorage(URL)
    open_to_all.chmod(0o1777)  # the advice
    MemoryStorage(URL).publish("a", b"1")
    assert (open_to_all / FOLDER / "a").exists()


def test_reads_make_no_folder(storage: MemoryStorage, tmpfs: Path) -> None:
    assert storage.list() == storage.folders() == storage.siblings() == memory_runs() == []
    assert storage.size("a") is None and not storage.drop() and not storage.in_use()
    storage.delete("a")
    with pytest.raises(StorageError, match="There is no such file") as error:
        storage.read("a")
    assert error.value.details["missing"] and list(tmpfs.iterdir()) == []


def test_only_its_user_can_open_the_folder(storage: MemoryStorage, tmpfs: Path) -> None:
    before = os.umask(0)
    try:
        write(storage.within("step-1"), "a", b"1")
    finally:
        os.umask(before)
    assert (tmpfs / FOLDER).stat().st_mode & 0o777 == 0o700
    (tmpfs / FOLDER).chmod(0o755)
    for use in (lambda: MemoryStorage(URL), lambda: write(storage, "b", b"1"), lambda: storage.within("a")):
        with pytest.raises(StorageError, match=r"its mode is 0755.*`chmod 700 ") as error:
            use()
    command = error.value.message.split("`")[1]
    assert subprocess.run(command.split(), check=True).returncode == 0
    assert MemoryStorage(URL).list() == ["step-1/a"]


@pytest.mark.parametrize("what", ["link", "file", pytest.param("other user", marks=only_root)])
def test_a_folder_that_another_user_made_first_is_refused(
    storage: MemoryStorage, tmpfs: Path, tmp_path: Path, what: str
) -> None:
    """It appears after the storage was made, and before the first write."""
    place = tmpfs / FOLDER
    if what == "link":
        place.symlink_to(tmp_path)
    elif what == "file":
        place.write_bytes(b"")
    else:
        place.mkdir(0o700)
        os.chown(place, OTHER, OTHER)
    fault = {"link": "a symbolic link", "file": "no folder", "other user": f"to user {OTHER}; choose"}[what]
    for use in (
        lambda: write(storage, "a", b"1"),
        lambda: storage.within("step-1").publish("a", b"1"),
        lambda: storage.replace("a"),
        lambda: sp.Checkpointer(URL),
        lambda: storage.drop(),
        lambda: MemoryStorage(URL),
    ):
        with pytest.raises(StorageError, match=fault):
            use()
    assert list(tmp_path.iterdir()) == [] and os.path.lexists(place)
    assert memory_runs() == []
    MemoryStorage("memory://another-name").publish("a", b"1")  # the advice
    assert MemoryStorage("memory://another-name").siblings() == [f"shardproof-{os.geteuid()}-another-name"]


def test_the_lock_of_a_run_follows_no_link(storage: MemoryStorage, tmpfs: Path, tmp_path: Path) -> None:
    """A link that takes the place of the folder between its check and its lock."""
    (tmpfs / FOLDER).symlink_to(tmp_path)
    with pytest.raises(StorageError, match=FOLDER):
        memory_store._RunLock(tmpfs / FOLDER)


def test_the_folder_of_another_user_delays_no_save(storage: MemoryStorage, tmpfs: Path) -> None:
    """A commit reads the manifests beside its own, which may refer to its files."""
    for name in ("other", "link"):
        (tmpfs / f"shardproof-{OTHER}-{name}").mkdir()
    (tmpfs / f"shardproof-{os.geteuid()}-x").symlink_to("/nowhere")
    for _ in range(2):
        sp.save(storage, state(1), overwrite=True)
    assert len(storage.list("shards")) == 1, "the files of the replaced save are removed"


def test_a_step_outlives_its_process(storage: MemoryStorage) -> None:
    code = """
assert sp.Checkpointer(sys.argv[1]).save(3, {"w": torch.full((1000,), 3.0)}).result().step == 3
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert in_another_process(code, URL).returncode == -signal.SIGKILL
    assert not storage.in_use()
    found = state(0)
    restored = sp.Checkpointer(URL).restore(found)
    assert restored == 3 and restored.tier == storage.location and torch.equal(found["w"], state(3)["w"])


DIE_IN_A_SAVE = """
from shardproof.storage import LocalSink
run = sp.Checkpointer(sys.argv[1])
run.save(1, {"w": torch.ones(1000)}).result()
finish = LocalSink.finish
def die(sink, size):
    if not sys.argv[2:]:
        finish(sink, size)
    os.kill(os.getpid(), signal.SIGKILL)
LocalSink.finish = die
run.save(2, {"w": torch.ones(1000)}).result()
"""


@pytest.mark.parametrize("when", [(), ("before it is finished",)])
def test_the_files_of_a_dead_save_go_when_the_next_job_begins(
    storage: MemoryStorage, when: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert in_another_process(DIE_IN_A_SAVE, URL, *when).returncode == -signal.SIGKILL
    assert storage.folders() == ["step-00000001", "step-00000002"]
    with caplog.at_level(logging.INFO, "shardproof"):
        again = sp.Checkpointer(URL)
    assert storage.folders() == ["step-00000001"]
    assert f"{storage.location}/step-00000002: removed 1 files of a save that died" in caplog.text
    assert again.restore(state(0)) == 1


def test_the_files_of_a_save_in_progress_stay(storage: MemoryStorage) -> None:
    """The process with the first `Checkpointer` may be in a save."""
    first = sp.Checkpointer(URL)
    write(LocalStorage(storage.path), "step-00000002/shards/00000-1111111111111111.safetensors", b"1")
    assert storage.in_use()
    sp.Checkpointer(URL)
    assert storage.folders() == ["step-00000002"]
    del first
    assert not storage.in_use()
    sp.Checkpointer(URL)
    assert storage.folders() == []


def _of_a_tree(job: sp.Checkpointer) -> None:
    job.save(1, state(1)).durable(LIMIT)
    job.restore(state(0))


def _of_modules(job: sp.Checkpointer) -> None:
    """The later saves wait for optimizer steps at a fence."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        pending = job.save(step, {"model": model, "optimizer": optimizer})
    pending.durable(LIMIT)
    job.pin(3, "best")


def _of_failures(job: sp.Checkpointer) -> None:
    """Of two saves and a restore. The program keeps none of the errors."""
    job.save(1, state(1)).durable(LIMIT)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tree = {"model": model, "optimizer": optimizer}
    job.save(2, tree).durable(LIMIT)
    with suppress(AlreadyCommittedError):
        job.save(2, tree).result()
    with suppress(AlreadyCommittedError):
        job.save(1, state(1)).result()
    with suppress(NotCommittedError):
        job.restore(state(0), step=9)
    with suppress(PlainDataError):
        job.save(3, {"refused": object()})


@pytest.mark.parametrize("saves", [_of_a_tree, _of_modules, _of_failures])
@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"second_tier": "second"}], ids=str)
def test_a_checkpointer_ends_with_its_last_reference(
    storage: MemoryStorage, tmp_path: Path, saves: Callable[[sp.Checkpointer], None], options: dict[str, Any]
) -> None:
    """Nothing in it refers back to it, so its lock does not live until a garbage collection."""
    if "second_tier" in options:
        options = {"second_tier": tmp_path / "second"}
    saves(sp.Checkpointer("memory://before"))  # imports of torch catch errors, which keep frames
    gc.collect()
    gc.disable()
    try:
        job = sp.Checkpointer(URL, keep=sp.KeepLatest(2), **options)
        saves(job)
        assert storage.in_use()
        del job
        assert not storage.in_use()
    finally:
        gc.enable()


@only_root
def test_a_tmpfs_of_another_user_is_refused(tmpfs: Path) -> None:
    """The sticky bit does not keep the owner of the tmpfs from replacing folders."""
    os.chown(tmpfs, OTHER, OTHER)
    with pytest.raises(StorageError, match=f"belongs to user {OTHER}, who may replace folders in it"):
        MemoryStorage(URL)


def test_the_files_of_a_save_without_a_checkpointer_stay(storage: MemoryStorage) -> None:
    name = "shards/00000-1111111111111111.safetensors"
    step = storage.within("step-00000002")
    write(step, name, b"1")
    sp.Checkpointer(URL)
    assert step.list() == [name]
    assert MemoryStorage(URL).drop() and not storage.in_use()  # as a command does
    write(step, name, b"1")
    assert storage.in_use(), "the folder is a new one"
    sp.Checkpointer(URL)
    assert step.list() == [name]


def test_another_question_whether_a_run_is_in_use_is_no_use(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.make_folder()
    other = memory_store._RunLock(storage.path)
    assert other.get_alone()
    monkeypatch.setattr(memory_store.time, "sleep", lambda seconds: other.close())
    assert not storage.in_use()


def test_a_folder_of_a_run_takes_a_checkpointer(storage: MemoryStorage) -> None:
    assert sp.Checkpointer(f"{URL}/inside").save(1, state(1)).result().step == 1
    assert storage.within("inside").folders() == ["step-00000001"]


def test_a_save_that_does_not_fit_is_refused_and_each_remedy_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    with small_disk(small, 8 << 20):
        monkeypatch.setenv(VARIABLE, str(small))
        part = state(1, (5 << 20) // 8)  # 2.5 MiB
        sp.Checkpointer("memory://ended").save(1, part).result()
        gc.collect()  # its job has ended
        checkpointer = sp.Checkpointer("memory://run")
        for step in (1, 2):
            checkpointer.save(step, part).result()
        with pytest.raises(sp.NoSpaceError) as error:
            checkpointer.save(3, part).result()
        assert checkpointer.steps() == [1, 2]
        prune, lists, drops, remount = error.value.message.split("`")[1::2]
        assert (lists, drops) == ("shardproof memory", "shardproof memory --drop RUN")
        assert run(["memory"]) == 0
        assert run(drops.replace("RUN", "ended").split()[1:]) == 0
        checkpointer.save(3, part).result()
        assert run(prune.split()[1:]) == 0
        checkpointer.save(4, part).result()
        checkpointer.save(5, part).result()
        larger = remount.replace("SIZE", "16M").split()
        assert subprocess.run(larger, timeout=20).returncode == 0
        checkpointer.save(6, part).result()
        assert checkpointer.restore(state(0, (5 << 20) // 8)) == 6


def test_a_save_beyond_the_available_memory_is_refused(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs may be larger than the memory that the control group of the job has left."""
    checkpointer = sp.Checkpointer(URL)
    monkeypatch.setattr(memory_store, "available_memory", lambda: 3999)
    with pytest.raises(sp.NoSpaceError, match="the node has no more available memory") as error:
        checkpointer.save(1, state(1)).result()
    assert (error.value.details["needed"], error.value.details["free"]) == (4000, 3999)
    assert storage.folders() == []
    monkeypatch.setattr(memory_store, "available_memory", lambda: 4000)
    checkpointer.save(1, state(1)).result()


def test_no_byte_goes_past_the_page_cache(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the memory itself: a direct write is refused by old kernels, and a direct read copies twice."""
    monkeypatch.setenv("SHARDPROOF_DIRECT", "1")
    seen: list[str] = []

    def note(event: sp.events.Event) -> None:
        if event.phase in ("write", "read") and event.kind == "end":
            seen.append(str(event.facts.get("cache")))

    with sp.events.subscribe(note):
        sp.save(URL, state(1))
        sp.load(URL, state(0))
    assert len(seen) == 2 and all(choice.startswith("through") for choice in seen), seen
    sink = storage.create("a")
    assert not sink.direct
    sink.abort()


def test_a_forked_child_keeps_no_removed_file_in_memory(storage: MemoryStorage) -> None:
    write(storage, "a", b"0123")
    storage.read_into("a", 0, memoryview(bytearray(4)))
    sink = storage.create("b")
    assert storage.in_use()
    child = os.fork()
    if not child:
        code = 1
        try:
            left = [name for name in open_files() if f"{FOLDER}/" in name]
            buffer = bytearray(2)
            storage.read_into("a", 2, memoryview(buffer))
            code = 0 if not left and buffer == b"23" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.in_use(), "the parent's lock stays"
    sink.write_at(0, memoryview(b"the parent's is open"))
    sink.finish(20)
    assert storage.list() == ["a", "b"]


def test_a_long_run_does_not_grow(storage: MemoryStorage) -> None:
    checkpointer = sp.Checkpointer(storage, keep=sp.KeepLatest(2))

    def measured() -> tuple[int, int, int]:
        files = storage.list()
        return len(files), sum(storage.size(name) or 0 for name in files) // 1000, len(open_files())

    sizes = []
    for step in range(30):
        checkpointer.save(step, state(step)).result()
        if step in (9, 29):
            sizes.append(measured())
    assert sizes[0] == sizes[1]


def test_commands(storage: MemoryStorage, tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shardproof(*arguments: str) -> tuple[int, str]:
        return run([*arguments]), capsys.readouterr().out

    assert shardproof("memory") == (0, "no run is in the memory of this node\n")
    checkpointer = sp.Checkpointer(URL)
    checkpointer.save(1, state(1)).result()
    write(LocalStorage(storage.path), "step-00000002/shards/00000-1111111111111111.safetensors", b"1")
    (tmpfs / f"shardproof-{OTHER}-fake").mkdir()  # its owner is not the user in its name
    (tmpfs / FOLDER.replace("run", "link")).symlink_to(tmpfs / FOLDER)
    code, listed = shardproof("memory", "--json")
    (mine,) = json.loads(listed)
    assert code == 0 and (mine["run"], mine["location"]) == ("run", storage.location)
    assert mine["last_step"] == 1 and mine["in_use"] is True and 4000 < mine["bytes"] < 20_000
    assert shardproof("verify", f"{URL}/step-00000001")[0] == 0
    assert shardproof("watch", URL, "--once")[0] == 0
    code, examined = shardproof("doctor", URL)
    assert code in (0, 1) and f"{storage.location}: 1 committed step" in examined
    code, pruned = shardproof("prune", URL, "--yes", "--older-than", "0s")
    assert code == 0 and "step-00000002" in pruned and storage.folders() == ["step-00000001"]
    del checkpointer
    gc.collect()
    code, listed = shardproof("memory")
    assert code == 0 and URL in listed and "no" in listed.split()
    assert shardproof("memory", "--drop", f"{URL}/step-00000001")[0] == 2, "not the whole run"
    assert shardproof("memory", "--drop", "-x")[0] == 2
    assert shardproof("memory", "--drop", "run")[0] == 0
    assert shardproof("memory", "--drop", "run")[0] == 2, "a run that is not in memory is bad usage"
    assert shardproof("memory", "--json") == (0, "[]\n")
    write(storage, "a", b"1")
    assert shardproof("memory", "--drop", URL)[0] == 2, "a job uses it"
    code, dropped = shardproof("memory", "--drop", URL, "--force", "--json")
    assert code == 0 and json.loads(dropped) == {"run": "run", "location": storage.location, "dropped": True}
    assert not (tmpfs / FOLDER).exists()


@only_root
def test_runs_of_other_users_are_listed(tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmpfs / f"shardproof-{OTHER}-theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    assert run(["memory", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["run"], listed["bytes"], listed["in_use"]) == ("theirs", None, None)
    assert run(["memory"]) == 0
    assert str(theirs) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    "command",
    [
        ("ls", "{run}"),
        ("prune", "{run}"),
        ("watch", "{run}", "--once"),
        ("doctor", "{run}"),
        ("doctor", ".", "--second-tier", "{run}"),
        ("verify", "{run}/step-00000001"),
        ("inspect", "{run}/step-00000001"),
        ("diff", "{run}/step-00000001", "{run}/step-00000001"),
        ("repair", "{run}/step-00000001"),
        ("convert", "{run}/step-00000001", "copy", "--to", "hf"),
        ("convert", "{run}/step-00000001", "copy", "--standalone"),
    ],
)
def test_a_command_on_a_run_that_is_not_in_memory_is_bad_usage(
    tmpfs: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([word.format(run=URL) for word in command])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert f"{tmpfs}/{FOLDER}" in captured.err and "`shardproof memory` lists" in captured.err

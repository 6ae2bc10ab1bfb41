"""Hostile files: every reader raises a clear error in bounded memory and time, and runs no code."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.errors import ShardproofError
from shardproof.maintenance import repair, verify
from shardproof.storage import LocalStorage
from tests.faults.damage import target_like, values_of
from tests.faults.forgeries import CASES, SHARDS, VALUES, Forge, a_large_tensor, cut_along_all, with_value
from tests.faults.forging import Forgery, state
from tests.harness import rank, rendezvous, run_ranks

SECONDS = 5.0
MEMORY = 512 << 20


class _TooSlow(Exception):
    pass


def _out_of_time(number: int, frame: Any) -> None:
    raise _TooSlow


def _load(folder: Path) -> Any:
    target = target_like(state())
    before = values_of(target)
    try:
        sp.load(folder, target)
    except ShardproofError as error:
        if "partly overwritten" not in error.message and values_of(target) != before:
            raise AssertionError("a target was changed in silence") from error
        raise
    return "right" if values_of(target) == values_of(state()) else "WRONG"


def _load_evil(folder: Path) -> Any:
    return sp.load(folder, {**target_like(state()), "evil": 0})


def _open(folder: Path) -> Any:
    with sp.open(folder) as checkpoint:
        for key in checkpoint:
            value = checkpoint[key]
            if hasattr(value, "read"):
                value.read()
    return "read"


def _verify(folder: Path) -> Any:
    for fault in verify(LocalStorage(folder)).faults:
        raise fault


def _repair(folder: Path) -> Any:
    (folder / MANIFEST_NAME).unlink()
    repair(LocalStorage(folder))


def _command_line(folder: Path) -> Any:
    from shardproof.commands.cli.group import run

    answers = {}
    for words in ("verify", "verify --json", "inspect", "inspect --json"):
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            code = run([*words.split(), str(folder)])
        answers[words] = (code, "Traceback" in out.getvalue() + err.getvalue())
    return json.dumps(answers)


READERS: dict[str, Callable[[Path], Any]] = {
    "command line": _command_line,
    "load": _load,
    "load evil": _load_evil,
    "open": _open,
    "verify": _verify,
    "repair": _repair,
}


def read_all(folders: dict[str, str], readers: list[str]) -> dict[str, dict[str, tuple[str, str, float]]]:
    """Runs each reader on each folder under limits: the kind of error, its text or the result, seconds."""
    sp.load, sp.open  # noqa: B018  (imported before memory and time are limited)
    for command in ("check", "look"):
        importlib.import_module(f"shardproof.commands.cli.{command}")
    signal.signal(signal.SIGALRM, _out_of_time)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found: dict[str, dict[str, tuple[str, str, float]]] = {}
    for name, folder in folders.items():
        found[name] = {}
        for reader in readers:
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                kind, text = "", str(READERS[reader](Path(folder)))
            except ShardproofError as error:
                kind, text = type(error).__name__, error.message
            except BaseException as error:
                kind, text = f"NOT OURS: {type(error).__name__}", str(error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            found[name][reader] = (kind, text, time.monotonic() - began)
    return found


Answers = dict[str, dict[str, tuple[str, str, float]]]


def _read_forgeries(root: Path, cases: dict[str, Forge], readers: list[str]) -> Answers:
    folders = {}
    for number, (name, forge) in enumerate(cases.items()):
        forgery = Forgery(root / str(number))
        forge(forgery)
        forgery.seal()
        folders[name] = str(root / str(number))
    (outcome,) = run_ranks(1, read_all, folders, readers, timeout=120)
    return outcome.value  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _read_forgeries(
        tmp_path_factory.mktemp("forged"), CASES, ["load", "open", "verify", "command line"]
    )


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    cases = {name: with_value(value) for name, value in VALUES.items()}
    return _read_forgeries(tmp_path_factory.mktemp("strange"), cases, ["load evil", "open"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _read_forgeries(tmp_path_factory.mktemp("shards"), SHARDS, ["load", "verify", "repair"])


def _is_clear(answer: tuple[str, str, float]) -> None:
    kind, text, seconds = answer
    assert kind.endswith("Error") and "NOT OURS" not in kind, answer
    assert seconds < SECONDS and len(text) < 2000 and "\n\n" not in text


def test_every_reader_accepts_the_checkpoint_before_it_is_forged(tmp_path: Path) -> None:
    answers = _read_forgeries(
        tmp_path, {"nothing": lambda forgery: None}, ["load", "open", "verify", "repair", "verify"]
    )
    assert [answer[:2] for answer in answers["nothing"].values()] == [
        ("", "right"), ("", "read"), ("", "None"), ("", "None")
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_manifest_or_index_is_a_clear_error(name: str, forged: Answers) -> None:
    for reader in ("load", "open", "verify"):
        _is_clear(forged[name][reader])
        assert "hash to" not in forged[name][reader][1], "the digests of a forgery are right"


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_reports_a_fault_without_a_traceback(name: str, forged: Answers) -> None:
    kind, text, _ = forged[name]["command line"]
    assert not kind, text
    answers = json.loads(text)
    assert answers["verify"] == answers["verify --json"] == [1, False]
    assert answers["inspect"] in ([0, False], [1, False]), "it reads no shard"
    assert answers["inspect --json"] == answers["inspect"]


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_plain_value_is_a_clear_error(name: str, strange: Answers) -> None:
    for answer in strange[name].values():
        _is_clear(answer)


@pytest.mark.parametrize("name", SHARDS)
def test_a_hostile_shard_is_a_clear_error_or_is_not_needed(name: str, shards: Answers) -> None:
    assert shards[name]["load"][:2] == ("", "right"), "loading needs the index alone"
    if shards[name]["verify"][0]:  # what a header says is not needed to prove the checkpoint whole
        _is_clear(shards[name]["verify"])
    _is_clear(shards[name]["repair"])


def test_a_large_sparse_manifest_is_refused_by_its_size(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path)
    with (tmp_path / MANIFEST_NAME).open("r+b") as file:
        file.truncate((4 << 30) + 1)
    with pytest.raises(sp.FormatError, match="at most"):
        read_manifest(LocalStorage(tmp_path))
    assert forgery.manifest["step"] == 1


def test_a_large_tensor_takes_no_memory_before_the_size_of_its_file_is_checked(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path)
    a_large_tensor(forgery)
    forgery.seal()
    with (
        sp.open(tmp_path) as checkpoint,
        pytest.raises(sp.StorageError, match=f"expected {2**43} bytes, it has"),
    ):
        checkpoint["w"].read()


def test_verify_reports_a_tiling_that_it_cannot_prove(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path)
    cut_along_all(forgery)
    forgery.seal()
    (unproved, short) = verify(LocalStorage(tmp_path)).faults
    assert isinstance(unproved, sp.FormatError) and "too many corners" in unproved.message
    assert isinstance(short, sp.StorageError)


@pytest.mark.parametrize("target", [0, torch.zeros(2)])
def test_no_memory_is_taken_for_a_tensor_that_is_not_stored(tmp_path: Path, target: Any) -> None:
    forgery = Forgery(tmp_path)
    forgery.manifest["tensors"].append(["x.ghost", "uint8", [2**37]])
    forgery.manifest["objects"]["evil"] = {"$tensor": "x.ghost"}
    forgery.seal()
    with pytest.raises(sp.FormatError, match=rf"'x.ghost' have 0 bytes together, .* has {2**37}\."):
        sp.load(tmp_path, {**target_like(state()), "evil": target})


def test_many_references_to_one_tensor_read_it_once(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path)
    forgery.manifest["objects"]["evil"] = [{"$tensor": "w"}] * 10_000
    forgery.seal()
    with sp.open(tmp_path) as checkpoint:
        evil = checkpoint["evil"]
    assert len(evil) == 10_000 and len({tensor.data_ptr() for tensor in evil}) == 1


_RUNS_CODE = (
    "pickle.", "exec", "compile", "marshal.", "code.", "import", "os.system", "os.exec", "os.posix_spawn",
    "subprocess.", "ctypes.dlopen", "function."
)  # fmt: skip
_watched: list[tuple[str, str]] = []
_watching = [False]


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching[0] and event.startswith(_RUNS_CODE):
        _watched.append((event, str(arguments)[:200]))


@contextlib.contextmanager
def _no_code() -> Iterator[list[tuple[str, str]]]:
    """Within it, audit events that run code are recorded, and unpickling raises."""
    import pickle  # noqa: TID251

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("unpickled")

    names = [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")]
    kept = [(module, name, getattr(module, name)) for module, name in names]
    for module, name, _ in kept:
        setattr(module, name, refuse)
    _watched.clear()
    _watching[0] = True
    try:
        yield _watched
    finally:
        _watching[0] = False
        for module, name, value in kept:
            setattr(module, name, value)


def _training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": sp.RandomState(),
        **state(),
    }


def watch_readers(root: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Audit events that run code: while a training state is read in every way, and while a pickle is read."""
    import pickle  # noqa: TID251

    meeting = rendezvous(deadline=20.0)
    sys.addaudithook(_watch)

    def read(folder: Path) -> None:
        sp.load(folder, _training(), rendezvous=meeting)
        if rank() == 0:
            _open(folder)
            assert verify(LocalStorage(folder)).ok
            _repair(folder)

    for name in ("first", "second"):
        sp.save(Path(root) / name, _training(), rendezvous=meeting)
    read(Path(root) / "first")  # late imports happen here
    state_ = _training()  # of another run: its modules are loaded too
    with _no_code() as found:
        sp.load(Path(root) / "second", state_, rendezvous=meeting)
        if rank() == 0:
            _open(Path(root) / "second")
            assert verify(LocalStorage(Path(root) / "second")).ok
            _repair(Path(root) / "second")
        seen = list(found)
    pickled = pickle.dumps(Path)
    _watched.clear()
    _watching[0] = True
    pickle.loads(pickled)
    _watching[0] = False
    return seen, list(_watched)


def test_reading_runs_no_code(tmp_path: Path) -> None:
    for outcome in run_ranks(2, watch_readers, str(tmp_path)):
        seen, of_pickle = outcome.value
        assert seen == []
        assert any(event == "pickle.find_class" for event, _ in of_pickle), "the watch sees what it should"

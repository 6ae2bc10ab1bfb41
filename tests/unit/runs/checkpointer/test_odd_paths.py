"""Paths that are not UTF-8, relative, or have "." and ".." in them: a call works, or says why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.commands.cli.group import run as run_cli

_NOT_UTF8 = os.fsdecode(b"caf\xe9")

_PATHS: dict[str, Callable[[Path], Any]] = {
    "str": str,
    "Path": lambda top: top,
    "bytes": os.fsencode,
    "not UTF-8": lambda top: str(top / _NOT_UTF8),
    "bytes that are not UTF-8": lambda top: os.fsencode(top / _NOT_UTF8),
    "a trailing slash": lambda top: f"{top}//",
    "dots": lambda top: f"{top}/./there/../here/.",
    "relative": lambda top: "run",
    "relative with dots": lambda top: "../work/./run/",
    "control characters": lambda top: f"{top}/\x1b[2J\nrun",
}


@pytest.fixture(autouse=True)
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value), "frozen": torch.ones(1000)}


@pytest.mark.parametrize("path", _PATHS.values(), ids=_PATHS.keys())
def test_a_run_at_any_path_is_saved_and_restored(
    tmp_path: Path, path: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = path(tmp_path / "top")
    checkpointer = sp.Checkpointer(root, keep=sp.KeepLatest(1), incremental=True)
    checkpointer.save(1, state(1)).result()
    monkeypatch.chdir("/")
    checkpointer.save(2, state(2)).result()
    checkpointer.wait_for_scrub(timeout=60)
    checkpointer.save(3, state(3)).result()
    target = state(0)
    assert checkpointer.restore(target) == 3 and target["w"][0] == 3
    assert checkpointer.steps() == [2, 3]  # the last step that the scrub has proved readable stays
    assert checkpointer.last_restore is not None
    checkpointer.last_restore.location.encode()
    monkeypatch.chdir(tmp_path / "work")
    assert sp.Checkpointer(root).steps() == [2, 3]


@pytest.mark.parametrize("path", _PATHS.values(), ids=_PATHS.keys())
def test_a_checkpoint_at_any_path_is_saved_and_loaded(tmp_path: Path, path: Callable[[Path], Any]) -> None:
    place = path(tmp_path / "top")
    sp.save(place, state(1))
    with pytest.raises(sp.AlreadyCommittedError) as caught:
        sp.save(place, state(1))
    json.dumps(caught.value.to_wire(), ensure_ascii=False).encode()
    sp.save(place, state(2), overwrite=True)
    target = state(0)
    sp.load(place, target)
    with sp.open(place) as checkpoint:
        assert torch.equal(checkpoint["w"][:], target["w"])
    with pytest.raises(sp.KeyMismatchError):
        sp.load(place, {"v": torch.ones(2)})


def test_dots_after_a_link_are_resolved_as_the_system_does(tmp_path: Path) -> None:
    (tmp_path / "disk" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "inside")
    sp.save(tmp_path / "link" / ".." / "ckpt", state(1))
    assert (tmp_path / "disk" / "ckpt" / "manifest.json").exists()
    sp.load(f"{tmp_path}/link/../ckpt", state(0))


@pytest.mark.parametrize(
    ("path", "text"), [("", "empty"), ("a\0b", "NUL"), (b"a\0b", "NUL"), ("a\ud800", "not valid Unicode")]
)
def test_an_invalid_path_is_refused(path: Any, text: str) -> None:
    for use in (sp.Checkpointer, sp.open, lambda path: sp.save(path, {}), lambda path: sp.load(path, {})):
        with pytest.raises(sp.StorageError, match=text):
            use(path)


def test_a_relative_path_in_a_removed_working_directory_is_refused(working: Path) -> None:
    shutil.rmtree(working)
    with pytest.raises(sp.StorageError, match="working directory"):
        sp.Checkpointer("run")
    sp.Checkpointer(working / "run")


def test_a_foreign_folder_whose_name_is_not_utf8_fails_no_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(1), incremental=True)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    (run / _NOT_UTF8).mkdir()
    (run / "step-00000002" / _NOT_UTF8).touch()
    shutil.copytree(run / "step-00000002", run / os.fsdecode(b"copy\xff"))  # refers to step 1, too
    checkpointer.save(3, {"w": torch.zeros(3)}).result()
    assert checkpointer.steps() == [3]
    assert list(run.glob("step-00000001/shards/*")), "the copy needs it"


@pytest.fixture(params=["café", os.fsdecode(b"caf\xe9"), "../work/./run", "run/"])
def run(request: pytest.FixtureRequest) -> str:
    """A run with two steps, the second incremental."""
    checkpointer = sp.Checkpointer(request.param, incremental=True)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    return str(request.param)


@pytest.mark.parametrize("as_json", [False, True])
def test_commands_accept_any_path(run: str, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = f"{run}/step-00000001", f"{run}//./step-00000002/"
    with events.trace(f"{run}-traces"):
        sp.load(two, state(0))
    for code, arguments in (
        (0, ["ls", run]),
        (0, ["inspect", two]),
        (0, ["inspect", two, "w"]),
        (0, ["verify", two]),
        (1, ["diff", one, two]),
        (0, ["repair", two]),
        (0, ["convert", "--standalone", two, f"{run}-copy"]),
        (0, ["verify", f"{run}-copy"]),
        (0, ["trace", f"{run}-traces", "-o", f"{run}-all.json"]),
        (0, ["prune", run, "--keep", "1", "--yes"]),
    ):
        assert run_cli([*arguments, *(["--json"] if as_json else [])]) == code, arguments
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "unexpected" not in err
        if as_json:
            json.loads(out)


@pytest.mark.parametrize("path", ["../run/./y", "none/", f"{_NOT_UTF8}/x", "-x", "a file", "a file/x", ""])
def test_commands_name_a_path_that_does_not_exist(
    working: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (working / "a file").write_text("text")
    for command in ("ls", "inspect", "verify", "repair", "prune", "diff", "convert", "trace"):
        more = {"diff": [path], "convert": ["copy"]}.get(command, [])
        options = {"convert": ["--standalone"], "trace": ["-o", "all.json"]}.get(command, [])
        reads_files = path == "a file" and command in ("inspect", "verify", "diff")
        assert run_cli([command, *options, "--", path, *more]) == (1 if reads_files else 2)
        out, err = capsys.readouterr()
        if reads_files:
            assert "is not a checkpoint of a known format" in out + err
            continue
        assert out == "" and err.startswith("error: ") and "Usage" not in err
        assert "does not exist" in err or "is a file" in err
        if path.startswith(".."):
            assert str(working.parent / "run" / "y") in err

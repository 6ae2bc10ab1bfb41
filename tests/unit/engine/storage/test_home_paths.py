"""A path with an unexpanded ~ is refused wherever a path is taken, and no folder of that name appears."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.commands.cli.group import run
from shardproof.frameworks import dcp
from shardproof.rerun import ResultLog
from shardproof.storage import LocalStorage

STATE = {"w": torch.ones(2)}
CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: sp.save(path, STATE),
    "load": lambda path: sp.load(path, STATE),
    "open": sp.open,
    "convert from": lambda path: sp.convert(path, "there", to="dcp"),
    "convert to": lambda path: sp.convert("saved", path, to="dcp"),
    "convert to a file": lambda path: sp.convert("saved", f"{path}.safetensors", to="safetensors"),
    "Checkpointer": lambda path: sp.Checkpointer(path).save(1, STATE),
    "restore": lambda path: sp.Checkpointer(path).restore(STATE),
    "second tier": lambda path: sp.Checkpointer("run", second_tier=path),
    "restore of a path": lambda path: sp.Checkpointer("run").restore(STATE, step=path),
    "LocalStorage": LocalStorage,
    "DCP adapter": lambda path: dcp.save(STATE, checkpoint_id=path),
    "trace": events.trace,
    "merged traces": lambda path: events.merge_traces(["trace.json"], path),
    "result log": ResultLog,
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    sp.save("saved", STATE)
    with events.trace("trace.json"), events.phase("save x", "write", rank=0, world_size=1):
        pass
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_a_path_with_an_unexpanded_home_is_refused(call: str, saved: Path) -> None:
    with pytest.raises((sp.StorageError, ValueError), match=r"~"):
        CALLS[call]("~/x")
    assert not os.path.lexists("~")


@pytest.mark.parametrize("name", ["~/x", "a/~/x", "/runs/~"])
def test_a_folder_named_by_a_tilde_is_refused_with_advice(name: str, saved: Path) -> None:
    with pytest.raises(sp.StorageError, match=r"os\.path\.expanduser"):
        LocalStorage(name)


@pytest.mark.parametrize("name", ["x~", "~nobody_has_this_name", "a/~b"])
def test_other_tildes_are_names(name: str, saved: Path) -> None:
    sp.save(name, STATE)
    assert (saved / name / "manifest.json").exists()


def test_the_advice_helps(saved: Path) -> None:
    sp.save(os.path.expanduser("~/x"), STATE)
    assert (saved / "home" / "x" / "manifest.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "~/x"),
        ("inspect", "~/x"),
        ("verify", "~/x"),
        ("doctor", "run", "--second-tier=~/x"),
        ("convert", "saved", "~/x", "--to", "dcp"),
    ],
)
def test_commands_refuse_it(arguments: tuple[str, ...], saved: Path, capsys: Any) -> None:
    sp.Checkpointer("run").save(1, STATE).result()
    assert run(arguments) == 2
    assert "the shell did not expand ~: write $HOME/x" in capsys.readouterr().err
    assert not os.path.lexists("~")

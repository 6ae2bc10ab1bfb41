"""The origin of a save in its manifest."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.engine.format import encode_manifest, read_manifest
from shardproof.engine.saving import provenance
from shardproof.engine.saving.provenance import checked_commit, mask_arguments, stored_commit
from shardproof.engine.state import collect
from shardproof.errors import StructureError
from shardproof.maintenance import repair
from shardproof.storage import LocalStorage

STATE = {"w": torch.ones(2)}
PATIENCE = 60.0


def git(folder: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a", "GIT_COMMITTER_NAME": "a"}
    who |= {"GIT_COMMITTER_EMAIL": "a@a", "GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, env=who, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> provenance.ProcessFacts:
    """The facts of this process, not read yet."""
    found = provenance.ProcessFacts()
    monkeypatch.setattr(provenance, "facts", found)
    return found


def test_a_save_records_its_origin(
    repository: Path, tmp_path: Path, facts: provenance.ProcessFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_unicode = os.fsdecode(b"\xe9")
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py"), not_unicode, "--lr=3", "--token", "abc"])
    commit = git(repository, "rev-parse", "HEAD")
    facts.git(PATIENCE)
    sp.save(tmp_path / "step", STATE, metadata={"loss": 0.5})
    with sp.open(tmp_path / "step") as checkpoint:
        assert checkpoint.metadata == {"loss": 0.5}
        found = checkpoint.provenance
    assert found["program"] == str(repository / "train.py")
    assert found["arguments"] == ["\\udce9", "--lr=3", "--token", "***"]
    assert found["git"] == {"commit": commit, "changed": False}
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "shardproof"} <= found["versions"].keys()
    assert found["hosts"] == 1
    assert 0 < found["started"] < read_manifest(LocalStorage(tmp_path / "step")).time
    assert "abc" not in (tmp_path / "step" / "manifest.json").read_text()


def test_only_frameworks_that_are_loaded_have_a_version(tmp_path: Path) -> None:
    before = set(sys.modules)
    sp.save(tmp_path / "step", STATE)
    with sp.open(tmp_path / "step") as checkpoint:
        versions = checkpoint.provenance["versions"]
    assert "deepspeed" not in versions
    assert not {
        name for name in set(sys.modules) - before if name.partition(".")[0] in provenance._FRAMEWORKS
    }


def test_what_cannot_change_is_read_once(
    facts: provenance.ProcessFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later save reads neither packages nor /proc. A framework that is imported later has a version."""
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    facts.git(PATIENCE)
    first = provenance.provenance(1, [])

    def read(*_arguments: Any) -> str:
        raise OSError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(provenance.metadata, "version", read)
        patch.setattr(provenance.Path, "read_text", read)
        assert provenance.provenance(1, []) == first and first["started"] > 0
    module = ModuleType("trl")
    module.__dict__["__version__"] = "9.9"
    monkeypatch.setitem(sys.modules, "trl", module)
    assert provenance.provenance(1, [])["versions"] == {**first["versions"], "trl": "9.9"}


def test_the_record_is_shown(
    tmp_path: Path,
    facts: provenance.ProcessFacts,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py"), "--lr", "3"])
    (repository / "train.py").write_text("pass")
    facts.git(PATIENCE)
    checkpointer = sp.Checkpointer(tmp_path / "run")
    checkpointer.save(1, STATE, metadata={"loss": 0.5}).result()
    assert run(["inspect", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"program {repository}/train.py --lr 3 started 20" in shown
    assert f"git commit {git(repository, 'rev-parse', 'HEAD')}, with changes" in shown
    assert f"torch {torch.__version__}" in shown
    assert run(["inspect", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"] == {"loss": 0.5}
    assert found["provenance"]["git"]["changed"] is True
    assert run(["ls", str(tmp_path / "run"), "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert step["provenance"] == found["provenance"]


def test_a_switch_and_a_variable_turn_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def recorded(name: str, **options: Any) -> dict[str, Any]:
        sp.save(tmp_path / name, STATE, **options)
        with sp.open(tmp_path / name) as checkpoint:
            return checkpoint.provenance

    assert recorded("on")
    assert recorded("off", provenance=False) == {}
    assert b"provenance" not in (tmp_path / "off" / "manifest.json").read_bytes()
    checkpointer = sp.Checkpointer(tmp_path / "run", provenance=False)
    checkpointer.save(1, STATE).result()
    assert read_manifest(LocalStorage(tmp_path / "run" / "step-00000001")).provenance == {}
    monkeypatch.setenv(provenance.VARIABLE, "0")
    assert recorded("variable") == {}
    monkeypatch.setenv(provenance.VARIABLE, "1")
    assert recorded("variable is 1")
    monkeypatch.setenv(provenance.VARIABLE, "no")
    with caplog.at_level(logging.WARNING, "shardproof"):
        assert recorded("wrong")
        assert recorded("off in the program", provenance=False) == {}
    (warning,) = caplog.messages
    assert "SHARDPROOF_PROVENANCE is 'no' and has no effect: set it to 0" in warning
    with pytest.raises(TypeError, match="provenance is True or False"):
        sp.Checkpointer(tmp_path / "run", provenance="no")  # type: ignore[arg-type]


def test_the_key_belongs_to_shardproof(tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="metadata has the key '@provenance'.*rename it"):
        sp.save(tmp_path / "step", STATE, metadata={"@provenance": {}})


def test_an_older_reader_finds_it_in_the_metadata_and_an_older_value_stays(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", STATE)
    manifest = read_manifest(LocalStorage(tmp_path / "step"))
    text = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert (text["version"], text["metadata"]) == (1, {"@provenance": manifest.provenance})
    older = msgspec.structs.replace(manifest, provenance={}, metadata={"@provenance": "mine"})
    (tmp_path / "step" / "manifest.json").write_bytes(encode_manifest(older))
    with sp.open(tmp_path / "step") as checkpoint:
        assert (checkpoint.metadata, checkpoint.provenance) == ({"@provenance": "mine"}, {})


def test_copies_keep_it(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", STATE, step=1)
    found = read_manifest(LocalStorage(tmp_path / "step")).provenance
    assert found
    sp.convert(tmp_path / "step", tmp_path / "copy", to="shardproof")
    assert run(["convert", str(tmp_path / "step"), str(tmp_path / "alone"), "--standalone"]) == 0
    next((tmp_path / "step").glob("index-*")).unlink()
    repair(LocalStorage(tmp_path / "step"))
    for name in ("copy", "alone", "step"):
        assert read_manifest(LocalStorage(tmp_path / name)).provenance == found, name


def test_no_fault_of_the_record_fails_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "trl", object())
    with caplog.at_level(logging.WARNING, "shardproof"):
        sp.save(tmp_path / "step", STATE)
    assert "the save has no record of its origin: TypeError" in caplog.text
    assert read_manifest(LocalStorage(tmp_path / "step")).provenance == {}


def test_arguments_that_are_no_text_are_recorded(
    tmp_path: Path, facts: provenance.ProcessFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [Path("train.py"), 3, None])
    sp.save(tmp_path / "step", STATE)
    found = read_manifest(LocalStorage(tmp_path / "step")).provenance
    assert (found["program"], found["arguments"]) == ("train.py", ["3", "None"])
    monkeypatch.setattr(sys, "argv", [3])
    assert provenance._git_state({}) == provenance._git_state({})


@pytest.fixture
def hanging_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program git that ends with the test."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "git"
    program.write_text(f"#!/bin/sh\nread line < {fifo}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    keep = os.open(fifo, os.O_RDWR)
    yield
    os.write(keep, b"end\n")
    os.close(keep)


def test_no_save_waits_for_git(
    repository: Path,
    tmp_path: Path,
    facts: provenance.ProcessFacts,
    hanging_git: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py")])
    for name in ("a", "b"):
        sp.save(tmp_path / name, STATE)
        assert "changed" not in read_manifest(LocalStorage(tmp_path / name)).provenance.get("git", {})
    assert not facts._is_read.is_set()


def test_a_git_that_takes_too_long_ends_with_its_children(repository: Path, tmp_path: Path) -> None:
    alive, hold = tmp_path / "alive", tmp_path / "hold"
    os.mkfifo(alive)
    os.mkfifo(hold)
    (repository / ".gitattributes").write_text("train.py filter=hang")
    git(repository, "config", "filter.hang.clean", f"exec 3>{alive}; echo begun >&3; read line < {hold}")
    (repository / "train.py").write_text("pass")
    reader, keep = os.open(alive, os.O_RDONLY | os.O_NONBLOCK), os.open(hold, os.O_RDWR)
    try:
        for timeout in (0.5, 2.0, 8.0, 32.0):  # until the filter has begun
            assert checked_commit(repository, timeout) is None
            if select.select([reader], [], [], 0)[0] and os.read(reader, 100):
                break
        assert select.select([reader], [], [], PATIENCE)[0], "the filter lives"
        assert os.read(reader, 100) == b""
    finally:
        os.write(keep, b"end\n" * 4)
        os.close(keep)
        os.close(reader)


def test_the_commit_is_read_from_the_files_where_there_is_no_git(
    repository: Path, tmp_path: Path, facts: provenance.ProcessFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py")])
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.git(PATIENCE) == {"commit": commit}


def test_an_installed_program_has_the_commit_of_the_working_directory(
    repository: Path, tmp_path: Path, facts: provenance.ProcessFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "environment"
    subprocess.run(["cp", "-r", str(repository), str(installed)], check=True, timeout=60)
    git(installed, "commit", "-qm", "other", "--allow-empty")
    monkeypatch.setattr(sys, "prefix", str(installed))
    monkeypatch.setattr(sys, "argv", [str(installed / "train.py")])
    monkeypatch.chdir(repository)
    assert facts.git(PATIENCE) == {"commit": git(repository, "rev-parse", "HEAD"), "changed": False}


def test_commits_of_all_kinds_of_repositories(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    assert stored_commit(repository) == first
    assert checked_commit(repository, PATIENCE) == (first, False)
    (repository / "untracked").write_text("")
    assert checked_commit(repository, PATIENCE) == (first, False)
    git(repository, "pack-refs", "--all")
    assert stored_commit(repository) == first
    git(repository, "commit", "-qm", "second", "--allow-empty")
    second = git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    (tmp_path / "tree" / "below").mkdir()
    assert stored_commit(tmp_path / "tree" / "below") == second
    git(repository, "checkout", "-q", "--detach", first)
    assert stored_commit(repository) == first
    (repository / "train.py").write_text("pass")
    assert checked_commit(repository, PATIENCE) == (first, True)
    assert checked_commit(tmp_path, PATIENCE) is None
    git(tmp_path / "tree", "checkout", "-q", "--orphan", "empty")
    assert (stored_commit(tmp_path / "tree"), checked_commit(tmp_path / "tree", PATIENCE)) == (None, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hf-token", "SECRET"],
        ["--hf-token=SECRET"],
        ["--token", "-SECRET"],
        ["--tokens", "SECRET", "SECRET"],
        ["-api_key", "SECRET"],
        ["+wandb.apiKey=SECRET"],
        ["--set", "db.password=SECRET,x=1"],
        ["--env", "AWS_SECRET_ACCESS_KEY=SECRET"],
        ["--env", "HF_TOKEN", "SECRET"],
        ["PASSWD=SECRET"],
        ['{"lr": 1, "api_key": "SECRET"}'],
        ["--header", "Authorization: Bearer SECRET"],
        ["--credentials", "SECRET"],
        ["--header=Bearer SECRET"],
        ["https://user:SECRET@host/path"],
        ["postgres://user:p@SECRET@host/db"],
        ["https://SECRET@host"],
        ["https://host/x?X-Amz-Signature=SECRET"],
        ["https://host/x?sv=1&sig=SECRET&b=SECRET"],
        ["hf_SECRETSECRET"],
        ["x=ghp_SECRETSECRET"],
        ["AKIASECRETSECRET"],
        [f"--db=postgres://user:{'SECRET' * 200}@host/db"],
        ["--pass", "SECRET"],
        ["--pass=SECRET"],
        ["--db-pass", "SECRET"],
        ["MYSQL_PASS=SECRET"],
        ["--creds=SECRET"],
        ["--authorization", "SECRET"],
        ["http://host/x?pass=SECRET"],
        ["https://user:SEC/RET@host"],
        ["https://user:SECRET/SECRET@host"],
        ["--opts=--token SECRET"],
        ["--cmd", "login --password SECRET"],
        ["token SECRET"],
        ["--header=Authorization:", "SECRET"],
        ["--api-key[0]", "SECRET"],
        ["--api-key[0]=SECRET"],
        ["--$token", "SECRET"],
        ["token@host", "SECRET"],
        ["'token'", "SECRET"],
        ["--signature", "SECRET"],
        ["sig=SECRET"],
        ["npm_SECRETSECRET"],
        ["dckr_pat_SECRETSECRET"],
        ["pypi-SECRETSECRET"],
        ["AIzaSECRETSECRET"],
        ["nvapi-SECRETSECRET"],
        ["gsk_SECRETSECRET"],
        ["r8_SECRETSECRET"],
        ["xapp-SECRETSECRET"],
        ["ya29.SECRETSECRET"],
        ["wandb_v1_SECRETSECRET"],
        ["https://hooks.slack.com/services/T0SECRETSECRET/B0/SECRET"],
    ],
)
def test_secrets_in_arguments_are_masked(arguments: list[str]) -> None:
    shown = mask_arguments(["--lr", "3", *arguments, "--last", "4"])
    assert not re.search("SEC(?!RET_ACCESS_KEY)|RET(?!_ACCESS_KEY)", " ".join(shown))
    assert shown[:2] == ["--lr", "3"]
    assert shown[-2:] == ["--last", "4"]
    assert len(shown) == len(arguments) + 4


def test_other_arguments_stay() -> None:
    arguments = [
        "--tokenizer",
        "gpt2",
        "--author=me",
        "--keep",
        "3",
        "s3://bucket/a@b",
        "-v",
        "data.json",
        "--task-name=x",
        "--passes",
        "3",
        "--design=2",
        "/data/tokens.bin",
        "out",
    ]
    assert mask_arguments(arguments) == arguments
    (long,) = mask_arguments(["x" * 5000])
    assert len(long) < 1100


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_meshes_are_recorded_once(four_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "a": DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)]),
        "b": DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(1)]),
        "c": DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Shard(0)]),
    }
    meshes = collect(state, rank=0, world_size=4).meshes
    assert meshes == (mesh, mesh["tp"])
    record = provenance.provenance(3, meshes)
    assert (record["hosts"], record["layout"]) == (3, {"meshes": [{"dp": 2, "tp": 2}]})


def test_each_save_records_the_meshes_of_its_state(tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        checkpointer = sp.Checkpointer(tmp_path / "run")
        one, other = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        sharded = {"a": DTensor.from_local(torch.ones(2), one, [Shard(0)]), "b": torch.ones(2)}
        moved = sharded | {"a": DTensor.from_local(torch.ones(2), other, [Shard(0)])}
        found = []
        for step, state in enumerate((sharded, sharded, moved, {"b": torch.ones(2)})):
            checkpointer.save(step, state).result()
            record = read_manifest(LocalStorage(tmp_path / "run" / f"step-{step:08d}")).provenance
            found.append(record.get("layout"))
    finally:
        dist.destroy_process_group()
    assert found == [{"meshes": [{"dim0": 1}]}, {"meshes": [{"dim0": 1}]}, {"meshes": [{"tp": 1}]}, None]

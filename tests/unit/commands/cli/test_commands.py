"""The commands, called in this process: exit codes, JSON and text."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardproof.commands.cli.terminal
from shardproof._utils.humanize import gigabytes
from shardproof.commands.cli.group import COMMANDS, run
from shardproof.engine.format import MANIFEST_NAME
from tests.unit.commands.cli.samples import Sample, cut, model, rows_cut, write

STATE = model(4)
SPREAD = Sample(
    STATE,
    cuts={key: rows_cut(array.shape, 2) for key, array in STATE.items()},
    world_size=2,
    step=7,
    time=time.time() - 7300,
    objects={"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}},
    aliases={"model.head.weight": "model.embed.weight"},
    metadata={"note": "hi"},
)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    write(tmp_path / "step-00000007", SPREAD)
    return tmp_path / "step-00000007"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command: exit code, standard output, standard error."""

    def called(*arguments: object) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return called


def make_old(folder: Path, seconds: float = 7200) -> None:
    then = time.time() - seconds
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then))


# What every command has in common.


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(call: Any, name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0
    assert out.startswith(f"Usage: shardproof {name}")
    assert "--json" in out
    assert " - " not in out, "click joins the items of a list"


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "/nowhere"),
        ("inspect", "/nowhere"),
        ("verify", "/nowhere"),
        ("diff", "/nowhere", "/nowhere"),
        ("repair", "/nowhere"),
        ("prune", "/nowhere"),
        ("ls",),
        ("ls", ".", "."),
        ("ls", ".", "--nothing"),
        ("prune", ".", "--keep", "0"),
        ("prune", ".", "--older-than", "soon"),
        ("inspect", ".", "--depth", "0"),
        ("nothing",),
        ("--nothing",),
    ],
)
def test_bad_usage_is_2(call: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "error: " in err
    code, out, err = call(*arguments, "--json")
    assert (code, out) == (2, "")
    report = json.loads(err)
    assert report["type"] == "UsageError"
    assert report["message"]
    assert report["details"] == {}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://x/y", "no URL of a known store"),
        ("file:///x", "no URL of a known store"),
        ("s3://", "names no bucket"),
        ("memory://-x", "names no run in memory"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("ls", "{url}"),
        ("prune", "{url}"),
        ("watch", "{url}", "--once"),
        ("doctor", "{url}"),
        ("doctor", ".", "--second-tier", "{url}"),
        ("doctor", ".", "--node", "{url}"),
        ("verify", "{url}"),
        ("inspect", "{url}"),
        ("diff", "{url}", "{url}"),
        ("repair", "{url}"),
        ("convert", "{url}", "copy", "--to", "hf"),
        ("convert", ".", "{url}", "--to", "hf"),
        ("convert", ".", "{url}", "--standalone"),
    ],
)
def test_a_url_of_no_known_store_is_bad_usage(
    call: Any, command: tuple[str, ...], url: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*(word.format(url=url) for word in command))
    assert (code, out) == (2, "")
    assert text in err
    assert list(tmp_path.iterdir()) == []


def test_a_destination_without_permission_gives_no_answer(
    call: Any, ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        if "closed" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    for how in (("--to", "hf", "--include", "model"), ("--standalone",)):
        code, out, err = call("convert", ckpt, tmp_path / "closed", *how)
        assert (code, out) == (3, ""), how
        assert "Permission denied (EACCES)" in err


def test_no_command_is_bad_usage_and_shows_the_help(call: Any) -> None:
    code, out, err = call()
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize("name", ["ls", "repair", "prune"])
def test_a_file_is_not_a_folder(call: Any, ckpt: Path, name: str) -> None:
    code, _, err = call(name, ckpt / MANIFEST_NAME)
    assert code == 2
    assert "is a file, expected a folder" in err


@pytest.mark.parametrize("name", ["inspect", "verify", "diff"])
def test_a_file_of_no_known_format_is_no_checkpoint(call: Any, ckpt: Path, name: str) -> None:
    code, out, err = call(name, *[ckpt / MANIFEST_NAME] * (2 if name == "diff" else 1))
    assert code == 1
    assert "is not a checkpoint of a known format" in out + err


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_the_newest_restorable_step_of_a_run_is_taken_and_named(call: Any, ckpt: Path, name: str) -> None:
    run = ckpt.parent
    write(run / "step-00000006", SPREAD)
    write(run / "step-00000008", SPREAD)
    cut(run / "step-00000008")
    code, out, err = call(name, run)
    assert code == 0
    assert f"{ckpt}, step 7" in out or f"{ckpt}: step 7" in out
    assert err.splitlines()[0].startswith("step-00000008: damaged, ")
    assert err.splitlines()[1:] == ["step-00000007: the newest step that can be restored"]
    write(run / "step-00000007", Sample(STATE, step=9, attempt="b"))  # the checkpoint of another step
    code, out, err = call(name, run, 6, "--json")
    assert (code, err, json.loads(out)["location"]) == (0, "", str(run / "step-00000006"))
    code, _, err = call(name, run, 5)
    assert code == 2
    assert f"{run} has no step 5 (`shardproof ls {run}` lists its steps)" in err
    (run / "step-00000006" / MANIFEST_NAME).write_text("{")
    code, out, err = call(name, run)
    assert code == 1
    assert f"{run}: no step can be restored:" in (out if name == "verify" else err)
    code, out, err = call(name, run, "--json")
    assert code == 1
    report = json.loads(out or err)
    assert "no step can be restored" in str(report) and (name != "verify" or report["ok"] is False)


@pytest.mark.parametrize("name", ["inspect", "verify", "stats"])
def test_a_step_that_cannot_be_read_at_the_moment_says_nothing_about_the_run(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A script that removes a run for code 1 would lose it."""
    write(ckpt.parent / "step-00000006", SPREAD)
    _unreadable(monkeypatch, "step-00000007", errno.EIO)
    code, out, err = call(name, ckpt.parent)
    assert (code, out) == (3, "")
    assert "EIO" in err and "may be whole" in err


@pytest.mark.parametrize("name", ["inspect", "verify", "stats"])
def test_a_dead_save_that_cannot_be_read_at_the_moment_is_passed_over(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(ckpt.parent / "step-00000008", SPREAD, commit=False)
    make_old(ckpt.parent)
    _unreadable(monkeypatch, "step-00000008/shards", errno.EACCES)
    code, _, err = call(name, ckpt.parent)
    assert code == 0
    first, second = err.splitlines()
    assert first.startswith("step-00000008: unreadable, ") and "EACCES" in first
    assert second == "step-00000007: the newest step that can be restored"


def test_a_number_behind_a_checkpoint_is_a_key_or_an_error(call: Any, ckpt: Path) -> None:
    code, _, err = call("verify", ckpt, 7)
    assert code == 2
    assert "is no run, so it has no step 7" in err
    assert "has no key '7'" in call("inspect", ckpt, 7)[2]
    code, _, err = call("inspect", ckpt.parent, 7, "model", "embed")
    assert code == 2
    assert "expected one KEY, found 2: model embed" in err
    assert call("inspect", ckpt.parent, 7, "model.embed.weight")[0] == 0


def test_a_misspelt_command_names_those_like_it_and_help_is_a_command(call: Any) -> None:
    code, _, err = call("verfy", "x")
    assert code == 2
    assert "No such command 'verfy'. Did you mean verify?" in err
    assert "No such command 'xyz'.\n" in call("xyz")[2]
    assert call("help") == call("--help")
    assert call("help", "verify") == call("verify", "--help")
    assert call("help", "verfy")[0] == 2


def test_a_word_that_is_no_command_or_option_names_what_to_use(call: Any, ckpt: Path) -> None:
    code, _, err = call("demo")
    assert (code, err.splitlines()[-1]) == (
        2, "error: No such command 'demo'. The demo is in the repository: `make demo`."
    )  # fmt: skip
    code, _, err = call("doctor", ckpt.parent, "--then", ckpt.parent)
    assert code == 2 and err.endswith("No such option '--then'. Name the second tier with '--second-tier'.\n")
    code, _, err = call("ls", ckpt.parent, "--then", ckpt.parent)
    assert code == 2 and "No such option '--then'." in err and "second" not in err, "ls has no --second-tier"
    assert "Did you mean" in call("doctor", ckpt.parent, "--prob")[2]


@pytest.mark.parametrize("name", ["diff", "repair"])
def test_a_run_is_no_checkpoint_and_a_step_is_named(call: Any, ckpt: Path, name: str) -> None:
    write(ckpt.parent / "step-00000006", SPREAD)
    write(ckpt.parent / "step-00000008", SPREAD, commit=False)
    code, out, err = call(name, *[ckpt.parent] * (2 if name == "diff" else 1))
    assert (code, out) == (2, "")
    assert f"this is a run: give a step, e.g. {ckpt} (`shardproof ls {ckpt.parent}`)" in err
    assert call(name, *[ckpt] * (2 if name == "diff" else 1))[0] == 0


def test_a_checkpoint_that_contains_steps_is_a_checkpoint(call: Any, ckpt: Path) -> None:
    write(ckpt / "step-00000001", SPREAD)
    assert call("verify", ckpt)[0] == 0
    (ckpt / MANIFEST_NAME).unlink()
    assert call("repair", ckpt)[0] == 0


def _unreadable(monkeypatch: pytest.MonkeyPatch, part: str, number: int) -> None:
    """Makes every open of a path that contains `part` fail with the errno `number`."""
    real = os.open

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if part in str(path):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    monkeypatch.setattr("shardproof.engine.storage.local.os.open", opened)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("part", [MANIFEST_NAME, "index-", "shards/00001"])
def test_a_failing_storage_gives_no_answer_about_the_checkpoint(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: int
) -> None:
    _unreadable(monkeypatch, part, number)
    code, out, err = call("verify", ckpt)
    assert (code, err) == (3, "")
    assert out.startswith("NO ANSWER")
    assert "may be whole" in out
    code, out, _ = call("verify", ckpt, "--json")
    assert (code, json.loads(out)["ok"]) == (3, False)
    if not part.startswith("shards"):
        code, out, err = call("inspect", ckpt)
        assert (code, out) == (3, "")
        assert "may be whole" in err


def test_damage_counts_even_where_the_storage_fails_too(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(ckpt / "shards" / "00000-a1.safetensors", 5000)
    _unreadable(monkeypatch, "shards/00001", errno.EIO)
    code, out, _ = call("verify", ckpt)
    assert code == 1
    assert out.startswith("BAD")


def test_a_missing_file_is_damage(call: Any, ckpt: Path) -> None:
    (ckpt / "shards" / "00000-a1.safetensors").unlink()
    assert call("verify", ckpt)[0] == 1


@pytest.mark.parametrize("name", ["inspect", "diff"])
def test_no_checkpoint_is_1_with_what_to_do(call: Any, tmp_path: Path, name: str) -> None:
    arguments = [name, *[tmp_path] * (2 if name == "diff" else 1)]
    code, out, err = call(*arguments)
    assert (code, out) == (1, "")
    assert "no committed checkpoint" in err
    code, out, err = call(*arguments, "--json")
    assert (code, out) == (1, "")
    assert json.loads(err)["type"] == "NotCommittedError"
    assert json.loads(err)["details"] == {"path": str(tmp_path)}


def test_a_damaged_manifest_is_1(call: Any, ckpt: Path) -> None:
    data = bytearray((ckpt / MANIFEST_NAME).read_bytes())
    data[10] ^= 1
    (ckpt / MANIFEST_NAME).write_bytes(data)
    code, _, err = call("inspect", ckpt, "--json")
    assert code == 1
    assert json.loads(err)["type"] == "FormatError"


def test_an_unexpected_error_is_3_and_no_traceback(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("shardproof.commands.report.scan_run", broken)
    monkeypatch.delenv(shardproof.commands.cli.terminal.TRACEBACK, raising=False)
    code, out, err = call("ls", ckpt)
    assert (code, out) == (3, "")
    assert "unexpected RuntimeError: oops" in err
    code, _, err = call("ls", ckpt, "--json")
    assert code == 3
    assert json.loads(err)["type"] == "RuntimeError"


def test_an_interrupt_is_130(call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardproof.commands.report.scan_run", interrupted)
    assert call("ls", ckpt)[0] == 130


def test_control_characters_in_keys_do_not_reach_the_terminal(call: Any, tmp_path: Path) -> None:
    hostile = "w\x1b]0;owned\x07"
    one = np.ones(2, np.float32)
    write(tmp_path / "a", Sample({hostile: one}, objects={"o\x1b[2J": "v\x1b"}, metadata={"m\x1b": "\x9b"}))
    write(tmp_path / "b", Sample({hostile: 2 * one}))
    for arguments in (
        ("inspect", tmp_path / "a"),
        ("inspect", tmp_path / "a", hostile),
        ("inspect", tmp_path / "a", "o\x1b[2J"),
        ("inspect", tmp_path / "a", "w\x1b"),
        ("diff", tmp_path / "a", tmp_path / "b"),
    ):
        _, out, err = call(*arguments)
        assert not {"\x1b", "\x07", "\x9b"} & set(out + err)
        assert "\\x1b" in out + err


# Each command.


def test_ls_suggests_an_interval_for_failures(call: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step:08d}", Sample(STATE, step=step, time=1e9 + 600 * step))
        os.utime(tmp_path / f"step-{step:08d}" / MANIFEST_NAME, (0, 1e9 + 600 * step + 2 * step))
    code, out, _ = call("ls", tmp_path, "--mtbf", "12h")
    words = " ".join(out.split())
    assert code == 0
    assert "a save every 10 min, and 4.00 s until its commit (medians of 3 steps)" in words
    assert "With a failure every 12 h (--mtbf), the formula of Daly suggests a save every 10 min" in words
    report = json.loads(call("ls", tmp_path, "--mtbf", "12h", "--json")[1])
    assert report["interval"].pop("suggested") == pytest.approx((2 * 4 * 43200) ** 0.5, rel=0.01)
    assert report["interval"] == {"saves": 3, "interval": 600.0, "cost": 4.0, "mtbf": 43200.0}
    assert "interval" not in json.loads(call("ls", tmp_path, "--json")[1])
    assert "needs two committed steps" in call("ls", write_one(tmp_path / "one"), "--mtbf", "1h")[1]
    assert call("ls", tmp_path, "--mtbf", "often")[0] == 2


def write_one(run: Path) -> Path:
    write(run / "step-00000001", Sample(STATE, step=1))
    return run


@pytest.mark.parametrize(
    "words",
    [
        *(["ls"], ["inspect"], ["verify"], ["stats"], ["doctor"], ["prune"], ["watch", "--once"]),
        *(["repair"], ["page", "-o", "x.html"], ["convert", "--to", "hf", "DST"], ["diff", "B"]),
    ],
    ids=lambda words: words[0],
)
def test_a_home_that_the_shell_did_not_expand_is_bad_usage(call: Any, ckpt: Path, words: list[str]) -> None:
    command, *options = [str(ckpt) if word == "B" else word for word in words]
    for path in ("~", "~/x", str(ckpt.parent / "~" / "x")):
        code, _, err = call(command, path, *options)
        whole = path.replace("~", "$HOME") if path[0] == "~" else "the whole path"
        assert code == 2 and f"the shell did not expand ~: write {whole}, or leave out" in err
    if command in ("ls", "doctor"):
        (ckpt.parent / "~").mkdir()
        assert call(command, ckpt.parent / "~")[0] == 2, "a folder of that name"
    if command == "convert":
        assert call("convert", ckpt, "~/x", *options[:2])[0] == 2
    if command == "doctor":
        assert call("doctor", ckpt.parent, "--second-tier", "~/x")[0] == 2


def test_a_span_has_its_unit(call: Any, ckpt: Path) -> None:
    run_folder = ckpt.parent
    write(run_folder / "step-00000008", Sample(STATE, step=8), commit=False)
    cut(run_folder / "step-00000008")
    files = sorted(run_folder.rglob("*"))
    for command in ("prune", "doctor", "watch"):
        code, _, err = call(command, run_folder, "--older-than", "0")
        assert code == 2 and "'0' is not a span of time with its unit; write 90s, 30m, 1h" in err
    assert sorted(run_folder.rglob("*")) == files
    assert call("ls", run_folder, "--mtbf", "12")[0] == 2
    assert call("page", run_folder, "-o", "-", "--mtbf", "12")[0] == 2
    for command, *option in (
        ("ls", "--mtbf", "0s"),
        ("page", "-o", "-", "--mtbf", "0h"),
        ("watch", "--once", "--every", "0s"),
    ):
        code, _, err = call(command, run_folder, *option)
        assert code == 2 and "it is more than 0" in err
    assert call("prune", run_folder, "--older-than", "0s", "--yes")[0] == 0
    assert not (run_folder / "step-00000008" / "shards").exists()


def test_a_step_is_named_by_its_number_or_its_folder(call: Any, ckpt: Path) -> None:
    run_folder, name = ckpt.parent, ckpt.name
    write(run_folder / "step-00000009", Sample({"other": next(iter(STATE.values()))}, step=9))
    assert f"{ckpt}, step 7" in call("verify", run_folder, name)[1]
    assert call("inspect", run_folder, name)[1] == call("inspect", run_folder, 7)[1] != ""
    assert call("stats", run_folder, name, "--json")[1] == call("stats", run_folder, 7, "--json")[1]
    pages = [call("page", run_folder, step, "-o", "-", "--json")[:2] for step in (name, "7")]
    assert pages[0][0] == pages[1][0] == 0
    for command, *options in (("verify",), ("page", "-o", "-")):
        code, _, err = call(command, run_folder, "abc", *options)
        assert (
            code == 2 and f"'abc' is no step of {run_folder}: give a number, or the name of its folder" in err
        )
        code, _, err = call(command, run_folder, "step-00000008", *options)
        assert code == 2 and f"{run_folder} has no step step-00000008" in err


def test_prune_shows_no_empty_columns(call: Any, ckpt: Path) -> None:
    write(ckpt.parent / "step-00000009", Sample(STATE, step=9))
    rows = call("prune", ckpt.parent, "--keep", 1, "--dry-run")[1].splitlines()
    assert rows[0].split() == ["to", "remove", "what"]
    write(ckpt.parent / "step-00000010", Sample(STATE, step=10), commit=False)
    cut(ckpt.parent / "step-00000010")
    rows = call("prune", ckpt.parent, "--keep", 1, "--older-than", "0s", "--dry-run")[1].splitlines()
    assert rows[0].split() == ["to", "remove", "what", "size", "age"]
    assert next(row for row in rows if row.startswith(ckpt.name)).split()[-2:] == ["-", "-"]


def test_stats_refuses_a_cut_shard_file(call: Any, ckpt: Path) -> None:
    cut(ckpt)
    code, _, err = call("stats", ckpt)
    assert code == 1 and "expected" in err and "shardproof verify" in err


def test_a_key_that_does_not_exist_is_bad_usage(call: Any, ckpt: Path) -> None:
    for words in (["nokey"], [next(iter(STATE)), "no*"]):
        code, _, err = call("stats", ckpt, *words)
        assert code == 2 and f"no tensor has a key like '{words[-1]}'" in err
        assert call("stats", ckpt, *words, "--json")[0] == 2
    for options in (["--include", "nokey"], ["--exclude", "nokey"], ["--rename", "nokey=x"]):
        assert call("diff", ckpt, ckpt, *options)[0] == 2
        assert call("convert", ckpt, ckpt.parent / "new", "--to", "safetensors", *options)[0] == 2
    assert call("inspect", ckpt, "nokey")[0] == 2


def test_ls(call: Any, ckpt: Path) -> None:
    run_folder = ckpt.parent
    write(run_folder / "step-00000008", Sample(STATE), commit=False)
    code, out, _ = call("ls", run_folder)
    assert code == 0
    committed, leftover = out.splitlines()[1:]
    size = sum(array.nbytes for array in STATE.values())
    files = sum(file.stat().st_size for file in ckpt.rglob("*-a1*"))
    cells = ["7", "step-00000007", "2", "h", *gigabytes(size).split(), *gigabytes(files).split()]
    assert committed.split()[:10] == [*cells, str(len(STATE)), "2"]
    assert size < files
    assert "committed" in committed
    assert "writing" in leftover
    assert "no manifest" in leftover
    code, out, _ = call("ls", run_folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["location"] == str(run_folder)
    first, second = report["checkpoints"]
    assert first == {
        "name": "step-00000007",
        "step": 7,
        "status": "committed",
        "committed": True,
        "reason": None,
        "time": SPREAD.time,
        "bytes": size,
        "tensors": len(STATE),
        "objects": 2,
        "world_size": 2,
        "attempt": "a1",
        "repaired": False,
        "unnamed": 0,
        "stored_step": 7,
        "file_bytes": files,
        "provenance": {},
        "references": [],
        "referenced_by": [],
        "suspect": False,
        "verdict": None,
        "linked": False,
        "pinned": None,
    }
    assert (second["step"], second["committed"], second["time"]) == (8, False, None)


def test_ls_goes_on_where_a_manifest_cannot_be_read(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ckpt.parent / "step-00000008", replace(SPREAD, step=8))
    _unreadable(monkeypatch, "step-00000007/manifest", errno.EACCES)
    code, out, _ = call("ls", ckpt.parent)
    assert code == 0
    bad, *_, good = out.splitlines()[1:]
    assert "unreadable  cannot read" in bad
    assert "EACCES" in out
    assert "committed" in good
    first, second = json.loads(call("ls", ckpt.parent, "--json")[1])["checkpoints"]
    assert (first["status"], first["committed"], second["committed"]) == ("unreadable", False, True)


def test_ls_of_an_empty_folder(call: Any, tmp_path: Path) -> None:
    code, out, _ = call("ls", tmp_path)
    assert code == 0
    assert "no checkpoints" in out
    assert json.loads(call("ls", tmp_path, "--json")[1])["checkpoints"] == []


def test_inspect(call: Any, ckpt: Path) -> None:
    code, out, _ = call("inspect", ckpt)
    assert code == 0
    for text in (
        "step 7",
        "2 h ago",
        "model.layers.{0..3}.wq",
        "optimizer.layers",
        "50.0 %",
        "shards/00001-a1",
        "betas",
        "note",
    ):
        assert text in out
    code, out, _ = call("inspect", ckpt, "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {
        "location", "format", "notes", "prefix", "step", "time", "writer", "attempt", "repaired",
        "world_size",
        "metadata", "provenance",
        "tensors", "bytes", "referenced_bytes", "chunks", "rows", "parts", "writers", "aliases", "objects",
        "unreadable",
    }  # fmt: skip
    assert {
        "key": "model.layers.{0..3}.wq",
        "count": 4,
        "dtype": "float32",
        "shape": [8, 8],
        "bytes": 1024,
    } in report["rows"]
    assert {"part": "model.layers", "tensors": 8, "bytes": 2048} in report["parts"]
    assert [writer["rank"] for writer in report["writers"]] == [0, 1]
    assert report["metadata"] == {"note": "hi"}
    assert report["provenance"] == {}


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"program": "train.py", "arguments": ["--lr", "3"]}, "program train.py --lr 3"),
        ({"program": "train.py", "arguments": 5}, "program train.py arguments 5"),
        ({"program": ["train.py"]}, "program ['train.py']"),
        ({"arguments": ["--lr"]}, "arguments ['--lr']"),
        ({"started": 0}, "started 1970-01-01 00:00:00 UTC"),
        *(({"started": time}, f"started {time}") for time in (1e300, 1e18, True, "then", [1])),
        ({"git": {"commit": "abc", "changed": True}}, "git commit abc, with changes"),
        ({"git": {"commit": "abc"}}, "git commit abc"),
        ({"git": {"commit": "abc", "changed": []}}, "git {'commit': 'abc', 'changed': []}"),
        ({"git": ["abc"]}, "git ['abc']"),
        ({"versions": {"torch": [2]}}, "versions torch [2]"),
        ({"versions": 5}, "versions 5"),
        ({"layout": {"meshes": [{"dp": 2, "tp": 4}]}}, "mesh dp=2xtp=4"),
        ({"layout": {"meshes": [1]}}, "mesh [1]"),
        ({"layout": {"meshes": 5, "megatron": {"tensor": 2}}}, "mesh 5 megatron tensor=2"),
        ({"layout": {"megatron": [2]}}, "megatron [2]"),
        ({"layout": {"pipeline": 2}}, "pipeline 2"),
        ({"layout": 5}, "layout 5"),
        ({"newer": {"a": 1}}, "newer {'a': 1}"),
    ],
)
def test_inspect_shows_a_record_of_another_form_as_it_is(
    call: Any, tmp_path: Path, record: dict[str, Any], shown: str
) -> None:
    write(tmp_path / "a", Sample({}, provenance=record))
    code, out, err = call("inspect", tmp_path / "a")
    assert (code, err) == (0, "")
    assert " ".join(out.split()).endswith(f"saved by {shown}")


def test_inspect_of_a_part(call: Any, ckpt: Path) -> None:
    report = json.loads(call("inspect", ckpt, "model.layers", "--json")[1])
    assert (report["prefix"], report["tensors"]) == ("model.layers", 8)


def test_inspect_of_a_tensor(call: Any, ckpt: Path) -> None:
    code, out, _ = call("inspect", ckpt, "model.embed.weight")
    assert code == 0
    for text in (
        "float32 [16, 8]",
        "[8:16, 0:8]",
        "shards/00001-a1",
        "[4096, 4352)",
        "tied with model.head.weight",
    ):
        assert text in out
    report = json.loads(call("inspect", ckpt, "model.embed.weight", "--json")[1])
    assert set(report) == {"kind", "key", "stored_as", "tied", "dtype", "shape", "bytes", "chunks"}
    assert report["kind"] == "tensor"
    assert set(report["chunks"][0]) == {
        "offsets",
        "sizes",
        "file",
        "rank",
        "byte_start",
        "byte_stop",
        "digest",
    }


def test_inspect_of_a_value(call: Any, ckpt: Path) -> None:
    assert call("inspect", ckpt, "betas") == (0, "betas = (0.9, 0.99)\n", "")
    report = json.loads(call("inspect", ckpt, "betas", "--json")[1])
    assert report == {"kind": "object", "key": "betas", "value": {"$tuple": [0.9, 0.99]}}


def test_inspect_of_an_unknown_key_is_bad_usage_and_names_a_near_one(call: Any, ckpt: Path) -> None:
    code, _, err = call("inspect", ckpt, "model.embed.weigth")
    assert code == 2
    assert "near it: model.embed.weight" in err


@pytest.mark.parametrize("name", ["verify", "repair"])
def test_bytes_are_read_past_the_page_cache(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Cached pages do not prove what is on the device."""
    shards = {str(path) for path in ckpt.glob("shards/*.safetensors")}
    if name == "repair":
        (ckpt / "manifest.json").unlink()
    real, past_the_cache = os.open, set[str]()

    def noted(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            past_the_cache.add(str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    assert call(name, ckpt)[0] == 0
    assert shards and shards <= past_the_cache


def test_verify(call: Any, ckpt: Path) -> None:
    code, out, err = call("verify", ckpt)
    assert (code, err) == (0, "")
    assert out.startswith(f"whole: {ckpt}, step 7")
    assert re.search(r" read in \S+ m?s at \S+ [kMG]B/s", out)
    code, out, _ = call("verify", ckpt, "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {
        "location", "format", "step", "ok", "files", "chunks", "bytes", "unproved", "seconds", "faults",
        "notes",
    }  # fmt: skip
    assert (report["ok"], report["faults"], report["bytes"]) == (
        True,
        [],
        sum(x.nbytes for x in STATE.values()),
    )


def test_verify_of_a_damaged_chunk(call: Any, ckpt: Path) -> None:
    file = ckpt / "shards" / "00001-a1.safetensors"
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    code, out, err = call("verify", ckpt)
    assert (code, err) == (1, "")
    assert "BAD" in out
    assert "model.embed.weight" in out
    code, out, err = call("verify", ckpt, "--json")
    report = json.loads(out)
    assert (code, report["ok"], err) == (1, False, "")
    (fault,) = report["faults"]
    assert fault["type"] == "CorruptChunkError"
    assert fault["details"]["key"] == "model.embed.weight"


def test_verify_of_nothing(call: Any, tmp_path: Path) -> None:
    code, out, err = call("verify", tmp_path)
    assert (code, err) == (1, "")
    assert "no committed checkpoint" in out
    code, out, _ = call("verify", tmp_path, "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    assert report["faults"][0]["type"] == "NotCommittedError"


def test_diff(call: Any, ckpt: Path, tmp_path: Path) -> None:
    code, out, _ = call("diff", ckpt, ckpt)
    assert code == 0
    assert "the same state" in out
    changed = {key: array.copy() for key, array in STATE.items()}
    changed["model.layers.2.wo"][1, 1] += 1
    del changed["model.layers.3.wq"]
    changed["model.layers.4.wq"] = changed["model.embed.weight"]
    write(tmp_path / "b", Sample(changed, objects={"lr": 0.2, "betas": {"$tuple": [0.9, 0.99]}}))
    code, out, _ = call("diff", ckpt, tmp_path / "b")
    assert code == 1
    for text in (
        "only in A",
        "model.layers.3.wq",
        "only in B",
        "model.layers.4.wq",
        "lr",
        "1 of 64 elements",
        "the states differ",
    ):
        assert text in out
    code, out, _ = call("diff", ckpt, tmp_path / "b", "--json")
    report = json.loads(out)
    assert code == 1
    assert set(report) == {
        "same", "a", "b", "only_a", "only_b", "changed", "objects", "values", "same_tensors", "by_digest",
        "by_reading", "bytes_read", "uncompared",
    }  # fmt: skip
    assert report["same"] is False
    assert report["objects"] == [{"key": "lr", "a": "0.1", "b": "0.2"}]
    found = {"key": "model.layers.2.wo", "how": "read", "different": 1, "total": 64}
    assert report["values"] == [found | {"measured": None}]
    assert json.loads(call("diff", ckpt, ckpt, "--json")[1])["same"] is True


def test_repair(call: Any, ckpt: Path) -> None:
    whole = json.loads(call("inspect", ckpt, "--json")[1])
    assert call("repair", ckpt)[0] == 0
    assert json.loads(call("repair", ckpt, "--json")[1])["repaired"] is False
    (ckpt / MANIFEST_NAME).unlink()
    code, out, _ = call("repair", ckpt, "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {"location", "repaired", "step", "attempt", "tensors", "objects", "bytes", "files"}
    assert (report["repaired"], report["step"], report["tensors"]) == (True, 7, len(STATE))
    again = json.loads(call("inspect", ckpt, "--json")[1])
    assert again["repaired"]
    assert again["rows"] == whole["rows"]
    assert call("verify", ckpt)[0] == 0
    (ckpt / MANIFEST_NAME).unlink()
    code, out, _ = call("repair", ckpt)
    assert code == 0
    assert out.startswith("repaired")


def test_repair_fails_where_a_shard_is_missing(call: Any, ckpt: Path) -> None:
    (ckpt / MANIFEST_NAME).unlink()
    (ckpt / "shards" / "00001-a1.safetensors").unlink()
    code, _, err = call("repair", ckpt, "--json")
    assert code == 1
    assert json.loads(err)["type"] == "FormatError"


def test_prune(call: Any, ckpt: Path) -> None:
    run_folder = ckpt.parent
    write(run_folder / "step-00000008", Sample(STATE, attempt="dead"), commit=False)
    cut(run_folder / "step-00000008")
    write(ckpt, Sample(STATE, attempt="dead"), commit=False)
    cut(ckpt, "dead")
    (run_folder / "step-00000009" / "shards").mkdir(parents=True)
    code, out, _ = call("prune", run_folder)
    assert code == 0
    assert "nothing to remove" in out
    assert "may be in progress" in out
    assert (run_folder / "step-00000009").exists()
    make_old(run_folder)
    code, out, _ = call("prune", run_folder, "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {
        "location", "dry_run", "removed", "committed_meanwhile", "bytes", "leftovers", "steps", "steps_bytes",
        "writing", "repairable", "damaged", "damaged_removed",
        "damaged_bytes", "referenced", "unknown", "settled",
        "suspect", "uploads", "recent_uploads", "uploads_fault", "complete", "misplaced", "branch",
        "newer",
    }  # fmt: skip
    assert (report["dry_run"], report["removed"]) == (True, False)
    assert [left["folder"] for left in report["leftovers"]] == ["step-00000007", "step-00000008"]
    assert (run_folder / "step-00000008").exists()
    code, out, _ = call("prune", run_folder)
    assert code == 0
    assert out.endswith("removed\n")
    assert [path.name for path in run_folder.iterdir()] == ["step-00000007"]
    assert call("verify", ckpt)[0] == 0
    assert "nothing to remove" in call("prune", run_folder)[1]


def test_prune_keeps_as_many_steps_as_asked(call: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path / f"step-{step:08d}", Sample(STATE, step=step))
    assert json.loads(call("prune", tmp_path, "--json")[1])["steps"] == []
    code, out, err = call("prune", tmp_path, "--keep", 2)
    assert (code, out) == (2, ""), "there is no terminal to ask on"
    assert "--yes" in err
    assert len(list(tmp_path.iterdir())) == 4
    dry = json.loads(call("prune", tmp_path, "--keep", 2, "--dry-run", "--json")[1])
    assert (dry["steps"], dry["removed"]) == (["step-00000001", "step-00000002"], False)
    report = json.loads(call("prune", tmp_path, "--keep", 2, "--yes", "--json")[1])
    assert (report["steps"], report["removed"]) == (["step-00000001", "step-00000002"], True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("loss", ["missing", "cut"])
def test_repair_and_prune_agree_that_a_lost_step_cannot_be_repaired(call: Any, ckpt: Path, loss: str) -> None:
    shard = ckpt / "shards" / "00001-a1.safetensors"
    if loss == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 5000)
    write(ckpt.parent / "step-00000001", replace(SPREAD, step=1))
    (ckpt / "tokenizer.json").write_text("{}")
    make_old(ckpt.parent)
    code, out, err = call("repair", ckpt)
    assert (code, out) == (1, "")
    assert "shards/00001-a1" in err
    assert "cannot be repaired: restore another step" in err
    code, out, _ = call("prune", ckpt.parent)
    assert code == 0
    assert "not removed: step-00000007: damaged, cannot be repaired; --damaged removes such steps" in out
    assert "--damaged" in out
    code, _, err = call("prune", ckpt.parent, "--damaged")
    assert code == 2
    assert "--yes" in err
    report = json.loads(call("prune", ckpt.parent, "--damaged", "--dry-run", "--json")[1])
    assert (report["damaged_removed"], report["damaged"], report["removed"]) == (["step-00000007"], [], False)
    files = [path for path in ckpt.rglob("*") if path.is_file() and path.name != "tokenizer.json"]
    assert report["bytes"] == report["damaged_bytes"] == sum(path.stat().st_size for path in files)
    assert shard.parent.exists()
    code, out, _ = call("prune", ckpt.parent, "--damaged", "--yes")
    assert code == 0
    assert out.endswith("removed\n")
    assert [path.name for path in ckpt.iterdir()] == ["tokenizer.json"]
    assert call("verify", ckpt.parent / "step-00000001")[0] == 0


def test_prune_leaves_a_damaged_step_that_is_young_or_may_be_repaired(call: Any, ckpt: Path) -> None:
    write(ckpt.parent / "step-00000008", replace(SPREAD, step=8))
    (ckpt.parent / "step-00000008" / "index-a1.safetensors").unlink()
    make_old(ckpt.parent)
    os.truncate(ckpt / "shards" / "00001-a1.safetensors", 5000)  # a copy that is under way looks the same
    report = json.loads(call("prune", ckpt.parent, "--damaged", "--yes", "--json")[1])
    assert (report["removed"], report["damaged_removed"], report["damaged"]) == (False, [], ["step-00000007"])
    assert report["repairable"] == ["step-00000008"]
    assert "written to in the last" in call("prune", ckpt.parent, "--damaged", "--yes")[1]
    assert call("repair", ckpt.parent / "step-00000008")[0] == 0


@pytest.mark.parametrize("file", ["shards/00001-a1.safetensors", "index-a1.safetensors"])
def test_prune_does_not_count_a_cut_step_as_one_of_the_newest(call: Any, ckpt: Path, file: str) -> None:
    write(ckpt.parent / "step-00000001", replace(SPREAD, step=1))
    os.truncate(ckpt / file, (ckpt / file).stat().st_size - 1)
    report = json.loads(call("prune", ckpt.parent, "--keep", 1, "--yes", "--json")[1])
    assert report["steps"] == []
    assert (ckpt.parent / "step-00000001").exists()


def test_prune_spares_a_step_that_was_saved_again_meanwhile(
    call: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(ckpt / "shards" / "00001-a1.safetensors", 5000)
    write(ckpt.parent / "step-00000001", replace(SPREAD, step=1))
    make_old(ckpt.parent)

    class Saves(_Terminal):
        def readline(self, *_: Any) -> str:
            write(ckpt, Sample(STATE, attempt="a2"))
            return "y\n"

    monkeypatch.setattr("shardproof.commands.cli.clean.sys.stdin", Saves(""))
    report = json.loads(call("prune", ckpt.parent, "--damaged", "--json")[1])
    assert report["committed_meanwhile"] == ["step-00000007"]
    assert call("verify", ckpt)[0] == 0


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_prune_asks_on_a_terminal(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, removed: bool
) -> None:
    write(tmp_path / "step-00000008", Sample(STATE), commit=False)
    cut(tmp_path / "step-00000008")
    make_old(tmp_path)
    monkeypatch.setattr("shardproof.commands.cli.clean.sys.stdin", _Terminal(answer))
    code, out, err = call("prune", tmp_path, "--json")
    assert code == 0
    assert "remove" in err
    assert json.loads(out)["removed"] is removed
    assert (tmp_path / "step-00000008").exists() is not removed
    if not removed:
        assert call("prune", tmp_path, "--yes")[0] == 0
        assert not (tmp_path / "step-00000008").exists()


def test_prune_keeps_a_step_that_lacks_only_its_manifest(call: Any, tmp_path: Path) -> None:
    """`repair` makes a step of it. Only --complete removes it, if a newer step is committed."""
    write(tmp_path / "step-00000007", Sample(STATE, step=7))
    write(tmp_path / "step-00000008", Sample(STATE, step=8, attempt="whole"), commit=False)
    make_old(tmp_path)
    code, out, _ = call("prune", tmp_path, "--yes")
    assert code == 0 and "nothing to remove" in out
    assert "not removed: step-00000008: all shard files of the save whole, which no manifest names" in out
    _, out, _ = call("doctor", tmp_path)
    assert f"shardproof repair {tmp_path}/step-00000008" in out.replace("\n", "")
    assert call("prune", tmp_path, "--complete", "--yes")[0] == 0
    write(tmp_path / "step-00000009", Sample(STATE, step=9))
    assert call("prune", tmp_path, "--yes")[0] == 0
    assert (tmp_path / "step-00000008").exists()
    code, _, err = call("prune", tmp_path, "--complete")
    assert code == 2 and "--yes" in err
    assert call("prune", tmp_path, "--complete", "--yes")[0] == 0
    assert not (tmp_path / "step-00000008").exists()


def test_prune_keeps_a_copy_under_way_whose_files_have_old_times(call: Any, tmp_path: Path) -> None:
    """As `rsync -a` and `cp -p` make it: shards before the manifest, and a manifest before the shards."""
    write(tmp_path / "step-00000007", Sample(STATE, step=7))
    write(tmp_path / "step-00000008", Sample(STATE, step=8), commit=False)
    cut(tmp_path / "step-00000008")
    write(tmp_path / "step-00000009", Sample(STATE, step=9))
    shutil.rmtree(tmp_path / "step-00000009" / "shards")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            os.utime(file, (0, 0))
    code, out, _ = call("prune", tmp_path, "--yes", "--damaged")
    assert code == 0 and "nothing to remove" in out
    make_old(tmp_path)
    code, out, _ = call("prune", tmp_path, "--yes", "--damaged")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_prune_works_beside_a_link_that_leads_nowhere(call: Any, tmp_path: Path) -> None:
    for step in (7, 8):
        write(tmp_path / f"step-0000000{step}", Sample(STATE, step=step))
        write(tmp_path / f"step-0000000{step}", Sample(STATE, attempt="dead"), commit=False)
        cut(tmp_path / f"step-0000000{step}", "dead")
    make_old(tmp_path)
    shards = tmp_path / "step-00000008" / "shards"
    (shards / "00009-dead.safetensors").symlink_to("/nowhere/x")
    os.utime(shards, (0, 0))
    code, out, _ = call("prune", tmp_path, "--yes")
    assert code == 0 and "removed" in out
    assert not list(tmp_path.rglob("*dead*"))


class _Terminal:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self, *_: object) -> str:
        return self.answer


# convert --standalone


def test_a_dry_run_of_a_standalone_copy_writes_nothing(call: Any, ckpt: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    code, out, _ = call("convert", ckpt, copy, "--standalone", "--dry-run")
    assert code == 0
    assert out.startswith(f"would copy to {copy}: {len(STATE)} tensors, ")
    dry = json.loads(call("convert", ckpt, copy, "--standalone", "--dry-run", "--json")[1])
    assert not copy.exists()
    done = json.loads(call("convert", ckpt, copy, "--standalone", "--json")[1])
    assert [dry[key] for key in ("location", "step", "tensors", "files")] == [
        done[key] for key in ("location", "step", "tensors", "files")
    ]
    assert (dry["bytes"], dry["dry_run"], done["dry_run"]) == (
        sum(array.nbytes for array in STATE.values()),
        True,
        False,
    )
    assert call("convert", ckpt, copy, "--standalone", "--dry-run")[0] == 1, "there is a checkpoint"
    os.truncate(ckpt / "shards" / "00000-a1.safetensors", 5000)
    assert call("convert", ckpt, tmp_path / "other", "--standalone", "--dry-run")[0] == 1


@pytest.mark.parametrize(
    "option",
    [
        ("--to", "hf"),
        ("--format", "shardproof"),
        ("--dtype", "float16"),
        ("--include", "model"),
        ("--exclude", "model"),
        ("--rename", "names.toml"),
        ("--map", "names.toml"),
        ("--max-file-size", "1GB"),
        ("--memory", "1GB"),
        ("--workers", "2"),
        ("--on", "processes"),
        ("--trust-pickle",),
        ("--register", "json"),
    ],
)
def test_options_of_other_formats_do_not_go_with_standalone(
    call: Any, ckpt: Path, tmp_path: Path, option: tuple[str, ...]
) -> None:
    code, out, err = call("convert", ckpt, tmp_path / "copy", "--standalone", *option)
    assert (code, out) == (2, "")
    assert option[0] in err.splitlines()[-1]
    assert not (tmp_path / "copy").exists()


# diff of checkpoints with lost files


@pytest.mark.parametrize("side", ["a", "b"])
def test_diff_does_not_trust_digests_of_bytes_that_are_not_there(
    call: Any, ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    other = tmp_path / "other"
    write(other, SPREAD)
    pair = (other, ckpt) if side == "a" else (ckpt, other)
    shard = other / "shards" / "00001-a1.safetensors"
    data = shard.read_bytes()
    assert call("diff", *pair)[0] == 0
    for size in (len(data) - 1, len(data) + 1, None):
        if size is None:
            shard.unlink()
        else:
            os.truncate(shard, size)
        code, out, err = call("diff", *pair)
        assert (code, out) == (1, ""), size
        assert f"error: {shard}: expected {len(data)} bytes, it" in err
    shard.write_bytes(data)
    _unreadable(monkeypatch, "other/shards/00001", errno.EACCES)
    code, out, err = call("diff", *pair)
    assert (code, out) == (3, "")
    assert "may be whole" in err
    (other / "shards" / "00000-a1.safetensors").unlink()
    assert call("diff", *pair)[0] == 1, "damage counts even where the storage fails too"

"""Any damage to a run: all commands agree, none removes good data, and every advice does what it says.

Note "Small runs": the steps are written once, and copied for each example. Nothing else runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.format import MANIFEST_NAME
from shardproof.errors import NotCommittedError
from tests.unit.commands.cli.samples import Sample, write
from tests.unit.commands.cli.test_commands import make_old

STEPS = (1, 2, 3, 4)


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(6), "frozen": torch.zeros(300)}


def sample(step: int, attempt: str) -> Sample:
    tensors = {"w": np.full(6, step, np.float32), "frozen": np.ones(300, np.float32)}
    return Sample(tensors, step=step, attempt=attempt, time=1_700_000_000.0 + step)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: step 1 is full, and the later steps refer to it. The other run has full steps."""
    top = tmp_path_factory.mktemp("runs")
    checkpointer = sp.Checkpointer(top / "run", incremental=sp.Incremental(scrub=None))
    write(folder_of(top / "run", 1), sample(1, "first"))
    for step in STEPS[1:]:
        values = {"w": torch.full((6,), float(step)), "frozen": torch.ones(300)}
        checkpointer.save(step, values).result()
    for step in STEPS:
        write(folder_of(top / "other", step), sample(step, f"other{step}"))
    return top


def steps_in(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("step-*") if path.is_dir())


def rename(run: Path, other: Path, step: Path, number: int) -> None:
    target = folder_of(run, 1 + number % 9)
    if not target.exists():
        step.rename(target)


def duplicate(run: Path, other: Path, step: Path, number: int) -> None:
    target = folder_of(run, 1 + number % 9)
    if not target.exists():
        shutil.copytree(step, target)


def take_the_manifest(run: Path, other: Path, step: Path, number: int) -> None:
    source = (
        folder_of(other, 1 + number % 4) if number % 8 < 4 else steps_in(run)[number % len(steps_in(run))]
    )
    files = [source / MANIFEST_NAME, *(source.glob("index-*") if number % 3 else ())]
    for file in files:
        if file.exists() and source != step:
            shutil.copy(file, step)


def lose_the_manifest(run: Path, other: Path, step: Path, number: int) -> None:
    (step / MANIFEST_NAME).unlink(missing_ok=True)


def change(pattern: str, how: str) -> Callable[[Path, Path, Path, int], None]:
    """Removes, cuts or flips a file."""

    def damage(run: Path, other: Path, step: Path, number: int) -> None:
        files = sorted(file for file in step.glob(pattern) if file.is_file())
        if not files:
            return
        file = files[number % len(files)]
        data = file.read_bytes()
        if how == "lose":
            file.unlink()
        elif how == "cut":
            file.write_bytes(data[: len(data) * (number % 10) // 10])
        else:
            at = number * 7919 % max(1, len(data))
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"x")

    return damage


def add_a_save(run: Path, other: Path, step: Path, number: int) -> None:
    """Files of a save that no manifest names: all of them, or one that is cut."""
    attempt = f"dead{number}"
    if list(step.glob(f"*/*-{attempt}.*")):
        return
    write(step, sample(int(step.name[5:]), attempt), commit=False)
    if number % 2:
        (shard,) = step.glob(f"shards/*-{attempt}.*")
        os.truncate(shard, 50)


def save_later(run: Path, other: Path, step: Path, number: int) -> None:
    """The step is saved again after all others, as after a rollback."""
    if list(step.glob(f"*/*-again{number}.*")):
        return
    again = sample(int(step.name[5:]), f"again{number}")
    write(step, replace(again, time=time.time() + 100 + number))


DAMAGE = {
    "rename": rename,
    "duplicate": duplicate,
    "take the manifest": take_the_manifest,
    "lose the manifest": lose_the_manifest,
    "add a save": add_a_save,
    "save later": save_later,
    "lose a shard": change("shards/*", "lose"),
    "cut a shard": change("shards/*", "cut"),
    "lose an index": change("index-*", "lose"),
    "flip an index": change("index-*", "flip"),
    "cut a manifest": change(MANIFEST_NAME, "cut"),
    "flip a manifest": change(MANIFEST_NAME, "flip"),
}


def restored(run: Path, step: int | None = None) -> int | None:
    """The step that a restore takes, with its values checked; None if no step can be restored."""
    target = state()
    try:
        found = sp.Checkpointer(run).restore(target, step=step)
    except NotCommittedError:
        return None
    if found is not None:
        assert target["w"].tolist() == [float(found)] * 6
        assert torch.equal(target["frozen"], torch.ones(300))
    return found


def answer(*arguments: Any) -> Any:
    """What a command prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run_cli([*map(str, arguments), "--json"])
    return json.loads(out.getvalue())


@contextlib.contextmanager
def copied(run: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as top:
        yield Path(shutil.copytree(run, Path(top) / run.name, symlinks=True))


def follow(fix: str) -> int:
    """Runs an advice that is a command, as it is printed. Returns its exit code."""
    words = shlex.split(fix)
    if words[0] == "shardproof":
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return run_cli(words[1:])
    assert words[0] in ("mv", "rm"), fix
    if words[0] == "mv":
        shutil.move(words[1], words[2])
    else:
        assert words[1] == "-r"
        shutil.rmtree(words[2])
    return 0


_Damage = list[tuple[str, int, int]]
"""Changes: a name of `DAMAGE`, and two numbers that choose its step and its kind."""
ANY_DAMAGE: st.SearchStrategy[_Damage] = st.lists(
    st.tuples(st.sampled_from(sorted(DAMAGE)), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=4
)


@example(damage=[("save later", 1, 0)])
@example(damage=[("cut a manifest", 1, 0)])  # an incremental step, whose repair is refused
@settings(max_examples=6, deadline=None)
@given(damage=ANY_DAMAGE)
def test_all_commands_agree(template: Path, damage: _Damage) -> None:
    _all_commands_agree(template, damage)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=120, deadline=None)
@given(damage=ANY_DAMAGE)
def test_all_commands_agree_on_much_damage(template: Path, damage: _Damage) -> None:
    _all_commands_agree(template, damage)


def _all_commands_agree(template: Path, damage: _Damage) -> None:
    with copied(template / "run") as run:
        for name, which, number in damage:
            DAMAGE[name](run, template / "other", steps_in(run)[which % len(steps_in(run))], number)
        make_old(run)
        with advised() as commands:
            newest = restored(run)
        _branch_is_removed(run, commands)
        examined = answer("doctor", run)
        healthy = examined["steps"]
        assert max(healthy, default=None) == newest, "what doctor counts as committed, restore takes"
        assert all(restored(run, step) == step for step in healthy)
        for options in ((), ("--keep", 1), ("--keep", 2, "--damaged", "--complete")):
            with copied(run) as one:
                answer("prune", one, "--yes", *options)
                assert restored(one) == newest, (options, "prune leaves what restore takes")
        with copied(run) as one:
            checkpointer = sp.Checkpointer(one, keep=sp.KeepLatest(2), incremental=sp.Incremental(scrub=None))
            checkpointer.save(20, {"w": torch.full((6,), 20.0), "frozen": torch.ones(300)}).result()
            assert restored(one) == 20
            assert newest is None or restored(one, newest) == newest, "retention keeps two restorable steps"
        if newest is None:
            assert not any(
                "prune" in one["fix"] and "--damaged" in one["fix"] for one in examined["findings"]
            )
        _advice_helps(run, newest)


@contextlib.contextmanager
def advised() -> Iterator[list[str]]:
    """Collects the commands in what the block logs."""
    commands: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: commands.extend(  # type: ignore[method-assign]
        re.findall("`shardproof (.*?)`", record.getMessage())
    )
    log = logging.getLogger("shardproof")
    log.addHandler(handler)
    try:
        yield commands
    finally:
        log.removeHandler(handler)


def _branch_is_removed(run: Path, commands: list[str]) -> None:
    """Follows what `restore` logs of a branch, in a copy of the run: the step that it names is restored."""
    for words in (shlex.split(command) for command in commands if "--after" in command):
        with copied(run) as one:
            make_old(one)
            words[1] = str(one)
            named = int(words[words.index("--after") + 1])
            assert run_cli(words) == 0, words
            words[words.index("--dry-run")] = "--yes"
            assert run_cli(words) == 0 and restored(one) == named, words


def _advice_helps(run: Path, newest: int | None) -> None:
    """Follows each advice of `doctor` in a copy of the run."""
    for number in range(len(answer("doctor", run)["findings"])):
        with copied(run) as one:
            make_old(one)
            findings = answer("doctor", one)["findings"]
            found = findings[min(number, len(findings) - 1)]
            if not found["fix"].startswith(("shardproof ", "mv ", "rm ")):
                continue
            code = follow(found["fix"])
            assert (restored(one) or -1) >= (newest if newest is not None else -1), found
            if found["fix"].startswith("shardproof verify"):
                assert code == 1, found
                continue
            assert code == 0, found
            left = [(other["where"], other["kind"]) for other in answer("doctor", one)["findings"]]
            assert (found["where"], found["kind"]) not in left, found

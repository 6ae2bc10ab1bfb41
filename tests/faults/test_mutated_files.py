"""Files changed at random, with right digests: every reader succeeds or raises an error of ours.

The changes know the structure of the files: lengths, types, shapes, order and values of the index's columns,
of the tables of digests, of headers and of every number in the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.errors import FormatError, ShardproofError
from shardproof.runs.checkpointer.retention import leftovers, plan_removal
from shardproof.runs.maintenance import make_standalone, repair, verify
from shardproof.storage import LocalStorage
from tests.faults.damage import target_like
from tests.faults.forging import Forgery, state
from tests.faults.mutations import PARTS, mutate
from tests.harness import run_ranks
from tests.small_blocks import blocks_of

SECONDS = 10.0
MEMORY = 1 << 30
STEP = "step-00000001"
GOOD = "good"


class _TooSlow(BaseException):
    pass


def _out_of_time(number: int, frame: Any) -> None:
    raise _TooSlow


def _open(run: Path) -> None:
    with sp.open(run / STEP) as checkpoint:
        for key in checkpoint:
            value = checkpoint[key]
            if hasattr(value, "read"):
                value.read()


def _load(run: Path) -> None:
    sp.load(run / STEP, target_like(state()))


def _load_part(run: Path) -> None:
    part = sp.LocalShards((6, 4), [(torch.zeros(3, 2), (2, 1))], dtype=torch.float32)
    sp.load(run / STEP, {"w": part}, strict=False)


def _verify(run: Path) -> None:
    for fault in verify(LocalStorage(run / STEP)).faults:
        raise fault


def _copy(run: Path) -> None:
    make_standalone(LocalStorage(run / STEP), LocalStorage(run / "copy"))


def _retain(run: Path) -> None:
    plan_removal(LocalStorage(run), [STEP])
    leftovers(LocalStorage(run), lambda name: 0.0)


def _restore(run: Path) -> None:
    sp.Checkpointer(run).restore(target_like(state()))


def _repair(run: Path, *lost: str) -> None:
    for pattern in lost:
        for file in (run / STEP).glob(pattern):
            file.unlink()
    repair(LocalStorage(run / STEP))


def _save_after(run: Path) -> None:
    """An incremental save may build on the changed step, and must be whole."""
    sp.Checkpointer(run, incremental=True).save(3, state()).result()
    sp.load(run / "step-00000003", target_like(state()))


def _save_over(run: Path) -> None:
    sp.Checkpointer(run).save(1, state(), overwrite=True).result()
    sp.load(run / STEP, target_like(state()))


def _command(*words: str) -> Callable[[Path], None]:
    def call(run: Path) -> None:
        from shardproof.commands.cli.group import run as command_line

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = command_line([word.replace("RUN", str(run)) for word in words])
        text = out.getvalue()
        lists_values = words[0] == "diff" and code == 3 and json.loads(text)["uncompared"]
        assert (code in (0, 1) or lists_values) and "Traceback" not in text, (code, text[-500:])

    return call


READERS: dict[str, Callable[[Path], None]] = {
    "open": _open,
    "load": _load,
    "load a part": _load_part,
    "verify": _verify,
    "retention": _retain,
    "ls": _command("ls", "--json", "RUN"),
    "inspect": _command("inspect", "--json", f"RUN/{STEP}"),
    "diff": _command("diff", "--json", f"RUN/{STEP}", f"RUN/../{GOOD}"),
    "prune": _command("prune", "--json", "--dry-run", "RUN"),
}
WRITERS: dict[str, Callable[[Path], None]] = {
    "restore": _restore,
    "copy": _copy,
    "repair": lambda run: _repair(run, MANIFEST_NAME),
    "repair the index": lambda run: _repair(run, "index-*"),
    "repair both": lambda run: _repair(run, MANIFEST_NAME, "index-*"),
}
"""Operations that may change the run. Each gets a copy of it."""
SAVES: dict[str, Callable[[Path], None]] = {"save after": _save_after, "save over": _save_over}
"""Slower operations on a copy of the run, for every fifth seed."""


def _save(run: Path, *, incremental: bool) -> None:
    """Saves the checkpoint to change. An incremental one refers to files of the step before it."""
    if not incremental:
        Forgery(run / STEP)
        return
    checkpointer = sp.Checkpointer(run, incremental=True)
    checkpointer.save(0, state()).result()
    checkpointer.save(1, {**state(), "w": torch.zeros(6, 4)}).result()
    assert read_manifest(LocalStorage(run / STEP)).referenced_files


def run_all_on_mutated(
    root: str, part: str, incremental: bool, seeds: range
) -> tuple[list[tuple[int, str, str]], int]:
    """Answers that are neither success nor an error of ours (seed, reader, text); number of successes."""
    top = Path(root)
    logging.getLogger("shardproof").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _out_of_time)
    threading.stack_size(1 << 20)
    os.fsync = lambda descriptor: None  # no machine crashes here
    with blocks_of(16):  # so that chunks have several blocks
        _save(top / "template", incremental=incremental)
        Forgery(top / GOOD)
        for call in (READERS | WRITERS | SAVES).values():  # late imports happen here
            shutil.copytree(top / "template", top / "work")
            with contextlib.suppress(ShardproofError):
                call(top / "work")
            shutil.rmtree(top / "work")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        wrong: list[tuple[int, str, str]] = []
        succeeded = 0
        for seed in seeds:
            run = top / str(seed)
            shutil.copytree(top / "template", run)
            mutate(Forgery(run / STEP, saved=True), part, Random(seed))
            for name, call in (READERS | WRITERS | (SAVES if seed % 5 == 0 else {})).items():
                place = run
                if name not in READERS:
                    place = Path(shutil.copytree(run, top / "work"))
                answer = _answer(call, place)
                succeeded += answer == ""
                if answer:
                    wrong.append((seed, name, answer))
                shutil.rmtree(top / "work", ignore_errors=True)
            shutil.rmtree(run)
        return wrong, succeeded


def _answer(call: Callable[[Path], None], run: Path) -> str | None:
    """Empty if the call succeeded, None for an error of ours, otherwise the error's type and text."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        call(run)
    except ShardproofError:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


@pytest.mark.parametrize(
    ("part", "incremental"), [*((part, False) for part in PARTS), ("columns", True), ("manifest", True)]
)
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 500), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_every_reader_succeeds_or_raises_an_error_of_ours(
    part: str, incremental: bool, seeds: range, tmp_path: Path
) -> None:
    (outcome,) = run_ranks(1, run_all_on_mutated, str(tmp_path), part, incremental, seeds, timeout=280)
    wrong, succeeded = outcome.value
    assert wrong == []
    assert 0 < succeeded < len(seeds) * len(READERS | WRITERS), "some changes matter, and some do not"


def test_a_shard_that_contradicts_the_manifest_is_not_used_to_repair_it(tmp_path: Path) -> None:
    forgery = Forgery(tmp_path)
    forgery.manifest["tensors"][2][2] = [6, 4, 1]
    forgery.seal()
    (tmp_path / forgery.index_name).unlink()
    with pytest.raises(
        FormatError, match=r"declares 'w' as .*\(6, 4\)\), but the manifest has .*\(6, 4, 1\)\)"
    ):
        repair(LocalStorage(tmp_path))
    assert read_manifest(LocalStorage(tmp_path)).attempt == forgery.manifest["attempt"]

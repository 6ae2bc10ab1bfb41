"""Bytes that steps refer to rot while a run goes on: the scrub finds them, and no later step needs them."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.maintenance import verify
from shardproof.runs.checkpointer.retention import delete_steps
from shardproof.runs.checkpointer.scrub import Scrub
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.scenarios.test_rot_in_a_base import FROZEN_BYTES, flip_bit, same, shard_of, state

FOREVER = 1
"""Bytes a second: a pass at this rate does not end while a test runs."""


def run(root: Path, *, keep: Any = None, **options: Any) -> sp.Checkpointer:
    return sp.Checkpointer(root, incremental=sp.Incremental(**options), keep=keep)


def save(checkpointer: sp.Checkpointer, step: int, *, scrubbed: bool = True) -> int:
    """Saves a step in which "frozen" has not changed; returns the bytes that the save reused."""
    reused = checkpointer.save(step, state(1, step)).result().reused
    if scrubbed:
        checkpointer.wait_for_scrub(timeout=60)
    return reused


def referenced_steps(root: Path, step: int) -> set[str]:
    return {record.folder for record in read_manifest(LocalStorage(root / step_name(step))).referenced_files}


# The scrub finds and reports rot, and no save refers to it.


def test_rot_is_found_and_the_next_save_writes_the_chunks_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = run(tmp_path)
    assert [save(checkpointer, step) for step in (1, 2, 3)] == [0, FROZEN_BYTES, FROZEN_BYTES]
    assert checkpointer.damage == ()
    at = flip_bit(shard_of(tmp_path, 1), 1)
    with caplog.at_level(logging.ERROR, "shardproof"):
        save(checkpointer, 4)
    (damage,) = checkpointer.damage
    assert damage.file == f"{step_name(1)}/shards/{shard_of(tmp_path, 1).name}"
    assert damage.stop is not None and damage.start <= at < damage.stop
    (record,) = caplog.records
    text = record.getMessage()
    assert str(damage) in text
    assert ", ".join(map(step_name, (1, 2, 3, 4))) in text and "cannot be restored" in text
    assert save(checkpointer, 5) == 0 and referenced_steps(tmp_path, 5) == set()
    assert save(checkpointer, 6) == FROZEN_BYTES and referenced_steps(tmp_path, 6) == {step_name(5)}
    target = state(-1, -1)
    fresh = sp.Checkpointer(tmp_path)
    assert fresh.restore(target) == 6 and same(target, state(1, 6))
    assert len(caplog.records) == 1, "damage is told once"


def test_a_save_that_refers_to_rot_found_meanwhile_is_no_base(tmp_path: Path) -> None:
    checkpointer = run(tmp_path)
    save(checkpointer, 1)
    save(checkpointer, 2)
    flip_bit(shard_of(tmp_path, 1), 1)
    save(checkpointer, 3, scrubbed=False)
    save(checkpointer, 4)  # may begin before the pass over step 3 ends, and then refer to the damaged bytes
    assert len(checkpointer.damage) == 1
    save(checkpointer, 5)
    for step in (1, 2, 3):
        assert step_name(step) not in referenced_steps(tmp_path, 5)
    assert verify(LocalStorage(tmp_path / step_name(5))).ok


def test_a_step_that_needs_other_bytes_of_the_file_remains_a_base(tmp_path: Path) -> None:
    checkpointer = run(tmp_path)
    checkpointer.save(1, state(1, 1)).result()
    checkpointer.save(2, state(2, 1)).result()  # refers to "moving" of step 1
    checkpointer.wait_for_scrub(timeout=60)
    flip_bit(shard_of(tmp_path, 1), 1)
    checkpointer.save(4, state(2, 4)).result()
    checkpointer.wait_for_scrub(timeout=60)
    assert checkpointer.damage == (), "step 4 refers to step 2 alone"
    checkpointer.save(3, state(2, 1)).result()
    checkpointer.wait_for_scrub(timeout=60)
    assert checkpointer.damage == () and verify(LocalStorage(tmp_path / step_name(3))).ok


def test_a_damaged_header_makes_the_whole_file_damaged(tmp_path: Path) -> None:
    checkpointer = run(tmp_path)
    for step in (1, 2):
        save(checkpointer, step)
    shard = shard_of(tmp_path, 1)
    raw = bytearray(shard.read_bytes())
    raw[200] ^= 1
    shard.write_bytes(raw)
    save(checkpointer, 3)
    (damage,) = checkpointer.damage
    assert str(damage) == f"{step_name(1)}/shards/{shard.name}"
    assert save(checkpointer, 4) == 0


def test_the_scrub_reads_the_device_and_not_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass opens every file that it reads past the page cache, or tries to."""
    checkpointer = run(tmp_path)
    save(checkpointer, 1)
    opened: list[tuple[str, int]] = []
    real = os.open

    def recording(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if threading.current_thread().name == "shardproof-scrub" and str(path).endswith(".safetensors"):
            opened.append((str(path), flags & os.O_DIRECT))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", recording)
    save(checkpointer, 2)
    assert str(shard_of(tmp_path, 1)) in {path for path, _ in opened}
    assert {path for path, _ in opened} == {path for path, is_direct in opened if is_direct}


@pytest.mark.parametrize(("code", "is_damage"), [(errno.EIO, True), (errno.ESTALE, False)])
def test_a_file_is_damaged_only_if_its_device_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    is_damage: bool,
) -> None:
    """A device that fails has lost the bytes. A storage that cannot be reached now has not."""
    checkpointer = run(tmp_path)
    for step in (1, 2):
        save(checkpointer, step)
    shard, real = shard_of(tmp_path, 1), os.preadv

    def fail(number: int, buffers: Any, start: int) -> int:
        is_scrub = threading.current_thread().name == "shardproof-scrub"
        if is_scrub and os.readlink(f"/proc/self/fd/{number}") == str(shard):
            raise OSError(code, os.strerror(code))
        return real(number, buffers, start)

    monkeypatch.setattr(os, "preadv", fail)
    save(checkpointer, 3)
    assert [str(one) for one in checkpointer.damage] == is_damage * [f"{step_name(1)}/shards/{shard.name}"]
    assert ("could not be read again" in caplog.text) == (not is_damage)
    assert save(checkpointer, 4) == (0 if is_damage else FROZEN_BYTES)


# Which steps retention removes.


def test_retention_keeps_the_last_proved_step(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(1), scrub=FOREVER)
    for step in (1, 2, 3, 4):
        save(checkpointer, step, scrubbed=False)
        assert checkpointer.steps() == sorted({1, step}), "nothing but step 1 is proved"
    assert verify(LocalStorage(tmp_path / step_name(1))).ok


def test_retention_removes_older_steps_once_a_step_is_proved(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(1))
    found = []
    for step in (1, 2, 3, 4):
        save(checkpointer, step)
        found.append(checkpointer.steps())
    assert found == [[1], [1, 2], [2, 3], [3, 4]]


def test_a_step_that_was_restored_is_read_again(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(1))
    for step in (1, 2):
        save(checkpointer, step)
    restarted = run(tmp_path, keep=sp.KeepLatest(1))
    assert restarted.restore(state(-1, -1)) == 2
    restarted.wait_for_scrub(timeout=60)
    save(restarted, 3)
    assert restarted.steps() == [2, 3], "step 2 is proved, and takes the place of step 1"


def test_retention_keeps_no_other_step_if_one_of_two_is_proved(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(2))
    for step in (1, 2, 3, 4):
        save(checkpointer, step)
    assert checkpointer.steps() == [3, 4]


def test_a_step_without_references_is_proved_by_its_commit(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(1), scrub=None, full_every=3)
    found = []
    for step in range(1, 6):
        save(checkpointer, step)
        found.append(checkpointer.steps())
    assert found == [[1], [1, 2], [1, 3], [4], [4, 5]]
    plain = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    plain.save(6, state(1, 6)).result()
    assert plain.steps() == [6]


def test_a_damaged_step_is_not_proved(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, keep=sp.KeepLatest(1))
    sp.save(tmp_path / step_name(0), state(7, 0), step=0)
    checkpointer.save(1, state(7, 1)).result()  # refers to step 0
    checkpointer.wait_for_scrub(timeout=60)
    checkpointer.save(2, state(1, 2)).result()  # all changed: without references
    checkpointer.save(3, state(1, 3)).result()  # refers to step 2
    flip_bit(shard_of(tmp_path, 2), 1)
    checkpointer.wait_for_scrub(timeout=60)
    if not checkpointer.damage:  # the pass over step 3 ended before the flip
        checkpointer.save(4, state(1, 4)).result()
        checkpointer.wait_for_scrub(timeout=60)
    assert len(checkpointer.damage) == 1
    checkpointer.save(5, state(1, 5)).result()
    assert referenced_steps(tmp_path, 5) == set() and 5 in checkpointer.steps()
    target = state(-1, -1)
    assert sp.Checkpointer(tmp_path).restore(target) == 5 and same(target, state(1, 5))


@pytest.mark.parametrize("at", [1, 2, 3, 4], ids=["manifest", "index", "header", "digests"])
def test_a_step_that_is_removed_while_it_is_read_is_no_damage(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = run(tmp_path, scrub=None)
    for step in (1, 2, 3):
        save(checkpointer, step)
    reads: list[int] = []

    def remove_at_a_read() -> bool:
        reads.append(1)
        if len(reads) == at:
            delete_steps(LocalStorage(tmp_path), [step_name(step) for step in (1, 2, 3)])
        return False

    scrub = Scrub(LocalStorage(tmp_path), 1 << 40, remove_at_a_read)
    scrub.prepare()
    scrub.begin(step_name(3))
    scrub.wait(timeout=60)
    assert len(reads) >= at and scrub.damage == () and not scrub.is_proved(step_name(3))
    assert caplog.records == [], "retention removes steps all the time: there is nothing to tell"


# A pass yields to saves, and ends with its checkpointer.


def test_no_save_waits_for_a_pass(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, scrub=FOREVER)
    assert [save(checkpointer, step, scrubbed=False) for step in range(1, 5)] == [0, *[FROZEN_BYTES] * 3]
    with pytest.raises(TimeoutError):
        checkpointer.wait_for_scrub(timeout=0)


def test_a_pass_waits_for_the_save_under_way(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, scrub=None)
    for step in (1, 2):
        save(checkpointer, step)
    asked, is_over = threading.Semaphore(0), threading.Event()

    def is_saving() -> bool:
        asked.release()
        return not is_over.is_set()

    scrub = Scrub(LocalStorage(tmp_path), 1 << 40, is_saving)
    scrub.prepare()
    scrub.begin(step_name(2))
    for _ in range(3):
        assert asked.acquire(timeout=60)
    with pytest.raises(TimeoutError):
        scrub.wait(timeout=0)
    assert not scrub.is_proved(step_name(2))
    is_over.set()
    scrub.wait(timeout=60)
    assert scrub.is_proved(step_name(2))


def scrubbing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardproof-scrub"]


def test_a_pass_ends_with_its_checkpointer(tmp_path: Path) -> None:
    before = scrubbing_threads()
    checkpointer = run(tmp_path, scrub=FOREVER)
    for step in (1, 2):
        save(checkpointer, step, scrubbed=False)
    (thread,) = [thread for thread in scrubbing_threads() if thread not in before]
    gone = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert gone() is None
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_pass_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, torch, shardproof as sp\n"
        "checkpointer = sp.Checkpointer(sys.argv[1], incremental=sp.Incremental(scrub=1))\n"
        "for step in (1, 2):\n"
        "    checkpointer.save(step, {'w': torch.ones(100_000)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sp.Checkpointer(tmp_path).steps() == [1, 2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_has_a_scrub_of_its_own(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, scrub=FOREVER)
    for step in (1, 2):
        save(checkpointer, step, scrubbed=False)
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(60)
        torch.set_num_threads(1)  # OpenMP has no threads in a forked child, and would wait for them
        try:
            checkpointer.wait_for_scrub(timeout=0)  # no pass goes on here
            save(checkpointer, 3, scrubbed=False)
            with pytest.raises(TimeoutError):
                checkpointer.wait_for_scrub(timeout=0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verify(LocalStorage(tmp_path / step_name(3))).ok


@pytest.mark.parametrize("rate", [0, -1, True, 1.5, "fast"])
def test_a_rate_must_be_a_number_of_bytes_a_second(rate: Any) -> None:
    with pytest.raises(ValueError, match="scrub"):
        sp.Incremental(scrub=rate)


def trained(root: str) -> Any:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0), incremental=True)
    values = {f"own{rank()}": torch.full((30_000,), 1.0 + rank())}
    reused = []
    for step in range(1, 6):
        reused.append(checkpointer.save(step, values | {"step": step}).result().reused)
        checkpointer.wait_for_scrub(timeout=20)
        if step == 2 and rank() == 0:
            path = next((Path(root) / step_name(1) / "shards").glob("00001-*"))
            raw = bytearray(path.read_bytes())
            raw[raw.index(torch.full((30_000,), 2.0).numpy().tobytes()) + 90_000] ^= 1
            path.write_bytes(raw)
    return reused, len(checkpointer.damage)


def test_rot_of_one_ranks_file_is_written_again_by_all_ranks_alike(tmp_path: Path) -> None:
    one, other = (outcome.value for outcome in run_ranks(2, trained, str(tmp_path)))
    size = 2 * 4 * 30_000
    assert one == ([0, size, size, 0, size], 1) and other == (one[0], 0)
    assert referenced_steps(tmp_path, 5) == {step_name(4)}
    assert verify(LocalStorage(tmp_path / step_name(5))).ok

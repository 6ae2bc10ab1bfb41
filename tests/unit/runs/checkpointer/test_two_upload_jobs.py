"""Two jobs that upload to one second tier."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    alone,
    blank,
    checkpointer,
    files,
    remove,
    state,
    upload,
)


class _TwoUploads:
    """Two jobs upload one save. After one of them has ended, the step stays whole, whatever the other does.

    Args:
        near: the first tier of both.
        far: the second tier of both; is removed first.
        at: the second job begins before the first operation of this kind of the first job.
        stop: the second job stops before this operation, until the first job has ended.
    """

    def __init__(self, near: Path, far: Path, at: str, stop: int) -> None:
        if far.exists():
            remove(far)
        self.near, self.far, self.at, self.stop = near, far, at, stop
        self.stopped, self.first_ended = threading.Event(), threading.Event()
        self.second_ended = False
        self.broken: list[str] = []
        self.error: sp.ShardproofError | None = None
        self.first = FaultyStorage(LocalStorage(far), lambda: True, self.in_first)
        self.second = FaultyStorage(LocalStorage(far), lambda: True, self.in_second)

    def run(self) -> None:
        with ThreadPoolExecutor(1) as self.thread:
            self.error = upload(self.near, self.first)
            self.first_ended.set()
        self.look("at the end")

    def in_first(self, operation: str, name: str) -> None:
        if operation == self.at and not self.stopped.is_set():
            self.thread.submit(self.run_second)
            assert self.stopped.wait(WAIT)
        elif self.second_ended:
            self.look(f"the first job, {operation} {name}")

    def run_second(self) -> None:
        error = upload(self.near, self.second)
        self.second_ended = True
        self.stopped.set()
        self.error = self.error or error

    def in_second(self, operation: str, name: str) -> None:
        if len(self.second.operations) - 1 == self.stop:
            self.stopped.set()
            assert self.first_ended.wait(WAIT)
        if self.first_ended.is_set():
            self.look(f"the second job, {operation} {name}")

    def look(self, when: str) -> None:
        storage = LocalStorage(self.far / "step-00000001")
        if not verify(storage).ok:
            self.broken.append(when)


@pytest.mark.parametrize("at", ["write_at", "publish"])
def test_two_jobs_that_upload_one_save_lose_nothing(at: str, near: Path, far: Path) -> None:
    """In any order of their operations. So a job that dies in its upload does no harm to the other one."""
    alone(near).save(1, state(1)).result()
    stop = 0
    while True:
        jobs = _TwoUploads(near, far, at, stop)
        jobs.run()
        assert jobs.broken == [], f"the second job stops at {jobs.second.operations[stop:][:1]}"
        assert jobs.error is None
        assert {name: data for name, data in files(far).items() if not name.endswith(".tmp")} == files(near)
        if len(jobs.second.operations) <= stop:
            break
        stop += 1
    assert stop > 15


def test_one_of_two_jobs_that_upload_different_saves_of_a_step_wins_and_the_other_fails(
    near: Path, far: Path
) -> None:
    """One job uploads its save at each operation of the upload of the other."""
    at = won = 0
    while True:
        for root in (near, far, near.with_name("other")):
            if root.exists():
                remove(root)

        def save(root: Path, second: Any, number: int) -> sp.ShardproofError | None:
            pending = checkpointer(root, second).save(1, state(number))
            pending.result()
            try:
                pending.durable(WAIT)
            except sp.ShardproofError as error:
                return error
            return None

        ended: list[Any] = []

        def other_job(operation: str, name: str, ended: list[Any] = ended) -> None:
            ended.append(save(near.with_name("other"), far, 5))

        mine = save(near, FaultyStorage(LocalStorage(far), at, other_job), 1)
        if not ended:
            break
        target = blank()
        assert alone(far).restore(target) == 1
        assert verify(LocalStorage(far / "step-00000001")).ok, f"operation {at}"
        errors = {1: mine, 5: ended[0]}
        assert errors.pop(target["n"]) is None, f"operation {at}"
        (refusal,) = errors.values()
        assert isinstance(refusal, (sp.SaveSkipped, sp.AlreadyCommittedError)), f"operation {at}: {refusal!r}"
        won += target["n"] == 1
        at += 1
    assert 0 < won < at

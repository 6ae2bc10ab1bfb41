"""Runs each way in processes of its own, one at a time.

Ways in the same processes share memory. A peer that forks for each save leaves all pages of its parent to be
copied at their next write, also those of other ways. The more memory the other ways use, the longer its fork
takes. Apart, each way is a job with a state of its own, and one job works at a time: the command
that started them gives the turns over a store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from common import launched

from peers.figures import Row
from peers.roster import Missing

_NAME, _PORT = "SHARDPROOF_BENCH_JOB", "SHARDPROOF_BENCH_PORT"
_HOST = "127.0.0.1"
_LOOK = timedelta(seconds=20)
_PATIENCE = timedelta(minutes=30)


class Turns:
    """A rank's side: it works when it is the turn of its job.

    Args:
        name: of the job.
        port: of the store.
    """

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._store = dist.TCPStore(_HOST, port, timeout=_PATIENCE)

    @classmethod
    def of_this_job(cls) -> Turns | None:
        """The turns of this rank's job; None if the same ranks measure all ways."""
        return cls(os.environ[_NAME], int(os.environ[_PORT])) if _NAME in os.environ else None

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """The turn of this job in one round. Called by all its ranks."""
        self._store.wait([f"{self.name} begins {number}"])
        dist.barrier()
        yield
        dist.barrier()
        self._set(f"{self.name} ends {number}", "")

    def answer(self, rows: Sequence[Row], missing: Sequence[Missing], **facts: Any) -> None:
        """Sends what this job measured to the command that started it."""
        answer = {
            "figures": {row.name: row.figures for row in rows},
            "missing": {item.name: item.reason for item in missing},
            "facts": facts,
        }
        self._set(f"{self.name} answers", json.dumps(answer))

    def _set(self, key: str, value: str) -> None:
        if dist.get_rank() == 0:
            self._store.set(key, value)


@dataclass
class Answers:
    """The measurements of all jobs."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By the names of rows."""
    missing: list[Missing] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def measure_apart(options: Any, names: Sequence[str], ranks: int) -> Answers:
    """Starts a job of this script for each name, and lets them work in turn.

    Args:
        options: of the script.
        names: of the jobs.
        ranks: of each.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    answers = Answers()
    with ThreadPoolExecutor(len(names)) as pool:
        jobs = {
            name: pool.submit(
                launched, options, ranks, timeout=7200, environment={_NAME: name, _PORT: str(store.port)}
            )
            for name in names
        }
        for number in range(options.repeats + 1):
            for name, job in jobs.items():
                store.set(f"{name} begins {number}", "")
                _value_of(store, f"{name} ends {number}", job)
        for name, job in jobs.items():
            if (value := _value_of(store, f"{name} answers", job)) is None:
                ended = job.exception() or f"code {job.result()}"
                answers.missing.append(Missing(name, f"its processes ended without an answer: {ended}"))
                continue
            answer = json.loads(value)
            answers.figures |= answer["figures"]
            answers.missing += [Missing(*item) for item in answer["missing"].items()]
            answers.facts |= answer["facts"]
    return answers


def _value_of(store: dist.TCPStore, key: str, job: Future[int]) -> bytes | None:
    """The value that a job sets for a key; None if the job ends without it."""
    while not job.done():
        try:
            store.wait([key], _LOOK)
            break
        except dist.DistStoreError:
            continue
    return bytes(store.get(key)) if store.check([key]) else None

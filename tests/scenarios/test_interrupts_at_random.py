"""Ctrl-C reaches ranks at random moments of their saves. Afterwards all ranks save together again."""

from __future__ import annotations

import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

SAVES = 40
DEADLINE = 3.0
LATEST = 0.02
"""Seconds after the start of a save within which the signal comes. Some come when the save is over."""


class Interrupts:
    """SIGINT raises KeyboardInterrupt in the main thread, once each time that it is armed."""

    def __init__(self) -> None:
        self.armed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def after(self, seconds: float) -> threading.Timer:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        return timer


def end_of(checkpointer: sp.Checkpointer, step: int, state: object, interrupts: Interrupts) -> str:
    """How a save ended during which an interrupt may come."""
    try:
        try:
            interrupts.armed = True
            checkpointer.save(step, state).result()
            return "saved"
        except sp.ShardproofError as error:
            return type(error).__name__
        finally:
            interrupts.armed = False
    except KeyboardInterrupt:
        return "interrupted"


def save_under_interrupts(root: str, seed: int) -> tuple[list[str], int]:
    """How each save ended on this rank, and the step of a last save without interrupts."""
    chance, interrupts = random.Random(100 * seed + rank()), Interrupts()
    meetings = rendezvous(deadline=DEADLINE)
    steps = rendezvous(deadline=60.0, name="steps")  # ranks that train begin each step together
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, keep=sp.KeepLatest(2))
    weights = {str(number): torch.zeros(2000) for number in range(8)}
    ends = []
    for step in range(SAVES):
        steps.meet("step", "begin", b"", lambda posts: b"")
        timer = interrupts.after(LATEST * chance.random()) if chance.random() < 0.4 else None
        ends.append(end_of(checkpointer, step, weights, interrupts))
        if timer is not None:
            timer.join(60)
    # An interrupt may have come before the last save reported its failure, which `wait` then raises.
    with suppress(sp.ShardproofError):
        checkpointer.wait()
    steps.meet("step", "begin", b"", lambda posts: b"")
    return ends, checkpointer.save(SAVES, weights).result().step or 0


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2)])
def test_ranks_save_together_after_interrupts_at_random_moments(
    tmp_path: Path, ranks: int, seed: int
) -> None:
    outcomes = [outcome.value for outcome in run_ranks(ranks, save_under_interrupts, str(tmp_path), seed)]
    assert [step for _, step in outcomes] == [SAVES] * ranks
    found = {end for ends, _ in outcomes for end in ends}
    assert {"saved", "interrupted"} <= found, "no interrupt came while a rank saved"
    # RankSilent: a rank was interrupted before its call, so the others waited for it until the deadline.
    assert found <= {"saved", "interrupted", "RankFailure", "RankSilent"}

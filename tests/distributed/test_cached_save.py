"""A save in which only values have changed has two meetings, sends a few bytes and does not plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

RANKS, TENSORS = 3, 300
"""Tensors that all ranks hold."""


@dataclass(frozen=True)
class MeetingSizes:
    """The bytes that this rank posted and received at one meeting."""

    phase: str
    posted: int
    answered: int


class CountingRendezvous:
    """A rendezvous that records its meetings, and those of every rendezvous that it makes."""

    def __init__(self, inner: Any, meetings: list[MeetingSizes]) -> None:
        self._inner = inner
        self._meetings = meetings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def deadline(self) -> float:
        return self._inner.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._inner.deadline = seconds

    def meet(self, operation: str, phase: str, post: Any, decide: Any) -> bytes:
        answer = self._inner.meet(operation, phase, post, decide)
        self._meetings.append(MeetingSizes(phase, len(post) if isinstance(post, bytes) else -1, len(answer)))
        return answer

    def new_rendezvous(self, name: str) -> CountingRendezvous:
        return CountingRendezvous(self._inner.new_rendezvous(name), self._meetings)


def state_of(value: float, tensors: int) -> dict[str, Any]:
    """Replicas with names so long that the byte counts show whether the names were sent."""
    named = {
        f"layers.{number:05d}.some.long.name.weight": torch.full((8, 4), value) for number in range(tensors)
    }
    return {"model": named, "epoch": 3}


def save_three_times(root: str, metadata: dict[str, Any], check: Any) -> list[list[MeetingSizes]]:
    """Meetings of a first save, of one with other values, and of one with one more tensor on rank 1."""
    log: list[MeetingSizes] = []
    counted = CountingRendezvous(rendezvous(deadline=10.0), log)
    checkpointer = sp.Checkpointer(root, rendezvous=counted, check_replicas=check)
    meetings = []
    for step, extra in enumerate((0, 0, int(rank() == 1)), start=1):
        checkpointer.save(step, state_of(float(step), TENSORS + extra), metadata=metadata).result()
        meetings.append(list(log))
        log.clear()
    return meetings


@pytest.mark.parametrize(
    ("metadata", "check"), [({}, None), ({"loss": 1.5, "run": "a name of some length"}, None), ({}, "all")]
)
def test_a_second_save_agrees_in_a_few_bytes_and_does_not_plan(
    tmp_path: Path, metadata: dict[str, Any], check: Any
) -> None:
    outcomes = run_ranks(RANKS, save_three_times, str(tmp_path), metadata, check, timeout=120)
    option = f"replicascheck_replicas={check!r}" if check else ""  # its name and its request
    room = 100 + len(repr(metadata)) + len(option)
    for first, second, third in (outcome.value for outcome in outcomes):
        assert [met.phase for met in first] == ["collect", "plan", "write"]
        assert [met.phase for met in second] == ["collect", "write"]
        assert [met.phase for met in third] == ["collect", "plan", "write"]
        assert first[1].posted < sum(map(len, state_of(0.0, TENSORS)["model"])) / 2, (
            "names are not compressed"
        )
        assert second[0].posted <= room
        assert second[0].answered <= room
    posted = sum(outcome.value[1][1].posted for outcome in outcomes)
    # 16 bytes for each chunk, and each rank's record of its file and its objects. If replicas are compared,
    # each rank posts 16 bytes for each replica too.
    replicas = 16 * TENSORS * RANKS if check else 0
    assert replicas <= posted <= replicas + 16 * TENSORS + RANKS * 200

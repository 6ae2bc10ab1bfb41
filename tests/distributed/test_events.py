"""Events of real ranks that save and load: in listeners, traces and printed lines."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.saving import save_protocol
from shardproof.errors import RankFailure
from tests.harness import Job, rank, reach, rendezvous, run_ranks
from tests.perfetto import COMPLAINTS, ask_perfetto

FOREGROUND, BACKGROUND = ["collect", "stage"], ["agree", "write", "commit"]
MILLISECOND = 1e3


def state_of(number: int) -> dict[str, Any]:
    weight = torch.arange(1 << 18, dtype=torch.float32).reshape(-1, 64) + number
    return {"w": weight, "mine": sp.PerRank({"rank": number})}


def save_under_trace(folder: str) -> tuple[list[tuple[str, str, int | None]], str]:
    """Rank 1 begins to trace one save later than rank 0, so that their files begin at other times."""
    shown, seen = io.StringIO(), []
    checkpointer = sp.Checkpointer(f"{folder}/run", deadline=30.0)
    with sp.events.show(shown):
        state = state_of(rank())
        subscriptions = []
        for step in (1, 2):
            if step == 2 or rank() == 0:
                subscriptions = subscriptions or [sp.events.trace(f"{folder}/traces")]
            if step == 2:
                subscriptions.append(sp.events.subscribe(seen.append))
            checkpointer.save(step, state).result(60)
        checkpointer.wait()
        for subscription in subscriptions:
            subscription()
        checkpointer.restore(state)
    events = [(event.kind, event.phase, event.step) for event in seen if event.action == "save"]
    return [one for one in events if one[0] != "progress"], shown.getvalue()


def test_traces_of_two_ranks_merge_into_one_time_line(tmp_path: Path) -> None:
    outcomes = run_ranks(2, save_under_trace, str(tmp_path), timeout=120)
    for outcome in outcomes:
        events, shown = outcome.value
        begun = [phase for kind, phase, _ in events if kind == "begin"]
        assert sorted(phase for kind, phase, _ in events if kind == "end") == sorted(begun)
        for sequence in (FOREGROUND, BACKGROUND):  # each in its own thread, side by side
            assert [phase for phase in begun if phase in sequence] == sequence
        assert {step for _, _, step in events} == {2}
        lines = shown.splitlines()
        assert (outcome.rank == 0) == bool(lines)
        if lines:
            assert any(line.startswith("save ") and ": write " in line and "B/s" in line for line in lines)

    merged = sp.events.merge_traces((tmp_path / "traces").iterdir(), tmp_path / "all.json")
    assert (merged.ranks, merged.unfinished, merged.skipped) == (2, 0, ())
    rows = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    second = defaultdict(dict)
    for row in rows:
        if row["ph"] == "X" and row["cat"] == "save" and row["args"]["step"] == 2:
            second[row["pid"]][row["name"]] = row
    assert set(second[0]) == set(second[1]) >= {*FOREGROUND, *BACKGROUND}
    for meeting in ("agree", "commit"):
        ends = [second[number][meeting]["ts"] + second[number][meeting]["dur"] for number in (0, 1)]
        begins = [second[number][meeting]["ts"] for number in (0, 1)]
        # No rank leaves a meeting before the last one joins. The time line shows it only with aligned clocks.
        assert max(begins) <= min(ends) + MILLISECOND, (meeting, begins, ends)
    assert sum(second[number]["write"]["args"]["bytes"] for number in (0, 1)) > 4 * (1 << 18)


def test_perfetto_reads_the_trace_of_two_ranks_without_a_complaint(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_under_trace, str(tmp_path), timeout=120):
        assert outcome.error is None, outcome.trace
    merged = sp.events.merge_traces((tmp_path / "traces").iterdir(), tmp_path / "all.json")
    complaints, phases, curves = ask_perfetto(
        tmp_path / "all.json",
        COMPLAINTS,
        "select process.name as rank, thread.name as thread, slice.name, slice.category, dur from slice"
        " join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)",
        "select process.name as rank, track.name, max(value) as most from counter"
        " join process_counter_track as track on track_id = track.id join process using (upid) group by 1, 2",
    )
    assert complaints == []
    assert len(phases) == merged.phases
    for number in (0, 1):
        found = {(row["thread"], row["name"]): row for row in phases if row["rank"] == f"rank {number}"}
        for thread, sequence in (("MainThread", FOREGROUND), ("shardproof-save", BACKGROUND)):
            for name in sequence:
                assert found[thread, name]["category"] == "save" and found[thread, name]["dur"] > 0
        drawn = {row["name"]: row["most"] for row in curves if row["rank"] == f"rank {number}"}
        assert drawn["save write GB"] > 0 and drawn["save write GB/s"] > 0


def fail_on_rank_1(folder: str) -> list[tuple[str, str, str | None]]:
    seen: list[Any] = []
    state = state_of(rank())
    if rank() == 1:
        state["bad"] = object()
    with sp.events.subscribe(seen.append), pytest.raises(RankFailure):
        sp.save(f"{folder}/step", state)
    return [(event.kind, event.phase, event.error) for event in seen if event.kind in ("end", "failed")]


def test_events_tell_the_failed_rank_from_the_others(tmp_path: Path) -> None:
    zero, one = (outcome.value for outcome in run_ranks(2, fail_on_rank_1, str(tmp_path), timeout=60))
    assert zero[0] == ("end", "collect", None)
    assert one[0][:2] == ("failed", "collect") and "PlainDataError" in one[0][2]
    for events in (zero, one):
        kind, phase, error = events[1]
        assert (kind, phase) == ("failed", "agree") and error.startswith("RankFailure: ")


def wait_for_rank_1() -> list[Any]:
    """Rank 0 waits at the meeting. Rank 1 reports its progress, and joins when rank 0 has received it."""
    seen: list[Any] = []
    progress = {1: (250, 1000)}

    def listen(event: sp.events.Event) -> None:
        seen.append((event.kind, event.rank, event.phase))
        if event.facts == {"ranks": progress} and ("received",) not in seen:
            seen.append(("received",))
            reach("received")

    meeting = rendezvous(deadline=10.0)
    meeting.meet("save a", "collect", b"", lambda posts: b"")
    with sp.events.subscribe(listen):
        if rank() == 1:
            meeting.progress(*progress[1])
            reach("half way")
        meeting.meet("save a", "write", b"", lambda posts: b"")
    return seen


def test_rank_0_receives_the_progress_of_the_ranks_it_waits_for() -> None:
    def script(job: Job) -> None:
        job.until_held(1, "half way")
        job.until_held(0, "received")
        job.go(0)
        job.go(1)

    held = {0: "received", 1: "half way"}
    zero, one = run_ranks(2, wait_for_rank_1, timeout=60, hold=held, script=script)
    assert one.value == []
    assert ("waiting", 0, "write") in zero.value and ("received",) in zero.value


def save_beside_a_slow_rank(folder: str) -> tuple[dict[str, Any], str]:
    if rank() == 1:
        hours = (3600.0 * hour for hour in range(1_000))
        save_protocol.time = SimpleNamespace(monotonic=lambda: next(hours))  # type: ignore[assignment]
    shown, facts = io.StringIO(), {}

    def hear(event: sp.events.Event) -> None:
        if (event.kind, event.phase) == ("end", "commit"):
            facts.update(event.facts)

    with sp.events.show(shown), sp.events.subscribe(hear):
        checkpointer = sp.Checkpointer(folder, deadline=30.0)
        checkpointer.save(1, state_of(rank())).result(60)
    return facts, shown.getvalue()


def test_the_commit_names_the_rank_that_took_longest_to_write(tmp_path: Path) -> None:
    (facts, shown), (elsewhere, _) = (
        outcome.value for outcome in run_ranks(2, save_beside_a_slow_rank, str(tmp_path))
    )
    assert facts == {"slowest_rank": 1, "slowest_seconds": 3600.0}
    assert "slowest rank 1" in shown
    assert elsewhere == {}

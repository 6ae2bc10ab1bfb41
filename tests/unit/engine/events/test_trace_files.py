"""Traces are valid at any time, nest phases correctly, and merge on one time line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shardproof import events
from shardproof.engine.events.phases import Hub
from shardproof.engine.events.trace_files import Tracer
from shardproof.errors import FormatError
from tests.unit.engine.events.hubs import Bench


def rows(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """A trace file's events; fails where it is no valid trace."""
    document = json.loads(path.read_text())
    for row in document["traceEvents"]:
        assert isinstance(row["pid"], int) and isinstance(row["tid"], int), row
        assert row["ph"] in ("X", "C", "M") and isinstance(row["name"], str) and isinstance(row["args"], dict)
        assert row["ph"] == "M" or row["ts"] >= 0
        assert row["ph"] != "X" or row["dur"] >= 0
    found: list[dict[str, Any]] = document["traceEvents"]
    return [row for row in found if kind is None or row["ph"] == kind]


def check_nesting(found: list[dict[str, Any]]) -> None:
    """Asserts that the phases of a lane are disjoint or nested, as viewers require."""
    lanes = defaultdict(list)
    for row in found:
        if row["ph"] == "X":
            lanes[row["pid"], row["tid"]].append(row)
    for lane in lanes.values():
        lane.sort(key=lambda row: (row["ts"], -row["dur"]))
        stack: list[float] = []
        for row in lane:
            while stack and stack[-1] <= row["ts"] + 1e-3:
                stack.pop()
            assert not stack or row["ts"] + row["dur"] <= stack[-1] + 1e-3, row
            stack.append(row["ts"] + row["dur"])


def traced(bench: Bench, folder: Path, wall: float = 1000.0) -> Tracer:
    tracer = Tracer(folder, wall=wall, clock=100.0)
    bench.hub.subscribe(tracer)
    return tracer


def test_a_file_for_each_operation_with_lanes_times_and_facts(tmp_path: Path) -> None:
    bench = Bench()
    tracer = traced(bench, tmp_path)

    def write() -> None:
        with bench.hub.phase("save runs/a", "write", rank=2, world_size=4, step=7) as phase:
            bench.clock.now += 1
            phase.progress(10**9, 3 * 10**9)
            bench.clock.now += 1
            phase.progress(3 * 10**9, 3 * 10**9)
            phase.note(files=1)

    with bench.hub.phase("save runs/a", "collect", rank=2, world_size=4, step=7):
        bench.clock.now += 0.5
    thread = threading.Thread(target=write, name="writer")
    thread.start()
    thread.join(20)
    with bench.hub.phase("load runs/b", "match", rank=2, world_size=4):
        bench.clock.now += 0.25
    tracer.close()

    load, save = sorted(tmp_path.iterdir())
    assert load.name.startswith("load-b-") and save.name.startswith("save-a-")
    assert save.name.endswith("-rank00002.json")
    collect, wrote = rows(save, "X")
    assert (collect["name"], collect["pid"], collect["ts"], collect["dur"]) == ("collect", 2, 0.0, 5e5)
    assert (wrote["name"], wrote["cat"], wrote["ts"], wrote["dur"]) == ("write", "save", 5e5, 2e6)
    assert wrote["args"] == {"operation": "save runs/a", "step": 7, "bytes": 3 * 10**9, "files": 1}
    names = {row["tid"]: row["args"]["name"] for row in rows(save, "M") if row["name"] == "thread_name"}
    assert names[wrote["tid"]] == "writer"
    assert names[collect["tid"]] == threading.current_thread().name
    (process,) = (row for row in rows(save, "M") if row["name"] == "process_name")
    assert process["args"] == {"name": "rank 2"}
    curves = [row["args"] for row in rows(save, "C") if row["name"] == "save write"]
    assert [values["GB"] for values in curves] == [1.0, 3.0, 3.0, 0.0]
    speeds = [values["GB/s"] for values in curves]
    assert speeds[:2] == [pytest.approx(1.0), pytest.approx(2.0)] and speeds[-1] == 0.0
    assert [row["name"] for row in rows(load, "X")] == ["match"]
    check_nesting(rows(save))


def test_phases_inside_phases_and_threads_nest(tmp_path: Path) -> None:
    hub = Hub()  # real clocks
    tracer = Tracer(tmp_path)
    hub.subscribe(tracer)
    start = threading.Barrier(3)

    def work() -> None:
        start.wait(20)
        for _ in range(20):
            with hub.phase("save a", "write"), hub.phase("save a", "hash"), hub.phase("save a", "copy"):
                pass

    with hub.phase("save a", "outer"):
        threads = [threading.Thread(target=work, name=f"writer {number}") for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    tracer.close()
    (file,) = tmp_path.iterdir()
    found = rows(file)
    assert len([row for row in found if row["ph"] == "X"]) == 3 * 20 * 3 + 1
    assert len([row for row in found if row["name"] == "thread_name"]) == 4
    check_nesting(found)


def overlap(hub: Hub) -> None:
    """Two threads of one name save at once: the second begins after the first and ends after it."""
    one_begun, two_begun, one_over = (threading.Event() for _ in range(3))

    def one() -> None:
        with hub.phase("save a", "write"), hub.phase("save a", "hash"):
            one_begun.set()
            two_begun.wait(20)
        with hub.phase("save a", "commit"):
            pass
        one_over.set()

    def two() -> None:
        one_begun.wait(20)
        with hub.phase("save b", "write"), hub.phase("save b", "hash"):
            two_begun.set()
            one_over.wait(20)
        with hub.phase("save b", "commit"):
            pass

    threads = [threading.Thread(target=work, name="shardproof-save") for work in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_concurrent_threads_of_one_name_have_lanes_of_their_own(tmp_path: Path) -> None:
    """Perfetto drops phases that overlap in a lane."""
    hub = Hub()
    tracer = Tracer(tmp_path / "one.json")
    hub.subscribe(tracer)
    for _ in range(3):
        overlap(hub)
    tracer.close()
    found = rows(tmp_path / "one.json")
    check_nesting(found)
    assert {row["args"]["name"] for row in found if row["name"] == "thread_name"} == {"shardproof-save"}
    assert {row["tid"] for row in found if row["ph"] == "X"} == {1, 2}, "lanes are reused"
    for operation in ("save a", "save b"):
        of_one = [row for row in found if row["ph"] == "X" and row["args"]["operation"] == operation]
        assert len({row["tid"] for row in of_one[:2]}) == 1, "a thread stays in its lane while it is at work"


def test_overlapping_phases_of_a_rank_get_lanes_of_their_own_in_a_merge(tmp_path: Path) -> None:
    hub = Hub()
    tracer = Tracer(tmp_path / "files")
    hub.subscribe(tracer)
    overlap(hub)
    tracer.close()
    assert len(list((tmp_path / "files").iterdir())) == 2
    events.merge_traces((tmp_path / "files").iterdir(), tmp_path / "all.json")
    found = rows(tmp_path / "all.json")
    assert len([row for row in found if row["ph"] == "X"]) == 6
    check_nesting(found)
    named = [row["tid"] for row in found if row["name"] == "thread_name"]
    assert named == sorted({row["tid"] for row in found if row["ph"] == "X"}) and len(named) == 2
    assert len([row for row in found if row["name"] == "process_name"]) == 1


def test_facts_are_json_and_text_that_a_reader_without_escapes_shows(tmp_path: Path) -> None:
    bench = Bench()
    tracer = traced(bench, tmp_path)
    with bench.hub.phase("save é", "write") as phase:
        phase.note(loss=float("nan"), speeds=[1.5, float("-inf")], half="a\udcff", path=Path("é"))
    tracer.close()
    (file,) = tmp_path.iterdir()
    merged = tmp_path / "all.json"
    events.merge_traces([file], merged)
    for trace in (file, merged):
        text = trace.read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        (row,) = (row for row in document["traceEvents"] if row["ph"] == "X")
        noted = {key: row["args"][key] for key in ("loss", "speeds", "half", "path")}
        assert noted == {"loss": "nan", "speeds": [1.5, "-inf"], "half": "a?", "path": "é"}
        assert '"save é"' in text


def test_times_are_whole_nanoseconds(tmp_path: Path) -> None:
    """Otherwise phases that end together may overlap by a nanosecond after a viewer rounds them."""
    hub = Hub()
    for rank, wall in ((0, 1_795_297_498.9085774), (1, 1_795_297_499.1234567)):
        tracer = Tracer(tmp_path, wall=wall, clock=0.1)
        with hub.subscribe(tracer, tracer.close):
            for _ in range(50):
                with hub.phase("save a", "outer", rank=rank), hub.phase("save a", "inner", rank=rank):
                    pass
    files = list(tmp_path.iterdir())
    events.merge_traces(files, tmp_path / "all.json")
    for file in (*files, tmp_path / "all.json"):
        for row in rows(file, "X"):
            for time in (row["ts"], row["dur"]):
                assert time == round(time, 3), row


def test_the_file_is_valid_after_every_event_and_lists_open_phases(tmp_path: Path) -> None:
    bench = Bench()
    traced(bench, tmp_path)
    looks: list[list[tuple[str, bool, float]]] = []

    def look(_: events.Event) -> None:
        (file,) = tmp_path.iterdir()
        looks.append(
            [(row["name"], row["args"].get("unfinished", False), row["dur"]) for row in rows(file, "X")]
        )

    bench.hub.subscribe(look)
    with bench.hub.phase("save a", "write") as phase:
        bench.clock.now += 1
        phase.note(long="x" * 5000)  # the tail shrinks again when this is finished
        phase.progress(1, 2)
        bench.clock.now += 1
    with bench.hub.phase("save a", "commit"):
        pass
    assert looks == [
        [("write", True, 0.0)],
        [("write", True, 1e6)],
        [("write", False, 2e6)],
        [("write", False, 2e6), ("commit", True, 0.0)],
        [("write", False, 2e6), ("commit", False, 0.0)],
    ]


def test_a_failed_phase_has_its_error(tmp_path: Path) -> None:
    bench = Bench()
    traced(bench, tmp_path)
    with pytest.raises(OSError, match="full"), bench.hub.phase("save a", "write"):
        raise OSError("full")
    (file,) = tmp_path.iterdir()
    (row,) = rows(file, "X")
    assert row["args"]["error"] == "OSError: full" and "unfinished" not in row["args"]


def test_the_same_operation_again_gets_a_file_of_its_own(tmp_path: Path) -> None:
    bench = Bench()
    traced(bench, tmp_path)
    for _ in range(2):
        for name in ("collect", "write", "write"):
            with bench.hub.phase("save a", name):
                bench.clock.now += 1
    first, second = sorted(tmp_path.iterdir())
    for file in (first, second):
        assert [row["name"] for row in rows(file, "X")] == ["collect", "write", "write"]


def test_one_file_for_a_process_if_asked(tmp_path: Path) -> None:
    bench = Bench()
    tracer = traced(bench, tmp_path / "new" / "all.json")
    for operation in ("save a", "load b"):
        with bench.hub.phase(operation, "collect"):
            pass
    with bench.hub.phase("save c", "collect", rank=3, world_size=4):
        pass
    tracer.close()
    assert len(rows(tmp_path / "new" / "all.json", "X")) == 2
    assert len(rows(tmp_path / "new" / "all.rank00003.json", "X")) == 1


def test_the_tracer_remembers_few_old_operations(tmp_path: Path) -> None:
    bench = Bench()
    tracer = traced(bench, tmp_path)
    for number in range(200):
        with bench.hub.phase(f"save run/step-{number:03}", "collect", step=number):
            pass
    assert len(tracer._files) <= 64
    assert len(list(tmp_path.iterdir())) == 200
    assert all(len(rows(file, "X")) == 1 for file in tmp_path.iterdir())


def test_a_full_disk_ends_the_trace_and_not_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in the way").write_text("a file")
    bench = Bench()
    traced(bench, tmp_path / "in the way")
    with bench.hub.phase("save a", "write"):
        pass
    assert bench.kinds() == [("begin", "write"), ("end", "write")]
    assert len(caplog.records) == 1


def test_a_killed_process_leaves_a_valid_trace_of_its_phases(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from shardproof import events\n"
        "events.trace(sys.argv[1])\n"
        "with events.phase('save a', 'collect'):\n"
        "    pass\n"
        "with events.phase('save a', 'write'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (file,) = tmp_path.iterdir()
    assert [(row["name"], row["args"].get("unfinished")) for row in rows(file, "X")] == [
        ("collect", None),
        ("write", True),
    ]


def of_rank(folder: Path, rank: int, wall: float, phases: list[tuple[str, float, float]]) -> None:
    """Traces a rank whose wall clock is `wall` at monotonic 100.0; phases are name, begin, end after it."""
    bench = Bench()
    tracer = traced(bench, folder, wall)
    for name, begin, end in phases:
        bench.clock.now = 100.0 + begin
        with bench.hub.phase("save a", name, rank=rank, world_size=2, step=7):
            bench.clock.now = 100.0 + end
    tracer.close()


def test_merging_puts_ranks_on_one_time_line(tmp_path: Path) -> None:
    """Rank 1 began to trace 2.5 s after rank 0 by the wall clock; monotonic clocks are not comparable."""
    of_rank(tmp_path, 0, 5000.0, [("agree", 3.0, 4.0), ("write", 4.0, 5.0)])
    of_rank(tmp_path, 1, 5002.5, [("agree", 1.0, 1.51), ("write", 1.51, 9.0)])
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "listed.json").write_text('{"otherData": ["process", "rank"], "traceEvents": []}')
    text = '{"otherData": {"process": 1, "rank": "0", "wall_seconds": 1.0}, "traceEvents": []}'
    (tmp_path / "text.json").write_text(text)
    out = tmp_path / "all.json"
    for _ in range(2):  # the second time, the merged file is no input
        merged = events.merge_traces(tmp_path.glob("*.json"), out)
        assert (merged.files, merged.ranks, merged.phases, merged.unfinished) == (2, 2, 4, 0)
    assert merged.spread == pytest.approx(0.01)
    skipped = ["all.json", "broken.json", "listed.json", "other.json", "text.json"]
    assert sorted(Path(name).name for name in merged.skipped) == skipped
    found = {(row["pid"], row["name"]): row for row in rows(out, "X")}
    assert found[0, "write"]["ts"] == pytest.approx(4e6)
    assert found[1, "agree"]["ts"] == pytest.approx(3.5e6) and found[1, "agree"]["dur"] == pytest.approx(
        5.1e5
    )
    check_nesting(rows(out))
    lanes = {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in rows(out, "M")
        if row["name"] == "thread_name"
    }
    assert all((row["pid"], row["tid"]) in lanes for row in found.values())


def test_threads_of_different_names_get_different_lanes_in_a_merge(tmp_path: Path) -> None:
    bench = Bench()
    tracer = traced(bench, tmp_path)

    def load() -> None:
        with bench.hub.phase("load a", "match"):
            bench.clock.now += 1

    thread = threading.Thread(target=load, name="reader")
    thread.start()
    thread.join(20)
    with bench.hub.phase("save a", "collect"):
        bench.clock.now += 1
    tracer.close()
    before = {row["tid"] for file in tmp_path.iterdir() for row in rows(file, "X")}
    assert before == {1}, "the first lane of each file"
    events.merge_traces(tmp_path.iterdir(), tmp_path / "all.json")
    assert len({row["tid"] for row in rows(tmp_path / "all.json", "X")}) == 2


def test_merging_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none of 0 files"):
        events.merge_traces([], tmp_path / "all.json")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardproof", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.processes
def test_the_command_merges_a_folder(tmp_path: Path) -> None:
    of_rank(tmp_path, 0, 5000.0, [("agree", 3.0, 4.0)])
    of_rank(tmp_path, 1, 5000.0, [("agree", 1.0, 4.25)])
    done = run_cli("trace", str(tmp_path), "-o", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    assert "2 phases of 2 ranks, from 2 files; ranks leave their meetings within 0.25 s" in done.stdout
    assert len(rows(tmp_path / "all.json", "X")) == 2
    as_json = run_cli("trace", str(tmp_path), "-o", str(tmp_path / "all.json"), "--json")
    assert json.loads(as_json.stdout)["ranks"] == 2
    (tmp_path / "empty").mkdir()
    assert run_cli("trace", str(tmp_path / "empty"), "-o", str(tmp_path / "x.json")).returncode == 1
    assert run_cli("trace", str(tmp_path / "nowhere"), "-o", "x.json").returncode == 2

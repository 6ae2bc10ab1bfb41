"""Perfetto's trace processor reads the traces of saves, of a killed process, and of unusual facts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from shardproof import events
from shardproof.engine.events.phases import Hub
from shardproof.engine.events.trace_files import Tracer
from tests.perfetto import COMPLAINTS, ask_perfetto
from tests.unit.engine.events.test_trace_files import overlap


def test_threads_of_one_name_lose_no_phase(tmp_path: Path) -> None:
    hub = Hub()
    tracers = [Tracer(tmp_path / "one.json"), Tracer(tmp_path / "files")]
    for tracer in tracers:
        hub.subscribe(tracer)
    overlap(hub)
    for tracer in tracers:
        tracer.close()
    events.merge_traces((tmp_path / "files").iterdir(), tmp_path / "all.json")
    for trace in ("one.json", "all.json"):
        complaints, phases = ask_perfetto(tmp_path / trace, COMPLAINTS, "select name from slice")
        assert complaints == [] and len(phases) == 6


def test_facts_of_all_kinds_are_shown(tmp_path: Path) -> None:
    hub = Hub()
    tracer = Tracer(tmp_path / "one.json")
    with hub.subscribe(tracer, tracer.close), hub.phase("save é", "write", step=7) as phase:
        phase.note(loss=float("nan"), half='"a\udcff"', nested={"speeds": [1.5, float("inf")]}, last=True)
    (facts,) = ask_perfetto(
        tmp_path / "one.json",
        "select key, display_value as value from slice join args using (arg_set_id) where name = 'write'",
    )
    assert {row["key"].removeprefix("args."): row["value"] for row in facts} == {
        "operation": "save é",
        "step": "7",
        "bytes": "0",
        "loss": "nan",
        "half": '"a?"',
        "nested.speeds[0]": "1.5",
        "nested.speeds[1]": "inf",
        "last": "true",
    }


def test_a_trace_has_the_open_phases_of_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from shardproof import events\n"
        "events.trace(sys.argv[1])\n"
        "with events.phase('save a', 'blocked'), events.phase('save a', 'write'):\n"
        "    with events.phase('save a', 'collect'):\n"
        "        pass\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (trace,) = tmp_path.iterdir()
    complaints, phases = ask_perfetto(
        trace, COMPLAINTS, "select name, extract_arg(arg_set_id, 'args.unfinished') as cut, depth from slice"
    )
    assert complaints == []
    assert [(row["name"], bool(row["cut"]), row["depth"]) for row in phases] == [
        ("blocked", True, 0),
        ("write", True, 1),
        ("collect", False, 2),
    ]

"""Workers on a Ray cluster of one node: a conversion, deadlines, too few processors, `diff` and `stats`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from tests.interop.peer import python_of

SCRIPT = """
import json, sys
import ray
import shardproof as sp

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
report = sp.convert(sys.argv[1], sys.argv[2], to="safetensors", max_file_bytes=4096, workers=2, on="ray")
print(json.dumps([report.units, report.verified]))
ray.shutdown()
"""


DEADLINES = """
import json, os, threading, types
import ray
from shardproof.errors import ShardproofError
from shardproof.workers import Job, RayExecutor

class Slow:
    "Takes longer than the deadline, and reads a byte every 3 s."
    def __call__(self, context):
        for _ in range(6):
            threading.Event().wait(3)
            context.on_bytes(1)
        return "done"

class Stalled:
    def __call__(self, context):
        context.on_bytes(1)
        threading.Event().wait(60)

class Killed:
    def __call__(self, context):
        os._exit(7)

def outcome(task):
    executor = RayExecutor(Job("the test", "run it again"), types.SimpleNamespace, 1, deadline=15.0)
    moved = []
    try:
        return [*executor.run([task], moved.append), sum(moved)]
    except ShardproofError as error:
        return [error.message.splitlines()[0], sum(moved)]
    finally:
        executor.close()

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(json.dumps([outcome(task()) for task in (Slow, Stalled, Killed)]))
ray.shutdown()
"""

REPORTS = """
import contextlib, io, json, sys
import ray
from shardproof.commands.cli.group import run
from shardproof.commands.report import divided_reads

def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([*arguments, "--json"])
    return [code, json.loads(out.getvalue())]

a, b = sys.argv[1:]
commands = ["diff", a, b, "--measure"], ["stats", a]
here = [printed(*command) for command in commands]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
divided_reads.open_bits = None  # this process reads no tensor
there = [printed(*command, "--on", "ray", "--workers", "2") for command in commands]
print(json.dumps([here, there]))
ray.shutdown()
"""

FEW_PROCESSORS = """
import json, logging, sys
import ray
from shardproof.report import measure_tensors
from shardproof.storage import LocalStorage

class Busy:
    def is_placed(self):
        return True

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("shardproof").addHandler(handler)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
busy = ray.remote(num_cpus=1)(Busy).remote()
ray.get(busy.is_placed.remote())
measures = measure_tensors(LocalStorage(sys.argv[1]), workers=64, on="ray", deadline=60.0)
print(json.dumps([len(measures), lines]))
ray.shutdown()
"""


def run_on_ray(script: str, source: Path, destination: Path) -> Any:
    """Runs a script in the environment of Ray. Its line of JSON stands among those that Ray prints."""
    run = subprocess.run(
        [python_of("ray"), "-c", script, source, destination],
        env={**os.environ, "PYTHONPATH": str(Path(sp.__file__).parents[1]), "RAY_TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (answer,) = (line for line in run.stdout.splitlines() if line.startswith("["))
    return json.loads(answer)


def test_units_are_written_and_verified_by_actors(tmp_path: Path) -> None:
    state = {f"w{number}": torch.arange(number, number + 500.0) for number in range(6)}
    sp.save(tmp_path / "source", dict(state))
    units, verified = run_on_ray(SCRIPT, tmp_path / "source", tmp_path / "there")
    assert (units, verified) == (3, sum(value.nbytes for value in state.values()))
    with sp.open(tmp_path / "there") as checkpoint:
        assert all(torch.equal(checkpoint[key].read(), value) for key, value in state.items())


def test_an_actor_without_progress_fails_and_a_slow_one_does_not(tmp_path: Path) -> None:
    slow, stalled, killed = run_on_ray(DEADLINES, tmp_path / "source", tmp_path / "there")
    assert slow == ["done", 6]
    assert "made progress for 15 s, the deadline" in stalled[0]
    assert stalled[1] == 1
    assert "ended with no result" in killed[0]


def test_workers_without_a_processor_keep_no_task(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {f"w{number}": torch.ones(4) for number in range(64)})
    measured, lines = run_on_ray(FEW_PROCESSORS, tmp_path / "a", tmp_path / "b")
    assert measured == 64
    (line,) = lines
    assert "cluster has 2 processors, so at most as many of the 64 workers run" in line


def test_diff_and_stats_print_the_same_with_actors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"w{number}": torch.randn(500) for number in range(6)}
    sp.save(tmp_path / "a", dict(state))
    sp.save(tmp_path / "b", {key: value * 1.01 for key, value in state.items()})
    (here, there) = run_on_ray(REPORTS, tmp_path / "a", tmp_path / "b")
    assert here == there
    (code, difference), (_, measures) = there
    assert code == 1
    assert len(difference["values"]) == len(measures["tensors"]) == 6
    assert all(0.0099 < value["measured"]["relative"] < 0.0101 for value in difference["values"])

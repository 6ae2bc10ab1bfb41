"""A conversion on a Ray cluster of one node writes what one in this process writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

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


def test_units_are_written_and_verified_by_actors(tmp_path: Path) -> None:
    state = {f"w{number}": torch.arange(number, number + 500.0) for number in range(6)}
    sp.save(tmp_path / "source", dict(state))
    source = Path(sp.__file__).parents[1]
    run = subprocess.run(
        [python_of("ray"), "-c", SCRIPT, tmp_path / "source", tmp_path / "there"],
        env={**os.environ, "PYTHONPATH": str(source), "RAY_TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    units, verified = json.loads(run.stdout.splitlines()[-1])
    assert (units, verified) == (3, sum(value.nbytes for value in state.values()))
    with sp.open(tmp_path / "there") as checkpoint:
        assert all(torch.equal(checkpoint[key].read(), value) for key, value in state.items())

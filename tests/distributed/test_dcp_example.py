"""`examples/dcp.py` on ranks as torchrun starts them: it trains, is killed, and resumes on other ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof as sp

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "dcp.py"
STEP = re.compile(r"step (\d+): loss (\S+)")


def train(run: Path, world_size: int, kill_at: int | None = None) -> dict[int, str]:
    """Runs the example, and kills all ranks at a step. Gives the loss of each step, as it is printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "PYTHONPATH": str(Path(sp.__file__).resolve().parents[1]),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), str(run), "12"],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    losses: dict[int, str] = {}
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if found := STEP.search(line):
                losses[int(found[1])] = found[2]
                if int(found[1]) == kill_at:
                    break
        if kill_at is None:
            assert [rank.wait(60) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(60)
        ranks[0].stdout.close()
    return losses


@pytest.mark.timeout(240)
def test_the_example_is_killed_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    killed = train(tmp_path, 3, kill_at=9)
    resumed = train(tmp_path, 2)
    first = min(resumed)
    assert first in {7, 9} and max(resumed) == 12
    assert resumed[first] == killed[first]  # the forward pass is that of the same weights, to the bit
    with sp.open(tmp_path / "step-00000012") as checkpoint:
        assert checkpoint["step"] == 12 and checkpoint.world_size == 2
        assert checkpoint["scheduler.last_epoch"] == 12
        assert checkpoint["optim.state.0.weight.step"].read() == 12


def test_the_page_shows_lines_of_the_example(tmp_path: Path) -> None:
    """The example is written for torch's DCP, but for one import. The Python block of the page runs."""
    page = (ROOT / "docs" / "frameworks" / "dcp.md").read_text()
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    removed = [line[1:] for line in diff if line.startswith("-")]
    added = [line[1:] for line in diff if line.startswith("+")]
    assert removed == ["import torch.distributed.checkpoint as dcp"]
    assert added == ["from shardproof.frameworks import dcp"]
    block = page.split("```python\n")[1].split("```")[0]
    source = {**os.environ, "PYTHONPATH": str(Path(sp.__file__).resolve().parents[1])}
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=source, check=True, timeout=60)
    example = EXAMPLE.read_text()
    assert example.count(added[0]) == 1 and example.count("shardproof") == 1

"""The pages of docs/tutorials that need a framework: their commands run, with the output that they show.

For Megatron-Core, `torchrun` puts the stand-ins of `megatron_stubs` in the place of CUDA.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import shardproof as sp
from tests.interop.peer import FOLDER as INTEROP
from tests.interop.peer import python_of
from tests.tutorials import FOLDER, commands_for, follow

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]
PEERS = INTEROP / "peers"
TORCHRUN = {"megatron": [str(PEERS / "torchrun_on_cpu.py")], "huggingface": ["-m", "torch.distributed.run"]}


@pytest.mark.parametrize(("name", "environment"), [("megatron", "megatron"), ("huggingface", "torch")])
def test_the_commands_of_a_page(name: str, environment: str, tmp_path: Path) -> None:
    python = str(python_of(environment))
    programs = commands_for(
        tmp_path / "programs",
        torchrun=[python, *TORCHRUN[name]],
        shardproof=[sys.executable, "-m", "shardproof"],
        python=[python],
    )
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "examples").symlink_to(INTEROP.parents[1] / "examples")
    source = Path(sp.__file__).resolve().parents[1]
    variables = {"PYTHONPATH": os.pathsep.join([str(source), str(PEERS)]), "PYTHONNOUSERSITE": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    assert len(follow(FOLDER / f"{name}.md", folder, programs, **variables)) >= 5

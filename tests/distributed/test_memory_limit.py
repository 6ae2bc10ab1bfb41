"""In a control group without room for the pages of a checkpoint: no kill, and other pages stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
STATE, OTHER = 256 * MIB, 64 * MIB

PROGRAM = """
import json, os, sys
sys.stdin.readline()  # this process is in its group from here on
from pathlib import Path
import torch
import shardproof as sp
from shardproof._utils.topology import available_memory

group, limit_file, used_file, folder = map(Path, sys.argv[1:5])
state = {"w": torch.ones(STATE // 4)}
target = {"w": torch.zeros(STATE // 4)}
sp.save(folder / "first", {"w": torch.ones(1024)})  # imports and buffers
used = int(used_file.read_text())
limit_file.write_text(str(used + OTHER + 96 * 2**20))
other = sp.storage.LocalStorage(folder)
other.read("other")
events = []
with sp.events.subscribe(events.append):
    sp.save(folder / "step", state)
    sp.load(folder / "step", target)
assert torch.equal(state["w"], target["w"])
pages = sum(other.is_cached("other", at, 4096) for at in range(0, OTHER, 2**20))
facts = [event.facts["cache"] for event in events if "cache" in event.facts]
print(json.dumps({"facts": facts, "pages": pages}))
"""


def own_group() -> tuple[Path, str, str]:
    """The memory group of this process, and the names of its limit and use."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            return (Path("/sys/fs/cgroup/memory") / path.lstrip("/"), *names)
    return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", "memory.current"


@pytest.fixture
def group() -> Iterator[tuple[Path, str, str]]:
    """A new group below that of this process."""
    try:
        own, limit, used = own_group()
        made = own / f"shardproof-{uuid.uuid4().hex[:8]}"
        made.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make control groups: {error}")
    try:
        if not os.access(made / limit, os.W_OK):
            pytest.skip("the group has no limit of memory")
        yield made, limit, used
    finally:
        made.rmdir()


def test_a_save_and_a_load_go_past_the_cache_and_leave_other_pages(
    tmp_path: Path, group: tuple[Path, str, str]
) -> None:
    made, limit, used = group
    (tmp_path / "other").write_bytes(bytes(OTHER))
    program = PROGRAM.replace("STATE", str(STATE)).replace("OTHER", str(OTHER))
    arguments = [str(made), str(made / limit), str(made / used), str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SHARDPROOF_DIRECT": ""},
    )
    (made / "cgroup.procs").write_text(str(process.pid))
    out, error = process.communicate("in\n", timeout=120)
    assert process.returncode == 0, error
    found = json.loads(out)
    assert len(found["facts"]) >= 2 and all(
        fact.startswith("past: more than half") for fact in found["facts"]
    )
    assert found["pages"] >= OTHER // MIB * 3 // 4

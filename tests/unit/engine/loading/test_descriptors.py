"""A load opens few files at once, and opens each before it overwrites anything."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp

_MANY_STEPS = """
import os, resource, sys
import torch
import shardproof as sp

run = sys.argv[1]
state = {f"w{number}": torch.full((40_000,), -1.0) for number in range(40)}
checkpointer = sp.Checkpointer(run, incremental=sp.Incremental(full_every=1000))
for number in range(40):
    state[f"w{number}"].fill_(number)
    checkpointer.save(number, state).result()
resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
target = {name: torch.zeros(40_000) for name in state}
with sp.open(f"{run}/step-00000039") as checkpoint:
    assert len({record.folder for record in checkpoint.manifest.files}) > 35
sp.load(f"{run}/step-00000039", target)
assert all(torch.equal(target[name], state[name]) for name in state)
print("loaded")
"""


@pytest.mark.timeout(240)
def test_a_load_from_40_steps_needs_few_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MANY_STEPS, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.stdout.strip() == "loaded", done.stderr


def _step_of_two_files(run: Path) -> dict[str, torch.Tensor]:
    """A run whose second step refers to a file of the first."""
    state = {"a": torch.full((40_000,), 1.0), "b": torch.full((40_000,), 2.0)}
    checkpointer = sp.Checkpointer(run, incremental=True)
    checkpointer.save(1, state).result()
    state["b"].fill_(3.0)
    checkpointer.save(2, state).result()
    return state


def test_a_file_that_cannot_be_opened_fails_the_load_before_it_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _step_of_two_files(tmp_path / "run")
    open_file = os.open

    def refuses(path: Any, *arguments: Any, **options: Any) -> int:
        if "step-00000002/shards" in os.fspath(path):
            raise OSError(5, "Input/output error")
        return open_file(path, *arguments, **options)

    target = {"a": torch.zeros(40_000), "b": torch.zeros(40_000)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuses)
        with pytest.raises(sp.StorageError, match="EIO") as caught:
            sp.load(tmp_path / "run/step-00000002", target)
    assert "overwritten" not in str(caught.value)
    assert not target["a"].any() and not target["b"].any()


def test_a_storage_without_descriptors_left_closes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _step_of_two_files(tmp_path / "run")
    open_file, refused = os.open, []

    def refuses_once(path: Any, *arguments: Any, **options: Any) -> int:
        if "step-00000002/shards" in os.fspath(path) and not refused:
            refused.append(path)
            raise OSError(24, "Too many open files")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuses_once)
    target = {"a": torch.zeros(40_000), "b": torch.zeros(40_000)}
    sp.load(tmp_path / "run/step-00000002", target)
    assert refused and torch.equal(target["b"], state["b"])


def test_the_bound_is_a_part_of_the_limit_of_the_process() -> None:
    from shardproof.engine.storage.direct_io import OpenFiles

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 160), hard))
    try:
        files = OpenFiles[str]()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    opened: list[int] = []
    for number in range(30):
        files.get(("folder", str(number)), lambda: opened.append(1) or "file")
    for number in range(29, 9, -1):
        files.get(("folder", str(number)), lambda: opened.append(1) or "file")
    assert len(opened) == 30
    files.get(("folder", "9"), lambda: opened.append(1) or "file")
    assert len(opened) == 31

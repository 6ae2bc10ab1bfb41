"""torchtitan's released checkpoint manager runs on shardproof with one import changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage
from tests.interop.peer import PeerFailed, assert_same_tensors, run_peer


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
def test_three_ranks_are_killed_and_two_resume(async_mode: str, tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="exit code -9"):
        run_peer("torchtitan", "train_torchtitan.py", "killed", tmp_path, async_mode, nproc=3)
    committed = {}
    for manifest in tmp_path.glob("checkpoint/step-*/manifest.json"):  # torchtitan removes old steps later
        with sp.open(manifest.parent) as checkpoint:
            committed[checkpoint["train_state.step"]] = checkpoint.world_size
    step = resume(tmp_path, async_mode)
    assert step in {2, 3}  # the last call was over, but a rank may have died before the commit was marked
    assert committed[step] == 3


def test_a_checkpoint_of_torch_is_resumed(tmp_path: Path) -> None:
    run_peer("torchtitan", "train_torchtitan.py", "torch", tmp_path, "disabled", nproc=3)
    assert not list(tmp_path.rglob("manifest.json"))
    assert resume(tmp_path, "disabled") == 2


def resume(path: Path, async_mode: str) -> int:
    """Resumes on two ranks. The state is that of the step, to the bit. Gives the step."""
    resumed = run_peer("torchtitan", "train_torchtitan.py", "resumed", path, async_mode, nproc=2)
    step = resumed.facts["step"]
    expected = torch.load(path / f"expected-{step}.pt", weights_only=False)  # noqa: TID251
    leaves = {f"{part}.{key}": value for part, values in expected.items() for key, value in values.items()}
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 30
    assert_same_tensors(resumed.tensors, tensors)
    for key in ("place", "step", "ntokens_seen"):
        part = "data" if key == "place" else "trainer"
        assert resumed.objects[f"others.{part}.{key}"] == leaves[f"others.{part}"][key]
    assert len(resumed.objects) > 50
    last = path / "checkpoint" / "step-5"
    assert verify(LocalStorage(last)).ok
    assert sorted(folder.name for folder in last.parent.iterdir())[-2:] == ["step-4", "step-5"]
    return int(step)

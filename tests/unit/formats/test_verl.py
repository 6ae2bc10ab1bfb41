"""Checkpoints of verl's manager of FSDP: the parts of all ranks merged, lost files found."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError
from shardproof.runs.maintenance import verify_foreign
from tests.unit.formats.peers import bits
from tests.unit.formats.torch.test_torch_checkpointing import local_of

State = dict[str, Any]


def run(seed: int) -> State:
    """A model, its optimizer and a schedule, after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 + seed)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}


def _sharded(value: Any, rank: int, ranks: int) -> Any:
    """The shard of a tensor on a rank, cut along the first dimension; other values are unchanged."""
    if not torch.is_tensor(value) or not value.dim():
        return value
    return DTensor.from_local(
        local_of(value.detach(), np.arange(ranks), rank, [Shard(0)]),
        DeviceMesh("cpu", np.arange(ranks)),
        [Shard(0)],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def write(folder: Path, state: State, ranks: int, *, flat: bool = False) -> None:
    """Writes what `FSDPCheckpointManager` writes for FSDP2.

    Args:
        folder: is made.
        state: of `run`.
        ranks: number of ranks.
        flat: True for the optimizer of FSDP1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            sharded = partial(_sharded, rank=rank, ranks=ranks)
            optimizer = copy.deepcopy(state["optimizer"].state_dict())
            for slots in optimizer["state"].values():
                for name, value in slots.items():
                    slots[name] = torch.full((2,), float(rank)) if flat and value.dim() else sharded(value)
            extra = {"lr_scheduler": state["lr_scheduler"].state_dict(), "rng": {"cpu": torch.tensor([rank])}}
            model = {name: sharded(value) for name, value in state["model"].state_dict().items()}
            for name, item in {"model": model, "optim": optimizer, "extra_state": extra}.items():
                torch.save(item, folder / f"{name}_world_size_{ranks}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def test_parts_of_all_ranks_fill_a_model_an_optimizer_and_a_schedule(tmp_path: Path) -> None:
    """As docs/frameworks/verl.md shows it."""
    saved, folder = run(0), tmp_path / "global_step_10" / "actor"
    write(folder, saved, 3)
    with sp.open(folder) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert (checkpoint.reader.name, checkpoint.world_size, checkpoint.step) == ("verl", 3, 10)
        assert [checkpoint[f"{rank}.extra_state.rng"]["cpu"].item() for rank in range(3)] == [0, 1, 2]
        report = verify_foreign(checkpoint)
        assert report.ok and report.unproved == 0 < report.bytes
    fresh = run(1)
    names = ["model", "optimizer", "lr_scheduler"]
    sp.load(folder, fresh, rename={"lr_scheduler": "extra_state.lr_scheduler"}, include=names)
    for name, value in saved["model"].state_dict().items():
        assert bits(fresh["model"].state_dict()[name]) == bits(value), name
    assert fresh["optimizer"].state_dict()["param_groups"] == saved["optimizer"].state_dict()["param_groups"]
    for number, slots in saved["optimizer"].state_dict()["state"].items():
        found = fresh["optimizer"].state_dict()["state"][number]
        assert {slot: bits(value) for slot, value in found.items()} == {
            slot: bits(value) for slot, value in slots.items()
        }
    assert fresh["lr_scheduler"].state_dict() == saved["lr_scheduler"].state_dict()


@pytest.mark.parametrize("lost", ["model", "optim", "extra_state"])
def test_a_file_that_a_rank_did_not_write_is_named(lost: str, tmp_path: Path) -> None:
    write(tmp_path, run(0), 2)
    (tmp_path / f"{lost}_world_size_2_rank_1.pt").unlink()
    with pytest.raises(NotCommittedError, match=f"{lost}_world_size_2_rank_1.pt is missing"):
        sp.open(tmp_path)


def test_files_of_two_saves_are_told_apart_by_the_configuration_alone(tmp_path: Path) -> None:
    write(tmp_path, run(0), 2)
    write(tmp_path, run(1), 1)
    with pytest.raises(
        FormatError, match=r"files of 1 and of 2 ranks, from several saves\. Move the files of the older save"
    ):
        sp.open(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint.world_size == 2
        assert bits(checkpoint["model.0.weight"].read()) == bits(run(0)["model"][0].weight)
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 3}))
    with pytest.raises(FormatError, match=r"world_size is 3, but the files are of \[1, 2\] ranks"):
        sp.open(tmp_path)


def test_flat_parts_of_an_optimizer_are_not_merged_and_are_noted(tmp_path: Path) -> None:
    write(tmp_path, run(0), 2, flat=True)
    with sp.open(tmp_path) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert "optimizer.state.0.exp_avg" not in checkpoint.reader.tensors
        assert checkpoint["1.optimizer.state.0.exp_avg"].read().tolist() == [1, 1]
        assert any("optimizer is that of FSDP1" in note for note in checkpoint.reader.notes)
        assert bits(checkpoint["model.0.weight"].read()) == bits(run(0)["model"][0].weight)

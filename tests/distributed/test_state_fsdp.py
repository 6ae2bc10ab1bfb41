"""Collecting and binding under real FSDP2 and tensor parallelism: pieces have the values of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import process_group, rank, run_ranks, world_size
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint

SECONDS = 120


class Block(nn.Module):
    """Sizes that no mesh divides, one of them smaller than the number of ranks."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def parallel(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Block(6 if "tp" in kind else 7)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 5)).square().sum().backward()
        optimizer.step()


def collect_trained(kind: str, folder: str) -> None:
    from torch.distributed.tensor import DTensor

    from shardproof.state import collect

    with process_group():
        model = parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fresh = collect({"m": model, "o": optimizer}, rank=rank(), world_size=world_size())
        assert not [entry for entry in fresh.tensors if entry.key.startswith("o.")]
        assert len(optimizer.state) == 0
        train(model, optimizer, 2)
        collected = collect({"m": model, "o": optimizer}, rank=rank(), world_size=world_size())
        # torch gathers the whole tensors by collectives, which the state package must do without
        full = {f"m.{name}": tensor.full_tensor() for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for slot, value in optimizer.state[parameter].items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                full[f"o.{name}.{slot}"] = whole
        torch.save((collected, full), Path(folder) / f"{rank()}.pt")


def load_and_compare(kind: str, folder: str, saved: int) -> None:
    from torch.distributed.tensor import DTensor

    parts = [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(saved)]  # noqa: TID251
    checkpoint = FakeCheckpoint([collected for collected, _ in parts])
    with process_group():
        model = parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        checkpoint.load({"m": model, "o": optimizer}, rank=rank(), world_size=world_size())
        for name, parameter in model.named_parameters():
            tensors: dict[str, Any] = {f"m.{name}": parameter}
            tensors |= {f"o.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()}
            for key, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(whole.detach(), parts[0][1][key]), key
                sharded = isinstance(tensor, DTensor)
                assert key.endswith(".step") or sharded == isinstance(parameter, DTensor), key
        train(model, optimizer, 1)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 4), ("hsdp", 4), ("fsdp+tp", 4)])
def test_pieces_have_the_values_of_torch_and_load_into_other_layouts(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    for outcome in run_ranks(ranks, collect_trained, kind, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    parts = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(ranks)]  # noqa: TID251
    checkpoint = FakeCheckpoint([collected for collected, _ in parts])
    for key, whole in parts[0][1].items():
        assert torch.equal(checkpoint.full[key], whole), key
        expected = ranks if key.endswith(".step") else None
        holders = checkpoint.holders(key)
        assert (holders == holders.flatten()[0]).all() and (
            expected is None or (holders == expected).all()
        ), key
    others = {"fsdp": ("fsdp", 3), "hsdp": ("one", 1), "fsdp+tp": ("fsdp+tp", 4)}
    for outcome in run_ranks(
        others[kind][1], load_and_compare, others[kind][0], str(tmp_path), ranks, timeout=SECONDS
    ):
        assert outcome.value is None


def look_at_fence(kind: str) -> None:
    from shardproof.engine.saving.write_watch import WriteWatch
    from shardproof.state import collect

    with process_group():
        model = parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 1)
        collected = collect({"m": model, "o": optimizer}, rank=rank(), world_size=world_size())
        pieces = [(entry.key, piece) for entry in collected.tensors for piece in entry.pieces]
        watch = WriteWatch([piece for _, piece in pieces], collected.stepped)
        assert [key for row, (key, _) in enumerate(pieces) if not watch.is_fenced(row)] == []


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 3), ("fsdp+tp", 4)])
def test_a_save_reads_padded_shards_live(kind: str, ranks: int) -> None:
    """FSDP2 keeps the shard of a rank with fewer rows in a larger buffer."""
    for outcome in run_ranks(ranks, look_at_fence, kind, timeout=SECONDS):
        assert outcome.value is None

"""A small model, its data, and its training without sharding: for the tests of `fsdp.fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.harness import rank, world_size

WORDS = 17


class Block(nn.Module):
    """Sizes that nothing divides, and parameters smaller than the number of ranks."""

    def __init__(self, width: int = 10, inner: int = 31) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Model(nn.Module):
    def __init__(self, blocks: int = 3, checkpointing: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(10, WORDS)
        self.unused = nn.Linear(3, 2) if unused else None
        self.checkpointing = checkpointing

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def made(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (world_size(),), mesh_dim_names=names)


def flat(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from shardproof.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def words_of(step: int, part: int) -> torch.Tensor:
    return torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(1000 * step + part))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(words).flatten(0, 1).float(), words.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    first: int = 0,
    clip: Callable[[], Any] | None = None,
) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, words_of(step, rank()))
        loss.backward()
        if clip is not None:
            clip()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0, max_norm: float = 0
) -> list[float]:
    """Training without parallelism on the batches of all ranks: this rank's losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(world_size()):
            loss = loss_of(model, words_of(step, part))
            loss.backward()
            if part == rank():
                losses.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return losses


def same(full: dict[str, Any], model: nn.Module) -> None:
    """Bit for bit."""
    expected = model.state_dict()
    assert full.keys() == expected.keys()
    for name, value in expected.items():
        difference = (full[name] - value).abs().max()
        assert torch.equal(full[name], value), f"{name} differs by up to {difference}"


class CollectiveLog:
    """Collectives of `shardproof.fsdp`, in order: name and elements."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __enter__(self) -> CollectiveLog:
        import torch.distributed as dist

        from shardproof.training.fsdp import flat_buffer

        self._stack = ExitStack()
        for module, name in (
            (flat_buffer, "all_gather"),
            (flat_buffer, "reduce_scatter"),
            (dist, "all_reduce"),
        ):
            call = self._recorded(name, getattr(module, name))
            self._stack.enter_context(patch.object(module, name, call))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _recorded(self, name: str, call: Any) -> Any:
        def recorded(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.calls.append((name, tensor.numel()))
            return call(tensor, *args, **options)

        return recorded

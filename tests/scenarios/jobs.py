"""Training jobs of every sharding with every optimizer, on any number of ranks of one test.

with Worlds(3) as worlds:
    job = Job(Setup("fsdp2", "hybrid", fraction=0.5), worlds, 3)
    losses = job.train(0, 5)
    job.save(path)
"""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardproof as sp
from shardproof import fsdp as flat
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from shardproof.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous
from shardproof.state import LocalRange, slots_of
from tests.harness import process_group, rank
from tests.scenarios.collectives import no_collectives
from tests.scenarios.models import Net, tokens

__all__ = ["Job", "Setup", "Worlds", "content", "unequal"]

LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Setup:
    """How a job trains."""

    sharding: str = "none"
    """One of none (DDP), fsdp2, and flat with the strategy after a space: "flat all"."""
    optimizer: str = "adamw"
    """One of adamw, hybrid, distributed, and distributed hybrid."""
    fraction: float = 0.0
    """Of the parameters that a hybrid optimizer updates on the CPU."""
    bf16: bool = False
    """Whether parameters are bfloat16 and the optimizer keeps masters."""
    aware: bool = False
    """Whether `exp_avg` is bfloat16 too."""
    mixed: bool = False
    """Whether parameters are gathered as bfloat16, and their shards are fp32, which "flat" offers."""
    tensor: int = 1
    """Tensor-parallel size."""

    def __str__(self) -> str:
        words = [self.sharding, self.optimizer]
        words += [str(self.fraction)] if "hybrid" in self.optimizer else []
        words += [name for name in ("bf16", "aware", "mixed") if getattr(self, name)]
        words += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return " ".join(words)


class Worlds:
    """The first n ranks as a world of their own, for every n: its mesh, and its rendezvous."""

    def __init__(self, size: int, *, deadline: float = 20.0) -> None:
        self.size, self.deadline = size, deadline
        self.meshes: dict[tuple[int, int], DeviceMesh] = {}
        self.meetings: dict[int, Rendezvous] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Worlds:
        self._exits.enter_context(process_group())
        store = dist.distributed_c10d._get_default_store()
        for n in range(1, self.size + 1):  # making a mesh is collective over all ranks
            for ways in [ways for ways in (1, 2) if n % ways == 0]:
                grid = torch.arange(n).reshape(-1, ways)
                self.meshes[n, ways] = DeviceMesh("cpu", grid, mesh_dim_names=("data", "tensor"))
            if n == 1:
                self.meetings[n] = LocalRendezvous()
            elif rank() < n:
                self.meetings[n] = StoreRendezvous(store, rank(), n, deadline=self.deadline, name=f"of {n}")
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            dist.barrier()
        for meeting in self.meetings.values():
            meeting.close()
        self._exits.close()


class Job:
    """A model and its optimizer in training on the first n ranks. Only those ranks make, train and save it.

    Args:
        setup: how it trains.
        worlds: the worlds of the test.
        n: number of ranks.
        seed: of the weights.
        order: shuffles the parameters of each of the optimizer's groups, where this rank may do so alone.
    """

    def __init__(
        self, setup: Setup, worlds: Worlds, n: int, *, seed: int = 1, order: random.Random | None = None
    ) -> None:
        mesh = worlds.meshes[n, setup.tensor]
        self.order = order
        self.setup, self.mesh, self.data = setup, mesh["data"], mesh["data"].get_group()
        self.meeting = worlds.meetings[n]
        self.net = Net(seed, mesh["tensor"].get_group() if setup.tensor > 1 else None)
        if setup.bf16:
            self.net.bfloat16()
        self.forward: nn.Module = self.net
        self._shard()
        self.optimizer = self._optimizer()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def train(self, first: int, last: int) -> list[float]:
        """Steps [first, last); their losses over all ranks."""
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.optimizer.step()
        return losses

    def backward(self, step: int) -> float:
        """The gradients of a step, for the optimizer; the loss over all ranks."""
        share, place = self.data.size(), self.data.rank()
        self.optimizer.zero_grad()
        loss = self.forward(tokens(step, 6 * place // share, 6 * (place + 1) // share), step)
        loss.backward()
        total = loss.detach().double()
        dist.all_reduce(total, group=self.data)
        return float(total) / share

    def save(self, path: str) -> None:
        """Saves. Asserts that no collective runs, and that the generator and the state stay as they were.

        A distributed optimizer may still be gathering. Reading it would end that, so it is not compared.
        """
        before = None if "distributed" in self.setup.optimizer else self.memory()
        generator = torch.get_rng_state()
        with no_collectives():
            sp.save(path, self.state, rendezvous=self.meeting)
        assert torch.equal(torch.get_rng_state(), generator), "saving stepped the generator"
        assert before is None or unequal(self.memory(), before) == [], "saving changed the state"

    def load(self, path: str, *, cast: bool = False) -> None:
        generator = torch.get_rng_state()
        with no_collectives():
            sp.load(path, self.state, rendezvous=self.meeting, cast=cast)
        assert torch.equal(torch.get_rng_state(), generator), "loading stepped the generator"

    def memory(self) -> dict[str, Any]:
        """This rank's own values by name: parameters, slots, options by parameter."""
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()
        found: dict[str, Any] = {name: _local(parameter) for parameter, name in names.items()}
        for one in slots_of(self.optimizer):
            name = names[one.parameter]
            items = {**one.tensors, **one.values}
            found |= {f"{name} {slot}": _local(item) for slot, item in items.items()}
            found[f"{name} slots"] = sorted(items)
            found[f"{name} options"] = copy.deepcopy(dict(one.options))
        return found

    def _shard(self) -> None:
        kind, _, strategy = self.setup.sharding.partition(" ")
        if kind == "fsdp2":
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.mesh)
        elif kind == "flat":
            precision = None
            if self.setup.mixed:
                precision = flat.MixedPrecision(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for part in (*self.net.blocks, self.net):
                flat.fully_shard(part, mesh=self.mesh, strategy=strategy, mixed_precision=precision)
        elif self.mesh.size() > 1 and "distributed" not in self.setup.optimizer:
            self.forward = DistributedDataParallel(
                self.net, process_group=self.data, find_unused_parameters=True
            )

    def _optimizer(self) -> Any:
        setup = self.setup
        # Without fused steps, every layout trains to equal bits.
        options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.1, "fused": False}
        if setup.optimizer == "adamw":
            return torch.optim.AdamW(self._groups(), **options)
        narrow = {"exp_avg": torch.bfloat16} if setup.aware else None
        offload = {"cpu_fraction": setup.fraction, "overlap": True, "state_dtypes": narrow}
        if setup.optimizer == "hybrid":
            masters = torch.float32 if setup.bf16 else None
            return HybridDeviceOptimizer(
                self._groups(), torch.optim.AdamW, master_dtype=masters, **offload, **options
            )
        inner: Any = torch.optim.AdamW
        if setup.optimizer == "distributed hybrid":
            inner = partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, **offload)
        return DistributedOptimizer(
            self.net,
            inner,
            param_groups=self._groups(),
            process_group=self.data,
            bucket_bytes=1024,
            state_dtypes=narrow if inner is torch.optim.AdamW else None,
            **options,
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Matrices are decayed, the others are not."""
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() <= 1]
        for group in (matrices, others) if self.order is not None else ():
            self.order.shuffle(group)
        return [{"params": others, "weight_decay": 0.0}, {"params": matrices}]


def content(path: str) -> dict[str, Any]:
    """All that a checkpoint holds, tensors whole."""
    with sp.open(path) as checkpoint:
        items = {key: checkpoint[key] for key in checkpoint}
        return {key: item.read() if hasattr(item, "read") else item for key, item in items.items()}


def unequal(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names whose values are not bit for bit the same."""
    wrong = sorted(left.keys() ^ right.keys())
    for name in sorted(left.keys() & right.keys()):
        a, b = left[name], right[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.dtype == b.dtype and torch.equal(a, b)
        else:
            same = a == b
        if not same:
            wrong.append(name)
    return wrong


def _local(value: Any) -> Any:
    if isinstance(value, LocalRange):
        return value.buffer.detach().clone()
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

"""Megatron-Core dist_checkpointing: torch_dist, fully parallel, and async by a forked process.

The peer is written for CUDA. Without CUDA, `stand_ins` replaces its queries for a device with the CPU, and
triton, which it imports and never calls here, with an empty module. The code that moves bytes to the files is
not replaced.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed.tensor import DTensor, Shard

from peers.subject import Subject
from peers.way import FINISHED, Save, Way, local


class Absent(types.ModuleType):
    """A module from which any name can be imported: a function that returns its argument."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unchanged


def unchanged(given: Any = None, **options: Any) -> Any:
    """Serves as `jit`, with options or without, and as `constexpr`."""
    return unchanged if given is None else given


def stand_ins() -> None:
    """Replaces what the peer needs to be imported, and to save and load, without CUDA."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    importlib.import_module("torch._inductor.compile_fx")  # torch itself must find that triton is missing
    if "triton" not in sys.modules:
        triton = sys.modules["triton"] = Absent("triton")
        triton.language = sys.modules["triton.language"] = Absent("triton.language")  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None
        torch.Tensor.cuda = lambda tensor, *options, **more: tensor  # type: ignore[assignment, method-assign]


class OnCpu(types.ModuleType):
    """A stand-in for torch in a module of the peer that makes tensors on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")


if not torch.cuda.is_available():
    stand_ins()

from megatron.core import dist_checkpointing as dc  # noqa: E402
from megatron.core.dist_checkpointing import exchange_utils  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

for name in ("triton", "triton.language"):
    if isinstance(sys.modules.get(name), Absent):
        del sys.modules[name]
if not torch.cuda.is_available():
    exchange_utils.torch = OnCpu("torch")
    begun = ShardedTensor.init_data
    ShardedTensor.init_data = lambda sharded, device, init_fn=torch.empty: begun(sharded, "cpu", init_fn)


def wrapped(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """This rank's part in the peer's description: an even split of one axis, or a replica."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    (placement,) = tensor.placements
    assert isinstance(placement, Shard)
    return ShardedTensor.from_rank_offsets(key, local(tensor).detach(), (placement.dim, rank, world))


STAND_INS = "torch.cuda's current_device and synchronize replaced for the CPU; triton by an empty module"


class Megatron(Way):
    name = "Megatron torch_dist"
    package = "megatron-core"
    flushes = "fsync of each file"
    driven = "" if torch.cuda.is_available() else STAND_INS
    in_place = False

    def prepare(self, subject: Subject) -> None:
        self.sharded = {key: wrapped(key, tensor) for key, tensor in subject.flat.items()}
        self.targets = subject.flat
        self.save_strategy = dc.serialization.get_default_save_sharded_strategy()
        self.load_strategy: Any = dc.serialization.get_default_load_sharded_strategy()

    def begin(self, number: int) -> Save:
        self._folder(number)
        dc.save(dict(self.sharded), str(self.path(number)), self.save_strategy)
        return FINISHED

    def load(self, number: int) -> None:
        loaded = dc.load(dict(self.sharded), str(self.path(number)), self.load_strategy)
        with torch.no_grad():
            for key, tensor in self.targets.items():
                if loaded[key].data_ptr() != local(tensor).data_ptr():
                    local(tensor).copy_(loaded[key])

    def _folder(self, number: int) -> None:
        if dist.get_rank() == 0:
            self.path(number).mkdir(parents=True, exist_ok=True)
        dist.barrier()


class MegatronFullyParallel(Megatron):
    name = "Megatron torch_dist, fully parallel"
    driven = (
        Megatron.driven and Megatron.driven + '; also the tensors on "cuda" over which its load exchanges'
    )

    def prepare(self, subject: Subject) -> None:
        super().prepare(subject)
        self.save_strategy = FullyParallelSaveStrategyWrapper(self.save_strategy)
        self.load_strategy = FullyParallelLoadStrategyWrapper(self.load_strategy)


class MegatronAsync(Megatron):
    name = "Megatron torch_dist, async process"
    driven = (
        Megatron.driven and Megatron.driven + "; "
    ) + "its `mcore` strategy: a process forked for each save, which holds the values"
    asynchronous = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.queue = AsyncCallsQueue()

    def begin(self, number: int) -> Save:
        self._folder(number)
        request = dc.save(
            dict(self.sharded),
            str(self.path(number)),
            self.save_strategy,
            async_sharded_save=True,
            async_strategy="mcore",
        )
        self.queue.schedule_async_request(request)
        return Save(lambda: self.queue.maybe_finalize_async_calls(blocking=True), self._poll)

    def _poll(self) -> bool:
        self.queue.maybe_finalize_async_calls(blocking=False)
        return bool(self.queue.get_num_unfinalized_calls() == 0)

    def close(self) -> None:
        self.queue.close()

"""Orbax: the same bytes as jax arrays over one CPU device per process, with async and sync saves."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peers.subject import Subject
from peers.way import FINISHED, Save, Way, local


def connect() -> None:
    """Connects the ranks to one jax program, with gloo for its collectives."""
    if jax.distributed.is_initialized():
        return
    address: list[Any] = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = [f"127.0.0.1:{probe.getsockname()[1]}"]
    dist.broadcast_object_list(address)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address[0], dist.get_world_size(), dist.get_rank())


@lru_cache(maxsize=1)
def copied(subject: Subject) -> dict[str, Any]:
    """The state as jax arrays, one copy for both ways."""
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    arrays: dict[str, Any] = {}
    for key, tensor in subject.flat.items():
        part = local(tensor).detach()
        spec = PartitionSpec("ranks") if part.shape != tensor.shape else PartitionSpec()
        arrays[key] = jax.make_array_from_single_device_arrays(
            tuple(tensor.shape),
            NamedSharding(mesh, spec),
            [jax.device_put(np.array(part.cpu().numpy()), jax.local_devices()[0])],
        )
    return arrays


class OrbaxAsync(Way):
    name = "Orbax, async"
    package = "orbax-checkpoint"
    flushes = "fsync of each file (TensorStore's file_io_sync, its default)"
    driven = "a jax copy of the state, one CPU device a process; jax arrays cannot change under a save"
    asynchronous = True
    in_place = False
    holds_copy = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        connect()
        self.checkpointer = ocp.StandardCheckpointer()
        self.waiter = ThreadPoolExecutor(1)

    def prepare(self, subject: Subject) -> None:
        self.arrays = copied(subject)

    def begin(self, number: int) -> Save:
        self.checkpointer.save(self.path(number).absolute(), self.arrays)
        ended = self.waiter.submit(self.checkpointer.wait_until_finished)
        return Save(ended.result, ended.done)

    def load(self, number: int) -> None:
        self.loaded_arrays = self.checkpointer.restore(self.path(number).absolute(), self.arrays)
        jax.block_until_ready(self.loaded_arrays)

    def loaded(self, subject: Subject) -> list[torch.Tensor]:
        return [
            torch.from_numpy(np.array(self.loaded_arrays[key].addressable_data(0))) for key in subject.flat
        ]

    def close(self) -> None:
        self.checkpointer.close()


class Orbax(OrbaxAsync):
    name = "Orbax"
    asynchronous = False

    def begin(self, number: int) -> Save:
        super().begin(number).wait()
        return FINISHED

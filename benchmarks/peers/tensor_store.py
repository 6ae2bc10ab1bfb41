"""TensorStore: a zarr3 array per tensor and a chunk per rank, written from the memory of the tensors."""

from __future__ import annotations

from typing import Any

import tensorstore as ts
import torch.distributed as dist

from peers.subject import Subject
from peers.way import FINISHED, Save, Way, local


class TensorStore(Way):
    name = "TensorStore, zarr3"
    package = "tensorstore"
    flushes = "fsync of each file (file_io_sync, its default)"
    driven = "rank 0 makes the arrays; then each rank writes its chunks, and rank 0 the replicated tensors"

    def prepare(self, subject: Subject) -> None:
        self.tensors = subject.flat
        self.context = ts.Context()

    def begin(self, number: int) -> Save:
        if dist.get_rank() == 0:
            made = [self._open(number, key, create=True) for key in self.tensors]
            stores = [opening.result() for opening in made]
        dist.barrier()
        if dist.get_rank() != 0:
            opened = [self._open(number, key) for key in self.tensors]
            stores = [opening.result() for opening in opened]
        writes = [
            store[self._box(key)].write(
                local(tensor).detach().numpy(), can_reference_source_data_indefinitely=True
            )
            for store, (key, tensor) in zip(stores, self.tensors.items(), strict=True)
            if dist.get_rank() == 0 or self._is_sharded(key)
        ]
        for write in writes:
            write.result()
        dist.barrier()
        return FINISHED

    def load(self, number: int) -> None:
        opened = [self._open(number, key) for key in self.tensors]
        reads = []
        for opening, (key, tensor) in zip(opened, self.tensors.items(), strict=True):
            into = ts.array(local(tensor).detach().numpy(), copy=False, write=True)
            reads.append(into.write(opening.result()[self._box(key)]))
        for read in reads:
            read.result()

    def _open(self, number: int, key: str, *, create: bool = False) -> Any:
        tensor = self.tensors[key]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.path(number)}/{key}/"}}
        made = {
            "create": True,
            "dtype": ts.float32,
            "shape": tuple(tensor.shape),
            "chunk_layout": ts.ChunkLayout(chunk_shape=tuple(local(tensor).shape)),
        }
        return ts.open(spec, context=self.context, open=True, **(made if create else {}))

    def _is_sharded(self, key: str) -> bool:
        tensor = self.tensors[key]
        return tensor.shape != local(tensor).shape

    def _box(self, key: str) -> Any:
        tensor = self.tensors[key]
        part = local(tensor)
        start = dist.get_rank() * part.shape[0] if self._is_sharded(key) else 0
        return ts.d[0][start : start + part.shape[0]] if part.ndim else ...

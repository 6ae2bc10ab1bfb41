"""One file per rank: torch.save and safetensors. No plan, commit or resharding: the minimum of a save."""

from __future__ import annotations

import safetensors.torch
import torch
import torch.distributed as dist

from peers.subject import Subject
from peers.way import FINISHED, Save, Way, local


class TorchSave(Way):
    name = "torch.save, a file a rank"
    package = "torch"
    flushes = "no"
    driven = "local tensors; each rank loads its own file (memory mapped) and copies it into place"

    def prepare(self, subject: Subject) -> None:
        self.tensors = {key: local(tensor).detach() for key, tensor in subject.flat.items()}

    def begin(self, number: int) -> Save:
        self.path(number).mkdir(parents=True, exist_ok=True)
        torch.save(self.tensors, self.path(number) / f"{dist.get_rank()}.pt")
        return FINISHED

    def load(self, number: int) -> None:
        loaded = torch.load(self.path(number) / f"{dist.get_rank()}.pt", mmap=True, weights_only=True)  # noqa: TID251
        for key, tensor in self.tensors.items():
            tensor.copy_(loaded[key])


class SafetensorsFile(TorchSave):
    name = "safetensors, a file a rank"
    package = "safetensors"

    def begin(self, number: int) -> Save:
        self.path(number).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(self.tensors, self.path(number) / f"{dist.get_rank()}.safetensors")
        return FINISHED

    def load(self, number: int) -> None:
        path = self.path(number) / f"{dist.get_rank()}.safetensors"
        with safetensors.safe_open(path, "pt") as file:
            for key, tensor in self.tensors.items():
                tensor.copy_(file.get_tensor(key))

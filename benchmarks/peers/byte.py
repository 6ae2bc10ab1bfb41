"""ByteCheckpoint: sync and fast_saving, by its FSDP2 framework."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import bytecheckpoint
import torch
import torch.distributed as dist

from peers.subject import Subject
from peers.way import FINISHED, Save, Way

logging.getLogger("bytecheckpoint").setLevel(logging.ERROR)


class Stateful:
    """Returns the tensors from `state_dict()`: the peer calls no other method of a model to save."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, loaded: dict[str, torch.Tensor]) -> None:
        """Checks that the peer has filled the tensors in place."""
        assert all(loaded[key] is tensor for key, tensor in self.tensors.items())


class ByteCheckpoint(Way):
    name = "ByteCheckpoint"
    package = "bytecheckpoint"
    flushes = "fsync of each file of tensors"
    driven = "all tensors, moments too, as one model's state dict, with framework fsdp2"

    def prepare(self, subject: Subject) -> None:
        self.state = {"model": Stateful(subject.flat)}

    def begin(self, number: int) -> Save:
        bytecheckpoint.save(str(self.path(number)), self.state, framework="fsdp2")
        return FINISHED

    def load(self, number: int) -> None:
        bytecheckpoint.load(str(self._saved(number)), self.state, framework="fsdp2")

    def _saved(self, number: int) -> Path:
        return self.path(number)


class ByteCheckpointFast(ByteCheckpoint):
    name = "ByteCheckpoint, fast_saving"
    driven = ByteCheckpoint.driven + "; the callback on rank 0 reports its end"
    asynchronous = True

    def begin(self, number: int) -> Save:
        ended = threading.Event()
        bytecheckpoint.save(
            str(self.path(number)),
            self.state,
            framework="fsdp2",
            fast_saving=True,
            global_steps=number,
            callback=lambda *given: ended.set(),
        )
        leads = dist.get_rank() == 0

        def wait() -> None:
            if leads and not ended.wait(600):
                raise TimeoutError("ByteCheckpoint did not call back within 600 s")
            dist.barrier()

        return Save(wait, lambda: ended.is_set() or not leads)

    def _saved(self, number: int) -> Path:
        return self.path(number) / f"global_step_{number}"

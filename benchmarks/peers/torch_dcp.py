"""torch.distributed.checkpoint: save, async_save by thread and by process, load."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from peers.subject import Subject
from peers.way import FINISHED, Save, Way


class TorchDcp(Way):
    name = "torch DCP"
    package = "torch"
    flushes = "fsync of each file"

    def prepare(self, subject: Subject) -> None:
        self.tree = subject.tree

    def begin(self, number: int) -> Save:
        dcp.save(self.tree, checkpoint_id=self.path(number))
        return FINISHED

    def load(self, number: int) -> None:
        dcp.load(self.tree, checkpoint_id=self.path(number))


class TorchDcpThread(TorchDcp):
    name = "torch DCP, async thread"
    driven = "one stager for all saves, so that staging reuses its memory; a process group of its own"
    asynchronous = True
    kind = AsyncCheckpointerType.THREAD
    shared = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # The next step tears a stage in the background unless the loop waits for it, so that is another way.
        self.stager = self.new_stager()
        self.group = dist.new_group(backend="gloo")

    def new_stager(self) -> DefaultStager:
        pinned = torch.accelerator.is_available()  # also the value for non-blocking copies
        return DefaultStager(StagingOptions(pinned, self.shared, self.in_background(), pinned))

    def in_background(self) -> bool:
        return False

    def begin(self, number: int) -> Save:
        if not self.stager._state_dict_stager._deepcopy_dispatch:  # torch 2.11 closes it after a save
            self.stager = self.new_stager()
        answer = dcp.async_save(
            self.tree,
            checkpoint_id=self.path(number),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            process_group=self.group,
        )
        if isinstance(answer, dcp.state_dict_saver.AsyncSaveResponse):
            self.staged = answer.staging_completion
            answer = answer.upload_completion
        return Save(answer.result, answer.done)

    def close(self) -> None:
        self.stager.close()


class TorchDcpThreadBackgroundStage(TorchDcpThread):
    name = "torch DCP, async thread, staged in background"
    driven = "as the last; staging by its thread: the loop must wait for it before it changes a tensor"

    def in_background(self) -> bool:
        return True

    def may_change(self) -> None:
        self.staged.result()


class TorchDcpProcess(TorchDcpThread):
    name = "torch DCP, async process"
    driven = "one stager in shared memory for all saves"
    kind = AsyncCheckpointerType.PROCESS
    shared = True

"""shardproof: sync, and in the background with the fence (module and optimizer) or staged (bare tensors)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import shardproof as sp
from peers.subject import Subject
from peers.way import FINISHED, Save, Way


class Shardproof(Way):
    name = "shardproof"
    package = "shardproof"
    flushes = "yes: O_DIRECT or fsync of every file and folder, and every byte has a digest"
    snapshot: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.checkpointer = sp.Checkpointer(folder, **self.snapshot)

    def path(self, number: int) -> Path:
        return self.folder / f"step-{number:08d}"

    def prepare(self, subject: Subject) -> None:
        self.state: Any = subject.tree

    def begin(self, number: int) -> Save:
        self.checkpointer.save(number, self.state).result()
        return FINISHED

    def load(self, number: int) -> None:
        self.checkpointer.restore(self.state, step=number)


class ShardproofStage(Shardproof):
    name = "shardproof, async, stage"
    asynchronous = True
    snapshot: ClassVar[dict[str, Any]] = {"snapshot": "stage"}

    def begin(self, number: int) -> Save:
        pending = self.checkpointer.save(number, self.state)
        return Save(pending.result, pending.done)


class ShardproofFence(ShardproofStage):
    name = "shardproof, async, fence"
    needs_optimizer = True
    driven = "the module and its optimizer themselves; the next optimizer step copies what is not yet written"
    snapshot: ClassVar[dict[str, Any]] = {"snapshot": "fence"}

    def prepare(self, subject: Subject) -> None:
        assert subject.module is not None, "the fence needs an optimizer"
        self.state = {"model": subject.module, "optimizer": subject.optimizer}
        self.optimizer = subject.optimizer

    def may_change(self) -> None:
        self.checkpointer.fence()

"""One trainer process of the demo: ``python -m examples.demo.train TASK.json`` under torchrun.

`Trainer.__init__`, `Trainer.restore` and `Trainer.save` show all calls of a training script to shardproof.
The other code trains, and writes the records that the demo evaluates.

A kill at a random time would miss a save that takes milliseconds. So the last rank stops in the middle of a
write (`stop_in_the_middle`). The parent waits for this, and then kills the whole job.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardproof as sp
from examples.demo.model import ModelSize, TextLoader, Transformer
from examples.demo.parallel import (
    RankPosition,
    average_gradients,
    clip_gradients,
    make_optimizer,
    spread,
    state_digests,
)
from examples.demo.story import BATCH, Task
from shardproof._utils.topology import ranks_here
from shardproof.storage import LocalStorage, ObjectStorage, Sink, Storage, is_url

__all__ = ["Trainer", "draws", "leave", "run_task", "stop_in_the_middle"]

PATIENCE = 300.0
"""Seconds that a stopped rank waits for the kill."""


def stop_in_the_middle(folder_name: str, mark: Path, kind: type[LocalStorage] | type[ObjectStorage]) -> None:
    """Make this process stop inside its first write into a checkpoint folder of that name; it makes `mark`.

    This replaces a method of the class of the storage, because the engine has no option for failures.
    """
    create: Callable[..., Sink] = kind.create

    def create_unfinished(storage: Storage, name: str) -> Sink:
        sink = create(storage, name)
        return _TornFile(sink, mark) if folder_name in f"{storage.location}/{name}" else sink

    setattr(kind, "create", create_unfinished)  # noqa: B010 (mypy refuses to assign a method)


class _TornFile:
    """A file whose first write stops after half of its bytes."""

    def __init__(self, sink: Sink, mark: Path) -> None:
        self._sink = sink
        self._mark = mark

    def write_at(self, start: int, buffer: memoryview) -> None:
        whole_blocks = len(buffer) // 2 // 4096 * 4096
        self._sink.write_at(start, buffer[: whole_blocks or len(buffer)])
        self._mark.touch()
        threading.Event().wait(PATIENCE)
        raise TimeoutError(
            f"stopped in the middle of a write for the demo, and not killed within {PATIENCE:.0f} s"
        )

    def finish(self, size: int) -> None:
        self._sink.finish(size)

    def abort(self) -> None:
        self._sink.abort()


WARM_UP = 4
DEADLINE = 60.0
"""Seconds of silence after which a rank, or a collective, counts as lost."""

AnyTask = TypeVar("AnyTask", bound=Task)


class Trainer:
    """One rank of a run."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = _device(task.device)
        if task.layout.ranks > 1:
            dist.init_process_group(_backend(self.device), timeout=timedelta(seconds=DEADLINE))
        self._records = task.records(self.rank).open("a")
        self.record("start", pid=os.getpid())

        # A resumed run starts from other weights and generators than the previous run, so that only the
        # checkpoint can give the right state.
        size = ModelSize()
        self.place = RankPosition.of(task.layout, self.device)
        self.model = Transformer(size, seed=task.seed).to(self.device)
        spread(self.model, self.place, task.layout.sharding)
        self.record("model", parameters=sum(parameter.numel() for parameter in self.model.parameters()))
        random.seed(task.seed + self.rank)
        np.random.seed(task.seed + self.rank)
        torch.manual_seed(task.seed + self.rank)
        self.optimizer = make_optimizer(self.model, task.layout, self.place)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, partial(_rate, horizon=task.horizon)
        )
        self.data = TextLoader(
            Path(task.text).read_bytes(),
            batch=BATCH,
            length=size.context,
            rows=(self.place.data_rank, task.layout.data),
            seed=task.seed,
        )

        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
            "rng": sp.RandomState(),
        }
        self.checkpointer = sp.Checkpointer(
            task.checkpoints,
            keep=sp.KeepLatest(3),
            deadline=DEADLINE,
            storage_options=task.storage_options,
        )
        if task.die_in_save_of and self.rank == task.layout.ranks - 1:
            kind = ObjectStorage if is_url(task.checkpoints) else LocalStorage
            stop_in_the_middle(f"step-{task.die_in_save_of:08d}", task.stalled, kind)
        self.step = 0

    def restore(self, **options: Any) -> None:
        """Fill the state from the newest checkpoint; `options` go to `Checkpointer.restore`."""
        begin = time.perf_counter()
        step: int | None = self.checkpointer.restore(self.state, **options)
        if step is None:
            raise RuntimeError(f"no checkpoint to resume from in {self.task.checkpoints}")
        seconds = time.perf_counter() - begin
        passed_over = {str(newer.step): newer.reason for newer in self.checkpointer.passed_over}
        report = self.checkpointer.last_restore
        folder = "" if report is None else report.location.rsplit("/", 1)[-1]
        self.record("restored", step=step, folder=folder, seconds=seconds, passed_over=passed_over)
        self.record_state("restored", step)
        self.step = step

    def run(self) -> int:
        """Train to the task's last step, with saves. Returns the exit code."""
        task = self.task
        if task.restore:
            self.restore()
        while self.step < task.stop:
            begin = time.perf_counter()
            loss, rate = self.train_step()
            self.step += 1
            seconds = time.perf_counter() - begin
            self.record("step", step=self.step, loss=loss, rate=rate, draws=draws(), seconds=seconds)
            if task.save_every and self.step % task.save_every == 0:
                self.save()
        self.record_state("end", self.step)
        self.record("done")
        return 0

    def save(self) -> None:
        """Save this step, and record the digests for a comparison with a later run."""
        self.record_state("saved", self.step)
        self.record("saving", step=self.step)
        begin = time.perf_counter()
        self.checkpointer.save(self.step, self.state).result()
        self.record("saved", step=self.step, seconds=time.perf_counter() - begin)

    def train_step(self) -> tuple[float, float]:
        """Run one step. Returns the loss of the whole batch and the learning rate."""
        share = self.compute_gradients(*self.data.next())
        rate = self.apply_gradients()
        return self.mean_loss(share), rate

    def compute_gradients(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward. Returns this rank's share of the loss of the whole batch, 0-D float64."""
        tokens, targets = tokens.to(self.device), targets.to(self.device)
        scores = self.model(tokens)
        total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        # Gradients are averaged over the data-parallel ranks. With this scale, the average is the gradient of
        # the mean over the whole batch, for any number of rows per rank.
        every = BATCH * tokens.shape[1]
        torch.autograd.backward(total * (self.task.layout.data / every))
        return total.detach().double() / every

    def apply_gradients(self) -> float:
        """Step the optimizer and the schedule. Returns the learning rate of the step."""
        average_gradients(self.model, self.task.layout, self.place)
        clip_gradients(self.model, self.optimizer, 1.0)
        rate = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return rate

    def mean_loss(self, share: torch.Tensor) -> float:
        """The sum of the data-parallel ranks' shares."""
        if self.place.mesh is not None:
            dist.all_reduce(share, group=self.place.data_group)
        return float(share)

    def record_state(self, when: str, step: int) -> None:
        """Record the digests of all tensors, and the states that are plain values."""
        tensors = state_digests(self.model, self.optimizer, self.place.data_group)
        plain = {"scheduler": self.scheduler.state_dict(), "data": self.data.state_dict()}
        self.record("digests", when=when, step=step, tensors=tensors, plain=repr(plain))

    def record(self, event: str, **values: Any) -> None:
        """Append one line to this rank's records."""
        self._records.write(json.dumps({"event": event, **values}) + "\n")
        self._records.flush()

    def close(self) -> None:
        """Close the records and leave the process group."""
        self._records.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rate(step: int, horizon: int) -> float:
    """Learning rate as a fraction of its peak: warm-up, then a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = min(1.0, (step - WARM_UP) / max(1, horizon - WARM_UP))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def _device(name: str) -> torch.device:
    """The device of this rank. Ranks share devices if there are fewer devices than ranks."""
    # Runs of the same layout are compared bit for bit, so the order of sums must be deterministic.
    torch.use_deterministic_algorithms(True)
    if name == "cpu":
        return torch.device("cpu")
    devices = torch.get_device_module(name)
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0")) % devices.device_count())
    devices.set_device(device)
    if name == "cuda":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _backend(device: torch.device) -> str:
    """gloo, and NCCL if every rank has its own device (NCCL refuses two ranks on one device)."""
    own = device.type == "cuda" and torch.cuda.device_count() >= ranks_here()
    return "cpu:gloo,cuda:nccl" if own else "gloo"


def draws() -> list[float]:
    """Draw one number from each generator, to check that a restore has restored the generators."""
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]


def run_task(make: Callable[[AnyTask], Trainer], task: AnyTask) -> int:
    """Run a trainer to its end. Returns its exit code. An error is recorded before it is raised."""
    torch.set_num_threads(1)
    try:
        trainer = make(task)
        code = trainer.run()
        trainer.close()
    except Exception as error:
        with task.records(int(os.environ.get("RANK", "0"))).open("a") as records:
            records.write(json.dumps({"event": "failed", "error": f"{type(error).__name__}: {error}"}) + "\n")
        raise
    return code


def leave(code: int) -> None:
    """Exit this process without a shutdown of the interpreter.

    A thread of gloo needs the interpreter to release the tensors of a collective, perhaps after their last
    use. During a shutdown of the interpreter, Python ends such a thread by force, and C++ aborts the process.
    The caches of DTensor keep the process group alive, so `destroy_process_group` does not join these
    threads.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(run_task(Trainer, Task.read(Path(sys.argv[1]))))

"""A step runs again, with components that keep state between backward passes, while a save is under way.

Reducers, gathered parameters, flat gradient buffers, loss scales and autocast keep state of the first run.
Meanwhile, the save of the step before reads the parameters that the step uses. Neither may change the
weights, the checkpoint or the generators.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardproof as sp
from shardproof import fsdp, optim, rerun
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import process_group, rank, run_ranks

STEPS, FAULT, SAVED = 5, 2, 2
"""Steps; the one with the fault, from 0; the checkpoint that is written meanwhile."""
KINDS = ["ddp and a loss scale", "fsdp2", "fully_shard", "DistributedOptimizer"]


class Second(rerun.FaultInjector):
    """Only the second microbatch's loss is wrong."""

    def hits(self, *, step: int, rank: int, call: int) -> bool:
        return call == 1 and super().hits(step=step, rank=rank, call=call)


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*layers)


class Trainer:
    """One rank's model, optimizer and what else its kind needs."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, network()
        self.scaler: Any = None
        if kind == "ddp and a loss scale":
            self.model = DistributedDataParallel(self.model)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        elif kind in ("fsdp2", "fully_shard"):
            shard = fsdp.fully_shard if kind == "fully_shard" else dist.fsdp.fully_shard
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
            for module in (*self.model, self.model):
                shard(module, mesh=mesh)
        if kind == "DistributedOptimizer":
            scale = optim.DynamicLossScale(256.0, interval=2)
            self.optimizer: Any = optim.DistributedOptimizer(
                self.model, torch.optim.AdamW, lr=0.01, loss_scale=scale, bucket_bytes=512
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(50 + rank())

    def gradients(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Computes the gradients of one microbatch; returns its loss."""
        waits = {"ddp and a loss scale": self.model, "DistributedOptimizer": self.optimizer}.get(self.kind)
        lazy = nullcontext() if last or waits is None else waits.no_sync()
        with lazy, torch.autocast("cpu", torch.bfloat16, enabled=self.scaler is not None):
            loss: torch.Tensor = self.model(batch).float().square().mean()
            scaled = loss
            if self.kind == "DistributedOptimizer":
                scaled = self.optimizer.scale(loss)
            elif self.scaler is not None:
                scaled = self.scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def apply(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def digest(self) -> str:
        """Digest of this rank's parameters, optimizer state and generator."""
        digest = hashlib.sha256()
        if self.kind == "DistributedOptimizer":
            self.optimizer.synchronize()
        own = [*self.model.parameters()]
        if self.kind != "DistributedOptimizer":
            own += [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        for tensor in own:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()


def batches() -> Iterator[torch.Tensor]:
    drawn = torch.Generator().manual_seed(900 + rank())
    while True:
        yield torch.randn(4, 8, generator=drawn)


def train(kind: str, folder: str, faulty: bool) -> dict[str, Any]:
    with process_group():
        trainer, runs, release = Trainer(kind), 0, threading.Event()
        storage = FaultyStorage(LocalStorage(folder))
        checkpointer = sp.Checkpointer(storage)
        data = rerun.ReplayableIterator(batches())
        machine = rerun.RerunMachine(
            inject=Second("transient", steps=[FAULT], ranks=[1]) if faulty else None,
            identity=rerun.DeviceIdentity("node", f"uuid-{rank()}", rank()),
        )
        state = trainer.state | {"rerun": machine}
        kinds, norms = [], []
        with machine:
            for step in range(STEPS):
                while machine.should_run(data):
                    runs += 1
                    if faulty and runs == FAULT + 2:
                        release.set()  # the second run of the step: the save was held through the first
                    trainer.optimizer.zero_grad()
                    for last in (False, True):
                        loss = trainer.gradients(next(data), last=last)
                        machine.validate(loss, rejected=rerun.not_finite, message="loss")
                    if kind == "DistributedOptimizer":
                        norm = trainer.optimizer.clip_grad_norm_(0.5)
                        machine.validate(norm, rejected=rerun.not_finite, message="norm")
                decision = machine.decide()
                kinds.append(decision.attribution and str(decision.attribution))
                norms.append(float(loss))
                trainer.apply()
                if step + 1 == SAVED:
                    storage.arm(0, lambda *_: release.wait(30), only=("write_at",))
                    if not faulty:
                        release.set()
                    pending = checkpointer.save(SAVED, state)
                    saved = trainer.digest()
        pending.result()
        end = trainer.digest()
        again = Trainer(kind)
        random_state = torch.get_rng_state()
        assert checkpointer.restore(again.state) == SAVED
        torch.set_rng_state(random_state)
        loaded = hashlib.sha256()
        for parameter in again.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            loaded.update(local.detach().numpy().tobytes())
        checkpointer.wait()
    found = {"runs": runs, "losses": norms, "end": end, "saved": saved, "loaded": loaded.hexdigest()}
    return found | {"kinds": kinds}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ran_twice_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    clean = [one.value for one in run_ranks(2, train, kind, str(tmp_path / "clean"), False)]
    found = [one.value for one in run_ranks(2, train, kind, str(tmp_path / "faulty"), True)]
    for one, other in zip(found, clean, strict=True):
        kinds = one.pop("kinds")
        assert [text is not None for text in kinds] == [step == FAULT for step in range(STEPS)]
        assert kinds[FAULT].startswith("transient fault in step 2: rank 1 on device 1 (uuid-1)")
        assert (one.pop("runs"), other.pop("runs")) == (STEPS + 1, STEPS)
        other.pop("kinds")
        assert one == other

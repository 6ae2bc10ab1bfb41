"""Trains with Ray Train: `train_ray.py RUN WORKERS STEPS KILLED_STEP`.

The workers of the first attempt kill themselves in the save of KILLED_STEP, and Ray Train starts them again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn

import shardproof as sp


def work(config: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from shardproof.frameworks.ray_train import report, restore

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Linear(9, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (ray.train.get_context().get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "rng": sp.RandomState()}
    step = restore(state) or 0
    is_first = step == 0
    if not is_first:
        sp.save(f"{config['run']}-restored-{step}", state, overwrite=True)

    def kill_within(event: sp.events.Event) -> None:
        name = f"checkpoint_{config['killed']:08d}"
        if is_first and event.operation.endswith(name) and (event.phase, event.kind) == ("write", "end"):
            os.kill(os.getpid(), signal.SIGKILL)

    sp.events.subscribe(kill_within)
    while step < config["steps"]:
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report({"step": step}, state, step=step)


def main() -> None:
    run, workers, steps, killed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(sp.__file__))
    ray.init(num_cpus=4, include_dashboard=False)
    trainer = ray.train.torch.TorchTrainer(
        work,
        train_loop_config={"run": str(run), "steps": steps, "killed": killed},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            storage_path=str(run.parent),
            name=run.name,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    print("reported", trainer.fit().metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()

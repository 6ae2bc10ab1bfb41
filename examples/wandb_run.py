"""A run of Weights & Biases names the steps of a checkpointer, and each step names the run.

    python examples/wandb_run.py [RUN [STEPS]]

The program is one process. With several, all ranks know the id of the run, because the metadata of a save
must be the same on all ranks, and only rank 0 talks to the tracker.
"""

import sys
from typing import Any

import torch
import wandb

import shardproof as sp


def main(run_id: str = "gpt-7", steps: int = 4) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpointer = sp.Checkpointer(f"runs/{run_id}")
    done = checkpointer.restore(state) or 0
    pending = None
    with wandb.init(project="gpt", id=run_id, resume="allow") as run:
        for step in range(done + 1, done + steps + 1):
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": loss.item()}, step=step)
            if step % 2 == 0:
                if pending is not None:  # by now the step before is committed
                    log_step(run, pending.result())
                pending = checkpointer.save(step, state, metadata={"wandb": run_id})
        if pending is not None:
            log_step(run, pending.result())


def log_step(run: Any, saved: sp.SaveResult) -> None:
    """Adds a version of the artifact with a reference to a step; its files stay where they are."""
    names = {"step": saved.step, "attempt": saved.attempt, "location": saved.location}
    artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model", metadata=names)
    place = saved.location if "://" in saved.location else f"file://{saved.location}"
    artifact.add_reference(f"{place}/manifest.json", checksum=False)
    run.log_artifact(artifact, aliases=["latest", f"step-{saved.step}"])


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))

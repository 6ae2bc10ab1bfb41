"""A run of MLflow names the steps of a checkpointer, and each step names the run.

    python examples/mlflow_run.py [RUN [STEPS]]

The program is one process. With several, all ranks know the name of the run, because the metadata of a save
must be the same on all ranks, and only rank 0 talks to the tracker.
"""

import sys

import mlflow
import torch

import shardproof as sp


def main(name: str = "gpt-7", steps: int = 4) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpointer = sp.Checkpointer(f"runs/{name}")
    done = checkpointer.restore(state) or 0
    pending = None
    mlflow.set_experiment("gpt")
    with mlflow.start_run(run_name=name):
        for step in range(done + 1, done + steps + 1):
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mlflow.log_metric("loss", loss.item(), step=step)
            if step % 2 == 0:
                if pending is not None:  # by now the step before is committed
                    log_step(pending.result())
                pending = checkpointer.save(step, state, metadata={"mlflow": name})
        if pending is not None:
            log_step(pending.result())


def log_step(saved: sp.SaveResult) -> None:
    """Adds the place of a step to the current run; its files stay where they are."""
    names = {"step": saved.step, "attempt": saved.attempt, "location": saved.location}
    mlflow.log_dict(names, f"checkpoints/step-{saved.step:08d}.json")
    mlflow.set_tag("shardproof.newest", saved.location)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))

"""Trains with Lightning: `train_lightning.py PACKAGE STRATEGY CALLBACK RUN LAST [CKPT_PATH]`.

PACKAGE is `lightning.pytorch` or `pytorch_lightning`; STRATEGY is `ddp`, `fsdp2` or `fsdp1`, refused;
CALLBACK is `ours`, `theirs`, or `io` or `io-async`, which is theirs with our `CheckpointIO`. At the end, the
state is saved to LAST. With RESTORED=1, that is done before the first step instead.
With WEIGHTS_ONLY=1, the last checkpoint has no optimizer. With AVERAGE=1, weights are averaged; they and the
average are saved to LAST at step 4, or once they are restored, and nothing else is. With LOOSE=1, the module
has a buffer more and does not load strictly. With BESIDE=FOLDER, a `ModelCheckpoint` saves there, too.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

PACKAGE, STRATEGY, CALLBACK, RUN, LAST, *PATH = sys.argv[1:]
pl: Any = import_module(PACKAGE)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.frameworks import lightning as adapter  # noqa: E402
from shardproof.frameworks.lightning import ShardproofCheckpoint, ShardproofCheckpointIO  # noqa: E402


class Batches:
    """Five batches of a rank, resumable in the middle."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        self.at, self.begin = self.begin, 0
        while self.at < len(self):
            self.at += 1
            generator = torch.Generator().manual_seed(100 * self.at + int(os.environ["RANK"]))
            yield torch.randn(4, 7, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Linear(9, 1))

    def configure_model(self) -> None:
        if STRATEGY == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveRestored(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(LAST)
        trainer.strategy.teardown()
        sys.stdout.flush()
        os._exit(0)


class WriteAverage(pl.Callback):
    def write(self, trainer: Any, module: Any) -> None:
        averaged = next(item for item in trainer.callbacks if hasattr(item, "_average_model"))
        sp.save(LAST, {"average": averaged._average_model.state_dict(), "current": module.state_dict()})

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if PATH:
            self.write(trainer, module)
            sys.stdout.flush()
            os._exit(0)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.write(trainer, module)


def plugins() -> list[Any] | None:
    if CALLBACK == "io-async":
        return [import_module(f"{PACKAGE}.plugins.io").AsyncCheckpointIO(ShardproofCheckpointIO())]
    return [ShardproofCheckpointIO()] if CALLBACK == "io" else None


def load_loosely(trainer: Any, module: Any) -> None:
    module.register_buffer("more", torch.full((3,), 7.0))
    module.strict_loading = False
    before = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        trainer.fit(module, Batches(), ckpt_path=PATH[0])
        print("trained to step", trainer.global_step)
    except sp.KeyMismatchError as error:
        print(error)
        same = [torch.equal(value, before[name]) for name, value in module.state_dict().items()]
        print("unchanged", all(same))


def main() -> None:
    pl.seed_everything(int(os.environ["RANK"]))
    if os.environ["RANK"] != "0":
        mock.patch.object(adapter, "is_committed", None).start()  # rank 0 alone finds the format
    world_size = int(os.environ["WORLD_SIZE"])
    strategy: Any = "ddp"
    if STRATEGY == "fsdp1":
        refused = import_module(f"{PACKAGE}.strategies").FSDPStrategy()
        try:
            ShardproofCheckpoint(dirpath=RUN).setup(SimpleNamespace(strategy=refused), None, "fit")
        except TypeError as error:
            print(error)
        return
    if STRATEGY == "fsdp2":
        strategies = import_module(f"{PACKAGE}.strategies")
        strategy = strategies.ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    kind = ShardproofCheckpoint if CALLBACK == "ours" else pl.callbacks.ModelCheckpoint
    options: dict[str, Any] = {"dirpath": RUN, "every_n_train_steps": 2, "save_top_k": -1}
    if os.environ.get("AVERAGE"):
        options["background"] = False
    callbacks = [kind(**options, filename="{step}")]
    if os.environ.get("BESIDE"):
        callbacks.append(pl.callbacks.ModelCheckpoint(os.environ["BESIDE"], every_n_train_steps=4))
    if os.environ.get("AVERAGE"):
        callbacks += [pl.callbacks.EMAWeightAveraging(decay=0.5), WriteAverage()]
    if os.environ.get("RESTORED"):
        callbacks.append(SaveRestored())
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        callbacks=callbacks,
        plugins=plugins(),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
    )
    module = Regression()
    if os.environ.get("LOOSE"):
        load_loosely(trainer, module)
        return
    trainer.fit(module, Batches(), ckpt_path=PATH[0] if PATH else "last")
    if CALLBACK == "ours" and not os.environ.get("AVERAGE"):
        trainer.save_checkpoint(LAST, weights_only=bool(os.environ.get("WEIGHTS_ONLY")))
        trainer.strategy.teardown()


if __name__ == "__main__":
    main()

"""Trains with data loaders that have a state: `train_lightning_loaders.py CALLBACK RUN LOADER...`.

CALLBACK is `ours` or `theirs`. For each loader, three epochs of three steps run without a restart. Others
resume from their checkpoints: within the second epoch (`within`), after the last batch of the first
(`last_batch`), and after the hooks of its end (`epoch_end`). Rank 0 prints, as JSON, what each resumed run
shares with the first: `same` for all bits, `batches` if random numbers in the step differ, and `none`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from torch.utils.data import RandomSampler as TorchRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from shardproof.frameworks.lightning import ShardproofCheckpoint

CALLBACK, RUN, *LOADERS = sys.argv[1:]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZE = 12


class Numbers(Dataset):
    """Each item is its number, with random noise if asked for."""

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)]) + (torch.rand(1) if self.noise else 0)


class Position:
    """An iterator over the numbers, with the position as its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == SIZE:
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.at)])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return Position()


class SizedStream(Stream):
    def __len__(self) -> int:
        return SIZE


class OwnSampler:
    """Another order in each epoch. The state is the epoch and the position in it."""

    def __init__(self) -> None:
        self.epoch = self.at = self.begin = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin = self.begin, 0
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        while self.at < SIZE:
            self.at += 1
            yield order[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.begin = state["epoch"] - 1, state["at"]


class OwnLoader:
    """A loader of the program. After the last batch of an epoch, its state is the begin of the next one."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
            batch = order[4 * self.at : 4 * self.at + 4]
            last = self.at == len(self) - 1
            self.epoch, self.at = (self.epoch + 1, 0) if last else (self.epoch, self.at + 1)
            yield batch.float().unsqueeze(1)
            if last:
                return

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.initial_seed())


def make_loader(name: str) -> Any:
    data = Numbers(noise="noise" in name)
    half = {"num_replicas": 2, "rank": 1}
    options: dict[str, Any] = {
        "ordered": {},
        "shuffled": {"shuffle": True},
        "noise": {"shuffle": True},
        "workers": {"shuffle": True, "num_workers": 2},
        "noise_in_workers": {"num_workers": 1},
        "own_sampler": {"sampler": OwnSampler()},
        "random_sampler": {"sampler": RandomSampler(data, generator=generator())},
        "torch_random_sampler": {"sampler": TorchRandomSampler(data, generator=generator())},
        "generator": {"shuffle": True, "generator": generator()},
        "distributed": {"sampler": DistributedSampler(data, **half), "batch_size": 2},
        "stateful_distributed": {"sampler": StatefulDistributedSampler(data, **half), "batch_size": 2},
        "stream": {"dataset": Stream()},
        "limited_stream": {"dataset": Stream()},
        "sized_stream": {"dataset": SizedStream()},
        "stream_in_worker": {"dataset": SizedStream(), "num_workers": 1},
    }
    if name == "own_loader":
        return OwnLoader()
    if name.startswith("divided"):  # by the sampler that Lightning inserts
        return StatefulDataLoader(data, batch_size=SIZE // 3 // RANKS, shuffle=name == "divided_shuffled")
    return StatefulDataLoader(**({"dataset": data, "batch_size": 4} | options[name]))


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.batches: list[list[float]] = []
        self.drawn: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        noise = torch.rand(())
        self.batches.append(batch.flatten().tolist())
        self.drawn.append(float(noise))
        return (self.linear(batch) + noise).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(name: str, folder: Path, checkpoint: Path | None, seed: int) -> Regression:
    torch.manual_seed(seed)
    module = Regression()
    kind = ShardproofCheckpoint if CALLBACK == "ours" else pl.callbacks.ModelCheckpoint
    callbacks = [
        kind(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        kind(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
    ]
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        callbacks=callbacks,
        limit_train_batches=3 if name == "limited_stream" else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=name.startswith("divided"),
    )
    trainer.fit(module, make_loader(name), ckpt_path=checkpoint)
    return module


def shared(whole: Regression, resumed: Regression, done: int) -> str:
    if resumed.batches != whole.batches[done:]:
        return "none"
    ends = [torch.nn.utils.parameters_to_vector(module.parameters()) for module in (whole, resumed)]
    return "same" if resumed.drawn == whole.drawn[done:] and torch.equal(*ends) else "batches"


def main() -> None:
    warnings.simplefilter("ignore")  # Lightning's, of each of the trainers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    points = {"within": ("step=4", 4), "last_batch": ("step=3", 3), "epoch_end": ("epoch=0", 3)}
    found: dict[str, dict[str, str]] = {}
    for name in LOADERS:
        folder = Path(RUN) / name
        whole = fit(name, folder, None, seed=1)
        found[name] = {
            point: shared(whole, fit(name, folder / point, folder / f"{file}.ckpt", seed=2), done)
            for point, (file, done) in points.items()
        }
    if RANK == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

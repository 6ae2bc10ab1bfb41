"""Trains with the rerun machine, torchdata's loader and transformers' collators, in docs/rerun.md's order.

    rerun_batches.py whole FOLDER WORKERS   six steps in one process
    rerun_batches.py first FOLDER WORKERS   three steps, and a suspicious one: exits the loop to be restarted
    rerun_batches.py second FOLDER WORKERS  restores, runs the suspicious step again and two more

Each writes the tokens of its steps, and the class of the batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peer_result import Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import BatchFeature, DataCollatorWithPadding, PreTrainedTokenizerFast

import shardproof as sp
from shardproof import rerun

STEPS, SUSPICIOUS = 6, 3


class Sentences(Dataset):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [index] * (1 + index % 3)}


class Collator:
    """A BatchEncoding of transformers, with a BatchFeature in it."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(WordLevel({"pad": 0}, unk_token="pad"))
        self.pad = DataCollatorWithPadding(
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="pad")
        )

    def __call__(self, items: list[dict[str, list[int]]]) -> Any:
        batch = self.pad(items)
        batch["pixels"] = BatchFeature(
            {"values": torch.stack([torch.tensor(len(i["input_ids"])) for i in items])}
        )
        return batch


class Job:
    def __init__(self, folder: Path, workers: int, node: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.loader = StatefulDataLoader(
            Sentences(), batch_size=2, collate_fn=Collator(), num_workers=workers
        )
        self.machine = rerun.RerunMachine(
            identity=rerun.DeviceIdentity(node, node, 0),
            inject=rerun.FaultInjector("persistent", steps=[SUSPICIOUS], seed=1) if node != "whole" else None,
        )
        self.data = rerun.ReplayableIterator(self.loader)
        self.checkpointer = sp.Checkpointer(folder / "run")
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.loader,
            "rng": sp.RandomState(),
            "rerun": self.machine,
        }
        self.seen: list[Any] = []

    def train_step(self, step: int) -> int | None:
        while self.machine.should_run(self.data):
            self.optimizer.zero_grad()
            batch = next(self.data)
            found = [batch.input_ids.tolist(), batch["pixels"]["values"].tolist(), type(batch).__name__]
            loss = self.model(batch.input_ids.float().sum().view(1, 1)).mean()
            loss.backward()
            self.machine.validate(loss, rejected=rerun.not_finite, message="loss")
        decision = self.machine.decide()
        if decision.checkpoint:
            self.checkpointer.save(step, self.state, suspect=True).result()
        if decision.settles:
            self.checkpointer.settle_suspect(step, str(decision.attribution))
        if decision.exit:
            return decision.code
        self.seen.append(found)
        self.optimizer.step()
        return None


def main() -> None:
    action, folder, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    job = Job(folder, workers, action)
    step = job.checkpointer.restore(job.state, suspect=True) if action == "second" else 0
    result = Result()
    while step < STEPS:
        code = job.train_step(step)
        if code is not None:
            result.facts["code"] = code
            break
        step += 1
    result.add_object("seen", job.seen)
    result.add_tensor("weight", job.model.weight.detach())
    result.write()


if __name__ == "__main__":
    main()

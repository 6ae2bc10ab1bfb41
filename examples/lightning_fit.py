"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/lightning_fit.py RUN"""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardproof.frameworks.lightning import ShardproofCheckpoint


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


pl.seed_everything(1)
data = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
trainer = pl.Trainer(
    max_epochs=int(os.environ.get("EPOCHS", "6")),
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    strategy="ddp",
    callbacks=[ShardproofCheckpoint(dirpath=sys.argv[1], save_top_k=2, monitor="epoch", mode="max")],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")

"""Checkpoints of a Lightning `Trainer`. Each rank saves its own part in the background.

`ShardproofCheckpoint` replaces Lightning's `ModelCheckpoint`, with the same arguments:

    from shardproof.frameworks.lightning import ShardproofCheckpoint

    trainer = Trainer(callbacks=[ShardproofCheckpoint(every_n_train_steps=1000)])
    trainer.fit(model, ckpt_path="last")

It works with `lightning` and with `pytorch_lightning`. If a program uses the latter, it imports
`pytorch_lightning` before this module.
"""

from __future__ import annotations

from shardproof.frameworks.lightning.lightning_io import ShardproofCheckpointIO
from shardproof.frameworks.lightning.lightning_trainer import ShardproofCheckpoint, with_shardproof

__all__ = ["ShardproofCheckpoint", "ShardproofCheckpointIO", "with_shardproof"]

"""Checkpoints of DeepSpeed engines at ZeRO stages 1, 2 and 3.

    engine, *_ = deepspeed.initialize(model=module, ...)
    path, client_state = adapter.load_checkpoint(engine, "runs/example")
    adapter.save_checkpoint(engine, "runs/example", client_state={"epoch": 3})

For saves in the background and retention, use ``sp.Checkpointer("runs/example")`` with `engine_state`.

ZeRO cuts flat buffers into one partition for each rank. The position of every parameter follows from the
sizes of the parameters before it. So nothing is gathered, and a checkpoint loads at another stage and on
another number of ranks.
"""

from __future__ import annotations

from shardproof.frameworks.deepspeed.deepspeed_engine import engine_state, load_checkpoint, save_checkpoint

__all__ = ["engine_state", "load_checkpoint", "save_checkpoint"]

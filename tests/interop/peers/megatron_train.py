"""Trains a small GPT of Megatron-Core, and loads and saves it: `megatron_train.py STEPS LAYOUT [OPTIONS]`.

STEPS is a JSON list of what to do, in order:

    ["load", PATH]       fill model and optimizer with `shardproof.frameworks.megatron_core`
    ["train", N]         take N steps
    ["save", PATH]       save with `shardproof.frameworks.megatron_core`
    ["save_live", PATH]  save with `live_state`; "load_live" loads so
    ["queue", PATH]      save through Megatron's queue of asynchronous calls
    ["begin", PATH]      save in the background, train a step meanwhile, and wait
    ["reference", PATH]  save with Megatron's own strategy `torch_dist`
    ["own", PATH]        fill model and optimizer with Megatron's own functions and strategy
    ["refuse", PATH]     make `live_state` of optimizers whose state it does not know; the errors are facts

LAYOUT is a JSON dict of `initialize_model_parallel`, with `kind`, the sharding type of the optimizer. OPTIONS
is one of `TransformerConfig`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_gpt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from peer_result import Result, join_ranks, leave_ranks, rank

import shardproof as sp
from shardproof.frameworks import megatron_core as ours


class Steps:
    """One run of the script."""

    def __init__(self, layout: dict[str, Any], options: dict[str, Any]) -> None:
        self.kind = layout.pop("kind", "fully_reshardable")
        self.run = megatron_gpt.Run(layout, options.pop("seed", 0), options)
        self.strategy = ours.SaveStrategy(deadline=60)
        self.done = 0
        self.errors: dict[str, str] = {}

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        return megatron_gpt.sharded_state(self.run, self.kind, is_loading=is_loading) | {"step": self.done}

    def load(self, path: str, load: Any = ours.load) -> None:
        state = load(self.state(is_loading=True), path)
        self.run.model.module.load_state_dict(state["model"])
        self.run.optimizer.load_state_dict(state["optimizer"])
        self.done = state["step"]

    def own(self, path: str) -> None:
        self.load(path, mcore.load)

    def train(self, steps: int) -> None:
        self.run.train(steps, self.done)
        self.done += steps

    def save(self, path: str) -> None:
        ours.save(self.state(), path, self.strategy, content_metadata={"kind": self.kind})

    def save_live(self, path: str) -> None:
        state = ours.live_state(self.run.model.module, self.run.optimizer) | {"step": self.done}
        ours.save(state, path, self.strategy)

    def load_live(self, path: str) -> None:
        module, optimizer = self.run.model.module, self.run.optimizer
        state = ours.live_state(module, optimizer, checkpoint_dir=path)
        self.done = ours.load_live_state(module, optimizer, state, path)["step"]

    def queue(self, path: str) -> None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(ours.save(self.state(), path, self.strategy, async_sharded_save=True))
        self.run.train(1, 100)
        queue.maybe_finalize_async_calls(blocking=True)

    def begin(self, path: str) -> None:
        pending = ours.begin_save(self.state(), path, self.strategy)
        self.run.train(1, 100)
        pending.result()

    def reference(self, path: str) -> None:
        if rank() == 0:
            Path(path).mkdir()
        dist.barrier()
        mcore.save(self.state(), path)

    def refuse(self, path: str) -> None:
        """Megatron's own optimizer, with the changes that its options make where their packages are there."""
        module, chained = self.run.model.module, self.run.optimizer
        (optimizer,) = getattr(chained, "chained_optimizers", [chained])
        fused = optimizer.optimizer

        def error(of: str) -> None:
            try:
                ours.live_state(module, chained)
            except sp.StructureError as refused:
                self.errors[of] = str(refused)

        optimizer.config.use_precision_aware_optimizer = True
        error("precision_aware")
        optimizer.config.use_precision_aware_optimizer = False
        for state in fused.state.values():
            state["master_param"] = torch.zeros(1)
        error("slot")
        for state in fused.state.values():
            del state["master_param"]
        optimizer.optimizer = torch.optim.AdamW(fused.param_groups)
        error("adamw")
        optimizer.optimizer = fused
        ours.live_state(module, chained)


def main() -> None:
    steps, layout, *options = map(json.loads, sys.argv[1:])
    join_ranks()
    it = Steps(layout, options[0] if options else {})
    for name, argument in steps:
        getattr(it, name)(argument)
    result = Result()
    result.facts["version"] = version("megatron-core")
    result.facts["errors"] = it.errors
    leave_ranks(result)


if __name__ == "__main__":
    main()

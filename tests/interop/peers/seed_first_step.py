"""A save before the first step of the optimizer: `seed_first_step.py WITH FOLDER`.

WITH is `own` for Megatron's own sharded state dict of the distributed optimizer, `ours` for
`optimizer_state`, or `drop_in` for `fully_reshardable` of Megatron with the adapter in the place of its
`dist_checkpointing`. The weight is so small that rank 0 has all of it, and the shards of the other ranks are
padding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank

megatron_stubs.install()

from megatron.core import dist_checkpointing as mcore  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

if sys.argv[1] != "own":  # its import makes Megatron's sharded state dict work before the first step
    from shardproof.frameworks import megatron_core as ours


class Small(MegatronModule):
    """One weight of six elements."""

    def __init__(self, config: TransformerConfig, value: float) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.full((2, 3), value))

    def forward(self, scale: float) -> torch.Tensor:
        return (self.weight * scale).sum()


class Run:
    """The module and its optimizer on this rank."""

    def __init__(self, value: float) -> None:
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        distributed = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, distributed, Small(config, value))
        options = OptimizerConfig(optimizer="adam", lr=0.5, use_distributed_optimizer=True, clip_grad=0.0)
        self.optimizer = get_megatron_optimizer(options, [self.model])

    def model_state(self) -> dict[str, ShardedTensor]:
        weight = self.model.module.weight
        return {"weight": ShardedTensor.from_rank_offsets("weight", weight, replica_id=(0, 0, rank()))}

    def step(self) -> list[float]:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model(3.0).backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return self.model.module.weight.flatten().tolist()


def own(run: Run, folder: str) -> None:
    """As Megatron's training loop saves."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model = run.model_state()
    optimizer = run.optimizer.sharded_state_dict(model, metadata=metadata)
    if rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    mcore.save({"model": model, "optimizer": optimizer}, folder)


def with_ours(run: Run, folder: str) -> dict[str, object]:
    """Saves before and after a step, and loads both into runs that have and have not taken steps."""

    def save(name: str) -> str:
        model = run.model_state()
        state = {"model": model, "optimizer": ours.optimizer_state(run.optimizer, model)}
        ours.save(state, f"{folder}/{name}")
        return f"{folder}/{name}"

    def load(into: Run, path: str) -> list[float]:
        model = into.model_state()
        keys = ours.load_tensors_metadata(path)
        state = {"model": model, "optimizer": ours.optimizer_state(into.optimizer, model, keys)}
        loaded = ours.load(state, path)
        into.model.module.weight.data.copy_(loaded["model"]["weight"])
        ours.load_optimizer_state(into.optimizer, loaded["optimizer"])
        return into.step()

    before = save("before")
    first = run.step()
    after = save("after")
    second = run.step()
    stepped, fresh = Run(9.0), Run(7.0)
    stepped.step()
    assert load(stepped, before) == load(fresh, before) == first
    assert load(Run(5.0), after) == second
    return {path: sorted(ours.load_tensors_metadata(f"{folder}/{path}")) for path in ("before", "after")}


def with_drop_in(run: Run, folder: str) -> dict[str, object]:
    """As Megatron's training loop saves and loads, with the functions of the adapter."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}

    def state(of: Run, *, is_loading: bool) -> dict[str, object]:
        model = of.model_state()
        described = of.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": described}

    def load(into: Run, path: str) -> list[float]:
        loaded = ours.load(state(into, is_loading=True), path)
        into.model.module.weight.data.copy_(loaded["model"]["weight"])
        into.optimizer.load_state_dict(loaded["optimizer"])
        return into.step()

    inner = getattr(run.optimizer, "chained_optimizers", [run.optimizer])[0].optimizer
    ours.save(state(run, is_loading=False), f"{folder}/before")
    assert not any(inner.state.values())  # a save leaves no moments behind
    first = run.step()
    ours.save(state(run, is_loading=False), f"{folder}/after")
    second = run.step()
    stepped, fresh = Run(9.0), Run(7.0)
    stepped.step()
    assert load(stepped, f"{folder}/before") == load(fresh, f"{folder}/before") == first
    assert load(Run(5.0), f"{folder}/after") == second
    return {path: sorted(ours.load_tensors_metadata(f"{folder}/{path}")) for path in ("before", "after")}


def main() -> None:
    who, folder = sys.argv[1:]
    join_ranks()
    parallel_state.initialize_model_parallel()
    run = Run(1.0)
    result = Result()
    if who != "own":
        result.facts |= (with_ours if who == "ours" else with_drop_in)(run, folder)
        leave_ranks(result)
    store = dist.distributed_c10d._get_default_store()
    try:
        own(run, folder)
    except KeyError as error:
        print(f"rank {rank()} failed: KeyError: {error}", flush=True)
    print(f"rank {rank()} is back", flush=True)
    store.set(f"back-{rank()}", "")
    store.wait([f"back-{other}" for other in range(dist.get_world_size())])
    leave_ranks(result)


if __name__ == "__main__":
    main()

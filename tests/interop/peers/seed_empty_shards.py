"""An offloaded optimizer whose ranks have empty shards: `seed_empty_shards.py WITH FOLDER`.

WITH is `own` for the function of megatron-fsdp that describes uneven shards before a save, or `ours`. The
last layer has one row, so rank 1 has empty shards of it, and its optimizer has no state of them.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import megatron_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

megatron_stubs.install()

from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor  # noqa: E402

import shardproof as sp  # noqa: E402


def trained() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A module after one step, and the state of its optimizer by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    mesh = init_device_mesh("cpu", (world_size(),))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    nonempty = {name: one for name, one in model.named_parameters() if one.to_local().numel()}
    optimizer = torch.optim.AdamW(nonempty.values(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        name: {slot: value for slot, value in optimizer.state[one].items() if slot != "step"}
        for name, one in nonempty.items()
    }
    return model, {"model": model.state_dict(), "optim": state}


def whole(value: Any, name: str) -> torch.Tensor:
    """A moment, whole. Rank 0 has all elements of those that are empty on rank 1."""
    if name.startswith("0"):
        return value.full_tensor()
    part = torch.empty((1, 4) if name == "1.weight" else (1,)) if value is None else value.to_local()
    dist.broadcast(part, 0)
    return part


def main() -> None:
    who, folder = sys.argv[1:]
    join_ranks()
    _, state = trained()
    result = Result()
    result.facts["version"] = version("megatron-fsdp")
    if who == "ours":
        sp.save(folder, state, deadline=60)
        for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
            for slot in ("exp_avg", "exp_avg_sq"):
                result.add_tensor(f"optim.{name}.{slot}", whole(state["optim"].get(name, {}).get(slot), name))
        leave_ranks(result)
    store = dist.distributed_c10d._get_default_store()
    print(f"rank {rank()} describes {len(state['optim'])} parameters", flush=True)
    preprocess_state_dict_for_uneven_dtensor(state)
    print(f"rank {rank()} is back", flush=True)
    store.set(f"back-{rank()}", "")
    store.wait([f"back-{other}" for other in range(world_size())])
    leave_ranks(result)


if __name__ == "__main__":
    main()

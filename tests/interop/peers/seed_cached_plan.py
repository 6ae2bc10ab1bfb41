"""The state of the rerun state machine appears between two saves: `seed_cached_plan.py WITH FOLDER`.

WITH is `own` for Megatron's own strategy with a cached structure, or `ours`. The script saves twice, with an
entry more the second time: the state of the machine where the release leaves it out at first, or another
ShardedObject where it does not. Facts: `machine_appears`, and in `found` the keys of the entry in the second
checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

megatron_stubs.install()

from megatron.core import dist_checkpointing as mcore  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402
from megatron.core.rerun_state_machine import (  # noqa: E402
    RerunDataIterator,
    RerunMode,
    RerunState,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from shardproof.frameworks import megatron_core as ours  # noqa: E402


def carry(entries: Callable[[], dict[str, Any]], first: str, second: str) -> None:
    """A checkpoint with the machine's state loads with and without it, and one without it loads with it."""
    with_it, without = entries(), {"weight": entries()["weight"]}
    loaded = ours.load(with_it, second)["rerun"]
    assert (
        loaded["state"] is RerunState.WILL_RERUN_FROM_CHECKPOINT
        and loaded["mode"] is RerunMode.VALIDATE_RESULTS
    )
    assert loaded["sharded"]["rerun_requested"] is True
    machine = get_rerun_state_machine()
    machine.rerun_requested = False
    machine.load_state_dict(loaded)
    assert machine.rerun_requested is True
    ours.load(without, second)
    assert "sharded" not in ours.load(entries(), first, strict="log_unexpected").get("rerun", {})


def main() -> None:
    who, folder = sys.argv[1:]
    join_ranks()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    batches = RerunDataIterator(iter([torch.ones(2)]))
    next(batches)

    def entries() -> dict[str, Any]:
        weight = torch.full((2, 2), float(rank()))
        state = {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank(), world_size()))}
        found = machine.state_dict(batches, "torch_dist")
        return state | ({} if found is None else {"rerun": found})

    own = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    strategy = own if who == "own" else ours.SaveStrategy()

    def save(state: dict[str, Any], name: str) -> str:
        path = Path(folder) / name
        if rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        # As Megatron's training loop with --ckpt-assume-constant-structure.
        mcore.save(state, str(path), strategy, validate_access_integrity=False)
        return str(path)

    before = entries()
    first = save(entries(), "first")
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT  # a suspicious result was found
    machine.rerun_requested = True
    after = entries()
    result = Result()
    result.facts["machine_appears"] = "rerun" in after and "rerun" not in before
    if not result.facts["machine_appears"]:
        after["more"] = ShardedObject("more", [7], (world_size(),), (rank(),))
    key = "rerun_state_machine_state" if result.facts["machine_appears"] else "more"
    second = save(after, "second")
    stored = ours.load_sharded_metadata(second)
    result.facts["found"] = sorted(name for name in stored if name.startswith(key + "/"))
    if who == "ours" and result.facts["machine_appears"]:
        carry(entries, first, second)
    result.facts["version"] = version("megatron-core")
    leave_ranks(result)


if __name__ == "__main__":
    main()

"""The state changes between two saves with a cached plan: `seed_cached_plan.py WITH FOLDER CHANGE`.

WITH is `own` for Megatron's own strategy with a cached structure, or `ours`. The script saves twice. CHANGE
says what is different the second time:

    machine   the state of the rerun state machine appears, which 0.16.1 leaves out at first
    object    a ShardedObject appears on each rank
    tensor    a tensor appears
    replaced  a tensor is replaced by an object of the same key
    one_rank  an object appears on rank 1 only

Facts: `appears`, whether the first save lacked the state of the machine; in `errors` what the second save
of `own` raised on each rank; in `found` the keys of the changed entry in the second checkpoint, if no rank
raised; and for `ours` in `values` what a load gives each rank for it.
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


def tensor(key: str, value: float) -> ShardedTensor:
    """Two elements a rank."""
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value + rank()), (0, rank(), world_size()))


def of_each_rank(key: str, value: Any) -> ShardedObject:
    """An object of each rank."""
    return ShardedObject(key, value, (world_size(),), (rank(),))


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
    who, folder, change = sys.argv[1:]
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
    first = save(entries() | ({"more": tensor("more", 1.0)} if change == "replaced" else {}), "first")
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT  # a suspicious result was found
    machine.rerun_requested = True
    after = entries()
    result = Result()
    result.facts["appears"] = "rerun" in after and "rerun" not in before

    def changed() -> dict[str, Any]:
        """The changed entry, as it is in the second save."""
        if change == "machine" or (change == "one_rank" and rank() == 0):
            return {}
        if change == "tensor":
            return {"more": tensor("more", 5.0)}
        if change == "one_rank":
            return {"more": ShardedObject("more", 7, (1,), (0,))}
        return {"more": of_each_rank("more", 7)}

    key = "rerun_state_machine_state" if change == "machine" else "more"
    second, error = str(Path(folder) / "second"), ""
    try:
        save(after | changed(), "second")
    except Exception as caught:
        if who == "ours":
            raise
        error = f"{type(caught).__name__}: {caught}"
    result.facts["errors"] = of_all_ranks(error)
    if not any(result.facts["errors"]):
        stored = ours.load_sharded_metadata(second)
        result.facts["found"] = sorted(name for name in stored if name.split("/")[0] == key)
    if who == "ours":
        result.facts["values"] = values_of(changed(), second)
    if who == "ours" and change == "machine":
        carry(entries, first, second)
    result.facts["version"] = version("megatron-core")
    leave_ranks(result)


def values_of(changed: dict[str, Any], path: str) -> list[Any]:
    """The values of the changed entry on all ranks, as a load gives them."""
    for item in changed.values():
        if isinstance(item, ShardedTensor):
            item.data.zero_()
    loaded = ours.load(changed, path).get("more")
    return of_all_ranks(loaded.tolist() if isinstance(loaded, torch.Tensor) else loaded)


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()

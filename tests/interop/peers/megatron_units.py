"""Small sharded state dicts of Megatron-Core, saved with shardproof: `megatron_units.py CASE FOLDER`.

Each case is a function below. It returns facts; an error of shardproof is the fact "error".
"""

from __future__ import annotations

import enum
import io
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron_stubs
import torch
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

megatron_stubs.install()

from megatron.core import dist_checkpointing as mcore  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.engine.storage.sink import LocalSink  # noqa: E402
from shardproof.frameworks import megatron_core as ours  # noqa: E402
from shardproof.frameworks.megatron import megatron_load, megatron_strategies  # noqa: E402


class Backend(enum.Enum):
    """An enum that no one registered."""

    FLASH = 1


def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
    """Two halves of a SwiGLU, each split over the ranks."""
    return [
        ShardedTensor.from_rank_offsets(
            key, half.contiguous(), (0, at * world_size() + rank(), 2 * world_size()), replica_id=replica_id
        )
        for at, half in enumerate(data.chunk(2))
    ]


def state(value: float, **changes: Any) -> dict[str, Any]:
    """One of each kind; `value` is in all of them."""
    here, ranks = rank(), world_size()
    rows = torch.arange(6.0).reshape(2, 3) + 10 * here + value
    gated = torch.arange(8.0).reshape(4, 2) + 100 * here + value
    return {
        "model": {
            "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, here, ranks)),
            "norm": ShardedTensor.from_rank_offsets("norm", torch.full((4,), value), replica_id=here),
            "stack": [
                ShardedTensor.from_rank_offsets(
                    "stack", torch.full((3,), value + at), (0, at, 2), replica_id=here, prepend_axis_num=1
                )
                for at in range(2)
            ],
            "fc1": ShardedTensorFactory("fc1", gated, build, torch.cat),
            "embedding": ShardedTensor.from_rank_offsets(
                "embedding", torch.full((8, 2), value), replica_id=here, allow_shape_mismatch=True
            ),
        },
        "rng": ShardedObject("rng", [{"seed": here, "state": torch.full((9,), here)}], (ranks,), (here,)),
        "extra": ShardedObject("extra", io.BytesIO(b"te"), (1,), (0,), replica_id=here),
        "local": LocalNonpersistentObject({"rank": here}),
        "args": Namespace(lr=value, backend=Backend.FLASH, path=Path("a"), nested=Namespace(depth=2)),
        "iteration": int(value),
        **changes,
    }


def flat(loaded: dict[str, Any]) -> Any:
    """A loaded state dict of this rank, for a comparison."""
    model = loaded["model"]
    return {
        "rows": model["rows"].tolist(),
        "norm": model["norm"].tolist(),
        "stack": [part.tolist() for part in model["stack"]],
        "fc1": model["fc1"].tolist(),
        "embedding": model["embedding"].tolist(),
        "rng": [loaded["rng"][0]["seed"], loaded["rng"][0]["state"].tolist()],
        "extra": loaded["extra"].getvalue().decode(),
        "local": loaded["local"],
        "args": vars(loaded["args"]),
        "iteration": loaded["iteration"],
    }


def expected(value: float) -> Any:
    """What a load must give, from the state itself."""
    whole = state(value)
    model = whole["model"]
    return {
        "rows": model["rows"].data.tolist(),
        "norm": model["norm"].data.tolist(),
        "stack": [part.data.tolist() for part in model["stack"]],
        "fc1": model["fc1"].data.tolist(),
        "embedding": model["embedding"].data.tolist(),
        "rng": [rank(), [rank()] * 9],
        "extra": "te",
        "local": {"rank": rank()},
        "args": vars(whole["args"]),
        "iteration": int(value),
    }


def expected_plain(value: float) -> Any:
    """What a load of `plain` must give."""
    return expected(value) | {"args": vars(plain(value)["args"])}


def plain(value: float) -> dict[str, Any]:
    """`state` with arguments that Megatron's own functions can load, too."""
    return state(value, args=Namespace(lr=value, nested=Namespace(depth=2)))


def made(folder: str) -> str:
    """The folder, which Megatron's own save wants to exist."""
    Path(folder).mkdir(exist_ok=True)
    return folder


def kinds(folder: str) -> dict[str, Any]:
    """Every kind goes in and comes out with the functions of shardproof, by default and by name."""
    ours.save(state(3), folder, ("shardproof", 1), content_metadata={"kind": "x"}, verify_integrity=True)
    loaded = ours.load(state(7), folder, verify_integrity=True)
    assert flat(loaded) == expected(3), (flat(loaded), expected(3))
    assert ours.load_content_metadata(folder) == {"kind": "x"}
    names = sorted(ours.load_tensors_metadata(folder))
    assert names == ["embedding", "fc1", "norm", "rows", "stack"], names
    plain = ours.load_plain_tensors(folder)
    assert plain["stack"].tolist() == [[3] * 3, [4] * 3] and plain["rows"].shape == (2 * world_size(), 3)
    half = state(7)
    half["model"]["rows"] = ShardedTensor.from_rank_offsets(
        "rows", torch.zeros(2, 3, dtype=torch.bfloat16), (0, rank(), world_size())
    )
    assert ours.load(half, folder)["model"]["rows"].dtype == torch.bfloat16
    return {"keys": names}


def own_functions(folder: str) -> dict[str, Any]:
    """Megatron's own functions take the strategies, and old checkpoints load through ours."""
    save, load = ours.SaveStrategy(), ours.LoadStrategy()
    mcore.save(plain(3), made(folder), save)
    assert flat(mcore.load(plain(7), folder, load)) == expected_plain(3)
    mcore.save(plain(4), folder, save)  # replaces it
    assert flat(mcore.load(plain(7), folder, load, strict="raise_all")) == expected_plain(4)
    assert flat(ours.load(plain(7), folder)) == expected_plain(4)
    mcore.save(plain(5), made(folder + "-own"))
    assert flat(ours.load(plain(7), folder + "-own")) == expected_plain(5)
    assert flat(mcore.load(plain(7), folder + "-own", load)) == expected_plain(5)
    return {}


def named(folder: str) -> dict[str, Any]:
    """The registry of 0.16 knows the backend, and its load finds it in the checkpoint."""
    mcore.save(plain(3), made(folder), ("shardproof", 1))
    assert flat(mcore.load(plain(7), folder)) == expected_plain(3)
    assert flat(ours.load(plain(7), folder)) == expected_plain(3)
    return {"files": sorted(path.name for path in Path(folder).iterdir())}


def wrapped(folder: str) -> dict[str, Any]:
    """Megatron's wrappers for data parallel ranks, and what does the same without them."""
    ours.save(state(3), folder, FullyParallelSaveStrategyWrapper(ours.SaveStrategy()))
    loader = FullyParallelLoadStrategyWrapper(ours.LoadStrategy(), exchange_algo="gather_object")
    assert flat(ours.load(state(7), folder, loader)) == expected(3)
    ours.save(state(4), folder, ours.SaveStrategy(replicas=True))  # any rank writes a replica
    assert flat(ours.load(state(7), folder)) == expected(4)
    return {}


def uneven(split: list[int], first: int = 0) -> dict[str, Any]:
    """Rows of a weight, counted from `first`, and a bias: on each rank as many as `split` has for it."""
    here, count = sum(split[: rank()]), split[rank()]
    rows = (torch.arange(3.0 * count) + 3 * here + first).reshape(count, 3)
    weight = ShardedTensor("weight", rows, rows.dtype, (count, 3), (sum(split), 3), (here, 0), None)
    bias = ShardedTensor("bias", rows[:, 0], rows.dtype, (count,), (sum(split),), (here,), None)
    return {"weight": weight, "bias": bias}


def empty(folder: str) -> dict[str, Any]:
    """Several ranks have no element of a tensor. Other ranks have none where it is loaded."""

    def nothing() -> dict[str, Any]:
        return {"nothing": ShardedTensor.from_rank_offsets("nothing", torch.ones(0, 2))}

    splits = [[5, 0, 0], [0, 2, 3], [0, 0, 5]]
    for at, split in enumerate(splits):
        ours.save(uneven(split) | nothing(), f"{folder}-{at}", ours.SaveStrategy(replicas=at == 1))
    mcore.save(uneven(splits[0]), made(f"{folder}-own"))  # with the other splits and `nothing`, it fails
    for name in ("0", "1", "2", "own"):
        for split in splits:
            more = {} if name == "own" else nothing()
            loaded, expected = ours.load(uneven(split, 100) | more, f"{folder}-{name}"), uneven(split)
            assert all(loaded[key].equal(expected[key].data) for key in expected), (name, split, loaded)
            assert not more or loaded["nothing"].shape == (0, 2)
    return {}


def default(folder: str) -> dict[str, Any]:
    """Saves without a strategy reuse the plan, and report the failure of a background save before them."""
    plans: list[str] = []
    sp.events.subscribe(lambda event: plans.append(event.operation) if event.phase == "plan" else None)
    ours.save(state(3), f"{folder}/a")
    ours.save(state(4), f"{folder}/b")
    write = LocalSink.write_at
    LocalSink.write_at = None  # not callable: the background write fails
    ours.save(state(5), f"{folder}/c", async_sharded_save=True)
    try:
        ours.save(state(6), f"{folder}/d")
    except sp.ShardproofError as error:
        LocalSink.write_at = write
        ours.save(state(6), f"{folder}/d")
        assert flat(ours.load(state(7), f"{folder}/d")) == expected(6)
        return {"plans": sorted(set(plans)), "failure": str(error)}
    raise AssertionError(f"rank {rank()} does not know of the failed save")


def unpublished(folder: str) -> dict[str, Any]:
    """Rank 0 cannot write `common.pt`. Then no rank has returned from its save before that file is there."""
    publish = sp.storage.LocalStorage.publish

    def refuse(storage: Any, name: str, data: bytes, **options: Any) -> None:
        if name == "common.pt":
            raise sp.StorageError("no room for common.pt")
        publish(storage, name, data, **options)

    sp.storage.LocalStorage.publish = refuse
    strategy, failures = ours.SaveStrategy(), []
    for save in (ours.save, lambda *given: ours.begin_save(*given).result()):
        outcome = ""
        try:
            save(state(3), folder, strategy)
        except sp.ShardproofError as error:
            outcome = str(error)
        outcomes: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(outcomes, outcome)
        assert len(set(outcomes)) == 1, outcomes
        failures.append(outcome)
    sp.storage.LocalStorage.publish = publish
    ours.save(state(4), folder)
    assert {"common.pt", "metadata.json"} <= set(os.listdir(folder)), os.listdir(folder)
    return {"failures": failures}


def other_format(folder: str) -> dict[str, Any]:
    """Rank 0 alone finds the format. Rank 1 would find another one, and enter Megatron's own load."""
    ours.save(plain(3), folder)
    find = megatron_strategies.is_ours
    if rank() == 1:
        megatron_strategies.is_ours = megatron_load.is_ours = lambda _: False
    assert flat(ours.load(plain(7), folder)) == expected_plain(3)
    megatron_strategies.is_ours = megatron_load.is_ours = find
    if rank() == 1:
        megatron_load.load_common_state_dict = None  # rank 1 fails where it reads the common state
    try:
        ours.load(plain(7), folder)
    except sp.ShardproofError as error:
        return {"failure": str(error)}
    raise AssertionError(f"rank {rank()} does not know that rank 1 could not read the common state")


def code(folder: str) -> dict[str, Any]:
    """Classes and functions in common state and in objects: those of the target, beside the stored data."""

    def options(rule: Any, betas: Any) -> dict[str, Any]:
        groups = [{"rule": rule, "betas": betas, "by": [build]}]
        item = ShardedObject("options", {"rule": rule, "betas": betas}, (1,), (0,), replica_id=rank())
        return {"optimizer": {"groups": groups}, "item": item}

    adam, other = torch.optim.AdamW, torch.optim.Adam
    ours.save(state(3, **options(adam, (0.5, 0.75))), folder)
    for mode in (None, "raise_all", "raise_unexpected"):
        more = {} if mode is None else {"strict": mode}
        loaded = ours.load(state(7, **options(adam, (0.25, 0.5))), folder, **more)
        assert loaded["optimizer"]["groups"] == [{"rule": adam, "betas": (0.5, 0.75), "by": [build]}]
        assert loaded["item"] == {"rule": adam, "betas": (0.5, 0.75)}
    errors = []
    for mode in ("raise_all", "raise_unexpected"):
        try:
            ours.load(state(7, **options(other, (0.25, 0.5))), folder, strict=mode)
        except sp.KeyMismatchError as error:
            errors.append(str(error))
    loaded = ours.load(state(7, **options(other, (0.25, 0.5))), folder, strict="log_all")  # the advice
    assert loaded["optimizer"]["groups"][0]["rule"] is other
    assert loaded["item"] == {"rule": other, "betas": (0.5, 0.75)}
    return {"errors": errors}


def two_mains(folder: str) -> dict[str, Any]:
    norm = ShardedTensor.from_rank_offsets("twice", torch.ones(4))
    ours.save(state(3, more=norm), folder, ours.SaveStrategy(deadline=30))
    return {}


def no_main(folder: str) -> dict[str, Any]:
    norm = ShardedTensor.from_rank_offsets("never", torch.ones(4), replica_id=1 + rank())
    ours.save(state(3, more=norm), folder, ours.SaveStrategy(deadline=30))
    return {}


def strict(folder: str) -> dict[str, Any]:
    """Keys of one side only."""
    extra = ShardedTensor.from_rank_offsets("old", torch.ones(2), replica_id=rank())
    ours.save(state(3, old=extra), folder)

    def asked() -> dict[str, Any]:
        more = {"new": ShardedObject("new", None, (1,), (0,))} if rank() == 1 else {}
        return state(7, **more)

    loaded, missing, unexpected = ours.load(asked(), folder, strict="return_all")
    assert flat(loaded) == expected(3) and missing == {"old"}
    assert unexpected == ({"new"} if rank() == 1 else set())
    loaded, missing, _ = ours.load(asked(), folder, strict="return_unexpected")
    assert missing == set() and "new" not in loaded
    for mode in ("log_unexpected", "log_all", "ignore_all"):
        assert flat(ours.load(asked(), folder, strict=mode)) == expected(3)
    for mode in ("raise_all", "raise_unexpected"):
        try:
            ours.load(asked(), folder, strict=mode)
        except CheckpointingException:  # on every rank, though one rank has the key
            continue
        raise AssertionError(mode)
    ours.load(asked(), folder)  # "new" is not there
    return {}


def names(folder: str) -> dict[str, Any]:
    """Megatron's other names, and what it tells of a checkpoint."""
    assert ours.ShardedTensor is ShardedTensor and ours.mapping.ShardedObject is ShardedObject
    assert not ours.check_is_distributed_checkpoint(folder)
    for at, save in (("own", mcore.save), ("ours", ours.save)):
        save(plain(3), made(f"{folder}-{at}"))
        torch.distributed.barrier()
        assert ours.check_is_distributed_checkpoint(f"{folder}-{at}")
    own, metadata = (ours.load_sharded_metadata(f"{folder}-{at}") for at in ("own", "ours"))
    assert {key: item.global_shape for key, item in metadata.items()} == {
        key: item.global_shape for key, item in own.items()
    }
    loaded = ours.load(metadata, f"{folder}-ours", strict="raise_all")
    if "common_state/shard_0_1" in metadata:  # 0.19
        assert loaded["common_state/shard_0_1"]["args"].nested.depth == 2
    ours.remove_sharded_tensors(f"{folder}-own", "st")  # Megatron's own: there is no such file
    ours.remove_sharded_tensors(f"{folder}-ours", "st")
    return {}


def without_stack(folder: str) -> dict[str, Any]:
    """A checkpoint without the tensors whose keys begin with "st" loads."""
    asked = plain(7)
    stack = [part.data for part in plain(3)["model"]["stack"]]
    asked["model"]["stack"] = LocalNonpersistentObject(stack)
    loaded, missing, unexpected = ours.load(asked, folder, strict="return_all")
    assert flat(loaded) == expected_plain(3) and not missing and not unexpected
    assert "stack" not in ours.load_tensors_metadata(folder)
    return {}


def padded(folder: str) -> dict[str, Any]:
    """A tensor with another padding than the checkpoint has."""
    ours.save(state(3), folder)
    larger = state(7)
    larger["model"]["embedding"] = ShardedTensor.from_rank_offsets(
        "embedding", torch.full((6, 2), 9.0), (0, rank(), world_size()), allow_shape_mismatch=True
    )
    loaded = ours.load(larger, folder)["model"]["embedding"]
    assert loaded.tolist() == ([[3, 3]] * 6 if rank() == 0 else [[3, 3]] * 2 + [[0, 0]] * 4), loaded
    larger["model"]["norm"] = ShardedTensor.from_rank_offsets("norm", torch.ones(5), replica_id=rank())
    ours.load(larger, folder)
    return {}


def damaged(folder: str) -> dict[str, Any]:
    """A flipped bit is found, also where nothing reads it."""
    if rank() == 0:
        stored = torch.arange(6.0).add(3).numpy().tobytes()
        file = next(path for path in Path(folder).glob("shards/*") if stored in path.read_bytes())
        data = bytearray(file.read_bytes())
        data[data.index(stored)] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    ours.load({"iteration": 0}, folder, verify_integrity=True)
    return {}


def killed(folder: str) -> dict[str, Any]:
    """A save that rank 1 does not survive, over the checkpoint that `kinds` made."""

    def kill(event: Any) -> None:
        if rank() == 1 and event.phase == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    sp.events.subscribe(kill)
    ours.begin_save(state(8), folder, ours.SaveStrategy(deadline=5)).result()
    return {}


def load_only(folder: str) -> dict[str, Any]:
    """What `kinds` saved is still there."""
    assert flat(ours.load(state(7), folder)) == expected(3)
    return {}


def main() -> None:
    case, folder = sys.argv[1:]
    join_ranks()
    result = Result()
    try:
        result.facts |= globals()[case](folder)
    except sp.ShardproofError as error:
        result.facts["error"] = f"{type(error).__name__}: {error}"
        classes = (CheckpointingException, CheckpointException)
        result.facts["classes"] = [kind.__name__ for kind in classes if isinstance(error, kind)]
    leave_ranks(result)


if __name__ == "__main__":
    main()

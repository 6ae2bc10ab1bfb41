"""The leader's work for 4,096 ranks of 500 tensors: from posted structures to one encoded plan a rank.

Before it, the tiling proof alone: a million boxes of one tensor, and 4,096 ranks of 500 tensors.

Ours includes decoding what the ranks posted, proving every tiling, balancing, laying out files and encoding
the answers. The peer's is `DefaultSavePlanner.create_global_plan` over the plans of all ranks, without its
transport.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time

import numpy as np
import torch
from common import Measured, parser, report
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardproof.geometry import Boxes, tiling_faults
from shardproof.planning import Structure, TensorTable, plan_writes


def posted(world_size: int, tensors: int) -> list[bytes]:
    """What the ranks post: every tensor sharded by rows over all of them."""
    shapes = tuple((world_size * 2, 1024) if number % 5 else (world_size,) for number in range(tensors))
    keys = tuple(f"model.layers.{number:05d}.weight" for number in range(tensors))
    table = TensorTable(keys, ("bfloat16",) * tensors, shapes, ("",) * tensors)
    posts = []
    for rank in range(world_size):
        offsets, sizes = [], []
        for shape in shapes:
            rows = shape[0] // world_size
            offsets += [rank * rows, *(0,) * (len(shape) - 1)]
            sizes += [rows, *shape[1:]]
        posts.append(Structure.build(table, ["epoch"], range(tensors), offsets, sizes).encode())
    return posts


def ours(posts: list[bytes]) -> None:
    plan = plan_writes([Structure.decode(post) for post in posts])
    assert len([part.encode() for part in plan.rank_plans()]) == len(posts)


def peer_plans(world_size: int, tensors: int) -> list[SavePlan]:
    """The same state as the local plans of torch DCP."""
    properties = TensorProperties(dtype=torch.bfloat16)
    shapes = [(world_size * 2, 1024) if number % 5 else (world_size,) for number in range(tensors)]
    plans = []
    for rank in range(world_size):
        items = []
        for number, shape in enumerate(shapes):
            rows = shape[0] // world_size
            offsets = torch.Size([rank * rows, *(0,) * (len(shape) - 1)])
            chunk = ChunkStorageMetadata(offsets, torch.Size([rows, *shape[1:]]))
            index = MetadataIndex(f"model.layers.{number:05d}.weight", offsets)
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    return plans


def peer(plans: list[SavePlan]) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    planner.create_global_plan(plans)


def proofs(repeats: int, as_json: bool) -> None:
    """Times the tiling proof on irregular orders of boxes."""
    for title, tensors, parts in (
        ("1 tensor, 1,000,000 boxes", 1, 1000),
        ("500 tensors, 2,048,000 boxes", 500, 64),
    ):
        corners = np.stack(np.meshgrid(*[np.arange(parts) * 128] * 2, indexing="ij"), -1).reshape(-1, 2)
        order = np.random.default_rng(0).permutation(tensors * len(corners))
        offsets = np.tile(corners, (tensors, 1))[order]
        boxes = Boxes(offsets, np.full_like(offsets, 128))
        tensor = np.repeat(np.arange(tensors), len(corners))[order]
        shapes = np.full((tensors, 2), parts * 128)
        measured = {"proof": Measured("proof")}
        for _ in range(repeats):
            timed(measured["proof"], tiling_faults, shapes, tensor, boxes)
        report(f"tiling proof, {title}", measured, ours="proof", nbytes=None, as_json=as_json)


def timed(measured: Measured, work: object, *arguments: object) -> None:
    gc.collect()
    begun = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    measured.seconds.append(time.perf_counter() - begun)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(ranks=4096, repeats=3)
    options.add_argument("--tensors", type=int, default=500, help="tensors (default 500)")
    options.add_argument(
        "--peer-repeats", type=int, default=1, help="rounds of the peer, which is slow (default 1)"
    )
    chosen: argparse.Namespace = options.parse_args()
    proofs(chosen.repeats, chosen.json)
    posts = posted(chosen.ranks, chosen.tensors)
    measured = {"shardproof": Measured("shardproof"), "torch DCP": Measured("torch DCP")}
    for _ in range(chosen.repeats):
        timed(measured["shardproof"], ours, posts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    plans = peer_plans(chosen.ranks, chosen.tensors)
    for _ in range(chosen.peer_repeats):
        timed(measured["torch DCP"], peer, plans)
    report(
        f"leader's planning, {chosen.ranks} ranks x {chosen.tensors} tensors",
        measured,
        ours="shardproof",
        nbytes=None,
        as_json=chosen.json,
        notes={"bytes posted a rank": len(posts[0]), "our peak memory, GiB": round(peak, 2)},
    )


if __name__ == "__main__":
    main()

"""Loading a GPT-shaped state into the layout that it was saved from, from a warm page cache.

shardproof (which verifies every byte) and torch DCP take turns with three limits. The limits read as many
bytes into the same tensors:

- a raw read of a file from its beginning;
- a raw read that begins at the fastest byte of a page, as shardproof lays out its files;
- the same in spans of 512 KiB, each hashed while it is in the processor's caches: the least work of a load
  that verifies.

With `--cold` the page cache has none of the files when a load begins. The limits are then raw reads of the
same files past the page cache (O_DIRECT) and through it. Each uses the depth and request size that a sweep
of the same run found fastest. With `--latency 5` every read of a storage takes 5 ms longer, as over a
network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cold import RawReads, Slow, evict, fill
from common import (
    LARGE_IN_PAGE,
    RawFile,
    folder,
    gpt_state,
    is_rank,
    launch,
    local_bytes,
    parser,
    report,
    rounds,
    start,
    tensors_of,
    total_bytes,
)

import shardproof as sp
from shardproof.engine.loading import load_from
from shardproof.rendezvous import connect


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--width", type=int, default=1024, help="of the model (default 1024, GPT-2 medium's)"
    )
    options.add_argument("--cold", action="store_true", help="with no file in the page cache")
    options.add_argument(
        "--latency", type=float, default=0.0, help="with --cold: milliseconds that each read takes longer"
    )
    given = options.parse_args()
    if not is_rank():
        launch(given, given.ranks)
    mesh = start(given)
    state = gpt_state(given.gib, mesh, width=given.width)
    nbytes = total_bytes(state)
    sp.save(folder() / "ours", state)
    dcp.save(state, checkpoint_id=folder() / "dcp")
    target = gpt_state(given.gib, mesh, width=given.width, filled=False)
    if given.cold:
        cold(given, target, nbytes)
        check(state, target)
    else:
        warm(given, state, target, nbytes)
    dist.destroy_process_group()


def cold(given: argparse.Namespace, target: dict[str, Any], nbytes: int) -> None:
    """Measures loads of files that are not in the page cache."""
    ours, latency = folder() / "ours", given.latency / 1e3
    raw = RawReads(sorted((ours / "shards").glob("*")) or sorted(ours.rglob("*.safetensors")), latency)
    ways: dict[str, Callable[[int], object]] = {}
    for name, direct in (("raw, past the cache", True), ("raw, through the cache", False)):
        depth, request = raw.best(direct=direct, evicted=ours)
        ways[f"{name}, {depth} x {request >> 10} KiB"] = (
            lambda number, direct=direct, depth=depth, request=request: raw.read(
                direct=direct, depth=depth, request=request
            )
        )
    limits = list(ways)
    if latency:
        Slow.latency = latency
        ways["shardproof"] = lambda number: load_from(Slow(ours), target, connect())
    else:
        ways["shardproof"] = lambda number: sp.load(ours, target)
        ways["torch DCP"] = lambda number: dcp.load(target, checkpoint_id=folder() / "dcp")
    measured = rounds(ways, given.repeats, prepare=lambda name, number: evict(folder()))
    best = min(measured[name].median for name in limits)
    notes = {"of the best raw read's speed": round(best / measured["shardproof"].median, 3)}
    if not latency:
        notes["times as fast as DCP"] = round(measured["torch DCP"].median / measured["shardproof"].median, 2)
    report(
        f"load, same layout, cold, {given.ranks} ranks" + (f", {given.latency} ms a read" if latency else ""),
        measured,
        ours="shardproof",
        nbytes=nbytes,
        to=given.json,
        notes=notes,
    )


def check(state: dict[str, Any], target: dict[str, Any]) -> None:
    """Loads once more, and compares every tensor."""
    for tensor in tensors_of(target):
        tensor.fill_(-1)
    evict(folder())
    sp.load(folder() / "ours", target)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(target), strict=True))


def warm(given: argparse.Namespace, state: dict[str, Any], target: dict[str, Any], nbytes: int) -> None:
    """Measures loads from the page cache."""
    fill(folder() / "ours")
    dist.barrier()
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", local_bytes(state))
    raw.write(direct=False)
    limits: dict[str, Callable[[int], object]] = {
        "raw read": lambda number: raw.read(tensors_of(target)),
        "raw read, off the page": lambda number: raw.read(tensors_of(target), LARGE_IN_PAGE),
    }
    if given.device == "cpu":
        limits["raw read, off the page, hashed"] = lambda number: raw.read_and_hash(tensors_of(target))
    measured = rounds(
        limits
        | {
            "shardproof": lambda number: sp.load(folder() / "ours", target),
            "torch DCP": lambda number: dcp.load(target, checkpoint_id=folder() / "dcp"),
        },
        given.repeats,
    )
    for tensor in tensors_of(target):
        tensor.fill_(-1)
    sp.load(folder() / "ours", target)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(target), strict=True))
    ours = measured["shardproof"].median
    report(
        f"load, same layout, warm, {given.ranks} ranks, width {given.width}",
        measured,
        ours="shardproof",
        nbytes=nbytes,
        to=given.json,
        notes={f"of the speed of a {name}": round(measured[name].median / ours, 3) for name in limits},
    )


if __name__ == "__main__":
    main()

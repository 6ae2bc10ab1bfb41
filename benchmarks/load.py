"""Loading a GPT-shaped state into the layout that it was saved from, from a warm page cache.

shardproof (every byte verified) and torch DCP in turn, beside three limits over the same bytes into the same
tensors: a raw read of a file from its beginning; one from the byte of a page from which it is fastest, as
shardproof lays out its files; and that in spans of 512 KiB, each hashed while the processor has it in its
caches, which is the least that a load can do that verifies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    tensors_of,
    total_bytes,
)
from torch.distributed.device_mesh import init_device_mesh

import shardproof as sp


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--width", type=int, default=1024, help="of the model (default 1024, GPT-2 medium's)"
    )
    given = options.parse_args()
    if not is_rank():
        launch(given, given.ranks)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (given.ranks,))
    state = gpt_state(given.gib, mesh, width=given.width)
    nbytes = total_bytes(state)
    sp.save(folder() / "ours", state)
    dcp.save(state, checkpoint_id=folder() / "dcp")
    target = gpt_state(given.gib, mesh, width=given.width, filled=False)
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", local_bytes(state))
    raw.write(direct=False)
    measured = rounds(
        {
            "raw read": lambda number: raw.read(tensors_of(target)),
            "raw read, off the page": lambda number: raw.read(tensors_of(target), LARGE_IN_PAGE),
            "raw read, off the page, hashed": lambda number: raw.read_and_hash(tensors_of(target)),
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
        as_json=given.json,
        notes={
            "of a raw read": round(measured["raw read"].median / ours, 3),
            "of a raw read off the page": round(measured["raw read, off the page"].median / ours, 3),
            "of one that hashes": round(measured["raw read, off the page, hashed"].median / ours, 3),
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

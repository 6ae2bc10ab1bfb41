"""Lists each peer on this machine: its release, whether it flushes, and how it is driven.

Every way saves a small state. As soon as the way allows it, every tensor is overwritten; then the save is
loaded. *values* is "saved" if the checkpoint has the values at the time of the call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import is_rank, launched, start
from peers.figures import Row, failing, made, options, show
from peers.subject import Subject, gpt
from peers.way import Way


def has_saved_values(way: Way, subject: Subject) -> bool:
    """True if a save has the values at its call. All values change as soon as the way allows it."""
    values = [tensor.clone() for tensor in subject.tensors]
    saving = way.begin(1)
    way.may_change()
    for tensor in subject.tensors:
        tensor.fill_(-1)
    saving.wait()
    way.load(1)
    same = all(torch.equal(*pair) for pair in zip(way.loaded(subject), values, strict=True))
    for tensor, value in zip(subject.tensors, values, strict=True):
        tensor.copy_(value)
    return same


def main() -> None:
    given = options(__doc__).parse_args()
    if not is_rank():
        raise SystemExit(launched(given, given.ranks[0]))
    mesh = start(given)
    torch.set_grad_enabled(False)
    subject = gpt(min(given.gib, 0.15), mesh)
    ways, missing = made(given.only)
    rows: list[Row] = []
    for way in ways:
        before = len(missing)
        same = False
        with failing(way.name, missing):
            way.prepare(subject)
            same = has_saved_values(way, subject)
        if len(missing) == before:
            answers: list[bool] = [False] * dist.get_world_size()
            dist.all_gather_object(answers, same)
            rows.append(Row(way.name, way, {"same": [float(all(answers))]}))
    show(
        f"Peers, {dist.get_world_size()} ranks, gloo, {mesh.device_type}",
        rows,
        {
            "package": lambda row: f"{row.way.package} {row.way.release()}" if row.way else "",
            "in background": lambda row: "yes" if row.way and row.way.asynchronous else "no",
            "flush": lambda row: row.way.flushes if row.way else "",
            "values": lambda row: "saved" if row.median("same") else "CHANGED",
            "driven": lambda row: (row.way.driven or "as documented") if row.way else "",
        },
        missing,
        to=given.json,
    )
    for way in ways:
        way.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

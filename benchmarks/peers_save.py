"""Saving beside every peer: how long a save holds training, and how long until its bytes are safe.

*held* is the time until the call returns. *done* is the time until the peer says that the save is done.
*durable* is the time until every byte is on stable storage: as *done* for those that flush, and with a
flush of all their files added for those that do not. A step of training goes before each save, as it does in
a job: without one, the way after a peer that forks would pay for the pages that the fork left to be copied.
Nothing trains meanwhile (see peers_steps.py), so the fence of shardproof never has to copy. With
`--change-at-once`, *held* lasts until tensors may be changed, as if the next optimizer step came at once:
ways that stage in the background are waited for, and the fence copies all that is not yet written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from common import GIB, RawFile, folder, is_rank, local_bytes, remove, start
from peers.figures import Clock, Figures, Row, flush, launch_each, made, options, releases, rounds, show
from peers.subject import gpt, small
from peers.training import Trainer
from peers.way import Way

OURS = ("shardproof",)


def save(way: Way, trainer: Trainer | None, at_once: bool, number: int) -> Figures:
    """One save, after a step of training, and its folder removed."""
    if trainer is not None:
        trainer.step()
    clock = Clock()
    begun = way.begin(number)
    if at_once:
        way.may_change()
    held = clock()
    begun.wait()
    done = clock()
    if way.flushes == "no":
        dist.barrier()
        flush(way.path(number))
    durable = clock()
    remove(way.folder)
    return {"held": held, "done": done, "durable": durable}


def write(raw: RawFile, direct: bool, number: int) -> Figures:
    """The same bytes from one buffer, flushed."""
    raw.remove()
    clock = Clock()
    raw.write(direct=direct)
    taken = clock()
    raw.remove()
    remove(folder() / "none")
    return {"held": taken, "done": taken, "durable": taken}


def main() -> None:
    given = options(__doc__)
    given.add_argument("--change-at-once", action="store_true", help="wait until tensors may be changed")
    given = given.parse_args()
    if not is_rank():
        launch_each(given)
    mesh = start(given)
    subject = gpt(given.gib, mesh) if given.state == "gpt" else small(given.tensors, mesh)
    nbytes = subject.total_bytes
    ways, missing = made(given.only, wanted=lambda way: subject.module is not None or not way.needs_optimizer)
    for way in ways:
        way.prepare(subject)
    trainer = Trainer(subject, mesh) if subject.module is not None else None
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", local_bytes(subject.tree))
    measures: list[tuple[Row, Callable[[int], Figures]]] = [
        (Row("raw write, O_DIRECT, flushed"), partial(write, raw, True)),
        (Row("raw write, buffered, flushed"), partial(write, raw, False)),
        *((Row(way.name, way), partial(save, way, trainer, given.change_at_once)) for way in ways),
    ]
    rows = rounds(measures, given.repeats, missing)
    limit = min(row.median("durable") for row in rows if row.way is None)
    ours = {
        figure: min(row.median(figure) for row in rows if row.name.startswith(OURS))
        for figure in ("held", "durable")
    }
    what = f"{nbytes / GIB:.2f} GiB" if given.state == "gpt" else f"{given.tensors} tensors of 4 KiB a rank"
    show(
        f"Save, {what}, {dist.get_world_size()} ranks, {given.repeats} rounds, "
        f"on {mesh.device_type}{', a change at once' if given.change_at_once else ''}",
        rows,
        {
            "held s": lambda row: row.spread("held"),
            "done s": lambda row: row.spread("done"),
            "durable s": lambda row: row.spread("durable"),
            "GiB/s": lambda row: f"{nbytes / row.median('durable') / GIB:.2f}",
            "held / ours": lambda row: f"{row.median('held') / ours['held']:.2f}",
            "durable / ours": lambda row: f"{row.median('durable') / ours['durable']:.2f}",
            "durable / raw": lambda row: f"{row.median('durable') / limit:.2f}",
        },
        missing,
        as_json=given.json,
        notes=[releases(rows)],
    )
    for way in ways:
        way.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

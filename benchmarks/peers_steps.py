"""The cost of a save to training that continues during it, for every peer that saves in the background.

A real loop (see peers/training.py) makes steps. A save begins between two of them, and steps continue until
it is done. Steps have two lengths: *short*, as short as the optimizer's pass allows; and *long*, with micro
batches added until a step takes longer than a durable raw write of the state. The cost of a save is the time
of all steps from its start to its end, less the time of as many undisturbed steps. It has three parts: the
time until the call returns; the time that a step waits before it may change a tensor (under shardproof's
fence, for the copy of what is not yet written); and the time that writing takes from computing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import GIB, RawFile, folder, is_rank, remove, start
from peers.figures import Clock, Figures, Row, launch_each, made, options, releases, rounds, show
from peers.subject import gpt
from peers.training import Trainer
from peers.way import Way

ALONE = 3
"""Undisturbed steps before each save."""
MOST = 400
"""Steps after which a save that is not done is an error."""


def everywhere(done: bool) -> bool:
    """True if `done` is true on every rank."""
    flag = torch.tensor(int(done))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def disturbed(way: Way, trainer: Trainer, number: int) -> Figures:
    """Undisturbed steps, then a save with steps until it is done."""
    alone = statistics.median(trainer.step() for _ in range(ALONE))
    waited: list[float] = []

    def before_change() -> None:
        begun = time.perf_counter()
        way.may_change()
        waited.append(time.perf_counter() - begun)

    clock = Clock()
    saving = way.begin(number)
    blocked = clock()
    steps = [trainer.step(before_change)]
    while not everywhere(saving.done()):
        steps.append(trainer.step(before_change))
        if len(steps) > MOST:
            raise TimeoutError(f"the save was not done after {MOST} steps")
    saving.wait()
    whole = clock()
    remove(way.folder)
    return {
        "alone": alone,
        "blocked": blocked,
        "waited": max(waited),
        "steps": float(len(steps)),
        "during": statistics.median(steps),
        "worst": max(steps),
        "cost": whole - len(steps) * alone,
    }


def lengthened(trainer: Trainer, raw: RawFile) -> tuple[float, int]:
    """Seconds of a durable raw write, and the micro batches that make a step one and a half times as long."""
    clock = Clock()
    raw.write(direct=True)
    raw.remove()
    write = torch.tensor(clock(), dtype=torch.float64)
    trainer.step()
    whole = torch.tensor(min(trainer.step() for _ in range(ALONE)), dtype=torch.float64)
    begun = time.perf_counter()
    trainer.gradients()
    one = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    for value in (write, whole, one):
        dist.all_reduce(value, dist.ReduceOp.MAX)
    more = max(0.0, 1.5 * write.item() - whole.item()) / one.item()
    return write.item(), 1 + math.ceil(more)


def main() -> None:
    given = options(__doc__)
    given.add_argument("--tokens", type=int, default=16, help="tokens of a micro batch (default 16)")
    given = given.parse_args()
    if not is_rank():
        launch_each(given)
    mesh = start(given)
    subject = gpt(given.gib, mesh)
    nbytes = subject.total_bytes
    short = Trainer(subject, mesh, tokens=given.tokens)
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", subject.local_bytes)
    write, batches = lengthened(short, raw)
    ways, missing = made(given.only, wanted=lambda way: way.asynchronous)
    for way in ways:
        way.prepare(subject)
    for length, trainer in (
        ("short", short),
        ("long", Trainer(subject, mesh, tokens=given.tokens, batches=batches)),
    ):
        measures: list[tuple[Row, Callable[[int], Figures]]] = [
            (Row(way.name, way), partial(disturbed, way, trainer)) for way in ways
        ]
        rows = rounds(measures, given.repeats, missing)
        ours = min(row.median("cost") for row in rows if row.name.startswith("shardproof"))
        gib = nbytes / GIB
        show(
            f"Training during a save, {length} steps, {gib:.2f} GiB, {dist.get_world_size()} ranks, "
            f"{given.repeats} rounds, on {mesh.device_type}",
            rows,
            {
                "step alone s": lambda row: row.spread("alone"),
                "blocked s": lambda row: f"{row.median('blocked'):.3f}",
                "waited s": lambda row: f"{row.median('waited'):.3f}",
                "stall s/GiB": lambda row, gib=gib: (
                    f"{(row.median('blocked') + row.median('waited')) / gib:.3f}"
                ),
                "steps": lambda row: f"{row.median('steps'):.0f}",
                "step during s": lambda row: f"{row.median('during'):.3f}",
                "worst step s": lambda row: f"{row.median('worst'):.3f}",
                "cost s": lambda row: row.spread("cost"),
                "cost - ours s": lambda row, ours=ours: f"{row.median('cost') - ours:+.3f}",
            },
            missing,
            to=given.json,
            notes=[
                f"A durable raw write takes {write:.2f} s; a step is of {trainer.batches} micro batches of "
                f"{given.tokens} tokens.",
                releases(rows),
            ],
        )
        names = {row.name for row in rows}
        ways = [way for way in ways if way.name in names]
    for way in ways:
        way.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

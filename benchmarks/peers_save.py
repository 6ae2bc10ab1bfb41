"""Saving beside every peer: how long a save holds training, and how long until its bytes are safe.

*held* is the time until the call returns. *done* is the time until the peer says that the save is done.
*durable* is the time until every byte is on stable storage: as *done* for those that flush, and with a
flush of all their files added for those that do not. A step of training goes before each save, as it does in
a job: without one, the way after a peer that forks would pay for the pages that the fork left to be copied.
Nothing trains meanwhile (see peers_steps.py), so the fence of shardproof never has to copy. With
`--change-at-once`, *held* lasts until tensors may be changed, as if the next optimizer step came at once:
ways that stage in the background are waited for, and the fence copies all that is not yet written.

All ways share their processes, and so what a fork leaves behind and what it has to copy. With `--apart` each
has processes and a state of its own, as in a job (see peers/apart.py): there must be memory for as many.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import GIB, RawFile, device_type, folder, is_rank, local_bytes, remove, start
from peers.apart import Turns, measure_apart
from peers.figures import (
    Clock,
    Figures,
    Row,
    flush,
    launch_each,
    made,
    options,
    releases,
    rounds,
    show,
    slowest,
)
from peers.roster import Missing, every_way
from peers.subject import Subject, gpt, small
from peers.training import Trainer
from peers.way import Way

OURS = ("shardproof",)
RAW = "raw"
"""Name of the job of the raw writes."""


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


def limits(raw: RawFile) -> list[tuple[Row, Callable[[int], Figures]]]:
    """The raw writes, and how each is measured."""
    return [
        (Row("raw write, O_DIRECT, flushed"), partial(write, raw, True)),
        (Row("raw write, buffered, flushed"), partial(write, raw, False)),
    ]


def copied_to_host(subject: Subject) -> float:
    """Seconds of a copy of a device's tensors to existing page-locked memory, on the slowest rank."""
    host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in subject.tensors]
    seconds = []
    for _ in range(3):
        clock = Clock()
        for onto, part in zip(host, subject.tensors, strict=True):
            onto.copy_(part, non_blocking=True)
        seconds.append(clock())
    return slowest({"copied": statistics.median(seconds)})["copied"]


def print_table(
    given: Namespace,
    rows: list[Row],
    missing: list[Missing],
    nbytes: int,
    ranks: int,
    copied: float | None = None,
) -> None:
    """All figures, with their ratios to ours and to the faster raw write.

    Args:
        given: the options.
        rows: the figures.
        missing: ways that could not be measured.
        nbytes: of the state.
        ranks: processes.
        copied: seconds that the ranks take to copy the state to the host, if it is on a device.
    """
    limit = min(row.median("durable") for row in rows if row.way is None)
    ours = {
        figure: min(row.median(figure) for row in rows if row.name.startswith(OURS))
        for figure in ("held", "durable")
    }
    what = f"{nbytes / GIB:.2f} GiB" if given.state == "gpt" else f"{given.tensors} tensors of 4 KiB a rank"
    how = (", each way in processes of its own" if given.apart else "") + (
        ", a change at once" if given.change_at_once else ""
    )
    show(
        f"Save, {what}, {ranks} ranks, {given.repeats} rounds, on {device_type(given)}{how}",
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
        to=given.json,
        notes=[
            releases(rows),
            *([] if copied is None else [f"A copy of the state to page-locked memory takes {copied:.3f} s."]),
        ],
        where=given.folder or Path(tempfile.gettempdir()),
    )


def measure(given: Namespace) -> None:
    """A rank's part."""
    mesh = start(given)
    turns = Turns.of_this_job()
    subject = gpt(given.gib, mesh) if given.state == "gpt" else small(given.tensors, mesh)
    nbytes = subject.total_bytes
    measures: list[tuple[Row, Callable[[int], Figures]]] = []
    if turns is None or turns.name == RAW:
        measures += limits(RawFile(folder() / f"raw-{dist.get_rank()}", local_bytes(subject.tree)))
    ways, missing = list[Way](), list[Missing]()
    if turns is None:
        ways, missing = made(given.only, wanted=partial(is_fit, given))
    elif turns.name != RAW:
        ways, missing = made(turns.name, wanted=lambda way: way.__name__ == turns.name)
    copied = copied_to_host(subject) if mesh.device_type != "cpu" else None
    trainer = Trainer(subject, mesh) if ways and subject.module is not None else None
    for way in ways:
        way.prepare(subject)
        measures.append((Row(way.name, way), partial(save, way, trainer, given.change_at_once)))
    if turns is None:
        rows = rounds(measures, given.repeats, missing)
        print_table(given, rows, missing, nbytes, dist.get_world_size(), copied)
    else:
        turns.answer(rounds(measures, given.repeats, missing, turns.round), missing, nbytes=nbytes)
    for way in ways:
        way.close()
    dist.destroy_process_group()


def is_fit(given: Namespace, way: type[Way]) -> bool:
    """Whether a way can save the state that was asked for."""
    return given.state == "gpt" or not way.needs_optimizer


def measure_each_apart(given: Namespace) -> None:
    """The command's part, where each way gets processes of its own."""
    classes, failed = every_way(given.only)
    ways = {way.__name__: way for way in classes if is_fit(given, way)}
    by_row = {way.name: way for way in ways.values()}
    for ranks in given.world_sizes:
        answers = measure_apart(given, [RAW, *ways], ranks)
        rows = [Row(name, by_row.get(name), figures) for name, figures in answers.figures.items()]
        missing = [*failed, *answers.missing]
        if not any(row.way is None for row in rows) or not any(row.name.startswith(OURS) for row in rows):
            raise SystemExit(f"nothing to compare with: {missing}")
        print_table(given, rows, missing, answers.facts["nbytes"], ranks)


def main() -> None:
    given = options(__doc__)
    given.add_argument("--change-at-once", action="store_true", help="wait until tensors may be changed")
    given.add_argument("--apart", action="store_true", help="each way in processes of its own")
    given = given.parse_args()
    if is_rank():
        measure(given)
    elif given.apart:
        measure_each_apart(given)
    else:
        launch_each(given)


if __name__ == "__main__":
    main()

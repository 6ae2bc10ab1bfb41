"""Saving with every peer: how long a save blocks training, and how long until its bytes are durable.

*blocked* is the time until the call returns. *done* is the time until the peer reports that the save is done.
*durable* is the time until every byte is on stable storage. For peers that flush it equals *done*; for
others, it includes a flush of all their files.

A step of training precedes each save, as in a job. Without it, the next way would pay for the pages that a
peer's fork left to be copied. Nothing trains during the save (see peers_steps.py), so shardproof's fence
never has to copy. With `--change-at-once`, *blocked* lasts until tensors may be changed, as if the next
optimizer step came at once. Then the benchmark waits for ways that stage in the background, and the fence
copies all that is not yet written.

All ways share their processes, so they also share the cost of forks: the pages that a fork copies, and those
that it leaves to be copied. With `--apart`, each way has its own processes and state, as in a job (see
peers/apart.py). The memory has to be large enough for all of them.
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
    """Runs a step of training and one save, then removes its folder."""
    if trainer is not None:
        trainer.step()
    clock = Clock()
    begun = way.begin(number)
    if at_once:
        way.may_change()
    blocked = clock()
    begun.wait()
    done = clock()
    if way.flushes == "no":
        dist.barrier()
        flush(way.path(number))
    durable = clock()
    remove(way.folder)
    return {"blocked": blocked, "done": done, "durable": durable}


def write(raw: RawFile, direct: bool, number: int) -> Figures:
    """Writes the same bytes from one buffer, and flushes them."""
    raw.remove()
    clock = Clock()
    raw.write(direct=direct)
    seconds = clock()
    raw.remove()
    remove(folder() / "none")
    return {"blocked": seconds, "done": seconds, "durable": seconds}


def limits(raw: RawFile) -> list[tuple[Row, Callable[[int], Figures]]]:
    """The raw writes, with the function that measures each."""
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
    """Prints all figures, with their ratios to ours and to the faster raw write.

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
        for figure in ("blocked", "durable")
    }
    what = f"{nbytes / GIB:.2f} GiB" if given.state == "gpt" else f"{given.tensors} tensors of 4 KiB a rank"
    how = (", each way in processes of its own" if given.apart else "") + (
        ", a change at once" if given.change_at_once else ""
    )
    show(
        f"Save, {what}, {ranks} ranks, {given.repeats} rounds, on {device_type(given)}{how}",
        rows,
        {
            "blocked s": lambda row: row.spread("blocked"),
            "done s": lambda row: row.spread("done"),
            "durable s": lambda row: row.spread("durable"),
            "GiB/s": lambda row: f"{nbytes / row.median('durable') / GIB:.2f}",
            "blocked / ours": lambda row: f"{row.median('blocked') / ours['blocked']:.2f}",
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
    """Runs the benchmark on one rank."""
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
    """True if a way can save the state of `--state`."""
    return given.state == "gpt" or not way.needs_optimizer


def measure_each_apart(given: Namespace) -> None:
    """The part of the command that starts processes for each way."""
    classes, failed = every_way(given.only)
    ways = {way.__name__: way for way in classes if is_fit(given, way)}
    by_row = {way.name: way for way in ways.values()}
    for ranks in given.ranks:
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

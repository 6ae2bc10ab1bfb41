"""Rounds in which each way gives several figures, and the table of their medians."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from common import file_system, folder, launched, machine, parser, settle_device, table
from recording import STDOUT, record

from peers.roster import Missing, every_way
from peers.way import Way, files_under

Figures = dict[str, float]

UNITS = {"steps": "steps", "same": "whether"}
"""Units of the figures that are not seconds."""


@dataclass
class Row:
    """The figures of one way: for each, one value per round, that of the slowest rank."""

    name: str
    way: Way | type[Way] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def median(self, figure: str) -> float:
        return statistics.median(self.figures[figure])

    def spread(self, figure: str) -> str:
        """The median with the least and the greatest."""
        values = self.figures[figure]
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def options(description: str | None, **defaults: object) -> argparse.ArgumentParser:
    """The options of a script that measures peers."""
    given = parser(description, ranks=(2, 4))
    given.add_argument(
        "--only", help="ways or modules of ways to measure, separated by commas (see peers/roster.py)"
    )
    given.add_argument("--state", choices=("gpt", "small"), default="gpt", help="what is saved (default gpt)")
    given.add_argument(
        "--tensors", type=int, default=20_000, help="tensors of the small state (default 20,000)"
    )
    given.set_defaults(gib=2.0, repeats=5, **defaults)
    return given


def launch_each(given: argparse.Namespace, timeout: float = 3600) -> None:
    """Runs the script once for each number of ranks, and exits with the greatest exit code."""
    codes = [launched(given, ranks, timeout=timeout) for ranks in given.ranks]
    sys.exit(max(map(abs, codes)))


def made(
    only: str | None, *, wanted: Callable[[type[Way]], bool] = lambda way: True
) -> tuple[list[Way], list[Missing]]:
    """The ways that start on every rank, and the other ways with their errors."""
    _keep_stdout()
    classes, missing = every_way(only)
    ways: list[Way] = []
    for made_by in filter(wanted, classes):
        with failing(made_by.name, missing):
            ways.append(made_by(folder() / made_by.__name__))
    return [way for way in ways if way.name not in {item.name for item in missing}], missing


def _keep_stdout() -> None:
    """Reserves standard output for the tables: the output of peers goes to standard error."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


@contextmanager
def failing(name: str, missing: list[Missing]) -> Iterator[None]:
    """An error on any rank lists the way as missing on all of them."""
    reason = ""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        missing.append(Missing(name, next(filter(None, reasons))))


def slowest(figures: Figures) -> Figures:
    """The greatest of each figure over the ranks."""
    values = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))


class Clock:
    """Seconds since all ranks met."""

    def __init__(self) -> None:
        settle_device()
        dist.barrier()
        self.begun = time.perf_counter()

    def __call__(self) -> float:
        settle_device()
        return time.perf_counter() - self.begun


def flush(path: Path) -> None:
    """Each rank flushes its share of the files of a save, and rank 0 its folders."""
    for file in [*files_under(path)][dist.get_rank() :: dist.get_world_size()]:
        _fsync(file)
    if dist.get_rank() == 0:
        for directory in [path, *(found for found in path.rglob("*") if found.is_dir())]:
            _fsync(directory)
    dist.barrier()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rounds(
    rows: Sequence[tuple[Row, Callable[[int], Figures]]],
    repeats: int,
    missing: list[Missing],
    turn: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext(),
) -> list[Row]:
    """Measures each way in turn, `repeats` times after one unmeasured round. A way that fails is left out.

    Args:
        rows: the ways, each with a function of the round's number.
        repeats: measured rounds.
        missing: the list to which ways that fail are added.
        turn: a context in which each round is measured.
    """
    failed: set[str] = set()
    for number in range(repeats + 1):
        with turn(number):
            for row, measure in rows:
                if row.name in failed:
                    continue
                before = len(missing)
                with failing(row.name, missing):
                    figures = measure(number)
                if len(missing) > before:
                    failed.add(row.name)
                elif number:
                    for figure, value in slowest(figures).items():
                        row.figures.setdefault(figure, []).append(value)
    return [row for row, _ in rows if row.figures]


def show(
    title: str,
    rows: Sequence[Row],
    columns: dict[str, Callable[[Row], str]],
    missing: Sequence[Missing],
    *,
    to: str | None,
    notes: Sequence[str] = (),
    where: Path | None = None,
) -> None:
    """Prints a table of the rows, the notes, and what could not be measured. Rank 0 only.

    `to` is the value of `--json`.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    facts = f"{machine()}, files on {file_system(where or folder())}"
    if to == STDOUT:
        print(
            json.dumps(
                {
                    "title": title,
                    "machine": facts,
                    "rows": [
                        {
                            "name": row.name,
                            "release": row.way.release() if row.way else None,
                            "flushes": row.way.flushes if row.way else None,
                            "driven": row.way.driven if row.way else None,
                            "figures": row.figures,
                        }
                        for row in rows
                    ],
                    "missing": {item.name: item.reason for item in missing},
                    "notes": list(notes),
                }
            ),
            flush=True,
        )
        return
    record(
        to,
        title,
        [
            (f"{row.name}: {figure}", UNITS.get(figure, "s"), values)
            for row in rows
            for figure, values in row.figures.items()
        ],
    )
    print(f"\n### {title}\n\n{facts}\n")
    table(("way", *columns), [(row.name, *(cell(row) for cell in columns.values())) for row in rows])
    for note in notes:
        print(f"\n{note}")
    for item in missing:
        print(f"\nNot measured: {item.name}: {' '.join(item.reason.split())[:300]}")
    sys.stdout.flush()


def releases(rows: Sequence[Row]) -> str:
    """Release and flush behaviour of each package, as a note."""
    texts = dict.fromkeys(
        f"{row.way.package} {row.way.release()} (flush: {row.way.flushes})" for row in rows if row.way
    )
    return f"Measured: {'; '.join(texts)}."

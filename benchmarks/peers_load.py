"""Loading into the layout that was saved, for every peer, from a warm page cache or from the disk.

Every way loads its own save. Before each load, its files are read into the page cache, which is not
measured. Afterwards they are dropped from it, so that the files of all ways need not fit into memory
together. With `--cold` they are dropped before each load too. The limit is a raw read of the same bytes into
the same tensors. After the rounds the tensors are overwritten and loaded once more, and every bit is
compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import GIB, LARGE_IN_PAGE, RawFile, folder, is_rank, start
from peers.figures import (
    Clock,
    Figures,
    Row,
    failing,
    flush,
    launch_each,
    made,
    options,
    releases,
    rounds,
    show,
)
from peers.roster import Missing
from peers.subject import Subject, gpt, small
from peers.way import Way, files_under

_BLOCK = bytearray(16 << 20)


def settle(files: Iterable[Path], cold: bool) -> None:
    """Reads files into the page cache, or drops them from it. Each rank does its share."""
    dist.barrier()
    for path in [*files][dist.get_rank() :: dist.get_world_size()]:
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.readinto(_BLOCK):
                    pass


def load(way: Way, cold: bool, number: int) -> Figures:
    """One load of the only save."""
    files = list(files_under(way.path(0)))
    settle(files, cold)
    clock = Clock()
    way.load(0)
    figures = {"load": clock()}
    settle(files, cold=True)
    return figures


def read(raw: RawFile, subject: Subject, cold: bool, start: int, number: int) -> Figures:
    """Reads the same bytes from one file per rank, from byte `start` on, into the same tensors."""
    files = sorted(raw.path.parent.glob("raw-*"))
    settle(files, cold)
    clock = Clock()
    raw.read(subject.tensors, start)
    figures = {"load": clock()}
    settle(files, cold=True)
    return figures


def check(way: Way, subject: Subject, values: list[torch.Tensor], missing: list[Missing]) -> None:
    """Overwrites the tensors and loads them: every bit must be restored."""
    with failing(f"{way.name}: a load of overwritten tensors", missing):
        for tensor in subject.tensors:
            tensor.fill_(-1)
        way.load(0)
        wrong = sum(not torch.equal(*pair) for pair in zip(way.loaded(subject), values, strict=True))
        if wrong:
            raise ValueError(f"{wrong} of {len(values)} tensors differ from what was saved")


def main() -> None:
    given = options(__doc__)
    given.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each load"
    )
    given = given.parse_args()
    if not is_rank():
        launch_each(given)
    mesh = start(given)
    torch.set_grad_enabled(False)
    subject = gpt(given.gib, mesh) if given.state == "gpt" else small(given.tensors, mesh)
    values = [tensor.clone() for tensor in subject.tensors]
    nbytes = subject.total_bytes
    raw = RawFile(folder() / f"raw-{dist.get_rank()}", subject.local_bytes)
    raw.write(direct=False)
    raw.read(subject.tensors)
    for tensor, value in zip(subject.tensors, values, strict=True):
        tensor.copy_(value)
    ways, missing = made(given.only, wanted=lambda way: not way.asynchronous)
    measures: list[tuple[Row, Callable[[int], Figures]]] = [
        (Row("raw read"), partial(read, raw, subject, given.cold, 0)),
        (Row("raw read, off the page"), partial(read, raw, subject, given.cold, LARGE_IN_PAGE)),
    ]
    for way in ways:
        before = len(missing)
        with failing(way.name, missing):
            way.prepare(subject)
            way.begin(0).wait()
        if len(missing) == before:
            flush(way.path(0))
            measures.append((Row(way.name, way), partial(load, way, given.cold)))
    rows = rounds(measures, given.repeats, missing)
    for row in rows:
        if row.way is not None:
            check(row.way, subject, values, missing)
    ours = min(row.median("load") for row in rows if row.name.startswith("shardproof"))
    limit = rows[0].median("load")
    what = f"{nbytes / GIB:.2f} GiB" if given.state == "gpt" else f"{given.tensors} tensors of 4 KiB a rank"
    show(
        f"Load, same layout, {'from disk' if given.cold else 'warm'}, {what}, {dist.get_world_size()} ranks, "
        f"{given.repeats} rounds, on {mesh.device_type}",
        rows,
        {
            "load s": lambda row: row.spread("load"),
            "GiB/s": lambda row: f"{nbytes / row.median('load') / GIB:.2f}",
            "load / ours": lambda row: f"{row.median('load') / ours:.2f}",
            "load / raw": lambda row: f"{row.median('load') / limit:.2f}",
        },
        missing,
        to=given.json,
        notes=[releases(rows)],
    )
    for way in ways:
        way.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

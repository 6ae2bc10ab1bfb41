"""Peak host memory of a save and of a load beyond the state itself, for every peer.

Each way runs separately, in its own ranks. Another process adds up the memory of the ranks and of all
processes that they start, every ten milliseconds. It counts anonymous and shared memory, a page that several
processes map once (Pss), but neither files nor the page cache. The base is measured when the state exists and
the peer is imported. Buffers that a way makes before a save or reuses after it count. The second save is
measured, when buffers that a way reuses exist.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import GIB, file_system, folder, is_rank, machine, start, table
from peers.figures import options
from peers.roster import every_way
from peers.subject import Subject, gpt, small
from recording import STDOUT, record

WAY = "SHARDPROOF_BENCH_WAY"
PAUSE = 0.5
"""Seconds without work in which the base is sampled."""


def tree_of(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it has ended
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def memory_of(root: int) -> int:
    """Bytes of anonymous and shared memory of a process and its descendants."""
    total = 0
    for process in tree_of(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total << 10


class Sampler(threading.Thread):
    """Samples the memory of a process tree until it is stopped."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.samples: list[tuple[float, int]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            self.samples.append((time.monotonic(), memory_of(self.root)))

    def greatest(self, begun: float, ended: float) -> int:
        """The greatest sample between two times of `time.monotonic`."""
        return max(bytes_ for at, bytes_ in self.samples if begun <= at <= ended)


def measure(name: str, ranks: int, timeout: float, where: Path | None) -> dict[str, float]:
    """Runs one way under torchrun. Returns GiB of the state, and of the peak beyond it in save and load."""
    work = Path(tempfile.mkdtemp(prefix="shardproof-bench-", dir=where))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *sys.argv,
    ]
    variables = {"OMP_NUM_THREADS": "1", "SHARDPROOF_BENCH_FOLDER": str(work), WAY: name}
    log = work / "log"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
        sampler = Sampler(process.pid)
        sampler.start()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            raise
        finally:
            sampler.stopped.set()
            sampler.join()
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
            raise RuntimeError(lines[0] if lines else f"exit code {code}")
        marks = json.loads((work / "marks.json").read_text())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    base = sampler.greatest(*marks["base"]) + marks["copied"]
    return {
        "state": marks["bytes"] / GIB,
        "save": (sampler.greatest(*marks["save"]) - base) / GIB,
        "load": (sampler.greatest(*marks["load"]) - base) / GIB,
    }


def one(subject: Subject, name: str) -> dict[str, object]:
    """The work of a rank: a pause, two saves of which the second is marked, and a load."""
    (kind,) = (way for way in every_way(name)[0] if way.__name__ == name)
    dist.barrier()
    marks: dict[str, object] = {"bytes": subject.total_bytes}
    begun = time.monotonic()
    time.sleep(PAUSE)
    marks["base"] = (begun, time.monotonic())
    way = kind(folder() / name)
    way.prepare(subject)
    marks["copied"] = subject.total_bytes if way.holds_copy else 0
    for number in range(2):
        dist.barrier()
        begun = time.monotonic()
        saving = way.begin(number)
        way.may_change()
        saving.wait()
        dist.barrier()
        marks["save"] = (begun, time.monotonic())
    with torch.no_grad():
        begun = time.monotonic()
        way.load(1)
        dist.barrier()
        marks["load"] = (begun, time.monotonic())
    way.close()
    return marks


def main() -> None:
    given = options(__doc__).parse_args()
    if is_rank():
        mesh = start(given)
        subject = gpt(given.gib, mesh) if given.state == "gpt" else small(given.tensors, mesh)
        marks = one(subject, os.environ[WAY])
        if dist.get_rank() == 0:
            (folder() / "marks.json").write_text(json.dumps(marks))
        dist.destroy_process_group()
        return
    ways, missing = every_way(given.only)
    for ranks in given.ranks:
        rows: dict[str, dict[str, float]] = {}
        reasons = {item.name: item.reason for item in missing}
        for way in ways:
            if way.needs_optimizer and given.state != "gpt":
                continue
            try:
                rows[way.name] = measure(way.__name__, ranks, 900, given.folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                reasons[way.name] = str(error)
        show(rows, reasons, ranks, given.json, given.folder or Path(tempfile.gettempdir()))


def show(
    rows: dict[str, dict[str, float]], reasons: dict[str, str], ranks: int, to: str | None, where: Path
) -> None:
    """Prints the table."""
    facts = f"{machine()}, files on {file_system(where)}"
    if to == STDOUT:
        print(
            json.dumps(
                {"title": "memory", "ranks": ranks, "machine": facts, "rows": rows, "missing": reasons}
            )
        )
        return
    record(
        to,
        f"peak host memory beyond the state, {ranks} ranks",
        [
            (f"{name}: {figure}", "GiB", [value])
            for name, row in rows.items()
            for figure, value in row.items()
        ],
    )
    print(f"\n### Peak host memory beyond the state, all {ranks} ranks together\n\n{facts}\n")
    table(
        ("way", "state GiB", "save GiB", "load GiB", "save / state", "load / state"),
        [
            (
                name,
                *(f"{row[figure]:.2f}" for figure in ("state", "save", "load")),
                *(f"{row[figure] / row['state']:.2f}" for figure in ("save", "load")),
            )
            for name, row in rows.items()
        ],
    )
    for name, reason in reasons.items():
        print(f"\nNot measured: {name}: {' '.join(reason.split())[:300]}")


if __name__ == "__main__":
    main()

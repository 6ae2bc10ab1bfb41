"""From the start of a process to the end of its first training step, for ranks that restart.

A model under FSDP2 and its AdamW are saved once to disk and once to memory (`MemoryStorage`). Then the ranks
restart many times, in turn with the checkpoint not in the page cache, with the checkpoint in it, and from
memory. Each phase is that of the slowest rank; the table has medians. The start of a process is the time
that the kernel recorded, with a resolution of 10 ms.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SCRIPT = time.clock_gettime(time.CLOCK_BOOTTIME)

PHASES = ("interpreter", "import torch", "import shardproof", "rendezvous", "build the model", "choose")
PHASES += ("open", "match", "read", "apply", "first step")
WIDTH = 1024


def main() -> None:
    if "RANK" in os.environ:
        work()
        return
    from cold import drop_all, fill
    from common import machine, parser, table
    from recording import STDOUT, record

    from shardproof.storage import MemoryStorage

    options = parser(__doc__, device=False)
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardproof-bench-", dir=given.folder))
    url = f"memory://{folder.name}"
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "memory": []}
    roots = {"memory": url}
    try:
        for root in (str(folder / "run"), url):
            start(given, folder, "save", root)
        for number in range(1 + given.repeats):
            for way, runs in found.items():
                if way == "cold":
                    drop_all(folder / "run")
                elif way == "warm":
                    fill(folder / "run")
                start(given, folder, "restart", roots.get(way, str(folder / "run")))
                ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(given.ranks)]
                if number:
                    runs.append({name: max(rank[name] for rank in ranks) for name in (*PHASES, "all")})
    finally:
        MemoryStorage(url).drop()
        shutil.rmtree(folder, ignore_errors=True)
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for way, runs in found.items()
    }
    if given.json == STDOUT:
        print(json.dumps({"title": "restart", "machine": machine(), "rows": medians}))
        return
    record(
        given.json,
        f"restart, {given.ranks} ranks, {given.gib} GiB",
        [
            (f"{way}: {name}", "s", [run[name] for run in runs])
            for way, runs in found.items()
            for name in runs[0]
        ],
    )
    print(f"\n### Restart of {given.ranks} ranks, {given.gib} GiB, {given.repeats} rounds\n\n{machine()}\n")
    rows = [(name, *(f"{medians[way][name]:.3f}" for way in found)) for name in (*PHASES, "all")]
    table(("phase", *(f"{way}, s" for way in found)), rows)


def start(given: Any, folder: Path, what: str, root: str) -> None:
    """Starts the ranks, and waits until they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={given.ranks}", sys.argv[0]]
    variables = {"OMP_NUM_THREADS": "1", "SHARDPROOF_BENCH_FOLDER": str(folder)}
    variables |= {"SHARDPROOF_BENCH_WHAT": what, "SHARDPROOF_BENCH_ROOT": root}
    variables |= {"SHARDPROOF_BENCH_GIB": str(given.gib)}
    subprocess.run(command, env=os.environ | variables, timeout=600, check=True)


def started() -> float:
    """The start of this process, in seconds since the start of the system."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def work() -> None:
    """The work of one rank."""
    clock = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)  # noqa: E731
    seconds = {"interpreter": _SCRIPT - started()}
    last = _SCRIPT

    def done(name: str) -> None:
        nonlocal last
        now = clock()
        seconds[name] = now - last
        last = now

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    done("import torch")
    import shardproof as sp
    from shardproof import events
    from shardproof.engine.loading import load_protocol as loader

    done("import shardproof")
    dist.init_process_group("gloo")
    folder = Path(os.environ["SHARDPROOF_BENCH_FOLDER"])
    checkpointer = sp.Checkpointer(os.environ["SHARDPROOF_BENCH_ROOT"])
    done("rendezvous")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = max(1, round(float(os.environ["SHARDPROOF_BENCH_GIB"]) * (1 << 30) / (12 * 8 * WIDTH**2)))
    with torch.device("meta"):
        blocks = [
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(layers)
        ]
        model = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer}
    done("build the model")
    if os.environ["SHARDPROOF_BENCH_WHAT"] == "save":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.01)
        train(model, optimizer)
        checkpointer.save(1, state).result()
    else:
        opened, begun = [0.0], {}
        real = loader.Checkpoint

        def opening(*arguments: Any) -> Any:
            before = clock()
            try:
                return real(*arguments)
            finally:
                opened[0] += clock() - before

        loader.Checkpoint = opening  # type: ignore[assignment,misc]

        def hear(event: Any) -> None:
            if event.kind == "begin":
                begun[event.phase] = clock()
            elif event.kind == "end":
                seconds[event.phase] = clock() - begun[event.phase]

        with events.subscribe(hear):
            assert checkpointer.restore(state) == 1
        total = clock() - last
        seconds["open"] = opened[0]
        seconds["match"] -= opened[0]
        seconds.setdefault("apply", 0.0)
        seconds["choose"] = total - sum(seconds[name] for name in ("open", "match", "read", "apply"))
        done("restore")
        train(model, optimizer)
        done("first step")
        seconds["all"] = clock() - started()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seconds))
    checkpointer.wait()
    dist.destroy_process_group()


def train(model: Any, optimizer: Any) -> None:
    """One step."""
    import torch

    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()

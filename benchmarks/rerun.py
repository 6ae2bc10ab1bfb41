"""The cost of the rerun machine in a step in which no result is rejected.

The ways take turns. Each does a step with a model of its own, and sums gradients over the ranks:

- `loop`: without the machine; the step reads the value of the loss;
- `disabled`: the machine in mode "disabled";
- `meeting`: validation; the ranks meet over the launcher's store at each step;
- `meeting, draws=False`: the same, and the states of the random generators are not stored with the data;
- `group`: validation; the ranks vote by an all-reduce over a process group of their own;
- `all-reduce`: `loop` and one bare all-reduce of a few integers, the minimum cost of any vote here.

A loss is rejected if it is not finite. `inside` is the time in the machine's calls (`should_run`, `validate`,
`decide`), or in the bare all-reduce: work and waiting, on the slowest rank. `step / loop` is the time of a
step over that of the `loop` step in the same round, the median over rounds. It includes what the machine
slows elsewhere, and more noise. The cost hardly grows with the step, so its share means little without the
size of the step, which `--milliseconds` sets. Ranks that share a core wait longest for each other, which
`all-reduce` shows: give each rank a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import is_rank, launched, machine, start, table
from recording import STDOUT, json_option, record
from torch import nn

from shardproof import rerun

WORDS = 1000
"""Size of the vocabulary."""
ROWS_FILE = "SHARDPROOF_BENCH_ROWS"
"""Environment variable: the file to which rank 0 appends its rows."""
SETTLE = 5
"""Steps of each way before the measured ones."""


class Way:
    """One way to do a step, with a model of its own.

    Args:
        watch: the machine; None for the plain loop.
        group: for a bare all-reduce in the plain loop; None for no all-reduce.
        device: of the model.
        options: `width` of the model, and `tokens` of a microbatch.
        microbatches: of a step.
        draws: False if the data draws no random numbers.
    """

    def __init__(
        self,
        watch: rerun.RerunMachine | None,
        device: str,
        options: argparse.Namespace,
        microbatches: int,
        group: dist.ProcessGroup | None = None,
        draws: bool = True,
    ) -> None:
        self.watch = watch
        self.group = group
        self.few = torch.zeros(3, dtype=torch.int64)
        self.microbatches = microbatches
        torch.manual_seed(0)
        width = options.width
        layers = [nn.Embedding(WORDS, width), *(nn.Linear(width, width) for _ in range(4))]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        batch = torch.randint(0, WORDS, (options.tokens,), device=device)
        self.plain = repeat(batch)
        self.data = rerun.ReplayableIterator(repeat(batch), draws=draws)
        self.steps: list[float] = []
        self.inside: list[float] = []

    def step(self) -> tuple[float, float]:
        """Runs one step. Returns its seconds, and those inside the machine."""
        dist.barrier()
        begun = time.perf_counter()
        inside = 0.0
        if self.watch is None:
            loss = self.body(self.plain)
            if rerun.not_finite(loss):
                raise SystemExit("the loss is not finite")
            if self.group is not None:
                enter = time.perf_counter()
                dist.all_reduce(self.few, dist.ReduceOp.MAX, group=self.group)
                inside = time.perf_counter() - enter
        else:
            ran = 0
            while True:
                enter = time.perf_counter()
                again = self.watch.should_run(self.data)
                inside += time.perf_counter() - enter
                if not again:
                    break
                ran += 1
                loss = self.body(self.data)
                if loss.is_cuda:
                    torch.cuda.synchronize()  # else the wait for the device would count as the machine's
                enter = time.perf_counter()
                self.watch.validate(loss, rejected=rerun.not_finite, message="loss")
                inside += time.perf_counter() - enter
            assert ran == 1, "a result was rejected"
            enter = time.perf_counter()
            self.watch.decide()
            inside += time.perf_counter() - enter
        self.optimizer.step()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun, inside

    def body(self, data: Any) -> torch.Tensor:
        """Runs forward and backward of all microbatches. Returns the loss."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=next(self.model.parameters()).device)
        for _ in range(self.microbatches):
            loss = self.model(next(data)).square().mean()
            loss.backward()
            total += loss.detach()
        flat = torch.cat(
            [weight.grad.flatten() for weight in self.model.parameters() if weight.grad is not None]
        )
        dist.all_reduce(flat)
        return total


def calibrated(device: str, options: argparse.Namespace) -> int:
    """Microbatches that make a step of that size on the slowest rank."""
    one = Way(None, device, options, 1)
    many = Way(None, device, options, 11)
    for way in (one, many):
        for _ in range(SETTLE):
            way.step()
    seconds = [statistics.median(way.step()[0] for _ in range(20)) for way in (one, many)]
    each = max((seconds[1] - seconds[0]) / 10, 1e-6)
    wanted = torch.tensor((options.milliseconds / 1e3 - seconds[0]) / each + 1.0)
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return max(1, round(wanted.item()))


def measure(options: argparse.Namespace) -> None:
    """Runs all ways in turn, on each rank. Rank 0 appends one line of JSON for each way to a file."""
    mesh = start(options)
    device, ranks = mesh.device_type, mesh.size()
    group = dist.new_group(backend="gloo")
    microbatches = calibrated(device, options)
    ways = {
        "loop": Way(None, device, options, microbatches),
        "disabled": Way(rerun.RerunMachine("disabled"), device, options, microbatches),
        "meeting": Way(rerun.RerunMachine(), device, options, microbatches),
        "meeting, draws=False": Way(rerun.RerunMachine(), device, options, microbatches, draws=False),
    }
    if ranks > 1:  # a single rank has no other rank to vote with
        ways["group"] = Way(rerun.RerunMachine(group=group), device, options, microbatches)
        ways["all-reduce"] = Way(None, device, options, microbatches, group)
    names = list(ways)
    for number in range(-SETTLE, options.steps):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = ways[name].step()
            worst = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if number >= 0:
                ways[name].steps.append(worst[0].item())
                ways[name].inside.append(worst[1].item())
    if dist.get_rank() == 0:
        base = ways["loop"].steps
        for name, way in ways.items():
            ratio = statistics.median(mine / other for mine, other in zip(way.steps, base, strict=True))
            row = {
                "ranks": ranks,
                "way": name,
                "step_ms": statistics.median(way.steps) * 1e3,
                "inside_us": statistics.median(way.inside) * 1e6,
                "inside_share": statistics.median(way.inside) / statistics.median(base),
                "over_loop": ratio,
                "steps": way.steps,
                "inside": way.inside,
            }
            with open(os.environ[ROWS_FILE], "a") as rows:
                rows.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="processes (default 1 2 4)")
    options.add_argument("--steps", type=int, default=100, help="measured steps of each way (default 100)")
    options.add_argument("--milliseconds", type=float, default=100.0, help="size of a step (default 100)")
    options.add_argument("--width", type=int, default=256, help="width of the model (default 256)")
    options.add_argument("--tokens", type=int, default=1024, help="tokens of a microbatch (default 1024)")
    options.add_argument("--device", default="cpu", help="cpu (default), cuda, or auto for what there is")
    json_option(options)
    options.set_defaults(folder=None)
    chosen = options.parse_args()
    if is_rank():
        torch.set_num_threads(1)
        measure(chosen)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        for ranks in chosen.ranks:
            code = launched(chosen, ranks, environment={ROWS_FILE: str(file)})
            if code:
                sys.exit(code)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    if chosen.json == STDOUT:
        print(json.dumps({"title": "rerun machine, idle", "machine": machine(), "rows": rows}))
        return
    size = f"{chosen.steps} steps of about {chosen.milliseconds:g} ms"
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        record(
            chosen.json,
            f"rerun machine, idle, {ranks} ranks, {size}",
            [
                (f"{row['way']}: {figure}", "s", row[figure])
                for row in rows
                if row["ranks"] == ranks
                for figure in ("steps", "inside")
            ],
        )
    print(f"\n### Rerun machine, idle: {size}\n\n{machine()}\n")
    table(
        ("ranks", "way", "step, median ms", "step / loop", "inside, median µs", "share of a step"),
        [
            (
                str(row["ranks"]),
                row["way"],
                f"{row['step_ms']:.2f}",
                f"{row['over_loop']:.4f}",
                f"{row['inside_us']:.0f}",
                f"{row['inside_share']:.3%}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()

"""Time and memory of a training step: shardproof and torch, and the hybrid optimizer by its fraction.

The last table has the step of the hybrid optimizer alone, with all parameters on the CPU. Its floor is
torch's fused step of copies of the parameters, with a copy of each gradient and parameter.

All ways train copies of one transformer on the same batches, and take turns in the same run. The floor is
forward, backward and step on every rank without communication. The benchmark runs on an accelerator if there
is one, else on the CPU with gloo.

A time is that of a step: the mean over `--steps` consecutive steps, with all communication finished at the
end. A ratio is the time of a way over that of its peer in the same round, the median over rounds. Memory is
that of the tensors of one rank, the greatest over ranks, as torch's allocator counts it (on the CPU, from
the profiler's record of every allocation). "allocated" is between steps, without gradients. "peak" is during
steps, with activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import is_rank, launch, rounds
from recording import STDOUT, json_option, record
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from examples.demo.model import ModelSize, Transformer
from shardproof.fsdp import fully_shard
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class Way:
    """One way of training: its model and optimizer, and the peer that it is compared with."""

    name: str
    make: Callable[[Transformer, DeviceMesh], tuple[nn.Module, torch.optim.Optimizer]]
    peer: str | None = None
    """Name of the way that the time is divided by; None for no ratio."""


class Still(torch.optim.Optimizer):
    """Drops gradients and updates no parameter."""

    def step(self, closure: Any = None) -> None:
        pass


def adamw(model: Transformer, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


def no_step(model: Transformer, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, Still(model.parameters(), {})


def ddp(model: Transformer, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), torch.optim.AdamW(
        model.parameters(), **OPTIONS
    )


def zero_redundancy(model: Transformer, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIONS
    )


def torch_sharded(
    model: Transformer, mesh: DeviceMesh, *, reshard: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    for module in (*model.blocks, model):
        fsdp2(module, mesh=mesh, reshard_after_forward=reshard)
    return adamw(model, mesh)


def sharded(model: Transformer, mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **options)
    return adamw(model, mesh)


def distributed(
    model: Transformer, mesh: DeviceMesh, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, DistributedOptimizer(model, torch.optim.AdamW, **options, **OPTIONS)


def hybrid(
    model: Transformer, mesh: DeviceMesh, *, fraction: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, HybridDeviceOptimizer(
        model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, **OPTIONS
    )


SHARDED = (
    Way("floor: forward and backward", no_step),
    Way("floor: and AdamW, all of it", adamw),
    Way("DDP, AdamW", ddp),
    Way("DDP, ZeroRedundancyOptimizer", zero_redundancy),
    Way("DistributedOptimizer, ZeRO-1", partial(distributed, shard_gradients=False), "DDP, AdamW"),
    Way("DistributedOptimizer, ZeRO-2", distributed, "DDP, ZeroRedundancyOptimizer"),
    Way(
        "DistributedOptimizer, ZeRO-2, 4 MiB",
        partial(distributed, bucket_bytes=4 << 20),
        "DDP, ZeroRedundancyOptimizer",
    ),
    Way("FSDP2", partial(torch_sharded, reshard=True)),
    Way("FSDP2, no reshard after forward", partial(torch_sharded, reshard=False)),
    Way("fsdp, all", sharded, "FSDP2"),
    Way(
        "fsdp, all, no reshard after forward",
        partial(sharded, reshard_after_forward=False),
        "FSDP2, no reshard after forward",
    ),
    Way("fsdp, optimizer and gradients", partial(sharded, strategy="optimizer_gradients"), "DDP, AdamW"),
)
OFFLOADED = (
    Way("floor: forward and backward", no_step),
    Way("AdamW", adamw),
    *(Way(f"hybrid, {part:.0%} on CPU", partial(hybrid, fraction=part), "AdamW") for part in FRACTIONS),
)


SMALL = (1000, 1024)
LARGE = (8, 1 << 20)
"""Numbers of parameters, and elements of each, for the step of the hybrid optimizer alone."""


def parameters_of(count: int, elements: int) -> list[nn.Parameter]:
    """Parameters on the CPU with gradients."""
    parameters = [nn.Parameter(torch.randn(elements)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(elements)
    return parameters


def fused_with_copies(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """The floor: torch's fused step of copies on the host."""
    copies = [parameter.detach().clone() for parameter in parameters]
    gradients = [torch.empty_like(copy) for copy in copies]
    optimizer = torch.optim.AdamW(copies, fused=True, **OPTIONS)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(gradients, [parameter.grad for parameter in parameters])
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        optimizer.step()
        torch._foreach_copy_(parameters, copies)

    return step


def step_of(
    make: Callable[..., torch.optim.Optimizer], **options: Any
) -> Callable[..., Callable[[], object]]:
    return lambda parameters: make(parameters, **options, **OPTIONS).step


ALONE: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
    "floor: fused AdamW and copies": fused_with_copies,
    "AdamW, fused": step_of(torch.optim.AdamW, fused=True),
    "AdamW": step_of(torch.optim.AdamW),
    "hybrid": step_of(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, cpu_fraction=1.0),
    "hybrid, fused=False": step_of(
        HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, cpu_fraction=1.0, fused=False
    ),
}


def measure_alone(count: int, elements: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step for each parameter, by way."""
    steps = {name: make(parameters_of(count, elements)) for name, make in ALONE.items()}

    def several(step: Callable[[], object], _round: int) -> None:
        for _ in range(options.steps):
            step()

    measured = rounds({name: partial(several, step) for name, step in steps.items()}, options.repeats)
    return {
        name: [seconds / options.steps / count for seconds in each.seconds] for name, each in measured.items()
    }


def print_alone(title: str, measured: dict[str, list[float]]) -> None:
    """The step of each parameter as a Markdown table."""
    floor = measured[next(iter(ALONE))]
    print(f"\n### {title}\n")
    print("| way | median µs a parameter | min | max | time / floor |")
    print("| --- | --- | --- | --- | --- |")
    for name, seconds in measured.items():
        times = " | ".join(f"{1e6 * of(seconds):.1f}" for of in (statistics.median, min, max))
        ratio = statistics.median(one / other for one, other in zip(seconds, floor, strict=True))
        print(f"| {name} | {times} | {ratio:.2f} |")
    sys.stdout.flush()


@dataclass
class Trained:
    """A way with its model and optimizer, its memory and its times."""

    way: Way
    module: nn.Module
    optimizer: torch.optim.Optimizer
    allocated: int
    """Bytes of this rank's tensors between steps."""
    peak: int
    """The greatest number of bytes during steps."""
    seconds: list[float] = field(default_factory=list)

    def steps(self, batches: list[tuple[torch.Tensor, torch.Tensor]], _round: int) -> None:
        train(self.module, self.optimizer, batches)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Runs a step for each batch, then waits for all communication and device work."""
    for tokens, targets in batches:
        loss = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.synchronize()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Meter:
    """Bytes that torch's allocator has allocated since the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated = 0
        self.peak = 0
        self._base = torch.accelerator.memory_allocated() if device.type != "cpu" else 0

    @contextmanager
    def during(self) -> Iterator[None]:
        """Counts allocations inside the context. `peak` is then the greatest number of bytes."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            yield
            torch.accelerator.synchronize()
            self.allocated = torch.accelerator.memory_allocated() - self._base
            self.peak = torch.accelerator.max_memory_allocated() - self._base
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            yield
            gc.collect()
        events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
        self.peak = self.allocated
        for event in sorted(events, key=lambda each: int(each.start_ns())):
            self.allocated += event.nbytes()
            self.peak = max(self.peak, self.allocated)


def prepare(
    way: Way, options: argparse.Namespace, device: torch.device, mesh: DeviceMesh, batches: list[Any]
) -> Trained:
    """Make a way, train it for a few steps, and count its memory."""
    meter = Meter(device)
    with meter.during():
        size = ModelSize(
            width=options.width,
            layers=options.layers,
            heads=options.width // 64,
            kv_heads=options.width // 64,
            hidden=options.width * 8 // 3,
            context=options.length,
        )
        module, optimizer = way.make(Transformer(size, seed=0).to(device), mesh)
        train(module, optimizer, batches[:1])
    with meter.during():
        train(module, optimizer, batches[:2])
    figures = torch.tensor([meter.allocated, meter.peak])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return Trained(way, module, optimizer, int(figures[0]), int(figures[1]))


def measure(ways: tuple[Way, ...], options: argparse.Namespace, device: torch.device) -> list[Trained]:
    """Measures every way in turn, round after round."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for _ in range(max(2, options.steps)):
        text = torch.randint(0, 256, (options.batch, options.length + 1), generator=generator).to(device)
        batches.append((text[:, :-1], text[:, 1:]))
    trained = [prepare(way, options, device, mesh, batches) for way in ways]
    measured = rounds(
        {each.way.name: partial(each.steps, batches[: options.steps]) for each in trained}, options.repeats
    )
    for each in trained:
        each.seconds = [seconds / options.steps for seconds in measured[each.way.name].seconds]
    return trained


def rows_of(trained: list[Trained]) -> list[dict[str, Any]]:
    """The figures of each way."""
    by_name = {each.way.name: each for each in trained}
    rows = []
    for each in trained:
        peer = by_name[each.way.peer] if each.way.peer else None
        ratios = [own / other for own, other in zip(each.seconds, peer.seconds, strict=True)] if peer else []
        rows.append(
            {
                "name": each.way.name,
                "median_s": statistics.median(each.seconds),
                "min_s": min(each.seconds),
                "max_s": max(each.seconds),
                "peer": each.way.peer,
                "over_peer": statistics.median(ratios) if ratios else None,
                "allocated_bytes": each.allocated,
                "peak_bytes": each.peak,
            }
        )
    return rows


def figures_of(trained: list[Trained]) -> list[tuple[str, str, list[float]]]:
    """The measured values of each way, by name and unit."""
    found: list[tuple[str, str, list[float]]] = []
    for each in trained:
        name = each.way.name
        found.append((f"{name}: step", "s", each.seconds))
        found += [(f"{name}: allocated", "bytes", [each.allocated]), (f"{name}: peak", "bytes", [each.peak])]
    return found


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """The figures as a Markdown table."""
    print(f"\n### {title}\n")
    print("| way | median ms | min | max | time / peer | peer | allocated MiB | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        times = " | ".join(f"{1000 * row[name]:.1f}" for name in ("median_s", "min_s", "max_s"))
        ratio = "" if row["over_peer"] is None else f"{row['over_peer']:.2f}"
        memory = " | ".join(f"{row[name] / MIB:.0f}" for name in ("allocated_bytes", "peak_bytes"))
        print(f"| {row['name']} | {times} | {ratio} | {row['peer'] or ''} | {memory} |")
    sys.stdout.flush()


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    options.add_argument("--repeats", type=int, default=7, help="measured rounds (default 7)")
    options.add_argument("--steps", type=int, default=3, help="steps a round (default 3)")
    options.add_argument(
        "--width", type=int, default=512, help="of the model, a multiple of 64 (default 512)"
    )
    options.add_argument("--layers", type=int, default=6, help="of the model (default 6)")
    options.add_argument("--batch", type=int, default=4, help="windows a rank and step (default 4)")
    options.add_argument("--length", type=int, default=64, help="bytes in a window (default 64)")
    options.add_argument(
        "--only", help="measure the ways with this in their name, and their peers; `alone` for the last table"
    )
    json_option(options)
    options.set_defaults(folder=None)
    return options.parse_args()


def chosen(ways: tuple[Way, ...], only: str | None) -> tuple[Way, ...]:
    """The ways that `--only` selects, with their peers."""
    wanted = {way.name for way in ways if only is None or only in way.name}
    wanted |= {way.peer for way in ways if way.name in wanted and way.peer}
    return tuple(way for way in ways if way.name in wanted)


def main() -> None:
    options = parse()
    if not is_rank():
        launch(options, options.ranks)
    torch.manual_seed(0)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else None)
    facts: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {device.type}, torch {torch.__version__}",
        "ranks": options.ranks,
        "tables": [],
    }
    for title, ways in (("sharded over ranks", SHARDED), ("hybrid, nothing sent", OFFLOADED)):
        ways = chosen(ways, options.only)
        if not ways:
            continue
        trained = measure(ways, options, device)
        parameters = sum(p.numel() for p in trained[0].module.parameters())
        title = f"{title}: {options.ranks} ranks, {parameters / 1e6:.1f} million parameters"
        facts["tables"].append({"title": title, "parameters": parameters, "rows": rows_of(trained)})
        if dist.get_rank() == 0 and options.json != STDOUT:
            print_table(title, facts["tables"][-1]["rows"])
            record(options.json, title, figures_of(trained))
        del trained
        gc.collect()
    for count, elements in (SMALL, LARGE) if options.only is None or options.only == "alone" else ():
        found = measure_alone(count, elements, options)
        title = f"step alone, {options.ranks} ranks, {count:,} parameters of {elements:,} elements"
        facts["tables"].append({"title": title, "seconds": found})
        if dist.get_rank() == 0 and options.json != STDOUT:
            print_alone(title, found)
            record(options.json, title, [(f"{name}: a parameter", "s", each) for name, each in found.items()])
    if dist.get_rank() == 0:
        print(json.dumps(facts) if options.json == STDOUT else f"\n{facts['machine']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

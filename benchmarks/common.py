"""The common parts of all benchmarks: ranks, states, the physical limit, a table of medians and ratios.

A benchmark is a command. It starts its own ranks. In the same run, shardproof, its peers, and raw reads and
writes of the same bytes take turns. The output is a table in Markdown, or JSON: medians, their spread, and
the ratio of each median to that of shardproof.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from recording import STDOUT, json_option, record
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.format import BLOCK_BYTES, LARGE_IN_PAGE
from shardproof.storage import aligned_buffer

sys.path.append(str(Path(__file__).parents[1]))  # so that a benchmark can import the model of examples.demo

GIB = 1 << 30
_BLOCK = 16 << 20
_SPAN = 2 * BLOCK_BYTES


def parser(
    description: str | None, *, device: bool = True, ranks: int | Sequence[int] = 2
) -> argparse.ArgumentParser:
    """The options that every benchmark takes.

    Args:
        description: of the benchmark.
        device: True if the benchmark can put its state on an accelerator.
        ranks: default of `--ranks`; several if the benchmark runs once for each number of ranks.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if isinstance(ranks, int):
        options.add_argument("--ranks", type=int, default=ranks, help=f"processes (default {ranks})")
    else:
        default = " ".join(map(str, ranks))
        options.add_argument(
            "--ranks",
            type=int,
            nargs="+",
            default=[*ranks],
            help=f"processes of each run (default {default})",
        )
    options.add_argument(
        "--gib", type=float, default=1.7, help="size of the whole state in GiB (default 1.7)"
    )
    options.add_argument("--repeats", type=int, default=5, help="measured rounds (default 5)")
    options.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    json_option(options)
    if device:
        options.add_argument(
            "--device",
            default="cpu",
            help="device of the state: cpu (default), cuda, or auto for what there is",
        )
    return options


def launch(options: argparse.Namespace, ranks: int, timeout: float = 1800) -> None:
    """Runs this script again under torchrun, as `launched` does, and exits with its exit code."""
    sys.exit(launched(options, ranks, timeout=timeout))


def launched(
    options: argparse.Namespace,
    ranks: int,
    *,
    timeout: float = 1800,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs this script under torchrun, in a folder that is removed afterwards. Returns the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="shardproof-bench-", dir=options.folder))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *sys.argv,
    ]
    variables = {"OMP_NUM_THREADS": "1"} | os.environ | {"SHARDPROOF_BENCH_FOLDER": str(folder)}
    try:
        return subprocess.run(
            command, env=variables | dict(environment or {}), timeout=timeout, check=False
        ).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(options: argparse.Namespace) -> DeviceMesh:
    """Joins the process group and makes the mesh of all ranks, on the device of `--device`.

    The backend is gloo if ranks share an accelerator, which NCCL refuses.
    """
    ranks, device = int(os.environ["WORLD_SIZE"]), device_type(options)
    backend = "gloo"
    if device != "cpu":
        count = torch.accelerator.device_count()
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % count)
        backend = (
            f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device) if ranks <= count else 'gloo'}"
        )
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    return init_device_mesh(device, (ranks,))


def device_type(options: argparse.Namespace) -> str:
    """The device type that `--device` selects on this machine."""
    found = accelerator()
    if options.device == "auto":
        return "cpu" if found is None else found.type
    if options.device != "cpu" and (found is None or found.type != options.device):
        raise SystemExit(f"--device {options.device}: this machine has {found or 'no accelerator'}")
    return str(options.device)


def is_rank() -> bool:
    """True if this process is a rank, and not the command that starts the ranks."""
    return "RANK" in os.environ


def folder() -> Path:
    """The folder of this run, the same on all ranks."""
    return Path(os.environ["SHARDPROOF_BENCH_FOLDER"])


@dataclass
class Measured:
    """Seconds of one way, one value for each round: the time of the slowest rank."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def rounds(
    ways: dict[str, Callable[[int], Any]], repeats: int, *, prepare: Callable[[str, int], None] | None = None
) -> dict[str, Measured]:
    """Measures each way in turn, `repeats` times after one unmeasured round.

    Args:
        ways: name to a function of the round's number.
        repeats: measured rounds.
        prepare: called before each measurement with the name and the round; its time does not count.
    """
    measured = {name: Measured(name) for name in ways}
    for number in range(-1, repeats):
        for name, way in ways.items():
            if prepare is not None:
                prepare(name, number)
            dist.barrier()
            settle_device()
            begun = time.perf_counter()
            way(number)
            settle_device()
            taken = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 0:
                measured[name].seconds.append(taken.item())
    return measured


def gpt_state(
    gib: float, mesh: DeviceMesh, *, width: int = 1024, placement: int = 0, filled: bool = True
) -> dict[str, Any]:
    """Parameters and Adam state of GPT-2 blocks, in float32, sharded, about `gib` GiB.

    The default width is that of GPT-2 medium. Larger models have larger tensors, so fewer of them in a GiB.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
    }
    per_layer = 3 * 4 * sum(int(torch.Size(shape).numel()) for shape in shapes.values())
    layers = max(1, round(gib * GIB / per_layer))
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for layer in range(layers):
        for name, shape in shapes.items():
            key = f"h.{layer}.{name}"
            parameter, exp_avg, exp_avg_sq = (sharded(shape, mesh, placement, filled) for _ in range(3))
            step = torch.tensor(1000.0 if filled else -1.0, device=mesh.device_type)  # as a fused AdamW needs
            state["model"][key] = parameter
            state["optimizer"][key] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return state


def sharded(shape: tuple[int, ...], mesh: DeviceMesh, placement: int, filled: bool) -> DTensor:
    """A DTensor of random values, or of touched memory with one value."""
    dim = min(placement, len(shape) - 1)
    index = mesh.get_local_rank()
    pieces = [len(part) for part in torch.arange(shape[dim]).chunk(mesh.size())]
    pieces += [0] * (mesh.size() - len(pieces))
    local_shape = (*shape[:dim], pieces[index], *shape[dim + 1 :])
    device = mesh.device_type
    local = (
        torch.randn(local_shape, device=device) if filled else torch.full(local_shape, -1.0, device=device)
    )
    stride = tuple(int(torch.Size(shape[at + 1 :]).numel()) for at in range(len(shape)))
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Local tensors of a nested state."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return [state.to_local() if isinstance(state, DTensor) else state]


def local_bytes(state: Any) -> int:
    """Bytes of the local tensors of this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


def total_bytes(state: Any) -> int:
    """Bytes of the local tensors of all ranks."""
    total = torch.tensor(local_bytes(state), dtype=torch.int64)
    dist.all_reduce(total)
    return int(total.item())


class RawFile:
    """The limit: raw reads and writes of the same bytes, one file per rank. Writes reuse one buffer."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = -(-nbytes // _BLOCK) * _BLOCK
        self.buffer = aligned_buffer(_BLOCK)

    def remove(self) -> None:
        """Removes the file of an earlier round, unmeasured."""
        self.path.unlink(missing_ok=True)

    def write(self, *, direct: bool) -> None:
        """Writes and flushes a new file, with two writes in flight."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
        handle = os.open(self.path, flags, 0o644)
        try:
            with ThreadPoolExecutor(2) as pool:
                starts = range(0, self.nbytes, _BLOCK)
                assert (
                    sum(pool.map(lambda start: os.pwrite(handle, self.buffer, start), starts)) == self.nbytes
                )
            # The hole at the end lets a read that begins at this byte read as many bytes.
            os.ftruncate(handle, self.nbytes + LARGE_IN_PAGE)
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, into: list[torch.Tensor], start: int = 0) -> None:
        """Reads the file, from byte `start` on, into existing tensors."""
        if into and into[0].device.type != "cpu":
            self.read_to_device(into, start)
        else:
            self._read(into, start, _BLOCK, lambda span: None)

    def read_and_hash(self, into: list[torch.Tensor]) -> None:
        """Reads the file from `LARGE_IN_PAGE` on in spans of 512 KiB, and hashes each after its read."""
        self._read(into, LARGE_IN_PAGE, _SPAN, _hash_back)

    def read_to_device(self, into: list[torch.Tensor], start: int = 0) -> None:
        """Reads the file into tensors of a device: four threads, each with a page-locked buffer."""
        parts: list[tuple[int, torch.Tensor]] = []
        for tensor in into:
            onto = tensor.reshape(-1).view(torch.uint8)
            parts += [(start + begin, onto[begin : begin + _BLOCK]) for begin in range(0, len(onto), _BLOCK)]
            start += len(onto)
        own = threading.local()
        handle = os.open(self.path, os.O_RDONLY)

        def read(part: tuple[int, torch.Tensor]) -> None:
            at, onto = part
            if not hasattr(own, "buffer"):
                own.buffer = torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
            host = own.buffer[: len(onto)]
            assert os.preadv(handle, [host.numpy().data], at) == len(onto)
            onto.copy_(host, non_blocking=True)
            torch.accelerator.current_stream().synchronize()

        try:
            with ThreadPoolExecutor(4) as pool:
                for _ in pool.map(read, parts):
                    pass
        finally:
            os.close(handle)

    def _read(
        self, into: list[torch.Tensor], start: int, step: int, then: Callable[[memoryview], object]
    ) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            for tensor in into:
                memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                for begin in range(0, len(memory), step):
                    span = memory[begin : begin + step]
                    start += os.preadv(handle, [span], start)
                    then(span)
        finally:
            os.close(handle)


def _hash_back(span: memoryview) -> None:
    """Hashes the blocks of a span, the last block first, because it was read last."""
    for begin in reversed(range(0, len(span), BLOCK_BYTES)):
        xxhash.xxh3_128_digest(span[begin : begin + BLOCK_BYTES])


def remove(path: Path) -> None:
    """Rank 0 removes the files of an earlier round, and syncs the disk, outside of the measured time."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def report(
    title: str,
    measured: dict[str, Measured],
    *,
    ours: str,
    nbytes: int | None,
    to: str | None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Prints a table of medians, spread, speed and ratio to ours, or the same as JSON. Rank 0 only.

    `to` is the value of `--json`.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    base = measured[ours].median
    rows = [
        {
            "name": name,
            "median_s": item.median,
            "min_s": min(item.seconds),
            "max_s": max(item.seconds),
            "gib_per_s": None if nbytes is None else nbytes / item.median / GIB,
            "over_ours": item.median / base,
        }
        for name, item in measured.items()
    ]
    facts = {
        "title": title,
        "bytes": nbytes,
        "machine": machine(),
        "rows": rows,
        **(notes or {}),
    }
    if to == STDOUT:
        print(json.dumps(facts), flush=True)
        return
    size = "" if nbytes is None else f", {nbytes / GIB:.2f} GiB"
    record(to, f"{title}{size}", [(name, "s", item.seconds) for name, item in measured.items()])
    print(f"\n### {title}{size}\n\n{facts['machine']}\n")
    table(
        ("way", "median s", "min", "max", "GiB/s", "time / ours"),
        [
            (
                row["name"],
                f"{row['median_s']:.3f}",
                f"{row['min_s']:.3f}",
                f"{row['max_s']:.3f}",
                "" if row["gib_per_s"] is None else f"{row['gib_per_s']:.2f}",
                f"{row['over_ours']:.2f}",
            )
            for row in rows
        ],
    )
    for name, value in (notes or {}).items():
        print(f"\n{name}: {value}")
    sys.stdout.flush()


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in Markdown."""
    for cells in (titles, ["---"] * len(titles), *rows):
        print(f"| {' | '.join(cells)} |")
    sys.stdout.flush()


def machine() -> str:
    """Processor, memory, software and accelerator of this machine."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith(("model name", "Processor"))
        ),
        platform.machine(),
    )
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    device = accelerator()
    return (
        f"{os.cpu_count()} cores ({model}), {int(total) / (1 << 20):.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        + ("no accelerator" if device is None else _devices(device))
    )


def _devices(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)()
    return f"{torch.accelerator.device_count()} x {name}"


def file_system(path: Path) -> str:
    """Type of the file system of a path."""
    mounts = [line.split()[1:3] for line in _lines("/proc/mounts")]
    holding = [mount for mount in mounts if path.resolve().is_relative_to(mount[0])]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"


def settle_device() -> None:
    """Waits for the work on the current stream of the accelerator, if there is one.

    It does not wait for other streams, such as the stream on which a save copies.
    """
    if accelerator() is not None:
        torch.accelerator.current_stream().synchronize()


def accelerator() -> torch.device | None:
    """The accelerator of this machine, if it has one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

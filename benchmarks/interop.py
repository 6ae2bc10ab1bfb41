"""Reads, loads and converts checkpoints of other projects, compared with torch's own tools.

    python benchmarks/interop.py [--gib 1.0] [--repeats 3] [--json FILE]

shardproof and the peer take turns, each run in a process of its own, so that peaks of memory can be
compared. With ``--inline``, all run in this process, which takes a fraction of the time and measures no
memory. The figures are medians of seconds, with the ratio of the peer to shardproof, and the time of a plain
read of the bytes. Files are in the page cache. shardproof verifies each CRC-32 that torch wrote; torch does
not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recording import json_option, record

ROWS, COLUMNS = 4096, 1024
"""Shape of the large tensors: 16 MiB of float32."""


def state(gib: float, *, blank: bool = False) -> dict[str, Any]:
    """A state of large tensors and 2,000 small ones."""
    import torch

    make = torch.zeros if blank else torch.randn
    count = max(1, int(gib * (1 << 30) / (ROWS * COLUMNS * 4)))
    tensors = {f"model.layers.{number}.weight": make(ROWS, COLUMNS) for number in range(count)}
    return tensors | {f"model.norms.{number}.bias": make(64) for number in range(2000)}


def write_dcp(folder: Path, gib: float) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state(gib), checkpoint_id=folder, no_dist=True)


def plain_read(folder: Path, work: Path, gib: float) -> None:
    """Reads all bytes of the files into one buffer: the limit of the page cache."""
    buffer = bytearray(16 << 20)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def warm() -> Any:
    """Imports both and runs each once on a small state, so that no run measures imports."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    import shardproof as sp

    with tempfile.TemporaryDirectory() as small:
        write_dcp(Path(small) / "dcp", 0.001)
        target = state(0.001, blank=True)
        dcp.load(target, checkpoint_id=f"{small}/dcp", no_dist=True)
        dcp_to_torch_save(f"{small}/dcp", f"{small}/out.pt")
        sp.load(f"{small}/dcp", target)
        sp.convert(f"{small}/dcp", f"{small}/st", to="safetensors")
    return sp


def ours_load(folder: Path, work: Path, gib: float) -> None:
    load = warm().load
    target = state(gib, blank=True)
    timed(lambda: load(folder, target))


def peer_load(folder: Path, work: Path, gib: float) -> None:
    import torch.distributed.checkpoint as dcp

    warm()
    target = state(gib, blank=True)
    timed(lambda: dcp.load(target, checkpoint_id=folder, no_dist=True))


def ours_to_safetensors(folder: Path, work: Path, gib: float) -> None:
    convert = warm().convert
    timed(lambda: convert(folder, work / "out", to="safetensors"))


def peer_to_torch_save(folder: Path, work: Path, gib: float) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    warm()
    timed(lambda: dcp_to_torch_save(folder, work / "out.pt"))


def peer_to_safetensors(folder: Path, work: Path, gib: float) -> None:
    """As torch's own tools do: the unsharded state in memory, then the writer of safetensors."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def convert() -> None:
        dcp_to_torch_save(folder, work / "out.pt")
        loaded = torch.load(work / "out.pt", weights_only=True)  # noqa: TID251 the peer
        save_file(loaded, work / "out.safetensors")

    timed(convert)


def ours_load_safetensors(folder: Path, work: Path, gib: float) -> None:
    load = warm().load
    target = state(gib, blank=True)
    timed(lambda: load(folder.with_name("st"), target))


def peer_load_safetensors(folder: Path, work: Path, gib: float) -> None:
    """As a loader does that reads a whole state dict and copies it into the module."""
    import torch
    from safetensors.torch import load_file

    target = state(gib, blank=True)

    def load() -> None:
        with torch.no_grad():
            for file in sorted(folder.with_name("st").glob("*.safetensors")):
                for key, value in load_file(file).items():
                    target[key].copy_(value)

    timed(load)


WAYS: dict[str, Callable[[Path, Path, float], None]] = {
    function.__name__: function
    for function in (
        ours_load,
        peer_load,
        ours_to_safetensors,
        peer_to_torch_save,
        peer_to_safetensors,
        ours_load_safetensors,
        peer_load_safetensors,
    )
}
QUESTIONS = (
    ("load a DCP checkpoint", "ours_load", ("peer_load",)),
    ("DCP to safetensors", "ours_to_safetensors", ("peer_to_torch_save", "peer_to_safetensors")),
    ("load safetensors", "ours_load_safetensors", ("peer_load_safetensors",)),
)


def timed(work: Callable[[], Any]) -> None:
    """Prints the seconds of some work, and the MiB of its peak above the memory before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kibibytes("VmRSS")
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "mib": (kibibytes("VmHWM") - before) / 1024}))


def kibibytes(field: str) -> int:
    """A field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measured(way: str, folder: Path, gib: float, *, inline: bool) -> dict[str, float]:
    """The figures of one run, in a process of its own unless `inline`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        if inline:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                WAYS[way](folder, Path(work), gib)
            return {"seconds": json.loads(printed.getvalue().splitlines()[-1])["seconds"], "mib": 0.0}
        command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--work", work]
        run = subprocess.run([*command, "--gib", str(gib)], capture_output=True, text=True, timeout=600)
        if run.returncode:
            raise SystemExit(f"{way} failed:\n{run.stderr[-2000:]}")
        figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
        return figures


def main() -> None:
    """Runs all ways in turn, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inline", action="store_true", help="run all ways in this process")
    json_option(parser)
    for name in ("way", "folder", "work"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.way:
        WAYS[options.way](Path(options.folder), Path(options.work), options.gib)
        return
    import shardproof as sp

    place = Path(tempfile.mkdtemp(prefix="shardproof-interop-"))
    try:
        write_dcp(place / "dcp", options.gib)
        sp.convert(place / "dcp", place / "st", to="safetensors", max_file_bytes=1 << 30)
        limits = []
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            begun = time.perf_counter()
            plain_read(place / "dcp", place, options.gib)
            limits.append(time.perf_counter() - begun)
            for way, figures in rounds.items():
                figures.append(measured(way, place / "dcp", options.gib, inline=options.inline))
    finally:
        shutil.rmtree(place)
    print(f"{options.gib} GiB of float32 in large tensors and 2,000 small ones; {options.repeats} rounds")
    print(f"plain read of the DCP files: {statistics.median(limits):.2f} s")
    for question, ours, peers in QUESTIONS:
        own = statistics.median(one["seconds"] for one in rounds[ours])
        memory = max(one["mib"] for one in rounds[ours])
        print(f"{question}: {ours} {own:.2f} s, {memory:,.0f} MiB")
        for peer in peers:
            other = statistics.median(one["seconds"] for one in rounds[peer])
            memory = max(one["mib"] for one in rounds[peer])
            print(f"    {peer} {other:.2f} s, {memory:,.0f} MiB: {other / own:.1f} times ours")
    size = f"{options.gib} GiB"
    record(options.json, f"plain read of a DCP checkpoint, {size}", [("read", "s", limits)])
    for question, ours, peers in QUESTIONS:
        figures = []
        for way in (ours, *peers):
            figures.append((way, "s", [one["seconds"] for one in rounds[way]]))
            if not options.inline:
                figures.append((f"{way}, memory", "MiB", [one["mib"] for one in rounds[way]]))
        record(options.json, f"{question}, {size}", figures)


if __name__ == "__main__":
    main()

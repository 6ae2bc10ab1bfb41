"""The cost of digests, the tiling proof and verification, in seconds of work inside real saves and loads.

The clock of the calling thread times every digest and every proof, less the time that reading the clock
takes. The sum over the threads of a rank is work, not delay: most of it runs while another thread waits for
the disk. So its share of a save or load is the upper bound of the gain without it. The benchmark also
measures the actual gain: in every other round, the digests of chunks are zeros and nothing is proved. Each
save makes a new plan, as a first save does.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from common import (
    GIB,
    folder,
    gpt_state,
    is_rank,
    launch,
    machine,
    parser,
    remove,
    sharded,
    start,
    table,
    total_bytes,
)
from recording import STDOUT, record

import shardproof as sp
import shardproof.engine.loading  # the timed modules must be imported before they are changed
import shardproof.engine.saving
from shardproof.geometry import tiling_faults

HASH_CHUNKS = ("engine.format.chunk_verifier", "engine.saving.shard_writer", "engine.loading.chunk_reader")
"""Modules that hash the bytes of chunks."""


class Timed:
    """Seconds of work, by kind of work, over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = _seconds_of_timing()
        self._lock = threading.Lock()

    def of(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*given: Any, **options: Any) -> Any:
            begun = time.thread_time()
            answer = function(*given, **options)
            taken = time.thread_time() - begun - self._clock
            with self._lock:
                self.seconds[what] += taken
            return answer

        return timed

    def hasher(self) -> Callable[..., Any]:
        """A stand-in for `xxhash.xxh3_128` that times updates and digests."""
        timed = self

        class Hasher:
            def __init__(self, data: Any = b"") -> None:
                inner = xxhash.xxh3_128()
                self.update = timed.of("digests", inner.update)
                self.digest = timed.of("digests", inner.digest)
                self.hexdigest = timed.of("digests", inner.hexdigest)
                self.intdigest = timed.of("digests", inner.intdigest)
                self.update(data)

        return Hasher


def _seconds_of_timing(calls: int = 2000) -> float:
    """Seconds that timing adds to a call. Reading the clock takes longer than hashing a small chunk."""
    found = []
    for _ in range(5):
        total = 0.0
        for _ in range(calls):
            begun = time.thread_time()
            total += time.thread_time() - begun
        found.append(total / calls)
    return statistics.median(found)


class Hashes:
    """A timed stand-in for xxhash in the modules of shardproof."""

    def __init__(self, timed: Timed) -> None:
        self.xxh3_128 = timed.hasher()
        for name in ("xxh3_128_digest", "xxh3_128_hexdigest", "xxh3_128_intdigest"):
            setattr(self, name, timed.of("digests", getattr(xxhash, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(xxhash, name)


@contextmanager
def timing() -> Iterator[Timed]:
    """Times every digest and proof of shardproof inside the context."""
    timed = Timed()
    hashes, proof = Hashes(timed), timed.of("proof", tiling_faults)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("shardproof.")]
    replaced = [(module, "xxhash", hashes) for module in modules if vars(module).get("xxhash") is xxhash]
    replaced += [
        (module, "tiling_faults", proof)
        for module in modules
        if vars(module).get("tiling_faults") is tiling_faults
    ]
    assert {name for _, name, _ in replaced} == {"xxhash", "tiling_faults"}, "what is timed was renamed"
    with replacing(replaced):
        yield timed


class Zeros:
    """A stand-in for xxhash in the modules that hash chunks: every digest is zeros."""

    def __init__(self, _data: Any = b"") -> None: ...

    def update(self, _data: Any) -> None: ...

    def digest(self) -> bytes:
        return bytes(16)

    @classmethod
    def xxh3_128(cls) -> Zeros:
        return cls()

    @staticmethod
    def xxh3_128_digest(_data: Any) -> bytes:
        return bytes(16)


@contextmanager
def leaving_out() -> Iterator[Timed]:
    """Inside the context, hashes no chunk and proves no tiling."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("shardproof.")]
    replaced = [
        (module, "tiling_faults", lambda *_: []) for module in modules if hasattr(module, "tiling_faults")
    ]
    replaced += [(sys.modules[f"shardproof.{name}"], "xxhash", Zeros) for name in HASH_CHUNKS]
    with replacing(replaced):
        yield Timed()


@contextmanager
def replacing(replaced: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replaces members of modules inside the context."""
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def measured(work: Callable[[], Any], how: Callable[[], Any] = timing) -> dict[str, float]:
    """Seconds of the whole and of its parts, each of the slowest rank."""
    with how() as timed:
        dist.barrier()
        begun = time.perf_counter()
        work()
        whole = time.perf_counter() - begun
    values = torch.tensor([whole, timed.seconds["digests"], timed.seconds["proof"]], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(("whole", "digests", "proof"), values.tolist(), strict=True))


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--tensors", type=int, default=20_000, help="tensors of the small state (default 20,000)"
    )
    options = options.parse_args()
    if not is_rank():
        launch(options, options.ranks)
    mesh = start(options)
    small_names = [f"layers.{number // 20}.part.{number % 20}" for number in range(options.tensors)]
    states: dict[str, dict[str, Any]] = {
        "GPT": gpt_state(options.gib, mesh),
        f"{options.tensors} tensors": {
            name: sharded((1024 * options.ranks,), mesh, 0, True) for name in small_names
        },
    }
    found: list[dict[str, Any]] = []
    for name, state in states.items():
        path = folder() / "ours"
        rounds: dict[str, list[dict[str, float]]] = {"save": [], "load": []}
        for _ in range(options.repeats + 1):
            remove(path)
            rounds["save"].append(measured(lambda path=path, state=state: sp.save(path, state)))
            rounds["load"].append(measured(lambda path=path, state=state: sp.load(path, state)))
            remove(path)
            for verb, work in (("save", sp.save), ("load", sp.load)):
                without = measured(lambda work=work, path=path, state=state: work(path, state), leaving_out)
                rounds[verb][-1]["without"] = without["whole"]
        for verb, values in rounds.items():
            counted = values[1:]
            row = {
                part: statistics.median(value[part] for value in counted)
                for part in ("whole", "digests", "proof", "without")
            }
            shares = [(value["digests"] + value["proof"]) / value["whole"] for value in counted]
            found.append(
                {
                    "state": name,
                    "verb": verb,
                    "bytes": total_bytes(state),
                    **row,
                    "share": statistics.median(shares),
                    "least": min(shares),
                    "greatest": max(shares),
                    "rounds": counted,
                }
            )
    if dist.get_rank() == 0:
        show(found, options.json)
    dist.destroy_process_group()


def show(found: list[dict[str, Any]], to: str | None) -> None:
    """Prints the table."""
    if to == STDOUT:
        print(json.dumps({"title": "costs", "machine": machine(), "rows": found}))
        return
    for row in found:
        size = f"{row['bytes'] / GIB:.2f} GiB, {dist.get_world_size()} ranks"
        figures = [(part, "s", [one[part] for one in row["rounds"]]) for part in row["rounds"][0]]
        record(to, f"costs, {row['verb']} {row['state']}, {size}", figures)
    print(f"\n### Cost of digests, proof and verification, {dist.get_world_size()} ranks\n\n{machine()}\n")
    table(
        ("what", "GiB", "whole s", "digests s", "proof s", "share (least to greatest)", "without s", "gain"),
        [
            (
                f"{row['verb']} {row['state']}",
                f"{row['bytes'] / GIB:.2f}",
                f"{row['whole']:.3f}",
                f"{row['digests']:.3f}",
                f"{row['proof']:.4f}",
                f"{row['share']:.1%} ({row['least']:.1%} to {row['greatest']:.1%})",
                f"{row['without']:.3f}",
                f"{1 - row['without'] / row['whole']:.1%}",
            )
            for row in found
        ],
    )


if __name__ == "__main__":
    main()

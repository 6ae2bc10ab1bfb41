"""Checkpoints of other projects, changed at random: every read gives the stored values, or an error of ours.

Each case opens a changed copy of a checkpoint that a released package wrote, reads all tensors and plain
values, and verifies it. It may use a bounded time and memory, and may raise only errors of ours. Damage to a
file of tensors (a flipped bit, a cut) must change neither the values that a checksum covers, nor those of
tensors in other files.
"""

from __future__ import annotations

import logging
import resource
import shutil
import signal
import tarfile
import threading
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.foreign import FormatReader, foreign_of, format_of
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import ShardproofError
from shardproof.runs.maintenance import verify_foreign
from tests.faults.foreign_mutations import damage, restructure
from tests.harness import run_ranks
from tests.unit.formats.peers import PEERS, bits

CPU_SECONDS = 20
MEMORY = 1 << 30
_FILES = {"torch_zip": "model.pt", "torch_legacy": "model.pt", "lightning_ckpt": "last.ckpt"}
"""Checkpoints that are a file, and its name."""
GOLDENS = [
    "accelerate_state", "bcp_fsdp2_w2", "dcp22_objects_w2", "dcp_fsdp_tp_w4", "dcp_hf_sharded_w2",
    "dcp_no_flatten_w1", "ds_zero2_bf16_w2", "ds_zero2_universal_w2", "ds_zero3_w3", "evil_dcp_metadata",
    "hf_bin_sharded", "hf_llama_sharded", "hf_peft_lora", "legacy_dp2_w2", "lightning_ckpt",
    "mc08_handmade_w2",
    "mc_handmade_w2", "mfsdp_z1_w2", "orbax_ocdbt", "orbax_plain", "orbax_zarr3_plain", "safetensors_single",
    "snap_w2", "tcp_fsdp2_w3", "torch_legacy", "torch_zip", "zarr2_group", "zarr3_group", "zarr3_tensorstore",
    "zarr_mc11_handmade_w2",
]  # fmt: skip
"""At least one checkpoint of each format."""


class _TooSlow(BaseException):
    pass


def _out_of_time(number: int, frame: Any) -> None:
    raise _TooSlow


class _Read:
    """The values of a checkpoint, and where the tensors lie."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.proved: set[str] = set()
        """Keys of tensors of whose bytes a checksum covers all."""
        self.files: dict[str, set[str]] = {}
        """By key, the files that hold the tensor."""


def _read(path: Path, name: str | None) -> _Read:
    """Reads all values that can be read. Raises if the checkpoint cannot be opened."""
    found = _Read()
    with sp.open(path, format=name) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        reader: FormatReader = checkpoint.reader
        for key, description in reader.tensors.items():
            try:
                found.tensors[key] = bits(checkpoint[key].read())
                found.files[key] = {box.file for box in description.boxes}
                if all(box.located().extent.has_checksum for box in description.boxes):
                    found.proved.add(key)
            except ShardproofError as error:
                _refuse_memory(error)
        for key in checkpoint.objects:
            try:
                checkpoint[key]
            except ShardproofError as error:
                _refuse_memory(error)
        for fault in verify_foreign(checkpoint).faults:
            _refuse_memory(fault)
    return found


def _refuse_memory(error: BaseException | None) -> None:
    """An error of ours may not hide that the memory did not suffice."""
    while error is not None:
        assert not isinstance(error, MemoryError), "it needs more memory than the bound"
        error = error.__cause__


def _case(good: _Read, path: Path, name: str, random: Random) -> None:
    """Changes a file of a checkpoint and reads it."""
    files = sorted(file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    chosen = random.choice(files)
    is_damage = random.random() < 0.4
    (damage if is_damage else restructure)(chosen, random)
    try:
        found = _read(path, name if random.random() < 0.7 else None)
    except ShardproofError as error:
        _refuse_memory(error)
        return
    if is_damage:
        _compare(good, found, chosen.as_posix())


def _compare(good: _Read, found: _Read, changed: str) -> None:
    """The values after damage to a file of tensors. Damage to a file of metadata may say anything."""
    holding = {key for key, names in good.files.items() if any(changed.endswith(name) for name in names)}
    if not holding:
        return
    for key in found.tensors.keys() & good.tensors.keys():
        is_same_kind = found.tensors[key][:2] == good.tensors[key][:2]
        if is_same_kind and (key not in holding or key in good.proved & found.proved):
            assert found.tensors[key] == good.tensors[key], f"{key} has other values"


def read_mutated(root: str, names: list[str], seeds: range) -> tuple[list[tuple[str, int, str]], int]:
    """Cases that gave neither values nor an error of ours (checkpoint, seed, text); number of all cases."""
    logging.getLogger("shardproof").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    threading.stack_size(1 << 20)
    signal.signal(signal.SIGPROF, _out_of_time)
    top = Path(root)
    good: dict[str, tuple[Path, str, _Read]] = {}
    for name in names:
        with tarfile.open(PEERS / f"{name}.tar.gz") as archive:
            archive.extractall(top, filter="data")
        path = top / name / "ckpt" / _FILES.get(name, "")
        kind = format_of(foreign_of(path))
        good[name] = path, kind, _read(path, kind)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    wrong: list[tuple[str, int, str]] = []
    for name, (path, kind, read) in good.items():
        for seed in seeds:
            work = top / "work"
            copy = work / path.name
            if path.is_file():
                work.mkdir()
                shutil.copy(path, copy)
            else:
                shutil.copytree(path, copy)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                _case(read, copy, kind, Random(f"{name} {seed}"))
            except BaseException as error:
                wrong.append((name, seed, f"{type(error).__name__}: {error}"[:500]))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                shutil.rmtree(work, ignore_errors=True)
    return wrong, len(good) * len(seeds)


def test_a_few_changes_to_every_format(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (outcome,) = run_ranks(1, read_mutated, str(tmp_path), GOLDENS, range(3), timeout=280)
    assert outcome.value == ([], 3 * len(GOLDENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_many_changes(name: str, tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, read_mutated, str(tmp_path), [name], range(3, 153), timeout=280)
    assert outcome.value == ([], 150)

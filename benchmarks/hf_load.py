"""Loads a folder of Hugging Face into a model that FSDP2 shards over two ranks, beside transformers.

    tests/interop/.venvs/torch/bin/python benchmarks/hf_load.py [--gib 1.0] [--repeats 5] [--json FILE]

The ways take turns in one job. Each begins with a folder and ends with a sharded model on the CPU:

- ours: the model on the meta device, ``fully_shard``, empty memory, ``sp.load``;
- whole: ``from_pretrained`` on each rank, then ``fully_shard``;
- broadcast: ``from_pretrained`` on rank 0, then ``set_model_state_dict`` broadcasts to the sharded model.

The time is that of the slowest rank; the memory, by how much the peak of rank 0 exceeds the memory before.
Files are in the page cache. At the end the models of all ways give equal bits.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interop import kibibytes
from recording import json_option, record

import shardproof as sp

RANKS = 2
HIDDEN, HEAD = 1024, 64


def configuration(gib: float) -> Any:
    """A Llama of about so many GiB in bfloat16."""
    from transformers import LlamaConfig

    layers = max(1, round(gib * (1 << 30) / (2 * 12.25 * HIDDEN * HIDDEN)))
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=11 * HIDDEN // 4,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=HIDDEN // HEAD,
        vocab_size=4096,
        dtype="bfloat16",
    )


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def empty(folder: Path) -> Any:
    """A sharded model with memory and no values, but for buffers that no file has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = sharded(model).to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def ours(folder: Path) -> Any:
    model = empty(folder)
    sp.load(folder, model)
    return model


def whole(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return sharded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def broadcast(folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from transformers import AutoModelForCausalLM

    model, values = empty(folder), {}
    if not dist.get_rank():
        values = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    return model


WAYS: tuple[Callable[[Path], Any], ...] = (ours, whole, broadcast)


def measured(way: Callable[[Path], Any], folder: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Seconds, MiB and the local shards of one load."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kibibytes("VmRSS")
    dist.barrier()
    begun = time.perf_counter()
    model = way(folder)
    dist.barrier()
    seconds = time.perf_counter() - begun
    mebibytes = (kibibytes("VmHWM") - before) / 1024
    return seconds, mebibytes, {key: value.to_local() for key, value in model.state_dict().items()}


def rank(folder: Path, options: argparse.Namespace) -> None:
    """The part of one rank: all ways in turn."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("shardproof").setLevel(logging.ERROR)
    rounds: dict[str, list[tuple[float, float]]] = {way.__name__: [] for way in WAYS}
    for number in range(options.repeats + 1):
        expected: dict[str, torch.Tensor] = {}
        for way in WAYS:
            seconds, mebibytes, found = measured(way, folder)
            expected = expected or found
            for key, value in expected.items():
                if not torch.equal(found[key], value):
                    raise SystemExit(f"{way.__name__}: {key} differs from that of {WAYS[0].__name__}")
            if number:  # the first round imports
                rounds[way.__name__].append((seconds, mebibytes))
            del found
    if not dist.get_rank():
        show(rounds, options)
    dist.destroy_process_group()


def show(rounds: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """Prints a table, and records it."""
    own = statistics.median(seconds for seconds, _ in rounds["ours"])
    print(f"{options.gib} GiB of bfloat16, {RANKS} ranks, {options.repeats} rounds")
    figures = []
    for name, found in rounds.items():
        times, memory = [one for one, _ in found], [one for _, one in found]
        ratio = statistics.median(times) / own
        print(f"{name}: {statistics.median(times):.2f} s, {max(memory):,.0f} MiB: {ratio:.1f} times ours")
        figures += [(name, "s", times), (f"{name}, memory of rank 0", "MiB", memory)]
    record(options.json, f"a folder of Hugging Face into FSDP2, {RANKS} ranks, {options.gib} GiB", figures)


def main() -> None:
    """Writes a model, and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    json_option(parser)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank(Path(options.folder), options)
        return
    from transformers import LlamaForCausalLM

    place = Path(tempfile.mkdtemp(prefix="shardproof-hf-"))
    try:
        torch.manual_seed(0)
        model = LlamaForCausalLM(configuration(options.gib)).to(torch.bfloat16)
        model.save_pretrained(place / "model", max_shard_size="400MB")
        del model
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        command = [*launch, "--standalone", __file__, *sys.argv[1:], "--folder", str(place / "model")]
        subprocess.run(command, check=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()

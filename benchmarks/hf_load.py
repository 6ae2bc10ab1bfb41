"""Loads a folder of Hugging Face into a model that FSDP2 shards over two ranks, compared with transformers.

    tests/interop/.venvs/torch/bin/python benchmarks/hf_load.py [--gib 1.0] [--repeats 5] [--json FILE]

The ways take turns in one job of two ranks on the CPU:

- ours_loads: ``sp.load`` into the model;
- copies: ``from_pretrained`` on each rank, then ``set_model_state_dict`` into the model;
- broadcasts: ``from_pretrained`` on rank 0, then ``set_model_state_dict`` broadcasts to the model;
- ours_builds: a model on the meta device, ``fully_shard``, empty memory, then ``sp.load``;
- pretrained_builds: ``from_pretrained`` on each rank, then ``fully_shard``.

The first three fill a sharded model that exists. The time is that of the slowest rank. The memory is the
peak of rank 0, less its memory before the load. Files are in the page cache. All ways give equal bits.
"""

from __future__ import annotations

import argparse
import ctypes
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
    """A Llama of about `gib` GiB in bfloat16."""
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
    """A sharded model in uninitialized memory. Only buffers that no file has are computed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = sharded(model).to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def ours_loads(folder: Path, model: Any) -> Any:
    sp.load(folder, model)
    return model


def copies(folder: Path, model: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = pretrained(folder).state_dict()
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return model


def broadcasts(folder: Path, model: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = {} if dist.get_rank() else pretrained(folder).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    return model


def ours_builds(folder: Path, model: Any) -> Any:
    model = empty(folder)
    sp.load(folder, model)
    return model


def pretrained_builds(folder: Path, model: Any) -> Any:
    return sharded(pretrained(folder))


QUESTIONS = (
    ("a folder of Hugging Face into a model of FSDP2", (ours_loads, copies, broadcasts)),
    ("a folder of Hugging Face to a new model of FSDP2", (ours_builds, pretrained_builds)),
)


def measured(way: Callable[..., Any], folder: Path, model: Any) -> tuple[float, float, Any]:
    """Seconds, MiB and the local shards of one load."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, so that the peak shows what a way uses
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kibibytes("VmRSS")
    dist.barrier()
    begun = time.perf_counter()
    model = way(folder, model)
    dist.barrier()
    seconds = time.perf_counter() - begun
    mebibytes = (kibibytes("VmHWM") - before) / 1024
    return seconds, mebibytes, {key: value.to_local() for key, value in model.state_dict().items()}


def rank(folder: Path, options: argparse.Namespace) -> None:
    """The part of one rank: all ways in turn."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("shardproof").setLevel(logging.ERROR)
    ways = [way for _, ways in QUESTIONS for way in ways]
    rounds: dict[str, list[tuple[float, float]]] = {way.__name__: [] for way in ways}
    model = empty(folder)
    sp.load(folder, model)
    expected = {key: value.to_local().clone() for key, value in model.state_dict().items()}
    for number in range(options.repeats + 1):
        for way in ways:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            seconds, mebibytes, found = measured(way, folder, model)
            for key, value in expected.items():
                if not torch.equal(found[key], value):
                    raise SystemExit(f"{way.__name__}: {key} has other values")
            if number:  # the first round also imports modules
                rounds[way.__name__].append((seconds, mebibytes))
            del found
    if not dist.get_rank():
        show(rounds, options)
    dist.destroy_process_group()


def show(rounds: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """Prints a table, and records it."""
    print(f"{options.gib} GiB of bfloat16, {RANKS} ranks, {options.repeats} rounds")
    for question, ways in QUESTIONS:
        figures = []
        own = statistics.median(seconds for seconds, _ in rounds[ways[0].__name__])
        for name in (way.__name__ for way in ways):
            times, memory = [one for one, _ in rounds[name]], [one for _, one in rounds[name]]
            ratio = statistics.median(times) / own
            print(f"{name}: {statistics.median(times):.2f} s, {max(memory):,.0f} MiB: {ratio:.1f} times ours")
            figures += [(name, "s", times), (f"{name}, memory of rank 0", "MiB", memory)]
        record(options.json, f"{question}, {RANKS} ranks, {options.gib} GiB", figures)


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

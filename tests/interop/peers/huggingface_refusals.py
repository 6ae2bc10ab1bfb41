"""What `load_pretrained` and `save_pretrained` refuse: `huggingface_refusals.py LLAMA MIXTRAL FOLDER`.

The facts have the class and the text of each error. In the case "one rank", rank 1 does not see the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardproof.frameworks.huggingface import load_pretrained, save_pretrained

llama, mixtral, folder = map(Path, sys.argv[1:4])


def on_meta(source: Path, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **options))


def edited(name: str, source: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A folder with the weights of a model in one file, after an edit."""
    path = folder / name
    if rank() == 0:
        weights = {
            key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()
        }
        edit(weights)
        path.mkdir(parents=True)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    return path


def out_of_sight() -> Any:
    os.chdir(llama.parent if rank() == 0 else folder)
    return load_pretrained(on_meta(llama), llama.name)


def with_buffer() -> Any:
    model = on_meta(llama)
    model.model.register_buffer("scale", torch.ones(3, device="meta"), persistent=False)
    return model


def broken_tie() -> Any:
    model = on_meta(llama, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def tied_twice(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1


expert = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
join_ranks()
cases: dict[str, Callable[[], Any]] = {
    "missing": lambda: load_pretrained(
        on_meta(llama), edited("missing", llama, lambda weights: weights.pop("model.norm.weight"))
    ),
    "unexpected": lambda: load_pretrained(
        on_meta(llama), edited("unexpected", llama, lambda weights: weights.update(extra=torch.ones(1)))
    ),
    "expert": lambda: load_pretrained(
        on_meta(mixtral), edited("expert", mixtral, lambda weights: weights.pop(expert))
    ),
    "tied twice": lambda: load_pretrained(
        on_meta(llama, tie_word_embeddings=True), edited("twice", llama, tied_twice)
    ),
    "broken tie": lambda: load_pretrained(broken_tie(), llama),
    "buffer": lambda: load_pretrained(with_buffer(), llama),
    "one rank": out_of_sight,
    "no model": lambda: load_pretrained(torch.nn.Linear(2, 2), llama),
    "existing": lambda: save_pretrained(AutoModelForCausalLM.from_pretrained(llama), llama),
}
result = Result()
for name, case in cases.items():
    try:
        case()
        result.facts[name] = ["no error", ""]
    except Exception as error:
        result.facts[name] = [type(error).__name__, str(error)]
excluded = edited("excluded", llama, lambda weights: weights.update(extra=torch.ones(1)))
load_pretrained(on_meta(llama), excluded, exclude="extra")
tied = on_meta(llama, tie_word_embeddings=True)
load_pretrained(tied, folder / "twice", exclude="lm_head.weight")
result.add_tensor("tied", tied.lm_head.weight)
leave_ranks(result)

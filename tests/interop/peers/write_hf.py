"""Writes a tiny model as Hugging Face stores it: `write_hf.py PATH FAMILY [SHARD_SIZE]`.

The result is what `save_pretrained` wrote, under its names on disk. SHARD_SIZE, such as 20KB, cuts it into
several files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peer_result import Result
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, dtype="bfloat16"),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}

path, family = Path(sys.argv[1]), sys.argv[2]
size = sys.argv[3] if len(sys.argv) > 3 else "1GB"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.bfloat16)
model.save_pretrained(path, max_shard_size=size)
result = Result()
for name in sorted(path.glob("*.safetensors")):
    with safe_open(name, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            result.add_tensor(key, file.get_tensor(key))
result.write()

"""Tiny models as Hugging Face stores them, and a slow reference conversion to Megatron's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardproof.formats.conversion import MappedTensor

__all__ = ["SIZES", "Sizes", "applied", "hugging_face", "megatron", "stored"]

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model."""

    layers: int = 2
    groups: int = 2
    heads_in_group: int = 2
    head_dim: int = 4
    hidden: int = 6
    ffn: int = 5
    experts: int = 3
    vocab: int = 11
    padded: int = 16
    tied: bool = False
    bias: bool = False
    query_key_norm: bool = False

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.groups * self.heads_in_group

    def config(self) -> dict[str, int]:
        """The entries of config.json."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "num_hidden_layers": self.layers,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
        }


SIZES: Mapping[str, Sizes] = {
    "gpt": replace(Sizes(), groups=4, heads_in_group=1, tied=True),
    "llama": Sizes(),
    "mixtral": Sizes(),
    "qwen": replace(Sizes(), bias=True, query_key_norm=True),
    "qwen-moe": replace(Sizes(), query_key_norm=True),
}
"""Sizes by family."""


def hugging_face(family: str, sizes: Sizes, seed: int = 0) -> State:
    """Random tensors under the names that Hugging Face's files have."""
    random = torch.Generator().manual_seed(seed)
    state: State = {}

    def add(key: str, *shape: int) -> None:
        state[key] = torch.randn(shape, generator=random)

    queries, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    hidden, ffn = sizes.hidden, sizes.ffn
    if family == "gpt":
        add("transformer.wte.weight", sizes.vocab, hidden)
        add("transformer.wpe.weight", 7, hidden)
        for layer in range(sizes.layers):
            at = f"transformer.h.{layer}"
            for norm in ("ln_1", "ln_2"):
                add(f"{at}.{norm}.weight", hidden)
                add(f"{at}.{norm}.bias", hidden)
            for name, rows, columns in (
                ("attn.c_attn", hidden, queries + 2 * keys),
                ("attn.c_proj", queries, hidden),
                ("mlp.c_fc", hidden, ffn),
                ("mlp.c_proj", ffn, hidden),
            ):
                add(f"{at}.{name}.weight", rows, columns)
                add(f"{at}.{name}.bias", columns)
        add("transformer.ln_f.weight", hidden)
        add("transformer.ln_f.bias", hidden)
    else:
        add("model.embed_tokens.weight", sizes.vocab, hidden)
        for layer in range(sizes.layers):
            at = f"model.layers.{layer}"
            add(f"{at}.input_layernorm.weight", hidden)
            add(f"{at}.post_attention_layernorm.weight", hidden)
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                add(f"{at}.self_attn.{name}_proj.weight", rows, hidden)
                if sizes.bias:
                    add(f"{at}.self_attn.{name}_proj.bias", rows)
            add(f"{at}.self_attn.o_proj.weight", hidden, queries)
            if sizes.query_key_norm:
                add(f"{at}.self_attn.q_norm.weight", sizes.head_dim)
                add(f"{at}.self_attn.k_norm.weight", sizes.head_dim)
            mlps = {
                "mixtral": [f"block_sparse_moe.experts.{expert}.w{{}}" for expert in range(sizes.experts)],
                "qwen-moe": [f"mlp.experts.{expert}.{{}}_proj" for expert in range(sizes.experts)],
            }.get(family, ["mlp.{}_proj"])
            if family == "mixtral":
                add(f"{at}.block_sparse_moe.gate.weight", sizes.experts, hidden)
            if family == "qwen-moe":
                add(f"{at}.mlp.gate.weight", sizes.experts, hidden)
                add(f"{at}.mlp.shared_expert_gate.weight", 1, hidden)
                mlps.append("mlp.shared_expert.{}_proj")
            names = (1, 3, 2) if family == "mixtral" else ("gate", "up", "down")
            for mlp in mlps:
                add(f"{at}.{mlp.format(names[0])}.weight", ffn, hidden)
                add(f"{at}.{mlp.format(names[1])}.weight", ffn, hidden)
                add(f"{at}.{mlp.format(names[2])}.weight", hidden, ffn)
        add("model.norm.weight", hidden)
    if not sizes.tied:
        add("lm_head.weight", sizes.vocab, hidden)
    return state


def fused(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Query, key and value of one group after the other."""
    of_groups = zip(*(part.chunk(groups) for part in parts), strict=True)
    return torch.cat([part for group in of_groups for part in group])


def _layer(family: str, sizes: Sizes, hf: State, layer: int) -> State:
    """A layer under Megatron's names, without the number of the layer."""
    if family == "gpt":
        own = {k.removeprefix(f"transformer.h.{layer}."): v for k, v in hf.items() if f".h.{layer}." in k}
        weight = own["attn.c_attn.weight"].T.chunk(3)
        bias = own["attn.c_attn.bias"].chunk(3)
        return {
            "self_attention.linear_qkv.weight": fused(weight, sizes.groups),
            "self_attention.linear_qkv.bias": fused(bias, sizes.groups),
            "self_attention.linear_qkv.layer_norm_weight": own["ln_1.weight"],
            "self_attention.linear_qkv.layer_norm_bias": own["ln_1.bias"],
            "self_attention.linear_proj.weight": own["attn.c_proj.weight"].T,
            "self_attention.linear_proj.bias": own["attn.c_proj.bias"],
            "mlp.linear_fc1.weight": own["mlp.c_fc.weight"].T,
            "mlp.linear_fc1.bias": own["mlp.c_fc.bias"],
            "mlp.linear_fc1.layer_norm_weight": own["ln_2.weight"],
            "mlp.linear_fc1.layer_norm_bias": own["ln_2.bias"],
            "mlp.linear_fc2.weight": own["mlp.c_proj.weight"].T,
            "mlp.linear_fc2.bias": own["mlp.c_proj.bias"],
        }
    own = {k.removeprefix(f"model.layers.{layer}."): v for k, v in hf.items() if f".layers.{layer}." in k}
    found: State = {
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            parts = [own[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
            found[f"self_attention.linear_qkv.{kind}"] = fused(parts, sizes.groups)
    for name in "qk":
        if sizes.query_key_norm:
            found[f"self_attention.{name}_layernorm.weight"] = own[f"self_attn.{name}_norm.weight"]
    if family in ("llama", "qwen"):
        found["mlp.linear_fc1.layer_norm_weight"] = own["post_attention_layernorm.weight"]
        gate_up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
        found["mlp.linear_fc1.weight"] = torch.cat(gate_up)
        found["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
        return found
    found["pre_mlp_layernorm.weight"] = own["post_attention_layernorm.weight"]
    if family == "mixtral":
        moe, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    else:
        moe, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
        shared = "mlp.shared_expert."
        found["mlp.shared_experts.gate_weight"] = own["mlp.shared_expert_gate.weight"]
        gate_up = own[f"{shared}gate_proj.weight"], own[f"{shared}up_proj.weight"]
        found["mlp.shared_experts.linear_fc1.weight"] = torch.cat(gate_up)
        found["mlp.shared_experts.linear_fc2.weight"] = own[f"{shared}down_proj.weight"]
    found["mlp.router.weight"] = own[f"{moe}.gate.weight"]
    experts = [f"{moe}.experts.{expert}." for expert in range(sizes.experts)]
    found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
        [torch.cat([own[f"{at}{gate}.weight"], own[f"{at}{up}.weight"]]) for at in experts]
    )
    found["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
        [own[f"{at}{down}.weight"] for at in experts]
    )
    return found


def megatron(family: str, sizes: Sizes, hf: State, *, padded: bool) -> State:
    """The tensors of Megatron's distributed checkpoints, layers and experts stacked."""
    layers = [_layer(family, sizes, hf, layer) for layer in range(sizes.layers)]
    found = {f"decoder.layers.{key}": torch.stack([layer[key] for layer in layers]) for key in layers[0]}
    base = "transformer." if family == "gpt" else "model."
    names = {
        "embedding.word_embeddings.weight": f"{base}{'wte' if family == 'gpt' else 'embed_tokens'}.weight",
        "embedding.position_embeddings.weight": f"{base}wpe.weight",
        "decoder.final_layernorm.weight": f"{base}{'ln_f' if family == 'gpt' else 'norm'}.weight",
        "decoder.final_layernorm.bias": f"{base}ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    }
    found |= {key: hf[name] for key, name in names.items() if name in hf}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if padded and key in found:
            rest = torch.zeros(sizes.padded - sizes.vocab, sizes.hidden)
            found[key] = torch.cat([found[key], rest])
    return found


def stored(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor, as a key map gets them."""
    return {
        key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in state.items()
    }


def applied(mapped: Mapping[str, MappedTensor], state: Mapping[str, torch.Tensor]) -> State:
    """Carries out moves, one after the other."""
    found: State = {}
    for key, tensor in mapped.items():
        values = torch.full(tensor.shape, float("nan"), dtype=getattr(torch, tensor.dtype))
        for move in tensor.moves:
            into = tuple(slice(a, a + n) for a, n in zip(move.offsets, move.sizes, strict=True))
            if move.key is None:
                values[into] = 0
                continue
            pairs = zip(move.source_offsets, move.source_sizes, strict=True)
            source = state[move.key][tuple(slice(a, a + n) for a, n in pairs)]
            values[into] = source.permute(move.axes or tuple(range(source.ndim))).reshape(move.sizes)
        found[key] = values
    return found

"""The rules between Megatron-Core and Hugging Face, for families of models.

Keys of Hugging Face are those in its files, not those of its modules. Keys of Megatron-Core are those of its
distributed checkpoints. The rules also take the names of older and of unsharded checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from shardproof.formats.conversion.key_maps.key_rules import KeyRules, Rule

_DECODER = "decoder.layers.{layer}."
_ATTENTION = f"{_DECODER}self_attention."
_QKV = f"{_ATTENTION}linear_qkv."
_EXPERT = f"{_DECODER}mlp.experts.experts.{{expert}}."
_ALSO_EXPERT = f"{_DECODER}mlp.experts.local_experts.{{expert}}."
_GROUPED_EXPERTS = f"{_DECODER}mlp.experts."
_LAYER = "model.layers.{layer}."
_HEADS = ("q", "kv", "kv")


def _norm(
    joined: str, part: str, size: str, *, unfused: str | None = None, kinds: Iterable[str] = ("weight",)
) -> Iterable[Rule]:
    for kind in kinds:
        yield Rule(
            joined + kind,
            (f"{part}.{kind}",),
            shapes=(size,),
            unfused=None if unfused is None else f"{unfused}.{kind}",
        )


def _linear(joined: str, part: str, rows: str, columns: str) -> Iterable[Rule]:
    """One weight, with or without bias."""
    yield Rule(f"{joined}weight", (f"{part}.weight",), shapes=(f"{rows} {columns}",))
    yield Rule(f"{joined}bias", (f"{part}.bias",), shapes=(rows,))


def _gated(joined: str, gate: str, up: str, size: str) -> Iterable[Rule]:
    """Gate and up projection, with or without bias."""
    for kind, shape in (("weight", f"{size} hidden"), ("bias", size)):
        yield Rule(f"{joined}{kind}", (f"{gate}.{kind}", f"{up}.{kind}"), "gate_up", (shape, shape))


def _experts(gate: str, up: str, down: str) -> Iterable[Rule]:
    """Experts, each with a gate, an up and a down projection."""
    inner, outer = "expert_ffn hidden", "hidden expert_ffn"
    yield Rule(
        f"{_EXPERT}linear_fc1.weight",
        (f"{gate}.weight", f"{up}.weight"),
        "gate_up",
        (inner, inner),
        also=(f"{_ALSO_EXPERT}linear_fc1.weight", f"{_GROUPED_EXPERTS}linear_fc1.weight{{expert}}"),
    )
    yield Rule(
        f"{_EXPERT}linear_fc2.weight",
        (f"{down}.weight",),
        shapes=(outer,),
        also=(f"{_ALSO_EXPERT}linear_fc2.weight", f"{_GROUPED_EXPERTS}linear_fc2.weight{{expert}}"),
    )


def _attention() -> Iterable[Rule]:
    """Embeddings, norms and attention of models like Llama."""
    query_key_value = [f"{_LAYER}self_attn.{name}_proj" for name in "qkv"]
    yield Rule(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary", ("vocab hidden",)
    )
    yield from _norm(
        f"{_QKV}layer_norm_", f"{_LAYER}input_layernorm", "hidden", unfused=f"{_DECODER}input_layernorm"
    )
    for kind in ("weight", "bias"):
        shapes = tuple(f"{rows} hidden" if kind == "weight" else rows for rows in _HEADS)
        yield Rule(f"{_QKV}{kind}", tuple(f"{name}.{kind}" for name in query_key_value), "qkv", shapes)
    yield from _linear(f"{_ATTENTION}linear_proj.", f"{_LAYER}self_attn.o_proj", "hidden", "q")
    yield from _norm("decoder.final_layernorm.", "model.norm", "hidden")
    yield Rule("output_layer.weight", ("lm_head.weight",), "vocabulary", ("vocab hidden",))


def _query_key_norms() -> Iterable[Rule]:
    for name in "qk":
        yield from _norm(f"{_ATTENTION}{name}_layernorm.", f"{_LAYER}self_attn.{name}_norm", "head_dim")


def _dense_mlp() -> Iterable[Rule]:
    mlp = f"{_DECODER}mlp.linear_"
    yield from _norm(
        f"{mlp}fc1.layer_norm_",
        f"{_LAYER}post_attention_layernorm",
        "hidden",
        unfused=f"{_DECODER}pre_mlp_layernorm",
    )
    yield from _gated(f"{mlp}fc1.", f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj", "ffn")
    yield from _linear(f"{mlp}fc2.", f"{_LAYER}mlp.down_proj", "hidden", "ffn")


def _expert_mlp(router: str, gate: str, up: str, down: str) -> Iterable[Rule]:
    yield from _norm(f"{_DECODER}pre_mlp_layernorm.", f"{_LAYER}post_attention_layernorm", "hidden")
    yield Rule(f"{_DECODER}mlp.router.weight", (f"{router}.weight",), shapes=("expert hidden",))
    yield from _experts(gate, up, down)


def _mixtral() -> Iterable[Rule]:
    moe = f"{_LAYER}block_sparse_moe."
    expert = f"{moe}experts.{{expert}}."
    yield from _expert_mlp(f"{moe}gate", f"{expert}w1", f"{expert}w3", f"{expert}w2")


def _qwen_experts() -> Iterable[Rule]:
    mlp, shared = f"{_LAYER}mlp.", f"{_DECODER}mlp.shared_experts."
    expert, one = f"{mlp}experts.{{expert}}.", f"{mlp}shared_expert."
    yield from _expert_mlp(f"{mlp}gate", f"{expert}gate_proj", f"{expert}up_proj", f"{expert}down_proj")
    yield from _gated(f"{shared}linear_fc1.", f"{one}gate_proj", f"{one}up_proj", "shared_ffn")
    yield from _linear(f"{shared}linear_fc2.", f"{one}down_proj", "hidden", "shared_ffn")
    yield Rule(f"{shared}gate_weight", (f"{mlp}shared_expert_gate.weight",), shapes=("1 hidden",))


def _gpt() -> Iterable[Rule]:
    layer, mlp = "[transformer.]h.{layer}.", f"{_DECODER}mlp.linear_"
    both = ("weight", "bias")
    yield Rule(
        "embedding.word_embeddings.weight", ("[transformer.]wte.weight",), "vocabulary", ("vocab hidden",)
    )
    yield Rule(
        "embedding.position_embeddings.weight", ("[transformer.]wpe.weight",), shapes=("positions hidden",)
    )
    yield from _norm(
        f"{_QKV}layer_norm_", f"{layer}ln_1", "hidden", unfused=f"{_DECODER}input_layernorm", kinds=both
    )
    for joined, part, layout, rows, columns in (
        (_QKV, "attn.c_attn", "qkv_conv1d", "qkv", "hidden"),
        (f"{_ATTENTION}linear_proj.", "attn.c_proj", "transposed", "hidden", "q"),
        (f"{mlp}fc1.", "mlp.c_fc", "transposed", "ffn", "hidden"),
        (f"{mlp}fc2.", "mlp.c_proj", "transposed", "hidden", "ffn"),
    ):
        for kind, shape in (("weight", f"{columns} {rows}"), ("bias", rows)):
            yield Rule(f"{joined}{kind}", (f"{layer}{part}.{kind}",), layout, (shape,))
    yield from _norm(
        f"{mlp}fc1.layer_norm_", f"{layer}ln_2", "hidden", unfused=f"{_DECODER}pre_mlp_layernorm", kinds=both
    )
    yield from _norm("decoder.final_layernorm.", "[transformer.]ln_f", "hidden", kinds=both)
    yield Rule("output_layer.weight", ("lm_head.weight",), "vocabulary", ("vocab hidden",))


def _family(*rules: Iterable[Rule], ignored: Iterable[str] = ()) -> KeyRules:
    return KeyRules(
        "megatron",
        "hf",
        tuple(chain(*rules)),
        tuple(ignored),
        first_prefix=r"(?:(?:model|module)\.)*",
        first_optimizer=r"(?:chained_[0-9]+\.)?optimizer\.",
    )


_ROTARY = (f"{_LAYER}self_attn.rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
"""Computed from the configuration."""
_MASKS = ("[transformer.]h.{layer}.attn.bias", "[transformer.]h.{layer}.attn.masked_bias")
"""Causal masks, which old versions of transformers stored."""

FAMILIES: Mapping[str, KeyRules] = {
    "gpt": _family(_gpt(), ignored=_MASKS),
    "llama": _family(_attention(), _dense_mlp(), ignored=_ROTARY),
    "mixtral": _family(_attention(), _mixtral(), ignored=_ROTARY),
    "qwen": _family(_attention(), _query_key_norms(), _dense_mlp(), ignored=_ROTARY),
    "qwen-moe": _family(_attention(), _query_key_norms(), _qwen_experts(), ignored=_ROTARY),
}
"""By name: GPT-2; Llama and Mistral; Mixtral; Qwen2 and Qwen3; Qwen2 and Qwen3 with experts in all layers."""

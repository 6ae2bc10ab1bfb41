"""Key maps of the families equal a slow reference, and map back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shardproof as sp
from shardproof.formats.conversion.key_maps import FAMILIES, apply_key_map
from tests.unit.formats.conversion.models import SIZES, Sizes, applied, hugging_face, megatron, stored
from tests.unit.formats.peers import Golden, bits


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert bits(found[key]) == bits(tensor.contiguous()), key


@st.composite
def models(draw: st.DrawFn) -> tuple[str, Sizes]:
    """A family and the sizes of a model."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    vocab = draw(st.integers(1, 9))
    sizes = Sizes(
        layers=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        heads_in_group=1 if family == "gpt" else draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 5)),
        experts=draw(st.integers(1, 3)),
        vocab=vocab,
        padded=vocab + draw(st.integers(0, 4)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        query_key_norm=family.startswith("qwen") and draw(st.booleans()),
    )
    return family, sizes


@given(models(), st.booleans())
def test_both_directions_equal_the_reference(model: tuple[str, Sizes], padded: bool) -> None:
    family, sizes = model
    hf = hugging_face(family, sizes)
    expected = megatron(family, sizes, hf, padded=padded)
    objects = {"config.json": sizes.config()}
    query = f"?padded_vocab={sizes.padded}" if padded else ""
    there = apply_key_map(f"hf-to-megatron:{family}{query}", stored(hf), objects)
    same(applied(there.tensors, hf), expected)
    args = {"num_attention_heads": sizes.heads, "num_query_groups": sizes.groups, "vocab_size": sizes.vocab}
    common = {"common": {"args": {**args, "group_query_attention": True, "kv_channels": sizes.head_dim}}}
    back = apply_key_map(f"megatron-to-hf:{family}", stored(expected), common)
    same(applied(back.tensors, expected), hf)


@given(models(), st.sampled_from(["none", "layer", "expert"]))
def test_tensors_that_are_not_stacked_map_back(model: tuple[str, Sizes], stack: str) -> None:
    family, sizes = model
    hf = hugging_face(family, sizes)
    objects = {"config.json": sizes.config()}
    there = apply_key_map(f"hf-to-megatron:{family}?stack={stack}&norms=unfused", stored(hf), objects)
    unstacked = applied(there.tensors, hf)
    assert any(key.startswith("decoder.layers.0.") for key in unstacked) == (stack in ("none", "expert"))
    assert any("input_layernorm." in key for key in unstacked)
    if family in ("mixtral", "qwen-moe"):
        assert any(".experts.experts.0.linear_fc1." in key for key in unstacked) == (stack != "expert")
    back = apply_key_map(f"megatron-to-hf:{family}", stored(unstacked), objects)
    same(applied(back.tensors, unstacked), hf)


@pytest.mark.parametrize("to", ["torch_dist", "safetensors"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_files_convert_back_bit_for_bit(family: str, to: str, tmp_path: Path) -> None:
    sizes = SIZES[family]
    hf = {key: tensor.bfloat16() for key, tensor in hugging_face(family, sizes).items()}
    (tmp_path / "hf").mkdir()
    save_file({key: tensor.contiguous() for key, tensor in hf.items()}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(sizes.config()))
    sp.convert(tmp_path / "hf", tmp_path / "there", to=to, key_map=f"hf-to-megatron:{family}?padded_vocab=16")
    expected = megatron(family, sizes, {key: tensor.float() for key, tensor in hf.items()}, padded=True)
    with sp.open(tmp_path / "there") as checkpoint:
        found = {key: checkpoint[key].read() for key in checkpoint if key not in checkpoint.objects}
    same(found, {key: tensor.bfloat16() for key, tensor in expected.items()})
    sp.convert(
        tmp_path / "there",
        tmp_path / "back",
        to="hf",
        key_map=f"megatron-to-hf:{family}?config={tmp_path / 'hf'}",
    )
    same(load_file(tmp_path / "back" / "model.safetensors"), hf)


OTHER_NAMES = {
    "decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight": [
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
        "module.decoder.layers.0.mlp.experts.linear_fc1.weight1",
        "model.decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight",
    ],
}


@pytest.mark.parametrize("name", [name for names in OTHER_NAMES.values() for name in names])
def test_other_names_of_a_tensor_are_accepted(name: str) -> None:
    sizes = replace(SIZES["mixtral"], layers=1)
    hf = hugging_face("mixtral", sizes)
    objects = {"config.json": sizes.config()}
    there = apply_key_map("hf-to-megatron:mixtral?stack=none", stored(hf), objects)
    (known,) = OTHER_NAMES
    renamed = {name if key == known else key: t for key, t in applied(there.tensors, hf).items()}
    same(applied(apply_key_map("megatron-to-hf:mixtral", stored(renamed), objects).tensors, renamed), hf)


def test_keys_of_gpt2_without_prefix_and_its_masks() -> None:
    sizes = SIZES["gpt"]
    hf = hugging_face("gpt", sizes)
    bare = {key.removeprefix("transformer."): tensor for key, tensor in hf.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 7, 7), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    objects = {"config.json": {"n_head": sizes.heads, "n_layer": 2, "vocab_size": sizes.vocab}}
    there = apply_key_map("hf-to-megatron:gpt", stored(bare | masks), objects)
    assert list(there.ignored) == list(masks)
    same(applied(there.tensors, bare), megatron("gpt", sizes, hf, padded=False))


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of tensors (tokens, heads, head_dim)."""
    q, k, v = (part.transpose(0, 1) for part in (queries, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@pytest.mark.parametrize(("groups", "in_group"), [(1, 4), (2, 2), (4, 1), (3, 2)])
def test_attention_is_the_same_after_the_map(groups: int, in_group: int) -> None:
    """Compares Megatron's forward with the fused weight with Hugging Face's with the separate weights.

    The elements are small integers, so that the products are exact however they are summed.
    """
    heads, size, hidden, tokens = groups * in_group, 4, 8, 5
    weight = torch.randint(-3, 4, (2, (heads + 2 * groups) * size, hidden)).double()
    x = torch.randint(-3, 4, (tokens, hidden)).double()
    key = "decoder.layers.self_attention.linear_qkv.weight"
    mapped = apply_key_map(
        f"megatron-to-hf:llama?heads={heads}&groups={groups}", stored({key: weight}), {}
    ).tensors
    parts = applied(mapped, {key: weight})
    for layer in range(2):
        mixed = (x @ weight[layer].T).view(tokens, groups, (in_group + 2) * size)
        q, k, v = mixed.tensor_split([in_group * size, (in_group + 1) * size], dim=2)
        q, k, v = (part.reshape(tokens, -1, size) for part in (q, k, v))
        fused = attention(q, k.repeat_interleave(in_group, 1), v.repeat_interleave(in_group, 1))
        q, k, v = (
            (x @ parts[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T).view(tokens, -1, size)
            for name in "qkv"
        )
        separate = attention(q, k.repeat_interleave(in_group, 1), v.repeat_interleave(in_group, 1))
        assert torch.equal(fused, separate)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with sp.open(path) as checkpoint:
        return {key: checkpoint[key].read() for key in checkpoint if key not in checkpoint.objects}


@pytest.mark.parametrize("name", ["hf_llama_sharded", "hf_llama_tied", "hf_bin_sharded"])
def test_golden_llama_converts_back(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    config = golden.checkpoint / "config.json"
    query = f"?config={config}"
    sp.convert(
        golden.checkpoint,
        tmp_path / "there",
        to="torch_dist",
        key_map="hf-to-megatron:llama?padded_vocab=128",
    )
    assert tensors(tmp_path / "there")["embedding.word_embeddings.weight"].shape == (128, 32)
    sp.convert(tmp_path / "there", tmp_path / "back", to="hf", key_map=f"megatron-to-hf:llama{query}")
    same(tensors(tmp_path / "back"), {key: golden.tensor(key) for key in golden.kinds})


GPT_OF_THE_GOLDEN = """
extends = "llama"
[options]
heads = 4
groups = 2
prefix = "optimizer.state.param,optimizer.state.exp_avg,optimizer.state.exp_avg_sq"
[[rules]]
megatron = "embedding.position_embeddings.weight"
hf = "model.embed_positions.weight"
shapes = "positions hidden"
[[rules]]
megatron = "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_bias"
hf = "model.layers.{layer}.input_layernorm.bias"
[[rules]]
megatron = "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_bias"
hf = "model.layers.{layer}.post_attention_layernorm.bias"
[[rules]]
megatron = "decoder.final_layernorm.bias"
hf = "model.norm.bias"
"""


@pytest.mark.parametrize("name", ["mc_gpt_fully_reshardable_w2", "mc11_gpt_fsms_w2", "zarr_mc11_gpt_fsms_w2"])
def test_golden_megatron_converts_back_with_its_optimizer(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    rules = tmp_path / "gpt.toml"
    state = "fp32_param" if "mc11" in name else "param"
    rules.write_text(GPT_OF_THE_GOLDEN.replace("state.param", f"state.{state}"))
    report = sp.convert(golden.checkpoint, tmp_path / "there", to="safetensors", key_map=str(rules))
    assert any(key.startswith("rng_state") for key in report.left_out)
    stored_tensors, found = tensors(golden.checkpoint), tensors(tmp_path / "there")
    assert "optimizer.state.exp_avg.model.layers.1.self_attn.k_proj.weight" in found
    fc1 = stored_tensors["decoder.layers.mlp.linear_fc1.weight"]
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], fc1[1, 40:])
    qkv = stored_tensors["decoder.layers.self_attention.linear_qkv.weight"][1].view(2, 32, 32)
    assert torch.equal(found["model.layers.1.self_attn.v_proj.weight"], qkv[:, 24:].reshape(16, 32))
    back: Any = f"{rules}?direction=hf-to-megatron"
    sp.convert(tmp_path / "there", tmp_path / "back", to="torch_dist", key_map=back)
    same(tensors(tmp_path / "back"), stored_tensors)

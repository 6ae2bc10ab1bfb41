"""Key maps from files and functions, their options, and their errors."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.errors import ShardproofError, StructureError, TilingError
from shardproof.formats import WRITERS
from shardproof.formats.conversion import MappedTensor, Move
from shardproof.formats.conversion.key_maps import apply_key_map
from shardproof.formats.conversion.work import MappedSource, box_digest
from tests.unit.formats.conversion.models import SIZES, applied, hugging_face, stored

TO_MEGATRON = "hf-to-megatron:llama"
LLAMA = SIZES["llama"]
HF = hugging_face("llama", LLAMA)
CONFIG: dict[str, Any] = {"config.json": LLAMA.config()}
MEGATRON = applied(apply_key_map(TO_MEGATRON, stored(HF), CONFIG).tensors, HF)
QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


def refused(
    match: str,
    state: Mapping[str, torch.Tensor],
    key_map: Any = "megatron-to-hf:llama",
    objects: Mapping[str, Any] = CONFIG,
    error: type[Exception] = StructureError,
) -> Any:
    with pytest.raises(error, match=match) as caught:
        apply_key_map(key_map, stored(state), objects)
    return caught.value


def without(state: Mapping[str, torch.Tensor], *keys: str) -> dict[str, torch.Tensor]:
    assert set(keys) <= state.keys()
    return {key: tensor for key, tensor in state.items() if key not in keys}


def test_all_keys_that_no_rule_takes_are_named() -> None:
    more = {f"decoder.layers.{layer}.mamba.weight": torch.ones(2) for layer in range(3)}
    error = refused(r"(?s)takes 3 of 12 keys.*--exclude.*\*\.mamba\.weight \(3 keys\)", MEGATRON | more)
    assert error.details["keys"] == list(more)
    refused("no rule takes 1 of 22", HF | {"model.layers.0.self_attn.qkv.weight": torch.ones(2)}, TO_MEGATRON)


def test_the_state_of_an_optimizer_is_left_out_unless_a_prefix_takes_it() -> None:
    moments = {f"optimizer.state.exp_avg.{key}": tensor for key, tensor in MEGATRON.items()}
    bucket = {"chained_1.optimizer.distributed.dp_group_idx_0.bucket_0.param": torch.ones(3)}
    weights = apply_key_map("megatron-to-hf:llama", stored(MEGATRON), CONFIG).tensors
    mapped = apply_key_map("megatron-to-hf:llama", stored(MEGATRON | moments | bucket), CONFIG)
    assert mapped.tensors.keys() == weights.keys()
    assert sorted(mapped.ignored) == sorted([*moments, *bucket])
    prefixed = "megatron-to-hf:llama?prefix=optimizer.state.exp_avg"
    mapped = apply_key_map(prefixed, stored(MEGATRON | moments | bucket), CONFIG)
    assert len(mapped.tensors) == 2 * len(weights)
    assert list(mapped.ignored) == [*bucket]


def test_missing_tensors_are_named() -> None:
    key, value = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
    refused(rf"{key}, {value} are missing", without(HF, key, value), TO_MEGATRON)
    refused("up_proj.weight is missing", without(HF, "model.layers.0.mlp.up_proj.weight"), TO_MEGATRON)
    refused("layer 0 are missing", without(HF, "model.layers.0.mlp.down_proj.weight"), TO_MEGATRON)
    refused("down_proj.weight has layer = 1, expected 2", without(HF, "model.layers.1.mlp.down_proj.weight"),
            TO_MEGATRON)  # fmt: skip
    one = {key: tensor for key, tensor in HF.items() if "layers.1." not in key}
    refused("has layer = 1, expected 2 as the configuration has", one, TO_MEGATRON)
    apply_key_map(f"{TO_MEGATRON}?layers=1", stored(one), CONFIG)


def test_missing_experts_are_named() -> None:
    sizes = SIZES["mixtral"]
    hf = hugging_face("mixtral", sizes)
    objects = {"config.json": sizes.config()}
    expert = "model.layers.{}.block_sparse_moe.experts.{}.w{}.weight"
    of_layer_1 = [expert.format(1, 2, part) for part in (1, 2, 3)]
    refused("layer 1, expert 2 is missing", without(hf, *of_layer_1), "hf-to-megatron:mixtral", objects)
    last = [*of_layer_1, *(expert.format(0, 2, part) for part in (1, 2, 3))]
    refused("expert = 3, expected 2", without(hf, *last), "hf-to-megatron:mixtral", objects)
    first = [expert.format(layer, 0, part) for layer in range(2) for part in (1, 2, 3)]
    refused("expert 0 are missing", without(hf, *first), "hf-to-megatron:mixtral", objects)


def test_shapes_that_contradict_are_named() -> None:
    rows = MEGATRON[QKV].shape[1]
    short = MEGATRON | {QKV: MEGATRON[QKV][:, :-1]}
    refused(rf"{QKV} of shape \[{rows - 1}, 6\].*expected \[16, 8, 8\] rows .*, found {rows - 1}", short)
    refused("expected a multiple of 2 rows, found 9", MEGATRON | {FC1: MEGATRON[FC1][:, 1:]})
    fc2 = "decoder.layers.mlp.linear_fc2.weight"
    refused(f"{fc2} has ffn = 10, expected 5 as {FC1} has", MEGATRON | {fc2: torch.ones(2, 6, 10)})
    refused("has 2 dimensions, expected 1", MEGATRON | {"decoder.final_layernorm.weight": torch.ones(6, 1)})
    refused("expected at least 12 rows", MEGATRON, "megatron-to-hf:llama?vocab=12")
    refused("expected at most 10 rows", HF, f"{TO_MEGATRON}?padded_vocab=10")
    key, value = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    refused(r"expected \[16, 8, 8\] rows", HF | {key: torch.ones(4, 6), value: torch.ones(4, 6)}, TO_MEGATRON)
    refused("as many rows of keys", HF | {key: torch.ones(4, 6)}, TO_MEGATRON)
    refused("differ in rows alone", HF | {key: torch.ones(8, 7)}, TO_MEGATRON)
    refused("gate_proj.weight is float64|up_proj.weight is float32, expected float64",
            HF | {"model.layers.0.mlp.gate_proj.weight": torch.ones(5, 6).double()}, TO_MEGATRON)  # fmt: skip
    refused("the same tensor", MEGATRON | {f"model.{QKV}": MEGATRON[QKV]})
    refused("expected one for each layer", MEGATRON | {QKV: torch.tensor(1.0)})


def test_false_shapes_and_numbers_are_refused_quickly() -> None:
    key, other = "decoder.layers.{}.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc2.weight"
    for tensors, match in (
        ({other: ("float32", (10**12, 0, 0))}, "tensors stacked, expected 1 to"),
        ({other: ("float32", (0, 6, 5))}, "has 0 tensors stacked"),
        ({key.format(999_999_999): ("float32", (6, 5))}, "layer 0, 1, 2, .* are missing"),
        ({QKV: ("float32", (1, 3 * 10**9, 0))}, "1 to 65536 query groups"),
    ):
        with pytest.raises(StructureError, match=match):
            apply_key_map(f"megatron-to-hf:llama?heads={10**9}&groups={10**9}", tensors, {})
    expert = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"
    cross = [(0, number) for number in range(2000)] + [(number, 0) for number in range(1, 2000)]
    with pytest.raises(StructureError, match="layer 1, expert 1 is missing"):
        apply_key_map("hf-to-megatron:mixtral", {expert.format(*at): ("float32", (6, 5)) for at in cross}, {})


@given(st.data())
def test_any_change_of_shapes_and_keys_is_a_clear_error(data: st.DataObject) -> None:
    direction, state = data.draw(
        st.sampled_from([("megatron-to-hf:llama", MEGATRON), (TO_MEGATRON, HF)]), label="direction"
    )
    tensors = stored(state)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(tensors)))
        dtype, shape = tensors.pop(key)
        kind = data.draw(st.sampled_from(["lost", "number", "shape", "dtype"]))
        if kind == "number":
            tensors[key.replace("layers.1", "layers.7")] = dtype, shape
        elif kind == "shape":
            tensors[key] = dtype, tuple(data.draw(st.lists(st.integers(0, 20), max_size=4)))
        elif kind == "dtype":
            tensors[key] = "bfloat16", shape
    with contextlib.suppress(StructureError):
        mapped = apply_key_map(direction, tensors, CONFIG)
        assert mapped.tensors


def test_a_gpt_without_gate_is_not_split_as_llama() -> None:
    """The first layer of its MLP has as many rows as the second has columns."""
    plain = MEGATRON | {FC1: torch.ones(2, 8, 6), "decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 6, 8)}
    refused("ffn = 8, expected 4", plain)


def test_options_that_cannot_be_derived_are_asked_for() -> None:
    refused(r"add two of \?heads=", MEGATRON, objects={})
    refused(r"add one of \?heads=", HF, TO_MEGATRON, {})
    for query in ("heads=4&groups=2", "heads=4&head_dim=4", "groups=2&head_dim=4"):
        apply_key_map(f"megatron-to-hf:llama?{query}", stored(MEGATRON), {})
    for query in ("heads=4", "groups=2", "head_dim=4"):
        found = apply_key_map(f"{TO_MEGATRON}?{query}", stored(HF), {})
        assert torch.equal(applied(found.tensors, HF)[QKV], MEGATRON[QKV])
    refused("that 1 to 65536 query groups divide", MEGATRON, "megatron-to-hf:llama?heads=2&groups=3", {})
    refused("expected .* rows", MEGATRON, "megatron-to-hf:llama?heads=5&groups=1&head_dim=4")


def test_the_norm_of_a_head_finds_wrong_heads() -> None:
    sizes = SIZES["qwen"]
    hf = hugging_face("qwen", sizes)
    there = apply_key_map("hf-to-megatron:qwen", stored(hf), {"config.json": sizes.config()})
    state = applied(there.tensors, hf)
    refused("head_dim = 4, expected 8", state, "megatron-to-hf:qwen?heads=2&groups=1", {})


ARGS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 4,
}


@pytest.mark.parametrize(
    "objects",
    [
        {"common": {"args": ARGS}},
        {"common.args": ARGS},
        {f"mp_rank_00/model_optim_rng/args.{name}": value for name, value in ARGS.items()},
        {f"common.args.{name}": value for name, value in ARGS.items()},
    ],
)
def test_arguments_of_megatron_are_found(objects: dict[str, Any]) -> None:
    found = apply_key_map("megatron-to-hf:llama", stored(MEGATRON), objects)
    assert torch.equal(
        applied(found.tensors, MEGATRON)["model.layers.1.self_attn.k_proj.weight"],
        HF["model.layers.1.self_attn.k_proj.weight"],
    )


def test_megatron_without_groups_has_one_for_each_head() -> None:
    """Megatron then stores 1 query group, which has no meaning."""
    state = {QKV: torch.arange(24.0).reshape(1, 24, 1)}
    args = {"num_attention_heads": 4, "num_query_groups": 1, "group_query_attention": False}
    mapped = apply_key_map("megatron-to-hf:llama", stored(state), {"common": {"args": args}})
    queries = applied(mapped.tensors, state)["model.layers.0.self_attn.q_proj.weight"]
    assert queries.flatten().tolist() == [0, 1, 6, 7, 12, 13, 18, 19]


@pytest.mark.parametrize("name", ["rotary_interleaved", "apply_layernorm_1p"])
def test_models_whose_values_differ_are_refused(name: str) -> None:
    refused(name, MEGATRON, objects={"common": {"args": {**ARGS, name: True}}})


def test_wrong_names_and_options_are_refused() -> None:
    for key_map, match in (
        ("megatron-to-hf:parchment", "there is no key map.*llama"),
        ("llama", "there is no key map"),
        ("megatron-to-hf:llama?heads", "write options as"),
        ("megatron-to-hf:llama?tails=3", "no option 'tails'"),
        ("megatron-to-hf:llama?heads=-3", "positive number"),
        ("megatron-to-hf:llama?heads=²", "positive number"),
        ("megatron-to-hf:llama?norms=none", "norms is fused or unfused"),
        ("megatron-to-hf:llama?stack=rows", "stack names placeholders: expert, layer"),
        ("megatron-to-hf:mixtral?stack=layer,", "stack names placeholders: expert, layer"),
        ("megatron-to-hf:llama?direction=hf-to-megatron", "option of .toml"),
        ("/nowhere/map.toml", "cannot be read"),
    ):
        refused(match, MEGATRON, key_map, error=ValueError)
    refused("cannot read the configuration", MEGATRON, "megatron-to-hf:llama?config=/nowhere")


RULES = """
sides = ["mine", "hf"]
ignored = ["step.{layer}"]

[options]
heads = 4

[[rules]]
mine = "blocks.{layer}.qkv"
also = "layers.{layer}.qkv"
hf = ["h.{layer}.q", "h.{layer}.k", "h.{layer}.v"]
layout = "qkv"
shapes = ["q hidden", "kv hidden", "kv hidden"]

[[rules]]
mine = "out"
hf = "head"
layout = "transposed"
"""


def test_a_file_declares_a_map(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RULES)
    state = {"layers.0.qkv": torch.randn(8, 3), "out": torch.randn(2, 3), "step.3": torch.ones(1)}
    there = apply_key_map(f"{file}?groups=2", stored(state), {})
    assert list(there.ignored) == ["step.3"]
    found = applied(there.tensors, state)
    assert {key: tuple(t.shape) for key, t in found.items()} == {
        "h.0.q": (4, 3), "h.0.k": (2, 3), "h.0.v": (2, 3), "head": (3, 2),
    }  # fmt: skip
    assert torch.equal(found["head"], state["out"].T)
    assert torch.equal(found["h.0.k"], state["layers.0.qkv"][[2, 6]])
    back = apply_key_map(f"{file}?direction=hf-to-mine&stack=none", stored(found), {})
    again = applied(back.tensors, found)
    assert torch.equal(again["blocks.0.qkv"], state["layers.0.qkv"])
    assert torch.equal(again["out"], state["out"])
    refused("direction is mine-to-hf or hf-to-mine", state, f"{file}?direction=up", error=ValueError)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"no \[\[rules\]\]"),
        ("x = [", "cannot be read"),
        ("colour = 1", "the file has colour"),
        ('extends = "parchment"', "extends is one of"),
        ('sides = ["a"]', "two different words"),
        ('sides = ["also", "hf"]', "cannot name sides"),
        ('[[rules]]\nmegatron = "a"', "rule 1 needs megatron"),
        ('[[rules]]\nmegatron = "a"\nhf = 3', "hf is a string or a list"),
        ('[[rules]]\nmegatron = "a"\nhf = "b"\nlayout = "qkv"', "rule 1: a: layout qkv has 3 parts, not 1"),
        ('[[rules]]\nmegatron = "a"\nhf = "b"\nlayout = "pile"', "layout is one of"),
        ('[[rules]]\nmegatron = "a.{layer}"\nhf = "b"', "different placeholders"),
        ('[[rules]]\nmegatron = "a.{x}.{x}"\nhf = "b.{x}.{x}"', "same placeholder twice"),
        ('[[rules]]\nmegatron = "a"\nhf = "b"\nshapes = ["x", "y"]', "2 shapes for 1 parts"),
        ('[[rules]]\nmegatron = "a"\nhf = "b"\ncolour = 1', "rule 1 has colour"),
        ('rules = "a"', r"no \[\[rules\]\]"),
        ("rules = [1]", r"begin it with \[\[rules\]\]"),
        ('extends = "llama"\noptions = 3', r"\[options\]"),
        ('extends = "llama"\noptions.tails = 3', "no option 'tails'"),
    ],
)
def test_wrong_files_are_refused(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    refused(match, MEGATRON, str(file), error=ValueError)


@given(st.text(max_size=80))
def test_any_name_is_a_clear_error(text: str) -> None:
    with pytest.raises((ValueError, ShardproofError)):
        apply_key_map(text, stored(MEGATRON), {})


def halves(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], objects: Mapping[str, Any]
) -> dict[str, MappedTensor]:
    """A map of a user: each tensor in two halves, transposed."""
    found = {}
    for key, (dtype, (rows, columns)) in tensors.items():
        for half in range(objects["parts"]):
            size = rows // 2
            move = Move((0, 0), (columns, size), key, (half * size, 0), (size, columns), (1, 0))
            found[f"{key}.{half}"] = MappedTensor(dtype, (columns, size), [move])
    return found


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_a_function_is_a_map(workers: int, tmp_path: Path) -> None:
    state = {"a": torch.randn(6, 4), "b": torch.randn(4, 2)}
    sp.save(tmp_path / "source", {**state, "parts": 2})
    report = sp.convert(
        tmp_path / "source", tmp_path / "there", to="safetensors", key_map=halves, workers=workers,
        max_file_bytes=100,
    )  # fmt: skip
    assert report.left_out == ("parts",)
    with sp.open(tmp_path / "there") as checkpoint:
        assert torch.equal(checkpoint["a.1"].read(), state["a"][3:].T)
        assert torch.equal(checkpoint["b.0"].read(), state["b"][:2].T)


def test_a_function_that_cannot_be_sent_to_workers_is_refused(tmp_path: Path) -> None:
    sp.save(tmp_path / "source", {"a": torch.ones(2, 2), "parts": 2})
    with pytest.raises(ValueError, match="cannot be sent to worker processes"):
        sp.convert(
            tmp_path / "source", tmp_path / "there", to="dcp", workers=2, key_map=lambda a, b: halves(a, b)
        )
    assert not (tmp_path / "there").exists()


def written(shape: tuple[int, ...], *moves: Move) -> dict[str, Any]:
    return {"b": MappedTensor("float32", shape, moves)}


WHOLE = Move((0,), (4,), "a", (0,), (4,))


@pytest.mark.parametrize(
    ("given", "match", "error"),
    [
        ({"b": 3}, "not MappedTensor", StructureError),
        ({"b": MappedTensor("float3", (4,), [WHOLE])}, "float3", StructureError),
        (written((4,), Move((0,), (4,), "x", (0,), (4,))), "not stored", StructureError),
        (written((4,), Move((0,), (4,), "a", (1,), (4,))), "wrong move", StructureError),
        (written((4,), Move((0,), (4,), "a", (0,), (3,))), "wrong move", StructureError),
        (written((4,), Move((0, 0), (4, 1), "a", (0,), (4,))), "wrong move", StructureError),
        (written((4,), Move((0,), (4,), "a", (0,), (4,), (1,))), "wrong move", StructureError),
        (written((5,), WHOLE), "gap, at .4.", TilingError),
        (written((4,), WHOLE, WHOLE), "overlap", TilingError),
        (written((3,), WHOLE), "out of bounds", TilingError),
    ],
)
def test_moves_that_do_not_fit_are_refused(
    given: dict[str, Any], match: str, error: type[ShardproofError]
) -> None:
    refused(match, {"a": torch.ones(4)}, lambda tensors, objects: given, error=error)


def test_the_plan_depends_on_the_file(tmp_path: Path) -> None:
    """An interrupted conversion does not go on with another map of the same keys and shapes."""
    from shardproof.formats.conversion.plan import ConversionRequest, plan_conversion

    sp.save(tmp_path / "source", MEGATRON)
    digests = set()
    for heads in (4, 8):
        (tmp_path / "a.toml").write_text(
            f'extends = "llama"\noptions.heads = {heads}\noptions.groups = {heads // 2}'
        )
        request = ConversionRequest(
            str(tmp_path / "source"), str(tmp_path / "there"), "hf", key_map=str(tmp_path / "a.toml")
        )
        with sp.open(tmp_path / "source") as checkpoint:
            digests.add(plan_conversion(checkpoint, request).digest)
    assert len(digests) == 2


def test_selection_comes_before_the_map_and_rename_after_it(tmp_path: Path) -> None:
    sp.save(tmp_path / "source", {**MEGATRON, "optimizer": {"x": torch.ones(2)}, "epoch": 3})
    report = sp.convert(
        tmp_path / "source",
        tmp_path / "there",
        to="shardproof",
        exclude=["optimizer"],
        key_map="megatron-to-hf:llama?heads=4&groups=2",
        rename={"model": "llama"},
        dtype="bfloat16",
    )
    assert report.left_out == ("optimizer.x", "epoch")
    with sp.open(tmp_path / "there") as checkpoint:
        key = "llama.layers.1.self_attn.v_proj.weight"
        assert torch.equal(checkpoint[key].read(), HF[key.replace("llama", "model")].bfloat16())


@pytest.mark.parametrize("to", sorted({"shardproof", "torch", "hf", "safetensors"} & set(WRITERS)))
def test_tied_tensors_stay_tied(to: str, tmp_path: Path) -> None:
    state = dict(HF)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.config()))
    sp.convert(tmp_path / "a.pt", tmp_path / "there", to=to, key_map=f"{TO_MEGATRON}?padded_vocab=16")
    with sp.open(tmp_path / "there") as checkpoint:
        tied = {"output_layer.weight": "embedding.word_embeddings.weight"}
        assert to == "safetensors" or checkpoint.aliases in (tied, {b: a for a, b in tied.items()}, {})
        assert ("output_layer.weight" in checkpoint) == (to != "hf")
        assert checkpoint.shape("embedding.word_embeddings.weight") == (16, 6)


def test_the_command_takes_a_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardproof.commands.cli.group import run

    sp.save(tmp_path / "source", MEGATRON)
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "there"), "--to", "hf", "--json", "--map"]
    assert run([*command, "megatron-to-hf:parchment"]) == 2
    assert "there is no key map" in capsys.readouterr().err
    assert run([*command, "megatron-to-hf:llama"]) == 2
    assert "add two of ?heads=" in capsys.readouterr().err
    assert run([*command, "megatron-to-hf:llama?heads=4&groups=2"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(HF)


@st.composite
def moved_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], MappedTensor]:
    """Stored tensors, and a stack of them: cut into rows, permuted, with zeros at the end."""
    count = draw(st.integers(1, 5) | st.just(80))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    leading = draw(st.sampled_from([(), (1,), (2,)]))
    turned = draw(st.booleans())
    state = {}
    moves = []
    for at in range(count):
        shape = (*leading, columns, rows) if turned else (*leading, rows, columns)
        state[f"t{at}"] = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * at
        last = len(leading) + 1
        axes = (*range(len(leading)), last, last - 1) if turned else ()
        layer = draw(st.integers(0, leading[0] - 1)) if leading else 0
        begin, extent = (*[layer] * len(leading), 0, 0), (*[1] * len(leading), *shape[-2:])
        moves.append(Move((at, 0, 0), (1, rows, columns), f"t{at}", begin, extent, axes))
    moves.append(Move((count, 0, 0), (1, rows, columns), None))
    return state, MappedTensor("float32", (count + 1, rows, columns), moves)


@settings(max_examples=40)
@given(moved_tensors(), st.data())
def test_any_box_of_a_moved_tensor_equals_that_box_of_the_whole(
    case: tuple[dict[str, torch.Tensor], MappedTensor], data: st.DataObject
) -> None:
    state, tensor = case
    whole = applied({"w": tensor}, state)["w"]
    offsets = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    sizes = [data.draw(st.integers(1, s - o)) for s, o in zip(tensor.shape, offsets, strict=True)]
    expected = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].contiguous()
    with tempfile.TemporaryDirectory() as folder:
        sp.save(f"{folder}/source", state)
        with sp.open(f"{folder}/source") as checkpoint:
            source = MappedSource(checkpoint, {"w": tensor})
            assert torch.equal(source.read("w", offsets, sizes), expected)
    (box,) = source.boxes
    assert box.digest == box_digest(expected)

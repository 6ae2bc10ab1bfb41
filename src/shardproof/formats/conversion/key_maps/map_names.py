"""The text that names a map, and the rules that it names: those of a family, or those of a TOML file.

The families are models of Megatron-Core and Hugging Face. Keys of Hugging Face are those in its files, not
those of its modules. Keys of Megatron-Core are those of its distributed checkpoints. The rules also take the
names of older and of unsharded checkpoints.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl

from shardproof.formats.conversion.key_maps.key_matching import KeyRules, Rule, RuleOptions
from shardproof.formats.conversion.key_maps.layouts import Hyperparameters

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


_NUMBERS = tuple(item.name for item in fields(Hyperparameters))
_TEXTS = ("config", "direction", "norms", "prefix", "stack")
_TOP = {"extends", "sides", "direction", "ignored", "options", "rules"}
_IN_RULE = {"layout", "shapes", "also"}
_SIDE = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class MapName:
    """The name of a map, as a user gives it: ``megatron-to-hf:llama?heads=32&groups=8``.

    Raises:
        ValueError: an option is unknown, or its value is wrong.
    """

    base: str
    """Before the question mark."""
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> MapName:
        """Parses the text.

        >>> MapName.parse("megatron-to-hf:llama?heads=8&groups=4").numbers()
        {'heads': 8, 'groups': 4}
        """
        base, _, query = text.partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError as error:
            raise ValueError(f"key map {text!r}: write options as ?heads=8&groups=4") from error
        return MapName(base, dict(pairs))

    def numbers(self) -> dict[str, int]:
        """Numbers of the model."""
        for name in self.options:
            if name not in (*_NUMBERS, *_TEXTS):
                known = ", ".join(sorted((*_NUMBERS, *_TEXTS)))
                raise ValueError(f"key map {self.base}: there is no option {name!r}; there are {known}")
        found = {}
        for name in _NUMBERS:
            if (value := self.options.get(name)) is not None:
                if not (value.isascii() and value.isdigit() and 0 < int(value[:19]) < 1 << 62):
                    raise ValueError(f"key map {self.base}: {name} is a positive number, not {value!r}")
                found[name] = int(value)
        return found

    def rule_options(self, placeholders: frozenset[str]) -> RuleOptions:
        """How the rules are applied."""
        norms = self.options.get("norms", "fused")
        if norms not in ("fused", "unfused"):
            raise ValueError(f"key map {self.base}: norms is fused or unfused, not {norms!r}")
        stack = self.options.get("stack")
        named = frozenset(() if stack in (None, "none") else str(stack).split(","))
        if not named <= placeholders:
            raise ValueError(
                f"key map {self.base}: stack names placeholders: {', '.join(sorted(placeholders))}; or none. "
                f"It is {stack!r}"
            )
        stacked = placeholders if stack is None else named
        prefixes = [item.removesuffix(".") for item in self.options.get("prefix", "").split(",") if item]
        return RuleOptions(sorted(prefixes, key=len, reverse=True), stacked, norms == "unfused")


def named_rules(name: MapName) -> tuple[KeyRules, MapName]:
    """The rules of a map, and its name with all options."""
    if name.base.endswith(".toml"):
        rules, options = _read_rules(name.base)
        return rules, MapName(name.base, {**options, **name.options})
    direction, _, family = name.base.partition(":")
    rules_of = FAMILIES.get(family)
    if rules_of is None or direction not in rules_of.directions:
        raise ValueError(
            f"there is no key map {name.base!r}. There are megatron-to-hf:FAMILY and hf-to-megatron:FAMILY "
            f"with FAMILY one of {', '.join(FAMILIES)}, or give the path of a .toml file"
        )
    if "direction" in name.options:
        raise ValueError(f"key map {name.base}: direction is an option of .toml files")
    return rules_of, MapName(name.base, {**name.options, "direction": direction})


def _read_rules(path: str) -> tuple[KeyRules, dict[str, str]]:
    """The rules of a file, and the options that it sets, ``direction`` among them.

    Raises:
        ValueError: the file cannot be read or declares no map; the message names the file and the place.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"key map {path} cannot be read: {error}") from error
    try:
        return _rules(table)
    except ValueError as error:
        raise ValueError(f"key map {path}: {error}") from error


def _rules(table: dict[str, Any]) -> tuple[KeyRules, dict[str, str]]:
    _check_names("the file", table, _TOP)
    family = table.get("extends")
    if family is not None and family not in FAMILIES:
        raise ValueError(f"extends is one of {', '.join(FAMILIES)}, not {family!r}")
    base = KeyRules("megatron", "hf", ()) if family is None else FAMILIES[family]
    sides = _texts("sides", table.get("sides", [base.first, base.second]))
    if len(sides) != 2 or sides[0] == sides[1] or not all(map(_SIDE.fullmatch, sides)):
        raise ValueError('sides are two different words, such as ["megatron", "hf"]')
    if set(sides) & _IN_RULE:
        raise ValueError(f"{sides} cannot name sides: rules have fields of that name")
    rules = table.get("rules", [])
    if not isinstance(rules, list) or not (rules or family):
        raise ValueError("it has no [[rules]]")
    declared = [_rule(f"rule {row}", rule, *sides) for row, rule in enumerate(rules, 1)]
    ignored = _texts("ignored", table.get("ignored", []))
    options = table.get("options", {})
    if not isinstance(options, dict) or not all(isinstance(item, int | str) for item in options.values()):
        raise ValueError("[options] has a value that is neither a number nor a string")
    texts = {name: str(value) for name, value in options.items()}
    if "direction" in table:
        texts["direction"] = str(table["direction"])
    found = KeyRules(
        *sides, (*declared, *base.rules), (*ignored, *base.ignored), base.first_prefix, base.first_optimizer
    )
    return found, texts


def _rule(where: str, table: Any, first: str, second: str) -> Rule:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is not a table: begin it with [[rules]]")
    _check_names(where, table, {first, second, *_IN_RULE})
    joined, parts = table.get(first), table.get(second)
    if not isinstance(joined, str) or not joined or parts in (None, [], ""):
        raise ValueError(f"{where} needs {first} = KEY and {second} = KEY, or a list of keys")
    layout = table.get("layout", "same")
    if not isinstance(layout, str):
        raise ValueError(f"{where}: layout must be a string")
    try:
        return Rule(
            joined,
            _texts(second, parts),
            layout,
            _texts("shapes", table.get("shapes", [])),
            also=_texts("also", table.get("also", [])),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _texts(name: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{name} is a string or a list of strings, not {value!r}")
    return tuple(found)


def _check_names(where: str, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")

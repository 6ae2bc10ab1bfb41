"""Numbers of a model that keys and shapes do not show: heads, query groups, the size of the vocabulary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.errors import PlainDataError, StructureError

CONFIG = "config.json"
"""Key of the configuration of Hugging Face among the values that a key map gets."""

_IN_CONFIG = {
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "layers": ("num_hidden_layers", "n_layer"),
    "vocab": ("vocab_size",),
}
"""Names in ``config.json``."""
_IN_ARGS = {
    "heads": ("num_attention_heads",),
    "groups": ("num_query_groups",),
    "head_dim": ("kv_channels",),
    "layers": ("num_layers",),
    "vocab": ("vocab_size",),
}
"""Names in the arguments of Megatron."""
_CHANGES_VALUES = {
    "rotary_interleaved": "rotates neighbouring elements of a head, while Hugging Face rotates its halves",
    "apply_layernorm_1p": "stores the weights of norms less 1",
}
"""Arguments of Megatron with which the values differ from those of Hugging Face, and how."""
_ARGUMENTS = {name for names in _IN_ARGS.values() for name in names} | {
    *_CHANGES_VALUES,
    "group_query_attention",
}
_ARGUMENT = re.compile(r"(?:.*[./])?args\.(\w+)")
"""Key of one argument."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Numbers of a model; None where unknown."""

    heads: int | None = None
    """Attention heads of a layer."""
    groups: int | None = None
    """Query groups of a layer: heads that keys and values have."""
    head_dim: int | None = None
    """Rows of the queries of one head."""
    layers: int | None = None
    vocab: int | None = None
    """Tokens: rows of the embedding without padding."""
    padded_vocab: int | None = None
    """Rows of the embedding with padding."""


def hyperparameters(
    given: Mapping[str, int], config_path: str | None, objects: Mapping[str, Any]
) -> Hyperparameters:
    """The numbers of a model: given ones, else from ``config.json``, else from the arguments of Megatron.

    Args:
        given: by the names of `Hyperparameters`; they take precedence.
        config_path: a ``config.json`` or its folder; None for the one of the checkpoint, if any.
        objects: values of the stored checkpoint by key, and its ``config.json`` under that name.
    """
    config = objects.get(CONFIG) if config_path is None else _read_config(config_path)
    args = _megatron_args(objects)
    for name, what in _CHANGES_VALUES.items():
        if args.get(name):
            raise StructureError(
                f"the model was trained with {name}, so Megatron {what}: no map of keys can convert it"
            )
    in_config, in_args = _numbers(_IN_CONFIG, config or {}), _numbers(_IN_ARGS, args)
    if "heads" in in_config:
        in_config.setdefault("groups", in_config["heads"])
    if not args.get("group_query_attention"):  # then num_query_groups has no meaning
        in_args.pop("groups", None)
        if "heads" in in_args and "group_query_attention" in args:
            in_args["groups"] = in_args["heads"]
    return Hyperparameters(**{**in_args, **in_config, **given})


def _numbers(names: Mapping[str, tuple[str, ...]], source: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for name, candidates in names.items():
        value = next((source[item] for item in candidates if item in source), None)
        if type(value) is int and value > 0:
            found[name] = value
    return found


def _read_config(path: str) -> dict[str, Any]:
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    try:
        with open(file, "rb") as opened:
            value = json.load(opened)
    except (OSError, ValueError, RecursionError) as error:
        raise StructureError(f"the key map cannot read the configuration {file}: {error}") from error
    if not isinstance(value, dict):
        raise StructureError(f"the configuration {file} is not a JSON object")
    return value


def _megatron_args(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron that a checkpoint has: in its common state, or as separate values."""
    args: dict[str, Any] = {}
    for key in objects:
        if key in ("common", "common.args"):
            value = _readable(objects, key)
            found = value.get("args") if key == "common" and isinstance(value, dict) else value
            args |= found if isinstance(found, dict) else {}
        elif (match := _ARGUMENT.fullmatch(key)) and match[1] in _ARGUMENTS:
            args[match[1]] = _readable(objects, key)
    return args


def _readable(objects: Mapping[str, Any], key: str) -> Any:
    """A value; None if it is not plain data."""
    try:
        return objects[key]
    except PlainDataError:
        return None

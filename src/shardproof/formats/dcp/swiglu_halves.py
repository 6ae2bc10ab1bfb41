"""Joins the halves of SwiGLU weights that Megatron-Core stores in ``fsdp_dtensor`` checkpoints.

Megatron-Core splits ``linear_fc1`` in two before it saves. The gate gets the suffix ``_w``, the up projection
the suffix ``_v``. It splits the moments of the optimizer in the same way. It stores all other slots, such as
the step and the master weight, whole under both names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from shardproof.engine.foreign import TensorDescription

_GATE = re.compile(
    r"(?P<name>(?:.*\.)?mlp\.(?:shared_experts\.|experts\.(?:local_experts\.[0-9]+\.)?)?linear_fc1\."
    r"(?:weight|bias)[0-9]*)_w(?P<slot>\.\w+)?"
)
"""Key of a gate, or of a slot of its optimizer state."""


def pairs_of_halves(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Finds the values that are stored under two keys.

    Returns:
        By the key without the suffix, the keys of gate and up projection. A pair is left out if one of the
        two is missing, or if the key without the suffix is stored too.

    Example:
        >>> pairs_of_halves(["mlp.linear_fc1.bias_w", "mlp.linear_fc1.bias_v"])
        {'mlp.linear_fc1.bias': ('mlp.linear_fc1.bias_w', 'mlp.linear_fc1.bias_v')}
        >>> pairs_of_halves(["mlp.linear_fc1.bias_w"])
        {}
    """
    known = set(keys)
    found = {}
    for key in sorted(key for key in known if "_w" in key):
        if match := _GATE.fullmatch(key):
            slot = match["slot"] or ""
            whole, up = f"{match['name']}{slot}", f"{match['name']}_v{slot}"
            if up in known and whole not in known:
                found[whole] = key, up
    return found


def join_halves(tensors: dict[str, TensorDescription], objects: dict[str, Any]) -> list[str]:
    """Replaces each pair of halves or copies by the whole tensor. Pairs that fit neither rule remain.

    Args:
        tensors: tensors by key; changed in place.
        objects: positions of the objects by key; changed in place.

    Returns:
        The removed keys.
    """
    gone: list[str] = []
    pairs = pairs_of_halves([*tensors, *objects])
    halves = {key: tensor.shape for key, tensor in tensors.items()} if pairs else {}
    for whole, pair in pairs.items():
        gate, up = pair
        if gate in tensors and up in tensors:
            half = halves.get(re.sub(r"(_w)\.\w+$", r"\1.exp_avg", gate))
            joined = _joined(tensors[gate], tensors[up], half)
            if joined is None:
                continue
            tensors[whole] = joined
        elif gate in objects and up in objects:
            objects[whole] = objects[gate]
        else:
            continue
        for key in pair:
            tensors.pop(key, None)
            objects.pop(key, None)
        gone += pair
    return gone


def _joined(
    gate: TensorDescription, up: TensorDescription, half: tuple[int, ...] | None
) -> TensorDescription | None:
    """The whole tensor of two halves or copies; None if they are neither. `half` is the shape of a half."""
    if (gate.dtype, gate.shape) != (up.dtype, up.shape):
        return None
    shape = gate.shape
    if prod(shape) == 1 and half != shape:
        return gate
    if not shape or half is None:
        return None
    if shape == (2 * half[0], *half[1:]):
        return gate
    if shape != half:
        return None
    rows = shape[0]
    boxes = [replace(box, offsets=(box.offsets[0] + rows, *box.offsets[1:])) for box in up.boxes]
    return TensorDescription(gate.dtype, (2 * rows, *shape[1:]), [*gate.boxes, *boxes])

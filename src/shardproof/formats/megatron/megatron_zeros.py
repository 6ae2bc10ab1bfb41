"""Rules that name lost ranges of Megatron's optimizers, whose formats give zeros for what a writer lost.

A zero is a value as any other. But a checkpoint has tensors that follow from each other, so that some zeros
contradict another tensor. The rules of this module hold for every state that training can reach:

- Main weights: a weight is its main weight, rounded. The rounded value of 0 is 0, in every dtype.
- Second moments of Adam: with the same gradients, ``exp_avg ** 2 <= c * exp_avg_sq``, by the Cauchy-Schwarz
  inequality, if ``beta1 ** 2 < beta2``. So where ``exp_avg_sq`` is 0, ``exp_avg`` is not larger than what an
  underflow of squares explains. The rule needs the betas, and moments that are trained in float32.

First moments have no such rule. They are 0 beside a second moment after some hundred steps without a
gradient, as in the rows of rare tokens. The same is true for weights without main weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.engine.foreign import TensorDescription, ZeroRule

_OPTIMIZER = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.)(fp32_param|param|exp_avg_sq)\.(.+)")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_TINY = 2.0**-126
"""Smallest normal number of float32. A step with underflow loses less of a square."""
_ROUNDING = 16.0
"""Factor for the rounding errors of both moments, in many steps. They are below 1 % of a moment."""


def rules_of_megatron(tensors: Mapping[str, TensorDescription], common: Any) -> list[ZeroRule]:
    """The rules for the distributed optimizer of Megatron-Core, by its keys.

    Args:
        tensors: of the checkpoint.
        common: the common state. The rule of second moments applies if it has the betas of all groups, and
            the arguments of the run say ``use_precision_aware_optimizer=False``.

    >>> tensors = {key: TensorDescription("float32", (4,), ()) for key in ("w", "optimizer.state.param.w")}
    >>> [(rule.key, rule.other) for rule in rules_of_megatron(tensors, None)]
    [('optimizer.state.param.w', 'w')]
    """
    rules = []
    bound = _bound(common) if isinstance(common, Mapping) else None
    for key, tensor in tensors.items():
        match = _OPTIMIZER.fullmatch(key)
        if match is None:
            continue
        is_main = match[2] != "exp_avg_sq"
        other = match[3] if is_main else f"{match[1]}exp_avg.{match[3]}"
        found = tensors.get(other)
        if found is None or found.shape != tensor.shape or not {tensor.dtype, found.dtype} <= {*_FLOATS}:
            continue
        if is_main:
            rules.append(ZeroRule(key, other, 0.0, "a weight is its main weight, rounded"))
        elif bound is not None and tensor.dtype == found.dtype == "float32":
            reason = f"Adam makes both of the same gradients, and 0 bounds exp_avg by {bound:.0e}"
            rules.append(ZeroRule(key, other, bound, reason))
    return rules


def _bound(common: Mapping[Any, Any]) -> float | None:
    """The largest `exp_avg` beside a second moment of 0; None if the common state does not say."""
    arguments = common.get("args")
    if not isinstance(arguments, Mapping) or arguments.get("use_precision_aware_optimizer") is not False:
        return None
    bounds = []
    for group in _groups(common.get("optimizer")):
        betas = group.get("betas")
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            return None
        if not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            return None
        first, second = betas
        if first**2 >= second:
            return None
        constant = (1 - first) ** 2 / ((1 - first**2 / second) * (1 - second))
        bounds.append(math.sqrt(_ROUNDING * constant * _TINY / (1 - second)))
    return max(bounds, default=None)


def _groups(state: Any) -> Iterator[Mapping[str, Any]]:
    """The parameter groups in the state of one optimizer or of several."""
    if not isinstance(state, Mapping):
        return
    for name, value in state.items():
        if name == "param_groups" and isinstance(value, list):
            yield from (group for group in value if isinstance(group, Mapping))
        else:
            yield from _groups(value)

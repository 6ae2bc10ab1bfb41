"""How far two results of the same computation are apart."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from shardproof.state import local_tensor

__all__ = ["Compare", "relative_difference", "reproduced"]

Compare = Callable[[Any, Any], float]
"""Of the first and the second result: their relative difference, 0.0 where they are equal."""

_ELEMENTS = 1 << 20
"""Of a large tensor, this many are widened at a time."""
_LEAST = math.ulp(0.0)
"""What unequal values differ by at least, even where the quotient is too small for a float."""


def relative_difference(first: Any, second: Any) -> float:
    """The difference of two values relative to the larger magnitude: ``|a - b| / max(|a|, |b|)``.

    ========================================== ==========================================================
    equal; NaN and NaN; 0.0 and -0.0           0.0
    finite numbers of the same sign            more than 0.0 and at most 1.0
    finite numbers of opposite signs           more than 1.0 and at most 2.0
    infinity and any other value; NaN and a    infinity
    number
    whole numbers                              exact, of any size: they are never equal by rounding
    complex numbers                            the larger one of the real and the imaginary parts'
    tensors and arrays                         the largest of their elements'; 0.0 without elements
    tensors unlike in shape or dtype; a tensor infinity
    and a number
    ========================================== ==========================================================

    Args:
        first: a number, a numpy array, or a tensor of any shape, dtype and device. Of a DTensor the part that
            this rank holds is compared: ranks may compare at different times.
        second: the same of another run.

    Raises:
        TypeError: values of other types; give ``compare`` for these.

    >>> relative_difference(2.0, 1.0), relative_difference(1.0, -1.0), relative_difference(math.nan, math.nan)
    (0.5, 2.0, 0.0)
    >>> relative_difference(math.inf, -math.inf), relative_difference(math.nan, 1.0)
    (inf, inf)
    >>> relative_difference(2**60, 2**60 + 1) > 0
    True
    >>> relative_difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    first, second = _comparable(first), _comparable(second)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _of_tensors(first, second)
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return math.inf
    return max(_of_reals(first.real, second.real), _of_reals(first.imag, second.imag))


def reproduced(first: Any, second: Any, *, compare: Compare | None = None, tolerance: float = 0.0) -> bool:
    """Whether a second run gave the result of the first.

    Args:
        first: of the first run.
        second: of the second run.
        compare: gives the relative difference, in place of `relative_difference`. Where it gives NaN, as most
            formulas do for values that are NaN, `relative_difference` decides.
        tolerance: the largest difference that counts as the same. With 0.0 the results have to be equal: bit
            for bit, but for the sign of zero and the payload of NaN.

    Raises:
        TypeError: values that cannot be compared, or `compare` answers with a bool or no number at all.

    >>> reproduced(math.nan, math.nan), reproduced(1.0, 1.001), reproduced(1.0, 1.001, tolerance=0.01)
    (True, False, True)
    >>> reproduced("a", "b", compare=lambda a, b: abs(ord(a) - ord(b)), tolerance=1)
    True
    """
    if compare is None:
        return relative_difference(first, second) <= tolerance
    difference = compare(first, second)
    if isinstance(difference, bool | np.bool_) or not isinstance(difference, numbers.Real):
        raise TypeError(
            f"compare answered {difference!r:.80}: it gives the relative difference of the two results as a "
            "number, 0.0 where they are equal"
        )
    if math.isnan(difference):
        return relative_difference(first, second) <= tolerance
    return float(difference) <= tolerance


def _comparable(value: Any) -> Any:
    """A number or a plain tensor."""
    if isinstance(value, torch.Tensor):
        return local_tensor(value.detach())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, numbers.Number):
        return value
    raise TypeError(
        f"a {type(value).__name__} cannot be compared between runs: give a number, a tensor or an array, or "
        "a function as compare= that gives the relative difference of two such values"
    )


def _of_reals(first: Any, second: Any) -> float:
    if first == second or (first != first and second != second):
        return 0.0
    if not all(isinstance(each, int) or math.isfinite(each) for each in (first, second)):
        return math.inf
    exact_first, exact_second = Fraction(first), Fraction(second)
    scale = max(abs(exact_first), abs(exact_second))
    return max(float(abs(exact_first - exact_second) / scale), _LEAST)


def _of_tensors(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    second = second.to(first.device)
    if first.is_complex():
        first, second = (torch.view_as_real(each.resolve_conj()) for each in (first, second))
    pairs = zip(
        torch.split(first.reshape(-1), _ELEMENTS), torch.split(second.reshape(-1), _ELEMENTS), strict=True
    )
    return max((_of_elements(*pair) for pair in pairs), default=0.0)


def _of_elements(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of flat tensors of one dtype.

    float64 holds every value of every dtype but large integers, which are therefore equal by their bits.
    """
    if first.numel() == 0:
        return 0.0
    a, b = first.double(), second.double()
    if first.dtype.is_floating_point:
        equal = (a == b) | (a.isnan() & b.isnan())
    else:
        equal = _bits(first) == _bits(second)
    scale = torch.maximum(a.abs(), b.abs())
    # Divided before it is subtracted: the difference itself can be too large for a float.
    difference = (a / scale - b / scale).abs().clamp(min=_LEAST)
    difference = torch.where(scale.isfinite(), difference, math.inf)
    return float(torch.where(equal, 0.0, difference).max())


def _bits(whole: torch.Tensor) -> torch.Tensor:
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return whole.view(signed[whole.element_size()])

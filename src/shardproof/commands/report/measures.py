"""Numbers of tensors, and measures of them, from their stored bits: with numpy, in memory bounded by a box.

The floats of 8 and 4 bits follow the OCP formats (Open Compute Project: OFP8, MX) and, with the suffix
"fnuz", the variant without infinities and negative zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.commands.report.stored_bits import Bits

_SAME = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_PAIRS = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_SMALL = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}
"""Bits of the exponent, bits of the mantissa, and the bias."""
_HALF_BYTES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of float4_e2m1fn."""
LOWEST, HIGHEST = -40, 40
"""Powers of two between which the histogram of magnitudes has a bin for each."""


def numbers(bits: Bits, dtype: str) -> NDArray[np.float64]:
    """Stored elements as float64. A complex number gives its two parts, a packed pair its two numbers.

    Integers beyond 2^53 are rounded.

    Args:
        bits: (n, itemsize) uint8.
        dtype: torch's name of the dtype.

    Returns:
        (n,) or (2 n,) float64.

    >>> numbers(np.array([[0x80, 0x3F], [0x80, 0xFF]], np.uint8), "bfloat16").tolist()
    [1.0, -inf]
    """
    raw = np.ascontiguousarray(bits).reshape(-1)
    if dtype in _SAME:
        return raw.view("?" if dtype == "bool" else f"<{np.dtype(dtype).str[1:]}").astype(np.float64)
    if dtype in _FLOATS or dtype in _PAIRS or dtype == "bfloat16":
        if dtype == "bfloat16":
            stored = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            stored = raw.view((_FLOATS | _PAIRS)[dtype])
        with np.errstate(invalid="ignore"):  # signalling NaN
            return stored.astype(np.float64)
    if dtype == "float4_e2m1fn_x2":
        return np.stack([_HALF_BYTES[raw & 15], _HALF_BYTES[raw >> 4]], axis=1).reshape(-1)
    found: NDArray[np.float64] = _values_of_bytes(dtype)[raw]
    return found


def _values_of_bytes(dtype: str) -> NDArray[np.float64]:
    """(256,) the value of each byte of an 8-bit float."""
    if dtype == "float8_e8m0fnu":
        return np.array([math.ldexp(1, byte - 127) for byte in range(255)] + [math.nan])
    exponent_bits, mantissa_bits, bias = _SMALL[dtype]
    bytes_ = np.arange(256)
    sign = np.where(bytes_ >> 7, -1.0, 1.0)
    exponent = (bytes_ >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = bytes_ & (2**mantissa_bits - 1)
    fraction = np.where(exponent == 0, 0, 1) + mantissa / 2**mantissa_bits
    values: NDArray[np.float64] = sign * np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if dtype.endswith("fnuz"):
        values[0x80] = math.nan
    elif dtype == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = math.nan
    else:  # as IEEE 754: the highest exponent is for infinities and NaN
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * math.inf, math.nan)
    return values


@dataclass(slots=True)
class Measure:
    """Measures of the numbers of a tensor. Those of no finite number are 0, or None for `low` and `high`."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    low: float | None = None
    """Smallest finite number."""
    high: float | None = None
    total: float = 0.0
    """Sum of the finite numbers."""
    squares: float = 0.0
    """Sum of their squares."""
    magnitudes: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(HIGHEST - LOWEST + 2, np.int64), repr=False
    )
    """Finite numbers by magnitude: in [2^k, 2^(k+1)) for k from `LOWEST` to `HIGHEST`, after those below.
    Zeros are in no bin. Larger numbers are in the last."""

    def add(self, values: NDArray[np.float64]) -> None:
        """Adds numbers of the tensor."""
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        self.count += len(values)
        self.nan += nan
        self.inf += len(values) - len(finite) - nan
        if not len(finite):
            return
        low, high = float(finite.min()), float(finite.max())
        self.low = low if self.low is None else min(low, self.low)
        self.high = high if self.high is None else max(high, self.high)
        with np.errstate(over="ignore"):
            self.total += float(finite.sum())
            self.squares += float(np.square(finite).sum())
        other = finite[finite != 0]
        self.zeros += len(finite) - len(other)
        _, exponents = np.frexp(other)  # 2^(e-1) <= |x| < 2^e
        bins = np.clip(exponents - 1 - LOWEST + 1, 0, len(self.magnitudes) - 1)
        self.magnitudes += np.bincount(bins, minlength=len(self.magnitudes))

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite numbers."""
        return math.sqrt(self.squares)

    @property
    def mean(self) -> float:
        """Mean of the finite numbers; 0 without one."""
        return self.total / max(self.count - self.nan - self.inf, 1)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values. `magnitudes` has the bins that are not empty, by power of two."""
        return {
            "count": self.count,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
            "min": self.low,
            "max": self.high,
            "mean": self.mean,
            "norm": self.norm,
            "magnitudes": {
                str(LOWEST - 1 + at): int(count) for at, count in enumerate(self.magnitudes) if count
            },
        }


@dataclass(slots=True)
class MeasuredDifference:
    """By how much the numbers of two tensors differ. NaN and infinities count apart."""

    largest: float = 0.0
    """Largest difference of two finite numbers."""
    squares: float = 0.0
    """Sum of the squares of the differences."""
    squares_a: float = 0.0
    """Sum of the squares of the first tensor's finite numbers."""
    nan: tuple[int, int] = (0, 0)
    """NaN in the first tensor, and in the second."""
    inf: tuple[int, int] = (0, 0)

    def add(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        """Adds numbers at the same places of both tensors."""
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        nans = [int(np.isnan(side).sum()) for side in (a, b)]
        infs = [int(np.isinf(side).sum()) for side in (a, b)]
        self.nan = self.nan[0] + nans[0], self.nan[1] + nans[1]
        self.inf = self.inf[0] + infs[0], self.inf[1] + infs[1]
        both = finite_a & finite_b
        with np.errstate(over="ignore"):
            difference = np.abs(a[both] - b[both])
            self.squares += float(np.square(difference).sum())
            self.squares_a += float(np.square(a[finite_a]).sum())
        self.largest = max(self.largest, float(difference.max(initial=0.0)))

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the first tensor; infinite if only the first norm is 0."""
        if self.squares_a == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.squares_a)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        relative = self.relative
        return {
            "largest": self.largest,
            "relative": relative if math.isfinite(relative) else None,
            "nan": list(self.nan),
            "inf": list(self.inf),
        }

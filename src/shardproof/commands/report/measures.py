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
MOST_NUMBERS = 8 << 20
"""Numbers of a box that is measured, at most: each takes up to 100 bytes for a while."""
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
class Norm:
    """A Euclidean norm of numbers of any size: the squares of a large or small number have no float64.

    >>> norm = Norm.of(np.array([3e200]))
    >>> norm.join(Norm.of(np.array([4e200])))
    >>> f"{norm.value:.6g}"
    '5e+200'
    """

    scale: float = 0.0
    """Largest magnitude."""
    squares: float = 0.0
    """Sum of the squares of the numbers over `scale`."""

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Norm:
        """The norm of finite numbers."""
        most = float(np.abs(values).max(initial=0.0))
        return cls(most, float(np.square(values / most).sum())) if most else cls()

    def join(self, other: Norm) -> None:
        """Adds the numbers of another norm."""
        most = max(self.scale, other.scale)
        if most:
            self.squares *= (self.scale / most) ** 2
            self.squares += other.squares * (other.scale / most) ** 2
            self.scale = most

    @property
    def value(self) -> float:
        """The norm; infinite beyond float64."""
        return self.scale * math.sqrt(self.squares)


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
    mean: float = 0.0
    """Mean of the finite numbers."""
    norm: Norm = field(default_factory=Norm)
    """Norm of the finite numbers."""
    magnitudes: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(HIGHEST - LOWEST + 2, np.int64), repr=False
    )
    """Finite numbers by magnitude: in [2^k, 2^(k+1)) for k from `LOWEST` to `HIGHEST`, after those below.
    Zeros are in no bin. Larger numbers are in the last."""

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Measure:
        """The measure of numbers."""
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        found = cls(len(values), nan, len(values) - len(finite) - nan)
        if not len(finite):
            return found
        found.low, found.high = float(finite.min()), float(finite.max())
        most = max(abs(found.low), abs(found.high)) or 1.0
        found.mean = float((finite / most).mean()) * most  # the sum may have no float64
        found.norm = Norm.of(finite)
        other = finite[finite != 0]
        found.zeros = len(finite) - len(other)
        _, exponents = np.frexp(other)  # 2^(e-1) <= |x| < 2^e
        bins = np.clip(exponents - LOWEST, 0, len(found.magnitudes) - 1)
        found.magnitudes += np.bincount(bins, minlength=len(found.magnitudes))
        return found

    @property
    def finite(self) -> int:
        """Finite numbers."""
        return self.count - self.nan - self.inf

    def join(self, other: Measure) -> None:
        """Adds the numbers of another measure. The order of joins determines how `mean` and `norm` round."""
        if other.finite:
            share = other.finite / (self.finite + other.finite)
            self.mean = self.mean * (1 - share) + other.mean * share
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self.low = min((low for low in (self.low, other.low) if low is not None), default=None)
        self.high = max((high for high in (self.high, other.high) if high is not None), default=None)
        self.norm.join(other.norm)
        self.magnitudes += other.magnitudes

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
            "norm": _json_number(self.norm.value),
            "magnitudes": {
                str(LOWEST - 1 + at): int(count) for at, count in enumerate(self.magnitudes) if count
            },
        }


@dataclass(slots=True)
class MeasuredDifference:
    """By how much the numbers of two tensors differ. NaN and infinities count apart."""

    largest: float = 0.0
    """Largest difference of two finite numbers."""
    difference: Norm = field(default_factory=Norm)
    """Norm of the differences of finite numbers."""
    first: Norm = field(default_factory=Norm)
    """Norm of the first tensor's finite numbers."""
    one_finite: int = 0
    """Places where only one of the two numbers is finite."""
    nan: tuple[int, int] = (0, 0)
    """NaN in the first tensor, and in the second."""
    inf: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, a: NDArray[np.float64], b: NDArray[np.float64]) -> MeasuredDifference:
        """The difference of numbers at the same places of both tensors."""
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        both = finite_a & finite_b
        with np.errstate(over="ignore"):
            difference = np.abs(a[both] - b[both])
        return cls(
            largest=float(difference.max(initial=0.0)),
            difference=Norm.of(np.minimum(difference, np.finfo(np.float64).max)),
            first=Norm.of(a[finite_a]),
            one_finite=int((finite_a != finite_b).sum()),
            nan=(int(np.isnan(a).sum()), int(np.isnan(b).sum())),
            inf=(int(np.isinf(a).sum()), int(np.isinf(b).sum())),
        )

    def join(self, other: MeasuredDifference) -> None:
        """Adds the numbers of another difference. The order of joins determines how the norms round."""
        self.largest = max(self.largest, other.largest)
        self.difference.join(other.difference)
        self.first.join(other.first)
        self.one_finite += other.one_finite
        self.nan = self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]
        self.inf = self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the first tensor; infinite if only the first norm is 0."""
        one, other = self.difference, self.first
        if not other.scale:
            return math.inf if one.scale else 0.0
        return one.scale / other.scale * math.sqrt(one.squares / other.squares)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "largest": _json_number(self.largest),
            "relative": _json_number(self.relative),
            "one_finite": self.one_finite,
            "nan": list(self.nan),
            "inf": list(self.inf),
        }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None

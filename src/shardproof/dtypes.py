"""The dtypes that a checkpoint can hold, by torch's names, without importing torch.

A shard file declares a dtype by its safetensors code, or by another code of the same bytes if there is none.
complex32 and complex128 are declared as pairs of floats, with one more dimension of 2. Packed pairs of 4-bit
floats are declared as U8, since F4 counts half bytes and would change the shape. The manifest has torch's
name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype: torch's name, bytes of an element, and the code that a safetensors entry declares."""

    name: str
    itemsize: int
    code: str
    parts: int = 1
    """Elements of `code` that one element takes (2 for complex numbers stored as pairs)."""

    @property
    def alignment(self) -> int:
        """Alignment of an entry's first byte that safetensors readers expect, bytes."""
        return self.itemsize // self.parts


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("uint16", 2, "U16"),
        DType("int16", 2, "I16"),
        DType("uint32", 4, "U32"),
        DType("int32", 4, "I32"),
        DType("uint64", 8, "U64"),
        DType("int64", 8, "I64"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float32", 4, "F32"),
        DType("float64", 8, "F64"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e8m0fnu", 1, "F8_E8M0"),
        DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
        DType("float4_e2m1fn_x2", 1, "U8"),
        DType("complex32", 4, "F16", 2),
        DType("complex64", 8, "C64"),
        DType("complex128", 16, "F64", 2),
    )
}

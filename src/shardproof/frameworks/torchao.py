"""torchao: low-bit optimizer state and quantised weights, whole or in shards.

Import the module before a save or load of such tensors:

>>> import shardproof.frameworks.torchao  # doctest: +SKIP

It declares the elements of a tensor to which each part of torchao's tensor subclasses belongs (see
`engine.state.subclasses`). It also registers the enums and dataclasses in their contexts. Checkpoints
store the parts unchanged, so nothing is rounded. Tested with torchao 0.18.0.
"""

from __future__ import annotations

import enum
import importlib
from typing import Any

import shardproof as sp

__all__: list[str] = []

_PARTS: dict[str, dict[str, str]] = {
    "torchao.optim.subclass_8bit.OptimState8bit": {"codes": "grid", "scale": "blocks", "qmap": "whole"},
    "torchao.optim.subclass_4bit.OptimState4bit": {"codes": "blocks", "scale": "blocks", "qmap": "whole"},
    "torchao.optim.subclass_fp8.OptimStateFp8": {"codes": "grid", "scale": "blocks"},
    # The scale is computed from the weight after each optimizer step.
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": {"_precomputed_scale": "derived"},
}
"""Kind of each part of each class."""

_TYPES = (
    *(
        f"torchao.quantization.granularity.{name}"
        for name in ("PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken")
    ),
    "torchao.quantization.quant_primitives.MappingType",
    "torchao.quantization.quant_primitives.ZeroPointDomain",
    "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
    "torchao.quantization.quantize_.common.packing_format.PackingFormat",
    "torchao.quantization.quantize_.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs",
    "torchao.quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
    "torchao.quantization.quantize_.workflows.intx.intx_packing_format.IntxPackingFormat",
)
"""Enums and dataclasses in the contexts of quantised weights."""


def _found(path: str) -> Any:
    """A class of torchao; None if this version does not have it."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name == "torchao":
            raise
        return None


def _declare() -> None:
    for path, parts in _PARTS.items():
        if (cls := _found(path)) is not None:
            cls.__shardproof_parts__ = parts
    for cls in filter(None, map(_found, _TYPES)):
        register = sp.register_enum if issubclass(cls, enum.Enum) else sp.register_dataclass
        register(cls, name=f"torchao.{cls.__qualname__}")


_declare()

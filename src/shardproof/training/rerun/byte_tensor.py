"""Packs nested plain data and tensors into one tensor of bytes, and unpacks it, without pickle.

The bytes are a valid safetensors file. Its metadata has one entry, ``plain``: the JSON of
`shardproof.state.encode_plain` for the plain data, the classes of microbatches, and the dtype, shape and
device type of each tensor.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from shardproof.dtypes import DTYPES
from shardproof.engine.state import as_bytes, decode_plain, encode_plain, hoisted_tensor
from shardproof.errors import PlainDataError
from shardproof.training.rerun.batch_classes import described, restored

_ALIGNED = 8


def pack(value: Any, path: str) -> torch.Tensor:
    """Pack a value into bytes.

    Args:
        value: plain data, microbatches (see `ReplayableIterator`), and tensors on any device.
        path: the name of the value, for error messages.

    Returns:
        1-D, uint8, on the CPU.

    Raises:
        PlainDataError: the value holds another type; the message gives its path.

    >>> packed = pack({"tokens": torch.arange(3), "rows": (1, None)}, "batch")
    >>> packed.dtype, unpack(packed)
    (torch.uint8, {'tokens': tensor([0, 1, 2]), 'rows': (1, None)})
    """
    value, classes = described(value, path)
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, list[Any]] = {}

    def take(where: str, kind: str, value: Any) -> str:
        name = str(len(specs))
        tensor = hoisted_tensor(kind, value)
        dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
        is_plain = tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "to_local")
        if not is_plain or dtype not in DTYPES:
            raise PlainDataError(
                f"{path}.{where}: a {type(tensor).__name__} ({tensor.layout}, {dtype}, {device}) cannot be "
                "saved for a rerun. Pass a plain tensor with its values",
                path=f"{path}.{where}",
            )
        tensors[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        specs[name] = [dtype, list(tensor.shape), device]
        return name

    plain = json.dumps(
        {
            "value": encode_plain(value, path, take),
            "tensors": specs,
            "classes": encode_plain(classes, path),
        }
    )
    header: dict[str, Any] = {"__metadata__": {"plain": plain}}
    end = 0
    # Gaps between tensors are not allowed, so the order by alignment aligns every tensor.
    names = sorted(tensors, key=lambda name: -DTYPES[specs[name][0]].alignment)
    for name in names:
        dtype, start = DTYPES[specs[name][0]], end
        end += tensors[name].nbytes
        shape = [*tensors[name].shape, *([dtype.parts] if dtype.parts > 1 else [])]
        header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    head = len(text).to_bytes(_ALIGNED, "little") + text
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [as_bytes(tensors[name]) for name in names]
    return torch.cat(parts)


def unpack(packed: torch.Tensor) -> Any:
    """Unpack the value. Each tensor is placed on the current device of its original device type."""
    packed = packed.cpu()
    begin = _ALIGNED + int.from_bytes(packed[:_ALIGNED].numpy().tobytes(), "little")
    header = json.loads(packed[_ALIGNED:begin].numpy().tobytes())
    content = json.loads(header["__metadata__"]["plain"])

    def give(name: str) -> torch.Tensor:
        dtype, shape, device = content["tensors"][name]
        if dtype not in DTYPES:
            raise PlainDataError(
                f"this version of shardproof has no dtype {dtype!r}: install the version that saved the step"
            )
        start, end = header[name]["data_offsets"]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        as_bytes(tensor).copy_(packed[begin + start : begin + end])
        return tensor.to(device)

    what = "the suspicious step"
    classes = decode_plain(content.get("classes", []), give, what)  # absent in version 0.1.0
    return restored(decode_plain(content["value"], give, what), classes)

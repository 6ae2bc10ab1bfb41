"""Tensors as pieces, and which tensors cannot be kept."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import StructureError
from shardproof.state.dtensor import LOCAL, is_dtensor, local_tensor

__all__ = [
    "PLAIN_TYPES",
    "are_strided",
    "array_dtype",
    "as_bytes",
    "check_destination",
    "dtype_name",
    "empty_like_layout",
    "is_in_host_memory",
    "local_of",
    "locals_of",
    "same_memory",
    "storage_of",
    "tensor_of_array",
    "torch_dtype",
]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The exact types that hold nothing but their elements. Buffers are plain tensors."""

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_LAYOUT = attrgetter("layout", "is_nested", "is_meta")
_IN_MEMORY = torch.strided, False, False


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """torch's name of a dtype that can be stored.

    >>> dtype_name(torch.bfloat16, "w")
    'bfloat16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise StructureError(f"{path}: tensors of dtype {dtype} cannot be stored. {_advice(dtype)}", key=path)
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name; StructureError where this torch does not have it."""
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise StructureError(f"torch {torch.__version__} has no dtype {name}: load with a newer torch")
    return dtype


def local_of(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The plain tensor that this rank holds of a plain tensor or DTensor.

    Raises:
        StructureError: it cannot be kept; the text names its path and what to do.
    """
    return locals_of([tensor], [path])[0]


def locals_of(tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> list[torch.Tensor]:
    """The plain tensors that this rank holds of plain tensors and DTensors; see `local_of`."""
    held = list(map(local_tensor, tensors))
    if not set(map(type, held)).issubset(PLAIN_TYPES) or not are_strided(held):
        for local, path in zip(held, paths, strict=True):
            _check(local, path)
    return held


def are_strided(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have their elements in strided memory."""
    return list(map(_LAYOUT, tensors)).count(_IN_MEMORY) == len(tensors)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor that can be stored, with its elements where the processor reads them.

    >>> is_in_host_memory(torch.ones(2)), is_in_host_memory(torch.ones(2, device="meta"))
    (True, False)
    """
    plain = type(tensor) in PLAIN_TYPES and tensor.dtype in _NAMES
    return plain and tensor.device.type == "cpu" and are_strided([tensor])


def _check(local: torch.Tensor, path: str) -> None:
    if type(local) not in PLAIN_TYPES:
        raise _refused_subclass(local, path)
    if not are_strided([local]):
        raise _without_memory(local, path)


def _without_memory(tensor: torch.Tensor, path: str) -> StructureError:
    """Why a tensor of an exact plain type is refused: it has no elements in strided memory."""
    if tensor.layout is not torch.strided:
        return StructureError(
            f"{path}: a tensor of layout {tensor.layout} cannot be stored. "
            "Store its parts (indices and values), or make it dense with to_dense()",
            key=path,
        )
    if tensor.is_meta:
        return StructureError(
            f"{path}: the tensor is on the meta device and has no values. "
            "Materialise it first, for example with module.to_empty(device=...)",
            key=path,
        )
    return StructureError(f"{path}: nested tensors cannot be stored. Store what they are made of", key=path)


def _refused_subclass(tensor: torch.Tensor, path: str) -> StructureError:
    kind = type(tensor)
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        return StructureError(
            f"{path}: the parameter of a lazy module has no shape yet. Run the module once before", key=path
        )
    return StructureError(
        f"{path}: {kind.__module__}.{kind.__qualname__} is a tensor subclass whose content is not known. "
        "Store the plain tensors that it is made of",
        key=path,
    )


def _advice(dtype: torch.dtype) -> str:
    if "q" in str(dtype).removeprefix("torch.")[:2]:
        return "Store what a quantised tensor is made of: int_repr(), q_scale() and q_zero_point()"
    return "Convert it to a dtype that safetensors can hold"


def check_destination(view: torch.Tensor, path: str) -> None:
    """Refuse memory in which two elements share a place: what it holds after a load would be chance."""
    if view.is_contiguous() or view.numel() < 2:
        return
    reach = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            raise StructureError(
                f"{path}: elements of this tensor share memory (shape {list(view.shape)}, strides "
                f"{list(view.stride())}), so it cannot be loaded into. Load into a clone()",
                key=path,
            )
        reach = stride * (size - 1) + reach


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as (nbytes,) uint8, in the tensor's own memory where they lie so.

    A dimension of one element may have any stride, at which `torch.Tensor.view` takes offence.

    >>> as_bytes(torch.arange(6, dtype=torch.int16).view(2, 3)[1:, 1])
    tensor([4, 0], dtype=torch.uint8)
    """
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage, which empty tensors have too."""
    return int(tensor.untyped_storage()._cdata)


def same_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors just when they are the same elements of the same storage."""
    return (
        storage_of(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def empty_like_layout(like: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A new tensor laid out as `like`, uninitialised, of another dtype.

    With a `shape` that is not `like`'s, a DTensor is replicated on the mesh of `like` and a plain tensor is
    contiguous on its device.
    """
    same = shape is None or shape == tuple(like.shape)
    if not is_dtensor(like):
        if same:
            return torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
        assert shape is not None
        return torch.empty(shape, dtype=dtype, device=like.device)
    from torch.distributed.tensor import DTensor, Replicate

    local = like._local_tensor.detach()
    if same:
        # The parts are given, so that nothing is agreed with other ranks.
        new = DTensor.from_local(
            torch.empty_like(local, dtype=dtype),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        if (embedding := getattr(like, LOCAL, None)) is not None:
            setattr(new, LOCAL, embedding)
        return new
    assert shape is not None
    whole = torch.empty(shape, dtype=dtype, device=local.device)
    return DTensor.from_local(
        whole,
        like.device_mesh,
        [Replicate()] * like.device_mesh.ndim,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def array_dtype(array: NDArray[Any]) -> str | None:
    """torch's name for the dtype of an array, None if a checkpoint cannot hold it."""
    name = array.dtype.name
    return name if name in DTYPES and array.dtype.isnative else None


def tensor_of_array(array: NDArray[Any]) -> tuple[torch.Tensor, bool]:
    """A tensor of the array's elements, and whether it shares the array's memory."""
    if array.flags.writeable and all(stride >= 0 for stride in array.strides):
        try:
            return torch.from_numpy(array), True
        except (ValueError, TypeError):  # strides that are no multiple of the element size
            pass
    return torch.from_numpy(np.array(array, order="C", copy=True)), False

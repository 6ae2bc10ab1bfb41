"""Properties of tensors for saves and loads, and errors for tensors that cannot be stored."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add, attrgetter, eq, le, mod, mul, ne, not_, or_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.state.dtensor import LIKE, LOCAL, is_dtensor, local_tensor
from shardproof.errors import StructureError

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""The exact types whose elements are their only content. Buffers are plain tensors."""

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_IS_NESTED = attrgetter("is_nested")
_STORAGE_BYTES = torch.UntypedStorage.nbytes
_BYTES = attrgetter("nbytes")
_ITEM_BYTES = attrgetter("itemsize")
_LARGEST_ITEM = 16
"""Bytes of a complex128."""

_OWNER = "_shardproof_storage_owner"


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """torch's name of a dtype that can be stored.

    >>> dtype_name(torch.bfloat16, "w")
    'bfloat16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        advice = "Convert it to a dtype that safetensors can hold"
        if "q" in str(dtype).removeprefix("torch.")[:2]:
            advice = "Store the components of a quantised tensor: int_repr(), q_scale() and q_zero_point()"
        raise StructureError(f"{path}: tensors of dtype {dtype} cannot be stored. {advice}", key=path)
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name. Raises StructureError if this torch does not have it."""
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise StructureError(f"torch {torch.__version__} has no dtype {name}: load with a newer torch")
    return dtype


def local_of(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The local tensor of a plain tensor or DTensor.

    Raises:
        StructureError: it cannot be stored, or some elements are not in memory. The message names its path
            and what to do.
    """
    (local,) = locals_of([tensor], [path])
    check_memory(local, path)
    return local


def locals_of(tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> list[torch.Tensor]:
    """The local tensors of plain tensors and DTensors; see `local_of`."""
    locals_ = list(map(local_tensor, tensors))
    if not are_plain(locals_):
        for local, path in zip(locals_, paths, strict=True):
            _check(local, path)
    return locals_


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """True if all tensors are of the exact plain types and are not nested."""
    return set(map(type, tensors)).issubset(PLAIN_TYPES) and not any(map(_IS_NESTED, tensors))


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """True for a plain tensor that can be stored and whose elements are in host memory.

    >>> is_in_host_memory(torch.ones(2)), is_in_host_memory(torch.ones(2, device="meta"))
    (True, False)
    """
    plain = type(tensor) in PLAIN_TYPES and tensor.dtype in _NAMES
    return plain and tensor.device.type == "cpu" and _is_strided(tensor) and _memory_fault(tensor) is None


def addresses_of(tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[list[int], list[bool]]:
    """The addresses of plain tensors.

    Saves and loads access these addresses without torch, so all elements must be in memory.

    Returns:
        The address of each tensor's first element on its device, 0 for a tensor without elements; and
        `torch.Tensor.is_contiguous` of each tensor.

    Raises:
        StructureError: some elements of a tensor are not in memory; see `check_memory`.

    >>> addresses_of([torch.ones(0)], ["w"])
    ([0], [True])
    """
    try:
        storage_bytes = map(_STORAGE_BYTES, map(torch.Tensor.untyped_storage, tensors))
        starts = list(map(torch.Tensor.storage_offset, tensors))
        if any(starts):
            starts = list(map(mul, starts, map(_ITEM_BYTES, tensors)))
        are_inside = list(map(le, map(add, starts, map(_BYTES, tensors)), storage_bytes))
        are_contiguous = list(map(torch.Tensor.is_contiguous, tensors))
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # a tensor has no storage
        for tensor, path in zip(tensors, paths, strict=True):
            check_memory(tensor, path)
        raise
    # The address of a tensor whose storage has no memory is its offset.
    are_sound = all(are_inside) and all(are_contiguous) and not any(map(eq, addresses, starts))
    if not are_sound or reduce(or_, addresses, 0) % _LARGEST_ITEM:
        tail = map(mod, addresses, map(_ITEM_BYTES, tensors))
        found = zip(are_inside, are_contiguous, map(ne, addresses, starts), map(not_, tail), strict=True)
        for tensor, path, is_sound in zip(tensors, paths, map(all, found), strict=True):
            if not is_sound:
                check_memory(tensor, path)
    return addresses, are_contiguous


def check_memory(tensor: torch.Tensor, path: str) -> None:
    """Raises unless all elements of a tensor are in the memory of its storage.

    Raises:
        StructureError: the tensor cannot be stored, its storage was freed or truncated, it has no memory, or
            its address is not a multiple of its element size.

    >>> weight = torch.ones(4)
    >>> _ = weight.untyped_storage().resize_(8)
    >>> check_memory(weight, "model.weight")
    Traceback (most recent call last):
      ...
    shardproof.errors.StructureError: model.weight: the tensor takes 16 bytes of a storage of 8. ...
    """
    _check(tensor, path)
    reason = _memory_fault(tensor)
    if reason is not None:
        raise StructureError(f"{path}: {reason}", key=path)


def _memory_fault(tensor: torch.Tensor) -> str | None:
    """Why some elements of a strided tensor are not in memory, and what to do; None if all are."""
    if not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()
        storage_bytes, address = storage.nbytes(), storage.data_ptr()
    except RuntimeError:  # torch raises for a placeholder of a storage
        return (
            "the tensor has no memory: torch.func (vmap, grad) or functionalisation wraps it, or it is a "
            "tensor of zeros without memory. Save and load outside such transformations, or give it memory "
            "with clone()"
        )
    needed = (int(tensor.storage_offset()) + _extent(tensor)) * tensor.element_size()
    if needed <= storage_bytes and address:
        size = tensor.element_size()
        if not address % size:
            return None
        return (
            f"the tensor begins {address % size} bytes after a multiple of its element size of {size}, and "
            "torch's operators may crash at such an address. Save and load a clone()"
        )
    return (
        f"the tensor takes {needed} bytes of a storage of {storage_bytes}. Code that frees memory of "
        "parameters (FSDP1, untyped_storage().resize_) must restore it first"
    )


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements of the storage from the first to the last one of a tensor that has elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def memory_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses of a plain tensor's first element and after its last; None if it has no memory.

    >>> begin, end = memory_range(torch.ones(3, 4).T)
    >>> end - begin, memory_range(torch.eye(3).to_sparse())
    (48, None)
    """
    is_plain = type(tensor) in PLAIN_TYPES and _is_strided(tensor) and tensor.numel() > 0
    if not is_plain or _memory_fault(tensor) is not None:
        return None
    begin = tensor.data_ptr()
    return begin, begin + _extent(tensor) * tensor.element_size()


def _check(local: torch.Tensor, path: str) -> None:
    if type(local) not in PLAIN_TYPES:
        raise _refused_subclass(local, path)
    if not _is_strided(local):
        raise _without_memory(local, path)


def _without_memory(tensor: torch.Tensor, path: str) -> StructureError:
    """The error for a plain tensor without elements in strided memory."""
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
    return StructureError(f"{path}: nested tensors cannot be stored. Store their components", key=path)


def _refused_subclass(tensor: torch.Tensor, path: str) -> StructureError:
    kind = type(tensor)
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        return StructureError(
            f"{path}: the parameter of a lazy module has no shape yet. Run the module once first", key=path
        )
    return StructureError(
        f"{path}: {kind.__module__}.{kind.__qualname__} is an unknown tensor subclass. "
        "Store its plain tensors",
        key=path,
    )


def check_destination(view: torch.Tensor, path: str) -> None:
    """Raises if two elements share an address, because the result of a load would be undefined."""
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
    """The elements in row-major order as (nbytes,) uint8, without a copy if the memory has that order.

    A dimension of one element may have any stride, for which `torch.Tensor.view` would raise.

    >>> as_bytes(torch.arange(6, dtype=torch.int16).view(2, 3)[1:, 1])
    tensor([4, 0], dtype=torch.uint8)
    """
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage. Empty tensors have one too."""
    return int(tensor.untyped_storage()._cdata)


def memory_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors if and only if they are the same elements of the same storage."""
    return (
        storage_of(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def dtensor_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor with this local tensor, and mesh, placements, shape and index map of the DTensor `like`."""
    if (make := getattr(like, LIKE, None)) is not None:
        made: torch.Tensor = make(local)
        return made
    new = _dtensor(local, like.device_mesh, like.placements, like)
    if (index_map := getattr(like, LOCAL, None)) is not None:
        setattr(new, LOCAL, index_map)
    return new


def _dtensor(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
    """A DTensor with the shape and the stride of `whole`, which avoids communication."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def empty_like_layout(like: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A new uninitialised tensor with the layout of `like` and another dtype.

    With a `shape` that is not `like`'s, a DTensor is replicated on the mesh of `like` and a plain tensor is
    contiguous on its device.
    """
    same = shape is None or shape == tuple(like.shape)
    if not is_dtensor(like):
        if same:
            return _plain_like(like.detach(), dtype)
        assert shape is not None
        return torch.empty(shape, dtype=dtype, device=like.device)
    from torch.distributed.tensor import Replicate

    local = like._local_tensor.detach()
    if same:
        return dtensor_like(_plain_like(local, dtype), like)
    assert shape is not None
    whole = torch.empty(shape, dtype=dtype, device=local.device)
    return _dtensor(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, whole)


def _plain_like(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new plain tensor with the shape, strides and device of a tensor, which may be of a subclass."""
    if type(local) in PLAIN_TYPES:
        return torch.empty_like(local, dtype=dtype, requires_grad=False)
    return torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)


def array_dtype(array: NDArray[Any]) -> str | None:
    """torch's name for the dtype of an array, None if a checkpoint cannot hold it."""
    name = array.dtype.name
    return name if name in DTYPES and array.dtype.isnative else None


def tensor_of_array(array: NDArray[Any]) -> tuple[torch.Tensor, bool]:
    """A tensor of the array's elements, and whether it shares the array's memory."""
    if array.flags.writeable and array.flags.aligned and all(stride >= 0 for stride in array.strides):
        try:
            return torch.from_numpy(array), True
        except (ValueError, TypeError):  # strides that are no multiple of the element size
            pass
    return torch.from_numpy(np.array(array, order="C", copy=True)), False


def declare_storage_owner(part: torch.Tensor, owner: torch.Tensor) -> None:
    """Declare that all writes to the storage of `part` go through `part`, `owner`, or a view of either.

    Args:
        part: the tensor that an optimizer steps: a parameter (possibly a DTensor), or a range of a buffer.
        owner: a tensor that covers the whole storage.

    >>> flat = torch.zeros(4)
    >>> parameter = torch.nn.Parameter(flat[:2])
    >>> declare_storage_owner(parameter, flat)
    >>> storage_owner(parameter) is flat
    True
    """
    setattr(part, _OWNER, owner)


def storage_owner(part: torch.Tensor) -> torch.Tensor | None:
    """The declared owner of the storage of `part`."""
    owner: torch.Tensor | None = getattr(part, _OWNER, None)
    return owner


def declare_fsdp2_owners(modules: Iterable[torch.nn.Module]) -> None:
    """Declare the padded buffers of torch's `fully_shard` (FSDP2).

    If the ranks do not divide a dimension evenly, FSDP2 puts the local tensor into a buffer with padding.
    torch has no public name for that buffer. If this torch has it under another name, the function declares
    nothing, and saves stage the parameter.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    for module in modules:
        if not isinstance(module, kind):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for item in getattr(group, "fsdp_params", ()):
                owner = getattr(item, "_sharded_param_data", None)
                if isinstance(owner, torch.Tensor):
                    declare_storage_owner(item.sharded_param, owner)

"""The DTensor of a parameter whose ranks have different numbers of rows.

Note: rows that torch would not compute
    torch derives the part of each rank from the placement `Shard(0)`: equal chunks, the last ones shorter.
    The ranks of a flat buffer have other rows, so torch's redistribution would send and expect wrong sizes.
    `RowSharded` runs each operation in one of these ways:

    1. Elementwise operations of tensors with the same rows run on the local tensors.
    2. The norm of a whole tensor is reduced from the norms of the parts.
    3. Other operations get gathered tensors, replicated over the ranks that share the rows, and torch's
       DTensor runs them. If an operation writes to an argument, each rank copies its rows of the result back.

    The way depends only on what all ranks know, so all ranks run the same collectives. A view other than a
    permutation of the dimensions is a `GatheredView`, which refuses writes, because they would be lost.

Note: placements that compute rows
    `torch.distributed.checkpoint` computes the part of a rank from `tensor.placements`, by its function
    `compute_local_shape_and_global_offset`. A function that names it gets placements that compute the rows.
    Other functions get `Shard(0)`, because they make tensors with torch's rows: `redistribute`, and torch's
    functions that make a tensor for a parameter on the meta device.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from shardproof.engine.geometry import Boxes, IndexMap
from shardproof.training.fsdp.row_layout import RowLayout, dtensor

aten = torch.ops.aten

_ELEMENTWISE = {
    *(aten.alias, aten.detach, aten.lift_fresh, aten._to_copy, aten.copy_, aten.zero_, aten.fill_),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.masked_fill, aten.masked_fill_),
}
"""Elementwise operations that torch does not tag as pointwise."""

_WITH_COLLECTIVE = {aten.equal}
"""Operations that torch tags as pointwise and whose result depends on all elements."""

_NORMS = {aten.linalg_vector_norm, aten.norm, aten._foreach_norm}

_OF_PARTS = {aten._amp_foreach_non_finite_check_and_unscale_}
"""Operations that torch's DTensor runs on any parts, and whose result it reduces."""

_OF_LISTS = ("_foreach_", "_fused_")

_REDUCTIONS_OF_LISTS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}

_PERMUTATIONS: dict[Any, Callable[..., list[int]]] = {
    aten.t: lambda n: [*range(n)][::-1],
    aten.transpose: lambda n, one, other: _swapped(n, one % n, other % n),
    aten.permute: lambda n, dims: [dim % n for dim in dims],
}


def _swapped(n: int, one: int, other: int) -> list[int]:
    dims = [*range(n)]
    dims[one], dims[other] = other, one
    return dims


def row_sharded(layout: RowLayout, local: torch.Tensor) -> RowSharded:
    """The tensor with these rows, of which this rank has the local tensor."""
    made: RowSharded = dtensor(RowSharded, local, layout.spec(local.dtype))
    made.row_layout = layout
    return made


class RowSharded(DTensor):
    """A DTensor of which each rank has the rows in its layout (see "rows that torch would not compute")."""

    row_layout: RowLayout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As `DTensor.placements` (see "placements that compute rows")."""
        names = sys._getframe(1).f_code.co_names
        if "compute_local_shape_and_global_offset" not in names or self.is_meta:
            return self._spec.placements
        if "from_local" in names and "to_local" not in names:
            return self._spec.placements
        return self.row_layout.placements_of_part

    @property
    def _shardproof_local(self) -> IndexMap:
        return self.row_layout.index_map

    def _shardproof_like(self, local: torch.Tensor) -> RowSharded:
        return row_sharded(self.row_layout, local)

    def _shardproof_rows_of(self, gradient: DTensor) -> RowSharded:
        return in_layout(self.row_layout, gradient)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RowSharded:
        spec, *others, requires_grad = flatten_spec
        meta = others[0] if others else spec.tensor_meta  # torch 2.6
        made = row_sharded(meta.layout, inner_tensors["_local_tensor"])
        made.requires_grad_(requires_grad)
        return made

    def _stable_hash_for_caching(self) -> str:
        layout = self.row_layout
        return f"{super()._stable_hash_for_caching()} {layout.bounds} {layout.index} {layout.dim}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                f"{func} changes the shape of a parameter of shardproof.fsdp, which is a part of a flat "
                "buffer. Change the shape of parameter.full_tensor()"
            )
        if packet in _PERMUTATIONS:
            tensor = args[0]
            dims = tuple(_PERMUTATIONS[packet](tensor.ndim, *args[1:]))
            made = row_sharded(tensor.row_layout.permuted(dims), func(tensor._local_tensor, *args[1:]))
            return return_and_correct_aliasing(func, args, {}, made)  # type: ignore[no-untyped-call]
        if packet in _NORMS and not _along_dimensions(func, args):
            return _norms(func, args, kwargs)
        if packet is aten.new_empty_strided and tuple(args[1]) == tuple(args[0].shape):
            # The same rows, for the gradient that autograd copies into its own memory.
            like, options = args[0], {name: value for name, value in kwargs.items() if value is not None}
            local = like._local_tensor.new_empty(like._local_tensor.shape, **options)
            return row_sharded(like.row_layout.contiguous, local)
        if packet in _OF_PARTS:
            return func(*tree_map(_plain_dtensor, args), **tree_map(_plain_dtensor, kwargs))
        is_of_lists = func.__name__.startswith(_OF_LISTS) and _is_tensor_list(args[0])
        if is_of_lists and func.__name__.split(".")[0] not in _REDUCTIONS_OF_LISTS:
            with suppress(_OtherRowsError):
                return _lists_elementwise(func, args, kwargs)
        elif packet in _ELEMENTWISE or (torch.Tag.pointwise in func.tags and packet not in _WITH_COLLECTIVE):
            with suppress(_OtherRowsError):
                return _elementwise(func, args, kwargs)
        return _with_gathered(func, args, kwargs)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """As `DTensor.redistribute`, from a gathered tensor. Its own placements return the tensor itself."""
        if placements is not None and tuple(placements) == tuple(self.placements) and not options:
            return self
        gathered: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        return gathered.redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As `DTensor.to_local`. A gradient has the rows of the tensor."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return super().to_local(grad_placements=grad_placements)
        local: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return local

    @property
    def data(self) -> torch.Tensor:
        """As `Tensor.data`. A value that is set is copied: the memory stays that of the flat buffer."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        try:
            rows = _local_of(value, self.row_layout)
        except _OtherRowsError:
            rows = None
        if rows is None or value.dtype != self.dtype or value.shape != self.shape:
            raise ValueError(
                f"the data of a parameter of shardproof.fsdp must be a DTensor of its mesh, with shape "
                f"{list(self.shape)} and dtype {self.dtype}, found a {type(value).__name__} of shape "
                f"{list(value.shape)} and dtype {value.dtype}. Use load_full_state_dict for plain tensors"
            )
        self._local_tensor.copy_(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            known: torch.Tensor = memo[id(self)]
            return known
        made: torch.Tensor = row_sharded(self.row_layout, self._local_tensor.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        layout, outer = self.row_layout, self.row_layout.outer
        columns = (outer.local.offsets.tolist(), outer.local.sizes.tolist(), outer.offsets.tolist())
        shapes = (outer.local_shape, outer.global_shape)
        known = (
            layout.mesh,
            layout.placements,
            layout.shape,
            layout.bounds,
            layout.mesh_dim,
            layout.index,
            layout.strides,
        )
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _loaded, (
            self._local_tensor,
            self.requires_grad,
            is_parameter,
            known,
            layout.dim,
            shapes,
            columns,
        )


def _loaded(
    local: torch.Tensor,
    requires_grad: bool,
    is_parameter: bool,
    known: tuple[Any, ...],
    dim: int,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    columns: tuple[list[list[int]], ...],
) -> torch.Tensor:
    """The tensor that `torch.load` reads."""
    starts, sizes, offsets = (np.array(one, np.int64).reshape(-1, len(shapes[0])) for one in columns)
    mesh, placements, shape, bounds, mesh_dim, index, strides = known
    outer = IndexMap(*shapes, Boxes(starts, sizes), offsets)
    layout = RowLayout(mesh, placements, shape, bounds, mesh_dim, index, outer, strides, dim)
    made = row_sharded(layout, local)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


class GatheredView(DTensor):
    """A view of a gathered copy of a `RowSharded`. An operation that writes to it raises.

    Other arguments may be a `RowSharded`: torch calls the class of the leftmost argument.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in _written(func, args, kwargs):
            if isinstance(value, GatheredView):
                raise RuntimeError(
                    f"{func} writes to a view, of shape {list(value.shape)}, of a parameter of "
                    "shardproof.fsdp. The view is a gathered copy, so the parameter would not change. Change "
                    "the whole value (parameter.full_tensor()), and load it with load_full_state_dict"
                )
        return _with_gathered(func, args, kwargs)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowSharded) -> DTensor:
        ctx.layout = tensor.row_layout
        return tensor.row_layout.gather(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return in_layout(ctx.layout, gradients[0])


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor, layout: RowLayout) -> RowSharded:
        ctx.layout = layout
        return row_sharded(layout.contiguous, layout.take(whole).contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Gather.apply(in_layout(ctx.layout, gradients[0])), None  # type: ignore[no-untyped-call]


def in_layout(layout: RowLayout, tensor: DTensor) -> RowSharded:
    """The tensor with these rows and contiguous local tensors. A collective, if its placements are others.

    A gradient that autograd computes for a sharded parameter may be gathered, or have the strides of a
    transposed tensor. Fused optimizers read the memory of parameters and gradients in one order, and norms
    count the gradient with the placements of the parameter.
    """
    if not isinstance(tensor, RowSharded):
        taken: RowSharded = _Take.apply(_plain_dtensor(tensor), layout)  # type: ignore[no-untyped-call]
        return taken
    if not layout.equals(tensor.row_layout):
        return in_layout(layout, _Gather.apply(tensor))  # type: ignore[no-untyped-call]
    if not tensor._local_tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)  # type: ignore[return-value]
    return tensor


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowSharded) -> torch.Tensor:
        ctx.layout = tensor.row_layout
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return row_sharded(ctx.layout.contiguous, gradients[0].contiguous())


def _plain_dtensor(value: Any) -> Any:
    """A DTensor of torch's class with the same local tensor and placements."""
    if isinstance(value, RowSharded | GatheredView):
        return dtensor(DTensor, value._local_tensor, value._spec)
    return value


def _part(value: Any, order: float) -> Any:
    """As `_plain_dtensor`. A rank without rows has one element that does not change the norm."""
    if isinstance(value, RowSharded) and not value._local_tensor.numel():
        neutral = value._local_tensor.new_full((1,) * value.ndim, float("inf") if order < 0 else 0.0)
        return dtensor(DTensor, neutral, value._spec)
    return _plain_dtensor(value)


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of whole tensors: those of the parts, reduced at once.

    torch's DTensor would leave the reduction to the next operation, and `item()` reads the norm of one part.
    """
    order = 2 if len(args) < 2 or args[1] is None else args[1]
    if isinstance(args[0], torch.Tensor):
        return _reduced([func(_part(args[0], order), *args[1:], **kwargs)])[0]
    found: dict[int, Any] = {}
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(args[0]):
        kind = (tensor.device_mesh, tensor.placements, tensor.dtype) if isinstance(tensor, DTensor) else None
        kinds.setdefault(kind, []).append(index)
    for kind, indices in kinds.items():
        norms = func([_part(args[0][index], order) for index in indices], *args[1:], **kwargs)
        found.update(zip(indices, norms if kind is None else _reduced(norms), strict=True))
    return [found[index] for index in range(len(args[0]))]


def _reduced(norms: list[DTensor]) -> list[torch.Tensor]:
    """Norms of parts, reduced by one collective for each dimension of the mesh."""
    joined: Any = torch.stack(norms)  # type: ignore[arg-type]
    everywhere = [Replicate()] * len(joined.placements)
    whole = joined.redistribute(placements=everywhere).to_local()  # torch 2.6 unbinds no DTensor
    return [DTensor.from_local(norm, joined.device_mesh, everywhere, run_check=False) for norm in whole]


def _along_dimensions(func: Any, args: tuple[Any, ...]) -> bool:
    """True if a norm is taken along some dimensions, so that it is no norm of the whole tensor."""
    names = [argument.name for argument in func._schema.arguments]
    return "dim" in names and len(args) > names.index("dim") and args[names.index("dim")] is not None


def _as_view(value: Any) -> Any:
    if type(value) is DTensor:
        return dtensor(GatheredView, value._local_tensor, value._spec)
    return value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else [value]


class _OtherRowsError(Exception):
    """An argument of an elementwise operation has other rows, so the operation needs gathered tensors."""


def _local_of(value: Any, layout: RowLayout) -> Any:
    """The rows of an argument of an elementwise operation."""
    if isinstance(value, RowSharded):
        if value.row_layout is layout or layout.equals(value.row_layout):
            return value._local_tensor
    elif not isinstance(value, torch.Tensor):
        return value
    elif not value.ndim:
        return value.full_tensor() if isinstance(value, DTensor) else value
    elif (
        isinstance(value, DTensor) and tuple(value.shape) == layout.shape and value.device_mesh == layout.mesh
    ):
        return layout.take(value)
    raise _OtherRowsError


def _check_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises if an operation writes to a DTensor of other rows, because `_local_of` would copy it."""
    for value in _written(func, args, kwargs):
        if isinstance(value, DTensor) and value.ndim and not isinstance(value, RowSharded):
            raise _OtherRowsError


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_written(func, args, kwargs)
    like = next(one for one in (*args, *kwargs.values()) if isinstance(one, RowSharded))
    layout = like.row_layout
    out = func(
        *[_local_of(value, layout) for value in args],
        **{name: _local_of(value, layout) for name, value in kwargs.items()},
    )
    if func._schema.is_mutable:
        return next(_written(func, args, kwargs))
    if kwargs.get("memory_format") is torch.contiguous_format:
        layout = layout.contiguous
    if not isinstance(out, torch.Tensor):
        return tree_map(lambda one: row_sharded(layout, one) if isinstance(one, torch.Tensor) else one, out)
    wrapped = row_sharded(layout, out)
    if func.is_view:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]
    return wrapped


def _lists_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    likes = list(lists[0])
    if not all(type(one) is RowSharded for one in likes):
        likes = [
            next((x for x in alike if type(x) is RowSharded), None) for alike in zip(*lists, strict=True)
        ]
    if not all(type(one) is RowSharded for value in lists for one in value):
        _check_written(func, args, kwargs)

    def local(value: Any) -> Any:
        if not _is_tensor_list(value):
            return value.full_tensor() if isinstance(value, DTensor) else value
        return [
            one if like is None else _local_of(one, like.row_layout)
            for one, like in zip(value, likes, strict=True)
        ]

    out = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if out is None:
        return None
    return [
        one if like is None else row_sharded(like.row_layout, one)
        for one, like in zip(out, likes, strict=True)
    ]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _with_gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on gathered tensors, and copies this rank's part of what it writes back."""
    written = [one for one in _written(func, args, kwargs) if isinstance(one, DTensor) and one.ndim]
    others = {id(one) for one in written}
    gathered: dict[int, tuple[DTensor, DTensor]] = {}

    def whole(value: Any) -> Any:
        if id(value) not in gathered:
            if isinstance(value, RowSharded):
                gathered[id(value)] = value, value.row_layout.gather(value._local_tensor)
            elif id(value) in others:
                gathered[id(value)] = (
                    value,
                    value.redistribute(placements=[Replicate()] * len(value.placements)),
                )
            else:
                return _plain_dtensor(value)
        return gathered[id(value)][1]

    values, named = tree_map(whole, args), tree_map(whole, kwargs)
    out = func(*values, **named)
    for tensor in written:
        result = gathered[id(tensor)][1]
        if isinstance(tensor, RowSharded):
            tensor._local_tensor.copy_(tensor.row_layout.take(result))
        else:
            tensor.copy_(result.redistribute(placements=tensor.placements))
    if func.is_view:
        return tree_map(_as_view, out)
    own = {id(made): tensor for tensor, made in gathered.values()}
    return tree_map(lambda one: own.get(id(one), one), out)


for _types in (_types_of_optimizers, _foreach_utils._foreach_supported_types):
    # As torch does for DTensor: so optimizers and `clip_grad_norm_` use operations of lists on accelerators.
    if RowSharded not in _types:
        _types.append(RowSharded)
torch.serialization.add_safe_globals([_loaded])

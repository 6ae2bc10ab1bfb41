"""A second opinion: the digest of every whole tensor, gathered by torch and not by shardproof.

The demo proves a restore by comparing what these digests were when a checkpoint was saved with what they are
after it was loaded, perhaps on another layout. Nothing of the checkpoint path takes part: the shards are put
together by torch's own collectives, which a demo may use and a checkpoint engine may not. Of an optimizer
that keeps its state in its own way, the tensors that it says it has are taken. They are joined here: rows in
the order of the ranks, ranges so that they cover each element once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardproof.state import LocalRange, SlotKeeper, as_bytes

__all__ = ["digest_of", "state_digests"]


def state_digests(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, tuple[str, int]]:
    """Name to (digest, bytes) of every parameter and every tensor of its optimizer state.

    All ranks call it together. A bit that differs changes the digest: this is equality of bits, under which
    0.0 and -0.0 are two values and nan equals itself.

    Args:
        model: its parameters, as any of the demo's shardings holds them.
        optimizer: over them.
        group: the data-parallel ranks; None on a single rank.
    """
    kept = list(_slots(optimizer))  # first: an optimizer that has parameters on their way waits for them here
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: digest_of(_whole(each, each, group)) for name, each in model.named_parameters()}
    for parameter, slots in kept:
        for slot, value in sorted(slots.items()):
            if isinstance(value, Tensor | LocalRange):
                found[f"{names[id(parameter)]} · {slot}"] = digest_of(_whole(value, parameter, group))
    return found


def digest_of(tensor: Tensor) -> tuple[str, int]:
    """xxh3_128 over dtype, shape and the bytes in row-major order; and the number of bytes.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2).neg())
    False
    """
    whole = tensor.detach()
    data = as_bytes(whole.cpu()).numpy()
    hasher = xxhash.xxh3_128(f"{whole.dtype} {tuple(whole.shape)}".encode())
    hasher.update(data.data)
    return hasher.hexdigest(), data.nbytes


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    if isinstance(optimizer, SlotKeeper):
        for described in optimizer.describe_slots():
            yield described.parameter, described.tensors
    else:
        yield from optimizer.state.items()


def _whole(value: Tensor | LocalRange, parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The whole tensor of what this rank holds of a parameter, or of one of its slots."""
    if isinstance(value, LocalRange):
        local = _joined_ranges(value, _local(parameter).shape, group)
    elif value.dim() == 0:
        return value
    else:
        local = _local(value)
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    if hasattr(parameter, "_shardproof_local"):  # rows of the flat sharding, as many as came to each rank
        local = torch.cat([rows.to(local.device) for rows in _of_all(local.cpu(), group)])
        if mesh.ndim == 1:
            return local
        mesh, placements = mesh["tensor"], placements[-1:]
    stride = torch.empty(parameter.shape, device="meta").stride()
    shards = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride
    )
    return shards.full_tensor()


def _local(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _joined_ranges(own: LocalRange, shape: torch.Size, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor of which each rank has a range of the row-major elements."""
    joined = own.buffer.new_empty(shape.numel())
    reached = 0
    for start, stop, elements in sorted(_of_all((own.start, own.stop, own.buffer.cpu()), group), key=_start):
        if start == stop:
            continue
        if start != reached:
            raise ValueError(f"the ranks' ranges leave or repeat elements between {reached} and {start}")
        joined[start:stop] = elements
        reached = stop
    if reached != shape.numel():
        raise ValueError(f"the ranks' ranges end at element {reached} of {shape.numel()}")
    return joined.view(shape)


def _start(part: tuple[int, int, Tensor]) -> tuple[int, int]:
    return part[:2]


def _of_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank of the group has, in the order of the ranks."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return list(values)

"""Clips gradients by their norm over parameters that are sharded in different ways."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardproof.engine.state import local_tensor
from shardproof.training.collectives import all_reduce


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    different_over: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales gradients so that their norm over all parameters and ranks is at most `max_norm`. A collective.

    Each element counts once. Shards (even, uneven or empty) are summed over the mesh dimensions that shard
    them; replicas are not. Parameters may be on different meshes.

    Args:
        parameters: a module or parameters, the same on all ranks, with or without gradients.
        max_norm: the largest norm that is allowed; infinity to compute the norm only.
        norm_type: p of the p-norm, or infinity.
        different_over: a group whose ranks have different parameters under one name, such as experts that are
            not DTensors of the expert parallel mesh. Pass only such parameters together with it.

    Returns:
        The norm before clipping, a float32 scalar on the gradients' device; the same on all ranks.

    Raises:
        ValueError: there are no parameters.
    """
    wanted = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    if not wanted:
        raise ValueError("clip_grad_norm_ needs at least one parameter")
    device = local_tensor(wanted[0]).device
    kinds: dict[tuple[int, ...], tuple[list[ProcessGroup], list[torch.Tensor]]] = {}
    gradients = []
    for parameter in wanted:
        groups: list[ProcessGroup] = []
        """Groups whose ranks hold different parts of the parameter."""
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            groups = [mesh.get_group(dim) for dim, one in enumerate(placements) if not one.is_replicate()]
        kind = kinds.setdefault(tuple(map(id, groups)), (groups, []))
        if parameter.grad is not None:
            gradients.append(local_tensor(parameter.grad))
            kind[1].append(gradients[-1])
    infinite = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    powers = []
    for groups, shards in kinds.values():
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in shards if g.numel()]
        power = torch.zeros((), dtype=torch.float32, device=device)
        if norms and infinite:
            power = torch.stack(norms).max()
        elif norms:
            power = torch.stack(norms).pow_(norm_type).sum()
        for group in [*groups, *([different_over] if different_over is not None else [])]:
            all_reduce(power, group, operation).wait()
        powers.append(power)
    total = torch.stack(powers).max() if infinite else torch.stack(powers).sum() ** (1.0 / norm_type)
    if gradients:
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, scale)
    return total

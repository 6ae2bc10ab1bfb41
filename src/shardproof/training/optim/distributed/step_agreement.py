"""The agreement of ranks before a step: parameters with gradients, gradient norm, finiteness.

Note: each element is counted once
    Each rank sums the elements that it owns. The ranges of a bucket are disjoint over its group, and
    different expert groups have different experts. So a sum over the data-parallel group counts each element
    once. A second sum over the ranks of the model group adds the other parts of the model. For a parameter
    that tensor parallelism replicates, only the first replica counts (`Weight.counted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardproof.training.optim.distributed.flat_bucket import FlatBucket, Weight
from shardproof.training.optim.distributed.process_group import RankGroups


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The result of an agreement. Equal on all ranks of a group."""

    stepped: list[Weight]
    """Parameters with a gradient on a rank of their group."""
    late: list[bool]
    """By bucket: True if a rank of its group has gradients that were not sent."""
    any_late: bool
    """True if a rank of any group has gradients that were not sent."""
    norm: float
    """2-norm of all gradients; NaN if it was not requested."""
    finite: bool
    """True if all gradients are finite, or the check was not requested."""


def agree(
    buckets: Sequence[FlatBucket],
    weights: Sequence[Weight],
    late: Sequence[bool],
    groups: RankGroups,
    *,
    norm: bool,
    finite: bool,
) -> StepAgreement:
    """Agree by one small sum over each group. All ranks must pass the same `norm` and `finite`."""
    flags = np.array([*(weight.seen for weight in weights), *late], np.float32)
    owners = [*(weight.bucket for weight in weights), *buckets]
    is_dense = np.array([bucket.ranks is groups.data for bucket in owners])
    device = buckets[0].device
    if not is_dense.all():
        of_experts = torch.from_numpy(flags[~is_dense]).to(device)
        groups.expert.sum(of_experts)
        flags[~is_dense] = of_experts.cpu().numpy()
    dense = torch.from_numpy(np.append(flags[is_dense], flags[len(weights) :].sum())).to(device)
    squares = _squares(buckets) if norm else dense.new_zeros(())
    not_finite = _not_finite(buckets) if finite else dense.new_zeros(())
    vector = torch.cat([dense, torch.stack([squares, not_finite])])
    groups.data.sum(vector)
    if groups.model is not None:
        totals = vector[-3:].clone()
        groups.model.sum(totals)
        vector[-3:] = totals
    *summed, any_late, total, not_finite_count = vector.tolist()
    flags[is_dense] = summed
    return StepAgreement(
        stepped=[weight for weight, flag in zip(weights, flags, strict=False) if flag],
        late=[bool(flag) for flag in flags[len(weights) :]],
        any_late=any_late > 0.0,
        norm=total**0.5 if norm else float("nan"),
        finite=not_finite_count == 0.0,
    )


def count_zeros(weights: Sequence[Weight], groups: RankGroups, device: torch.device) -> int:
    """Number of zero elements in the gradients of the parameters, over all ranks."""
    counts = [
        weight.owned_gradient.numel() - torch.count_nonzero(weight.owned_gradient)
        for weight in weights
        if weight.counted
    ]
    total = torch.stack(counts).sum().view(1) if counts else torch.zeros(1, dtype=torch.int64, device=device)
    groups.data.sum(total)
    if groups.model is not None:
        groups.model.sum(total)
    return int(total.item())


def _squares(buckets: Sequence[FlatBucket]) -> torch.Tensor:
    """Sum of the squares of the gradients that this rank counts, a 0-D fp32 tensor."""
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)).float()
        * bucket.scale
        for bucket in buckets
        for part in bucket.counted()
    ]
    return (
        torch.stack(norms).square().sum()
        if norms
        else torch.zeros((), dtype=torch.float32, device=buckets[0].device)
    )


def _not_finite(buckets: Sequence[FlatBucket]) -> torch.Tensor:
    """Number of this rank's ranges with an element that is not finite, a 0-D fp32 tensor."""
    largest = [
        torch.linalg.vector_norm(bucket.shard, float("inf")).float()
        for bucket in buckets
        if bucket.shard.numel()
    ]
    if not largest:
        return torch.zeros((), dtype=torch.float32, device=buckets[0].device)
    return torch.isfinite(torch.stack(largest)).logical_not().sum().float()

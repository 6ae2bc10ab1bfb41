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

import torch

from shardproof.optim.distributed.flat_bucket import FlatBucket, Weight
from shardproof.optim.distributed.process_group import RankGroup, RankGroups

__all__ = ["StepAgreement", "agree", "count_zeros"]


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
    seen = [float(weight.seen) for weight in weights]
    waiting = [float(item) for item in late]
    dense_weights = [row for row, weight in enumerate(weights) if weight.bucket.ranks is groups.data]
    dense_buckets = [row for row, bucket in enumerate(buckets) if bucket.ranks is groups.data]
    expert_weights = [row for row, weight in enumerate(weights) if weight.bucket.ranks is not groups.data]
    expert_buckets = [row for row, bucket in enumerate(buckets) if bucket.ranks is not groups.data]
    device = buckets[0].device
    if expert_buckets:
        _sum_flags(groups.expert, device, (seen, expert_weights), (waiting, expert_buckets))
    squares = _squares(buckets) if norm else torch.zeros((), dtype=torch.float32, device=device)
    not_finite = _not_finite(buckets) if finite else torch.zeros((), dtype=torch.float32, device=device)
    flags = [seen[row] for row in dense_weights] + [waiting[row] for row in dense_buckets] + [sum(waiting)]
    vector = torch.cat(
        [torch.tensor(flags, dtype=torch.float32, device=device), torch.stack([squares, not_finite])]
    )
    groups.data.sum(vector)
    if groups.model is not None:
        totals = vector[-3:].clone()
        groups.model.sum(totals)
        vector[-3:] = totals
    *flags, any_late, total, not_finite_count = vector.tolist()
    for row, flag in zip(dense_weights, flags, strict=False):
        seen[row] = flag
    for row, flag in zip(dense_buckets, flags[len(dense_weights) :], strict=True):
        waiting[row] = flag
    return StepAgreement(
        stepped=[weight for weight, flag in zip(weights, seen, strict=True) if flag],
        late=[flag > 0.0 for flag in waiting],
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


def _sum_flags(ranks: RankGroup, device: torch.device, *chosen: tuple[list[float], list[int]]) -> None:
    """Replace the chosen rows of the lists by their sums over the ranks."""
    vector = torch.tensor(
        [flags[row] for flags, rows in chosen for row in rows], dtype=torch.float32, device=device
    )
    ranks.sum(vector)
    summed = iter(vector.tolist())
    for flags, rows in chosen:
        for row in rows:
            flags[row] = next(summed)


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

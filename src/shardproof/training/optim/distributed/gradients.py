"""Copies gradients into flat buffers, reduces each full bucket, and makes ranks agree before a step.

Note: one order of reductions
    All ranks must begin the same collectives in the same order. The order in which gradients become ready may
    differ between ranks, and some gradients never do. So backward sends bucket k only after buckets 0 to k-1,
    each at most once between two calls of `zero_grad`. The end of backward sends the remaining buckets in
    order, before any later collective of the program. The time within backward at which a bucket is sent may
    differ between ranks. A gradient that comes after its bucket was sent stays in the full buffer. The ranks
    then agree which buckets have such gradients, and `reduce_late` sends these buckets again on all ranks.

Note: the end of backward
    The first gradient of a pass queues a callback of autograd for the end of the pass. Reentrant activation
    checkpointing runs inner passes within the outer pass. The first gradient may come in an inner pass, which
    ends earlier than the outer pass. But each inner pass follows a recomputed forward in the outer pass, so a
    forward during backward queues the callback too.

Note: no write to a full buffer during its reduction
    The reduction reads the buffer. `FlatBucket.full` is None from the launch on, so a late gradient gets
    another buffer. With one permanent buffer for each bucket, a late gradient first waits for the reduction.

Note: one stream
    Gradient copies, launches and waits run on the stream of backward. A collective begins after the earlier
    work of that stream. `wait` blocks the later work of the stream, not the host. So the reuse of a buffer
    after `wait` needs no event.

Note: each element is counted once
    Each rank sums the elements that it owns. The ranges of a bucket are disjoint over its group, and
    different expert groups have different experts. So a sum over the data-parallel group counts each element
    once. A second sum over the ranks of the model group adds the other parts of the model. For a parameter
    that tensor parallelism replicates, only the first replica counts (`Weight.counted`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardproof.training.optim.distributed.flat_bucket import FlatBucket, RankGroups, Weight
from shardproof.training.optim.distributed.loss_scale import LossScale
from shardproof.training.optim.parameter_values import gradient_of, local_gradient

_IN_FLIGHT = 2
"""Concurrent reductions if full buffers are reused: one bucket is reduced while the next fills."""


def _clear_gradient(weight: Weight) -> None:
    """Set the gradients of the parameter to None."""
    weight.parameter.grad = None
    if getattr(weight.parameter, "decoupled_grad", None) is not None:
        weight.parameter.decoupled_grad = None  # type: ignore[attr-defined]


def _take_gradient(weight: Weight) -> torch.Tensor:
    """Remove the gradient from the parameter, and return its local tensor in the parameter's layout."""
    gradient = gradient_of(weight.parameter)
    assert gradient is not None
    _clear_gradient(weight)
    if gradient.is_sparse:
        raise ValueError(
            f"{weight.name} has a sparse gradient, but flat buffers need dense ones. Use sparse=False in its "
            "embedding, or omit it from param_groups"
        )
    return local_gradient(gradient, weight.parameter, weight.name)


class Gradients:
    """Accumulates the gradients of parameters, and computes this rank's range of their mean.

    Args:
        buckets: buckets in the order in which they are sent.
        divisor: divisor of the sums over ranks.
        loss_scale: loss scale by which gradients are divided when their reduction completes.
        reuse: True if buckets share full buffers (ZeRO-2), False if each bucket has its own (ZeRO-1).
        overlap: True to send during backward, False to send in `finish`.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        divisor: int,
        loss_scale: LossScale,
        *,
        reuse: bool,
        overlap: bool,
    ) -> None:
        self.buckets, self.divisor, self.loss_scale = buckets, divisor, loss_scale
        self.weights = [weight for bucket in buckets for weight in bucket.weights]
        self.reuse, self.overlap = reuse, overlap
        self.synchronized = True
        """False within `no_sync`."""
        self._touched = False
        """True if a hook has added a gradient since `finish`."""
        self._next = 0
        """Index of the next bucket to send."""
        self._begun = False
        """True if a reduction may have begun on a rank."""
        self._end_queued = False
        """True if autograd has a callback for the end of this backward pass."""
        self._in_flight: deque[FlatBucket] = deque()
        self._free: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        """Unused full buffers, the smallest first."""
        self._own_buffers: dict[FlatBucket, torch.Tensor] = {}

    def attach_hooks(self) -> None:
        """Add every gradient as soon as autograd has accumulated it, while this object exists."""
        alive = weakref.ref(self)

        def hook_of(weight: Weight) -> None:
            def on_gradient(_: torch.Tensor) -> None:
                gradients = alive()
                if gradients is not None:
                    gradients.add_from_hook(weight)

            weight.parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

        for weight in self.weights:
            hook_of(weight)

    @torch.no_grad()
    def add_from_hook(self, weight: Weight) -> None:
        """Add a gradient that is complete in this backward pass, and send the buckets that are full."""
        self._touched = True
        self._add(weight)
        if weight.owners and not any(owner.called for owner in weight.owners):
            weight.bucket.eager = True
        if self.synchronized and self.overlap:
            self._begun = weight.ready = True
            self.queue_end()
            while self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                if any(weight.expected and not weight.ready for weight in bucket.weights):
                    break
                self._launch(bucket)
                self._next += 1

    def begin_forward(self) -> None:
        """Queue the end of the backward pass that recomputes a forward. See "the end of backward"."""
        if torch._C._current_graph_task_id() != -1:
            self.queue_end()

    def queue_end(self) -> None:
        """Send the remaining buckets when the current backward pass ends. See "the end of backward"."""
        if self.synchronized and self.overlap and not self._end_queued:
            self._end_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        self._end_queued = False
        if self._begun:
            self._launch_rest()

    @property
    def touched(self) -> bool:
        """True if a parameter got a gradient since `finish`, from autograd or from the program."""
        return self._touched or any(gradient_of(weight.parameter) is not None for weight in self.weights)

    def finish(self) -> None:
        """Add the remaining gradients, send the remaining buckets, and wait for all reductions."""
        for weight in self.weights:
            if gradient_of(weight.parameter) is not None:
                self._add(weight)
        self._launch_rest()
        self._complete_all()
        self._end_queued = self._begun = self._touched = False

    def expect(self, stepped: Iterable[Weight]) -> None:
        """Set the parameters for whose gradients buckets wait in the next backward pass."""
        expected = set(stepped)
        for weight in self.weights:
            weight.expected = weight in expected

    def late(self) -> list[bool]:
        """By bucket: True if this rank has gradients that came after the bucket was sent."""
        return [any(weight.written for weight in bucket.weights) for bucket in self.buckets]

    def reduce_late(self, late: Iterable[bool]) -> None:
        """Send the late buckets again. All ranks must pass the same flags."""
        for bucket, again in zip(self.buckets, late, strict=True):
            if again:
                self._launch(bucket)
        self._complete_all()

    def clear(self) -> None:
        """Clear all gradients. If a backward pass has begun to send buckets, send the others first."""
        if self._begun:
            self.finish()
        for bucket in self.buckets:
            bucket.reduced = False
            bucket.scale = 1.0
            if bucket.full is not None:
                self._release(bucket, bucket.full)
                bucket.full = None
        for weight in self.weights:
            weight.seen = weight.written = weight.ready = False
            _clear_gradient(weight)
        self._next = 0
        self._end_queued = False

    def _add(self, weight: Weight) -> None:
        bucket, gradient = weight.bucket, _take_gradient(weight)
        if bucket.full is None:
            bucket.full = self._take_buffer(bucket)
        size = gradient.numel()
        view = bucket.full[weight.offset : weight.offset + size].view(gradient.shape)
        if weight.written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        weight.seen = weight.written = True

    def _launch_rest(self) -> None:
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: FlatBucket) -> None:
        while self.reuse and len(self._in_flight) >= _IN_FLIGHT:
            self._complete(self._in_flight.popleft())
        buffer = bucket.full if bucket.full is not None else self._take_buffer(bucket)
        bucket.full = None
        full = buffer[: bucket.geometry.size]
        for weight in bucket.weights:
            if not weight.written:
                full[weight.offset : weight.offset + weight.data.numel()].zero_()
            weight.written = False
        for start, stop in bucket.geometry.gaps():
            full[start:stop].zero_()
        if bucket.gradient_dtype == torch.float16:
            full.mul_(1.0 / self.divisor)  # before the sum, which may overflow
        shard = torch.empty_like(bucket.shard) if bucket.reduced else bucket.shard
        bucket.reduction = (bucket.ranks.scatter_sum(shard, full), buffer, shard)
        self._in_flight.append(bucket)

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def _complete(self, bucket: FlatBucket) -> None:
        assert bucket.reduction is not None
        work, buffer, shard = bucket.reduction
        if work is not None:
            work.wait()
        bucket.reduction = None
        self._release(bucket, buffer)
        divisor = 1 if bucket.gradient_dtype == torch.float16 else self.divisor
        factor = 1.0 / (divisor * self.loss_scale.value)
        if bucket.reduced:
            ratio = factor / bucket.scale
            bucket.shard.add_(shard if ratio == 1.0 else shard.mul_(ratio))
            return
        bucket.reduced, bucket.scale = True, 1.0
        bucket.multiply(factor)

    def _take_buffer(self, bucket: FlatBucket) -> torch.Tensor:
        """Uninitialised memory for the bucket's gradients, of its size or larger."""
        kind = (bucket.device, bucket.gradient_dtype)
        if self.reuse:
            free, size = self._free.setdefault(kind, []), bucket.geometry.size
            at = bisect_left(free, size, key=torch.Tensor.numel)
            if at < len(free):
                return free.pop(at)
            if free:
                del free[0]  # replaced by a larger one
            return torch.empty(size, dtype=kind[1], device=kind[0])
        if bucket.reduction is not None:
            self._in_flight.remove(bucket)
            self._complete(bucket)
        if bucket not in self._own_buffers:
            self._own_buffers[bucket] = torch.empty(bucket.geometry.size, dtype=kind[1], device=kind[0])
        return self._own_buffers[bucket]

    def _release(self, bucket: FlatBucket, buffer: torch.Tensor) -> None:
        if self.reuse:
            free = self._free.setdefault((bucket.device, bucket.gradient_dtype), [])
            insort(free, buffer, key=torch.Tensor.numel)


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

"""Gradients into flat buffers, and each bucket's reduce-scatter as soon as it is full.

Note: one order of reductions
    All ranks must begin the same collectives in the same order. Gradients become ready in an order that may
    differ between ranks, and some never do. So bucket k is sent during backward only when buckets 0 to k-1
    have been, each at most once between two calls of `zero_grad`; what is left is sent, in order, when
    backward ends, whatever it holds: before any collective of the program's that follows. When in backward a
    bucket is sent (whose gradients are expected, which are ready) may differ between ranks. Gradients that
    come after their bucket was sent stay in the full buffer until all ranks have been asked whether any has
    such; then `reduce_late` sends that bucket again on all.

Note: the end of backward
    The first gradient of a pass has autograd call back when the pass ends. A checkpoint (the reentrant kind)
    runs passes of its own within the outer one, and its first gradient may come in one of these, which ends
    long before. But each runs the forward of a module again in the outer pass first: that is taken as its
    beginning too.

Note: who may write the full buffer
    A reduction under way reads it. `FlatBucket.full` is None from the launch on, so that a late gradient
    takes a buffer of its own; where the bucket keeps one buffer for good, it waits for the reduction first.

Note: one stream
    Gradients are written, buckets sent and reductions waited for on the stream that backward runs on. A
    collective begins after what that stream has been given so far, and `wait` holds back what it is given
    next, not the host: so a buffer that is used again after `wait` needs no event of its own.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardproof.optim.distributed.flat_bucket import FlatBucket, Weight
from shardproof.optim.distributed.loss_scale import LossScale
from shardproof.optim.parameter_values import gradient_of, local_gradient

__all__ = ["Gradients", "forget", "taken", "waiting"]


def waiting(weight: Weight) -> bool:
    """Whether the parameter has a gradient."""
    return gradient_of(weight.parameter) is not None


def forget(weight: Weight) -> None:
    """It has none any more."""
    weight.parameter.grad = None
    if getattr(weight.parameter, "decoupled_grad", None) is not None:
        weight.parameter.decoupled_grad = None  # type: ignore[attr-defined]


def taken(weight: Weight) -> torch.Tensor:
    """What this rank holds of the gradient, laid out as its parameter, which has none any more.

    Raises:
        ValueError: it has no place in a flat buffer.
    """
    gradient = gradient_of(weight.parameter)
    assert gradient is not None
    forget(weight)
    if gradient.is_sparse:
        raise ValueError(
            f"{weight.name} has a sparse gradient, which has no place in a flat buffer. Use sparse=False in "
            "its embedding, or leave it out of param_groups"
        )
    return local_gradient(gradient, weight.parameter, weight.name)


_IN_FLIGHT = 2
"""Reductions under way at once where full buffers are reused: one is sent while the next fills."""


class Gradients:
    """Takes gradients from parameters, adds them up, and has this rank's range of their mean.

    Args:
        buckets: in the order in which they are sent.
        divisor: what sums over ranks are divided by.
        loss_scale: what they are divided by as well, as it is when they land: before `step` changes it.
        reuse: full buffers are shared by buckets (ZeRO-2) instead of kept by each (ZeRO-1).
        overlap: send during backward, not only in `finish`.
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
        self.reuse, self.overlap = reuse, overlap
        self.synchronized = True
        """False within `no_sync`."""
        self._touched = False
        """Hooks have taken a gradient since `finish`."""
        self._next = 0
        """The bucket to be sent next."""
        self._begun = False
        """A reduction may have begun on some rank."""
        self._awaited = False
        """Autograd will say when this backward pass ends."""
        self._flying: deque[FlatBucket] = deque()
        self._free: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        """Full buffers that nobody uses, the smallest first."""
        self._kept: dict[FlatBucket, torch.Tensor] = {}

    def attach_hooks(self, module: torch.nn.Module) -> None:
        """Take every gradient as soon as autograd has added it up. Ends with the life of this object."""
        alive = weakref.ref(self)

        def before_forward(*_: Any) -> None:
            gradients = alive()
            if gradients is not None and torch._C._current_graph_task_id() != -1:
                gradients.await_end()

        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(before_forward)

        def hook_of(weight: Weight) -> None:
            def take(_: torch.Tensor) -> None:
                gradients = alive()
                if gradients is not None:
                    gradients.take(weight)

            frozen = not weight.parameter.requires_grad
            weight.parameter.requires_grad_(True)  # a frozen one takes no hook, and may be thawed
            weight.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            weight.parameter.requires_grad_(not frozen)

        for bucket in self.buckets:
            for weight in bucket.weights:
                hook_of(weight)

    @torch.no_grad()
    def take(self, weight: Weight) -> None:
        """The parameter's gradient is complete, as far as this backward pass goes."""
        self._touched = True
        self._add(weight)
        if weight.owners and not any(owner.called for owner in weight.owners):
            weight.bucket.eager = True
        if self.synchronized and self.overlap:
            self._begun = weight.ready = True
            self.await_end()
            self._advance()

    def await_end(self) -> None:
        """To be called in backward: what is left will be sent when it ends. See "The end of backward"."""
        if self.synchronized and self.overlap and not self._awaited:
            self._awaited = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        self._awaited = False
        if self._begun:
            self._launch_rest()

    @property
    def touched(self) -> bool:
        """A gradient has come since `finish`, from autograd or by hand."""
        return self._touched or any(waiting(weight) for bucket in self.buckets for weight in bucket.weights)

    def finish(self) -> None:
        """Take what hooks did not, send what has not been sent, and wait: a collective for each bucket."""
        for bucket in self.buckets:
            for weight in bucket.weights:
                if waiting(weight):
                    self._add(weight)
        self._launch_rest()
        self._land_all()
        self._awaited = self._begun = self._touched = False

    def expect(self, stepped: Iterable[Weight]) -> None:
        """In the next backward pass, buckets wait for gradients of these; others may still come, late."""
        for bucket in self.buckets:
            for weight in bucket.weights:
                weight.expected = False
        for weight in stepped:
            weight.expected = True

    def late(self) -> list[bool]:
        """By bucket: this rank has gradients that came after it was sent."""
        return [any(weight.written for weight in bucket.weights) for bucket in self.buckets]

    def reduce_late(self, late: Iterable[bool]) -> None:
        """Send those buckets once more; to be called with the same answer on all ranks."""
        for bucket, again in zip(self.buckets, late, strict=True):
            if again:
                self._launch(bucket)
        self._land_all()

    def clear(self) -> None:
        """Forget all gradients. Where a backward pass has begun to send them, the rest is sent too."""
        if self._begun:
            self.finish()
        for bucket in self.buckets:
            bucket.launched = bucket.landed = False
            bucket.scale = 1.0
            if bucket.full is not None:
                self._release(bucket, bucket.full)
                bucket.full = None
            for weight in bucket.weights:
                weight.seen = weight.written = weight.ready = False
                forget(weight)
        self._next = 0
        self._awaited = False

    def _add(self, weight: Weight) -> None:
        bucket, gradient = weight.bucket, taken(weight)
        if bucket.full is None:
            bucket.full = self._take_buffer(bucket)
        size = gradient.numel()
        place = bucket.full[weight.offset : weight.offset + size].view(gradient.shape)
        if weight.written:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        weight.seen = weight.written = True

    def _advance(self) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if any(weight.expected and not weight.ready for weight in bucket.weights):
                return
            self._launch(bucket)
            self._next += 1

    def _launch_rest(self) -> None:
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: FlatBucket) -> None:
        while self.reuse and len(self._flying) >= _IN_FLIGHT:
            self._land(self._flying.popleft())
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
            full.mul_(1.0 / self.divisor)  # before the sum, which might not be finite
        shard = torch.empty_like(bucket.shard) if bucket.landed else bucket.shard
        bucket.flight = (bucket.ranks.scatter_sum(shard, full), buffer, shard)
        bucket.launched = True
        self._flying.append(bucket)

    def _land_all(self) -> None:
        while self._flying:
            self._land(self._flying.popleft())

    def _land(self, bucket: FlatBucket) -> None:
        assert bucket.flight is not None
        work, buffer, shard = bucket.flight
        if work is not None:
            work.wait()
        bucket.flight = None
        self._release(bucket, buffer)
        divisor = 1 if bucket.gradient_dtype == torch.float16 else self.divisor
        factor = 1.0 / (divisor * self.loss_scale.value)
        if bucket.landed:
            ratio = factor / bucket.scale
            bucket.shard.add_(shard if ratio == 1.0 else shard.mul_(ratio))
            return
        bucket.landed, bucket.scale = True, 1.0
        bucket.multiply(factor)

    def _take_buffer(self, bucket: FlatBucket) -> torch.Tensor:
        """Memory for the bucket's gradients, of its size or larger, with anything in it."""
        kind = (bucket.device, bucket.gradient_dtype)
        if self.reuse:
            free, size = self._free.setdefault(kind, []), bucket.geometry.size
            at = bisect_left(free, size, key=torch.Tensor.numel)
            if at < len(free):
                return free.pop(at)
            if free:
                del free[0]  # a larger one takes its place
            return torch.empty(size, dtype=kind[1], device=kind[0])
        if bucket.flight is not None:
            self._flying.remove(bucket)
            self._land(bucket)
        if bucket not in self._kept:
            self._kept[bucket] = torch.empty(bucket.geometry.size, dtype=kind[1], device=kind[0])
        return self._kept[bucket]

    def _release(self, bucket: FlatBucket, buffer: torch.Tensor) -> None:
        if self.reuse:
            free = self._free.setdefault((bucket.device, bucket.gradient_dtype), [])
            insort(free, buffer, key=torch.Tensor.numel)

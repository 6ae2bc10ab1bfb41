"""Flat buffers of parameters, the range of each buffer that a rank owns, and the ranks of its process group.

`pack` depends only on its arguments, so it gives the same result on every rank. A bucket concatenates
parameters. It is cut into one equal range for each rank, without regard to parameters and rows (ZeRO,
Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardproof.engine.state import declare_storage_owner, local_tensor
from shardproof.training.collectives import Work, all_gather, reduce_scatter
from shardproof.training.optim.parameter_values import refreshed


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [offset, offset + size) of a bucket: one parameter, in row-major order."""

    parameter: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        """End of the range in the bucket."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Bucket:
    """Spans in rising order with padding, cut into one range for each rank.

    >>> (bucket,) = pack([(0, 5), (1, 6)], limit=100, ranks=3, align=2)
    >>> bucket.size, bucket.shard, bucket.spans[1]
    (12, 4, Span(parameter=1, offset=6, size=6))
    >>> [bucket.part(bucket.spans[1], rank) for rank in range(3)]
    [(0, 0), (0, 2), (2, 6)]
    """

    spans: tuple[Span, ...]
    size: int
    """Number of elements with padding: a multiple of the number of ranks."""
    ranks: int

    @property
    def shard(self) -> int:
        """Number of elements in the range of one rank."""
        return self.size // self.ranks

    def part(self, span: Span, rank: int) -> tuple[int, int]:
        """The range [start, stop) of a parameter's elements that a rank owns; (0, 0) if it owns none."""
        start = max(span.offset, rank * self.shard) - span.offset
        stop = min(span.stop, (rank + 1) * self.shard) - span.offset
        return (start, stop) if start < stop else (0, 0)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) that belong to no parameter."""
        at = 0
        for span in self.spans:
            if at < span.offset:
                yield at, span.offset
            at = span.stop
        if at < self.size:
            yield at, self.size


def pack(sizes: Iterable[tuple[int, int]], *, limit: int, ranks: int, align: int) -> list[Bucket]:
    """Pack parameters into buckets, in the given order.

    Args:
        sizes: each parameter with its number of elements.
        limit: largest number of elements in a bucket. A larger parameter has its own bucket.
        ranks: number of ranges in each bucket.
        align: every parameter and every range begins at a multiple of this number of elements.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    end = 0

    def close() -> None:
        unit = ranks * align
        buckets.append(Bucket(tuple(spans), -(-end // unit) * unit, ranks))

    for parameter, size in sizes:
        start = -(-end // align) * align
        if spans and start + size > limit:
            close()
            spans, start = [], 0
        spans.append(Span(parameter, start, size))
        end = start + size
    if spans:
        close()
    return buckets


@dataclass(slots=True, eq=False)
class Owner:
    """A module with parameters."""

    buckets: list[FlatBucket]
    """Buckets of its direct parameters."""
    called: bool = False
    """True if its forward has begun since the last step."""
    hook: Any = None
    """The hook before its forward; None if it is inside of a compiled module."""
    inner_hook: Any = None
    """The hook that replaces it there."""


@dataclass(slots=True, eq=False)
class Weight:
    """One parameter, its position in a bucket, and the part of it that this rank steps."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    """Index in `param_groups`."""
    counted: bool
    """True if norms include its elements on this rank. False for a tensor-parallel replica."""
    siblings: Mapping[str, torch.nn.Parameter | None]
    """The `_parameters` of its module."""
    bucket: FlatBucket = field(init=False)
    data: torch.Tensor = field(init=False)
    """The local tensor: a view of the bucket's parameters."""
    offset: int = field(init=False)
    """Offset in the bucket."""
    start: int = field(init=False)
    stop: int = field(init=False)
    """This rank owns the elements [start, stop) of the local tensor."""
    fragment: torch.Tensor = field(init=False)
    """1-D tensor of `stop - start` elements for the inner optimizer: masters, or a view of `data`."""
    mastered: bool = field(init=False)
    """True if `fragment` contains masters."""
    stepped_dtype: torch.dtype = field(init=False)
    """Dtype of the parameter in the inner optimizer."""
    expected: bool = True
    """True if a rank had a gradient in the last step. Then its bucket waits for one in the next step."""
    seen: bool = False
    """True if this rank has had a gradient since the last `zero_grad`."""
    written: bool = False
    """True if the full gradient buffer has a gradient of it that has not been sent."""
    ready: bool = False
    """True if its gradient is complete."""
    version: int = 0
    """Version of the parameter after the last write by the optimizer."""
    owners: list[Owner] = field(default_factory=list)

    def move_to(self, bucket: FlatBucket, offset: int, part: tuple[int, int]) -> None:
        """Move the parameter's values into the bucket."""
        local = local_tensor(self.parameter)
        self.bucket, self.offset, (self.start, self.stop) = bucket, offset, part
        view = bucket.parameters[offset : offset + local.numel()].view(local.shape).data
        view.copy_(local.detach())
        if local is self.parameter:
            self.parameter.data = view
        else:
            self.parameter._local_tensor = view  # type: ignore[attr-defined]
        self.data = view
        declare_storage_owner(self.parameter, bucket.parameters)

    @property
    def owned(self) -> torch.Tensor:
        """This rank's elements of the parameter, as a 1-D view."""
        return self.data.view(-1)[self.start : self.stop]

    @property
    def owned_gradient(self) -> torch.Tensor:
        """This rank's elements of the reduced gradient, before the multiplication by `FlatBucket.scale`."""
        return self.within(self.bucket.shard)

    def within(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's elements of the parameter in a tensor with the elements of the rank's range."""
        at = self.offset + self.start - self.bucket.first if self.start < self.stop else 0
        return shard[at : at + self.stop - self.start]

    def current_version(self) -> int:
        """A version that changes with each write to the parameter through torch, and with each load."""
        return int(self.parameter._version) + int(self.data._version)

    def check_in_place(self) -> None:
        """Check that the parameter still has its memory in the bucket."""
        current = self.siblings.get(self.name.rpartition(".")[2])
        replaced = current is not None and current is not self.parameter
        moved = local_tensor(self.parameter).data_ptr() != self.data.data_ptr()
        if replaced or (moved and self.data.numel()):
            raise RuntimeError(
                f"{self.name} is no longer in the optimizer's flat buffer: it got other memory after the "
                "DistributedOptimizer was made (module.to(...), load_state_dict(assign=True), "
                "param.data = ...). Make the optimizer after such changes"
            )


class FlatBucket:
    """The flat buffers of one bucket, and the progress of its gradient reduction.

    Args:
        geometry: positions of its parameters.
        ranks: ranks that share the bucket.
        weights: parameters in the order of the geometry's spans.
        gradient_dtype: dtype of the gradient buffers.
    """

    def __init__(
        self, geometry: Bucket, ranks: RankGroup, weights: list[Weight], gradient_dtype: torch.dtype
    ) -> None:
        like = local_tensor(weights[0].parameter)
        self.geometry, self.ranks, self.weights = geometry, ranks, weights
        self.device, self.gradient_dtype = like.device, gradient_dtype
        self.first = ranks.rank * geometry.shard
        """Start of this rank's range."""
        self.parameters = torch.zeros(geometry.size, dtype=like.dtype, device=like.device)
        for weight, span in zip(weights, geometry.spans, strict=True):
            weight.move_to(self, span.offset, geometry.part(span, ranks.rank))
        self.shard = torch.zeros(geometry.shard, dtype=gradient_dtype, device=like.device)
        """This rank's range of the reduced gradients."""
        self.scale = 1.0
        """Factor by which `shard` has still to be multiplied."""
        self.full: torch.Tensor | None = None
        """The gradients of the whole bucket, or None if all have been sent."""
        self.reduced = False
        """True if `shard` contains gradients."""
        self.reduction: tuple[Work | None, torch.Tensor, torch.Tensor] | None = None
        """The current reduction: its work, its input and its output."""
        self.gathering: Work | None = None
        """The current gather of the parameters."""
        self.eager = False
        """True if a parameter is used outside of its module's forward. Then `step` waits for the gather."""
        self.exact = all(weight.counted for weight in weights)
        """True if norms include all of `shard`."""

    @property
    def owned(self) -> torch.Tensor:
        """This rank's range of the parameters, as a view."""
        return self.parameters[self.first : self.first + self.geometry.shard]

    def multiply(self, factor: float) -> None:
        """Multiply the reduced gradients. For 16-bit gradients, the step does it after the cast to fp32."""
        scale = self.scale * factor
        if self.shard.dtype.itemsize >= 4 or scale == 0.0 or scale - scale != 0.0:
            if factor != 1.0:
                self.shard.mul_(factor)
        else:
            self.scale = scale

    def counted(self) -> list[torch.Tensor]:
        """The reduced gradients that norms include on this rank, before the multiplication by `scale`."""
        if self.exact:
            return [self.shard]
        return [weight.owned_gradient for weight in self.weights if weight.counted]


class Masters:
    """Makes the fragment of every weight.

    Args:
        buckets: buckets whose parameters are initialised.
        dtype: dtype of the masters of parameters that are narrower than fp32; None for no masters.
    """

    def __init__(self, buckets: Sequence[FlatBucket], dtype: torch.dtype | None) -> None:
        self._weights = [weight for bucket in buckets for weight in bucket.weights]
        self._masters: dict[FlatBucket, torch.Tensor] = {}
        for bucket in buckets:
            narrow = bucket.parameters.dtype
            if dtype is not None and narrow.itemsize < 4 and narrow != dtype:
                self._masters[bucket] = bucket.owned.to(dtype)
            master = self._masters.get(bucket)
            for weight in bucket.weights:
                weight.mastered = master is not None
                weight.fragment = weight.owned if master is None else weight.within(master)
                declare_storage_owner(weight.fragment, bucket.parameters if master is None else master)

    def follow_parameters(self) -> None:
        """Refreshes the masters of parameters that the program has written to.

        A fragment without a master shares the parameter's memory but not its version counter. The version of
        the fragment is incremented, so that an inner optimizer with its own copies sees the write.
        """
        for weight in self._weights:
            if weight.current_version() == weight.version:
                continue
            if weight.mastered:
                weight.fragment.copy_(refreshed(weight.fragment, weight.owned))
            else:
                torch.autograd.graph.increment_version(weight.fragment)
            weight.version = weight.current_version()

    def round_to_parameters(self, changed: Iterable[FlatBucket]) -> None:
        """Rounds the masters into this rank's range of each changed bucket."""
        for bucket in self._masters.keys() & set(changed):
            bucket.owned.copy_(self._masters[bucket])

    def record_versions(self) -> None:
        """Records the current version of every parameter."""
        for weight in self._weights:
            weight.version = weight.current_version()


class RankGroup:
    """A process group, or a single process.

    Args:
        group: None for all ranks, or for this process if `torch.distributed` is not initialized.

    >>> RankGroup(None).size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.size: int = 1 if alone else dist.get_world_size(group)
        self.rank: int = 0 if alone else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies the first rank's tensor to every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=0, group=self.group)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def scatter_sum(self, shard: torch.Tensor, full: torch.Tensor) -> Work | None:
        """Starts to fill `shard` with this rank's range of the sum. None if it is filled already."""
        if self.size == 1:
            shard.copy_(full)
            return None
        return reduce_scatter(shard, full, self.group)

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Starts to fill `full` with every rank's range. None if this rank owns all of it."""
        if self.size == 1:
            return None
        return all_gather(full, shard, self.group)

    def check_same(self, text: str, device: torch.device, what: str) -> None:
        """Checks that `text` is the same on all ranks.

        Raises:
            ValueError: on every rank, if `text` differs between ranks.
        """
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
        if self.size > 1:
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if ends.tolist() != [number, -number]:
            raise ValueError(
                f"{what} is not the same on all ranks of the group. Here (rank {self.rank}) it is:\n"
                f"{text[:2000]}"
            )


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of a rank."""

    data: RankGroup
    """Ranks with the same dense parameters, which together have every expert of this part of the model."""
    expert: RankGroup
    """Ranks with the same experts."""
    model: RankGroup | None
    """Ranks with the other parts of the model: tensor and pipeline parallel."""
